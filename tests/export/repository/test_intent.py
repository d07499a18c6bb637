"""How a version is to be served: what is written into its configurations, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Exported
from repositories import publish_files, read_config
from tritonclient.grpc import model_config_pb2 as pb

from export.engines.table import ENGINES
from export.errors import SettingsError
from export.repository.activation import activate
from export.repository.integrity import find_damage
from export.repository.intent import check_effect
from export.repository.promotion import promote
from export.repository.version import Version
from export.serving_options import ServingOptions
from export.signature import ModelSignature, TensorSignature

GRAPH = "sentence_embedding_model"


def test_the_same_files_that_are_served_otherwise_are_another_version(exported: Exported, tmp_path: Path) -> None:
    publish_files(exported, tmp_path)
    serving = ServingOptions(instances=4, max_queue_size=64, priority_levels=3, rate_limit={"cores": 2})
    for outcome in ("created", "unchanged"):
        done = publish_files(exported, tmp_path, serving=serving)
        assert (done.version, done.active, done.outcome) == (2, 2, outcome)
    config = read_config(tmp_path, GRAPH)
    assert [group.count for group in config.instance_group] == [4]
    assert [(each.name, each.count) for each in config.instance_group[0].rate_limiter.resources] == [("cores", 2)]
    for step in (GRAPH, "sentence_embedding_preprocess"):
        batching = read_config(tmp_path, step).dynamic_batching
        assert batching.default_queue_policy.max_queue_size == 64
        assert (batching.priority_levels, batching.default_priority_level) == (3, 3)
    files = [tmp_path / GRAPH / str(number) / "model.onnx" for number in (1, 2)]
    assert files[0].samefile(files[1])
    assert not [*find_damage(tmp_path)]
    activate(tmp_path, "sentence_embedding", 1)
    assert [group.count for group in read_config(tmp_path, GRAPH).instance_group] == [2]
    # Asked for nothing, the first version is what it was.
    assert publish_files(exported, tmp_path).version == 1


def test_variants_are_a_part_of_the_version_and_go_with_it(exported: Exported, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    publish_files(exported, here)
    for outcome in ("created", "unchanged"):
        done = publish_files(exported, here, variants={"staging": ServingOptions(instances=1)})
        assert (done.version, done.outcome) == (2, outcome)
    assert [group.count for group in read_config(here, GRAPH).instance_group] == [2]
    version = Version(repository=here, name="sentence_embedding", number=2)
    kept = version.read_variants()["staging"]
    assert kept.keys() == version.read_configs().keys()
    assert [group.count for group in kept[GRAPH].instance_group] == [1]
    assert {step.model_version for step in kept["sentence_embedding"].ensemble_scheduling.step} == {2}
    publish_files(exported, there)
    assert promote(here, "sentence_embedding", 2, destination=there).version == 2
    assert Version(repository=there, name="sentence_embedding", number=2).read_variants()["staging"] == kept
    assert not [*find_damage(here), *find_damage(there)]


def test_everything_else_stands_where_it_acts(exported: Exported, tmp_path: Path) -> None:
    serving = ServingOptions(
        max_queue_delay_microseconds=500,
        default_timeout_microseconds=9000,
        timeout_action="delay",
        response_cache=True,
        warmup=(8,),
    )
    publish_files(exported, tmp_path, serving=serving)
    graph, tokenizer = read_config(tmp_path, GRAPH), read_config(tmp_path, "sentence_embedding_preprocess")
    assert graph.dynamic_batching.max_queue_delay_microseconds == 500
    assert tokenizer.dynamic_batching.max_queue_delay_microseconds == 0
    for config in (graph, tokenizer):
        policy = config.dynamic_batching.default_queue_policy
        assert policy.default_timeout_microseconds == 9000
        assert policy.timeout_action == pb.ModelQueuePolicy.DELAY
        assert not config.response_cache.enable
    assert read_config(tmp_path, "sentence_embedding").response_cache.enable
    assert [list(each.inputs["input_ids"].dims) for each in graph.model_warmup] == [[1], [8], [64]]


def test_requests_are_fetched_ahead_only_from_queues_without_a_policy(exported: Exported, tmp_path: Path) -> None:
    publish_files(exported, tmp_path, serving=ServingOptions(prefetch=True, max_queue_delay_microseconds=500))
    for name in (GRAPH, "sentence_embedding_preprocess"):
        batching = read_config(tmp_path, name).dynamic_batching
        assert batching.max_queue_delay_microseconds == (500 if name == GRAPH else 0)
        assert not batching.HasField("default_queue_policy")


@pytest.mark.parametrize(
    "policy",
    [
        {"max_queue_size": 5},
        {"default_timeout_microseconds": 5},
        {"timeout_action": "delay"},
        {"priority_levels": 5},
    ],
)
def test_a_policy_of_queues_and_fetching_ahead_exclude_each_other(policy: dict[str, Any]) -> None:
    flag = "--" + next(iter(policy)).replace("_", "-")
    with pytest.raises(SettingsError, match=f"{flag} has no effect with --prefetch: .* leave one of the two out"):
        ServingOptions(prefetch=True, **policy)


@pytest.fixture
def tensors() -> ModelSignature:
    """Return a graph of fixed tensors, whose requests are not joined."""
    tensor = TensorSignature(name="x", dtype=torch.float32, dims=(2, 3))
    return ModelSignature(inputs=(tensor,), outputs=(replace(tensor, name="y"),))


@pytest.mark.parametrize(
    ("serving", "engine", "sentence"),
    [
        (ServingOptions(instances=3), "tensorrt", "--instances has no effect where TensorRT runs the model"),
        (ServingOptions(response_cache=True), "openvino-genai", "--response-cache has no effect where OpenVINO GenAI"),
        (ServingOptions(warmup=(65,)), "onnxruntime", "longer than the model takes: expected up to 64 tokens, got 65"),
    ],
)
def test_what_has_no_effect_on_an_engine_is_refused(
    serving: ServingOptions, engine: str, sentence: str, exported: Exported
) -> None:
    with pytest.raises(SettingsError, match=sentence):
        check_effect(serving, ENGINES[engine], exported.source.task.signature)


def test_what_has_no_effect_on_a_graph_is_refused(exported: Exported, tensors: ModelSignature) -> None:
    runtime, writer = ENGINES["onnxruntime"], ENGINES["openvino-genai"]
    with pytest.raises(SettingsError, match="--max-queue-size, --priority-levels have no effect where Triton joins no"):
        check_effect(ServingOptions(max_queue_size=1, priority_levels=2), runtime, tensors)
    with pytest.raises(SettingsError, match="--warmup has no effect where the graph takes no tokens"):
        check_effect(ServingOptions(warmup=(1,)), runtime, tensors)
    check_effect(ServingOptions(instances=3, response_cache=True, rate_limit={"a": 1}), runtime, tensors)
    check_effect(ServingOptions(max_queue_size=1), writer, tensors)
    signature = exported.source.task.signature
    assert signature.contract is not None
    lean = replace(signature, contract=replace(signature.contract, is_lean=True))
    check_effect(ServingOptions(threads=2), ENGINES["openvino"], lean)
    with pytest.raises(
        SettingsError, match="--max-queue-delay-microseconds, --warmup have no effect with --steps lean"
    ):
        check_effect(ServingOptions(max_queue_delay_microseconds=1, warmup=(1,)), runtime, lean)
