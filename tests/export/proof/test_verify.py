import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from harness import Exported, needs_newest, verify_files
from onnx import numpy_helper
from tokenizers import Tokenizer

from export.artefacts import Artefacts, hash_file
from export.errors import GraphError, VerificationError
from export.graph.onnx_export import check_graph, export_onnx
from export.proof.verify import CaseResult, VerificationReport, verify
from export.stages import write_files
from export.targets import DEFAULT_TARGET, find_target
from export.tasks.comparison import compare_embeddings
from export.tasks.own_module import FactoryTask, read_spec
from export.tasks.texts.pooling import PoolingSettings, SentenceEmbedding


def test_an_exact_export_passes_every_case(exported: Exported) -> None:
    report = exported.report
    assert report.passed
    assert report.worst.error < 1e-6
    names = [case.name for case in report.cases]
    assert names[:7] == ["1 token", "2 tokens", "3 tokens", "7 tokens", "8 tokens", "31 tokens", "64 tokens"]
    assert names[7:] == [
        "mixed lengths in one batch",
        "sentences one by one",
        "sentences in one batch",
        "sentences in batches of 8",
        "5 of 7 tokens, seed 0",
        "padded right, seed 0",
        "padded left, seed 0",
        "5 of 7 tokens, seed 1",
        "padded right, seed 1",
        "padded left, seed 1",
        "special tokens in texts",
        "new token [NEW]",
    ]


def test_the_report_names_the_bytes_and_what_was_tried(exported: Exported) -> None:
    report = exported.report
    assert report.sha256 == {
        "model.onnx": hash_file(exported.model_file),
        "tokenizer.json": hash_file(exported.tokenizer_file),
    }
    content = report.to_json()
    assert content["passed"] is True
    assert content["tolerances"]["max_abs_error"] == 1e-5
    assert content["tolerances"]["min_cosine"] == 0.999999
    assert content["versions"]["onnxruntime"] == DEFAULT_TARGET.onnxruntime_version
    assert not [key for key in content if "golden" in key]


def test_golden_samples_are_the_checkpoints_own_answers(exported: Exported) -> None:
    sample = exported.report.golden["samples"][-1]
    (asked,), (answered,) = sample["inputs"], sample["outputs"]
    assert (asked["name"], asked["datatype"], asked["shape"]) == ("TEXT", "BYTES", [1, 1])
    assert (answered["name"], answered["datatype"], answered["shape"]) == ("EMBEDDING", "FP32", [1, 16])
    assert "[NEW]" in asked["data"][0]
    inputs = exported.source.task.tokenizer(asked["data"], return_tensors="pt", truncation=True, max_length=64)
    names = [tensor.name for tensor in exported.source.task.signature.inputs]
    expected = exported.source.task.module(*(inputs[name] for name in names))[0]
    assert torch.equal(torch.tensor(answered["data"]), expected)


def sabotage(model_file: Path, change: Callable[[dict[str, onnx.TensorProto]], None]) -> None:
    model = onnx.load(model_file)
    change({tensor.name: tensor for tensor in model.graph.initializer})
    onnx.save(model, model_file)


def scale_one_layer(tensors: dict[str, onnx.TensorProto]) -> None:
    tensor = max(tensors.values(), key=lambda item: (list(item.dims) == [16, 32], item.name))
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.01), tensor.name))


def exchange_two_tensors(tensors: dict[str, onnx.TensorProto]) -> None:
    first, second = [item for item in tensors.values() if list(item.dims) == [16, 16]][:2]
    values = numpy_helper.to_array(first), numpy_helper.to_array(second)
    first.CopyFrom(numpy_helper.from_array(values[1], first.name))
    second.CopyFrom(numpy_helper.from_array(values[0], second.name))


def poison_one_weight(tensors: dict[str, onnx.TensorProto]) -> None:
    tensor = next(item for item in tensors.values() if list(item.dims) == [16, 16])
    values = numpy_helper.to_array(tensor).copy()
    values[0, 0] = np.nan
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


@pytest.mark.parametrize("change", [scale_one_layer, exchange_two_tensors, poison_one_weight])
def test_a_changed_weight_fails(change: Callable, exported: Exported, tmp_path: Path) -> None:
    model_file = Path(shutil.copytree(exported.model_file.parent, tmp_path / "model")) / "model.onnx"
    sabotage(model_file, change)
    report = verify_files(exported.source, model_file, exported.tokenizer_file)
    assert not report.passed
    assert not report.worst.passed


class IgnoresTheMask(SentenceEmbedding):
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs[0], torch.ones_like(inputs[1]) + 0 * inputs[1], inputs[2])


def test_a_graph_that_ignores_the_mask_fails_where_rows_are_padded(exported: Exported, tmp_path: Path) -> None:
    source = exported.source
    task = source.task
    wrong = IgnoresTheMask(task.module.model, task.pooling, task.module.input_names)
    model_file = tmp_path / "model" / "model.onnx"
    model_file.parent.mkdir()
    export_onnx(wrong.eval(), task.signature, task.build_example(), model_file, DEFAULT_TARGET)
    report = verify_files(source, model_file, exported.tokenizer_file)
    failed = {case.name for case in report.cases if not case.passed}
    assert "mixed lengths in one batch" in failed
    assert "sentences one by one" not in failed


@pytest.mark.rarer
def test_a_graph_with_another_pooling_fails(exported: Exported, tmp_path: Path) -> None:
    source = exported.source
    task = source.task
    pooling = PoolingSettings(mode="cls", normalize=True, source="test")
    wrong = SentenceEmbedding(task.module.model, pooling, task.module.input_names)
    model_file = tmp_path / "model" / "model.onnx"
    model_file.parent.mkdir()
    export_onnx(wrong.eval(), task.signature, task.build_example(), model_file, DEFAULT_TARGET)
    assert not verify_files(source, model_file, exported.tokenizer_file).passed


def test_a_server_tokenizer_that_makes_other_ids_is_refused_with_the_text(exported: Exported, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(exported.tokenizer_file))
    tokenizer.enable_truncation(8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(VerificationError, match="reads 'The cat sleeps on the warm windowsill.' differently"):
        verify_files(exported.source, exported.model_file, tmp_path / "tokenizer.json")


def exchange_two_outputs(model: onnx.ModelProto) -> None:
    graph = model.graph
    names = [value.name for value in graph.output]
    for node in graph.node:
        for index, name in enumerate(node.output):
            if name in names:
                node.output[index] = names[1 - names.index(name)]


def fix_an_axis(model: onnx.ModelProto) -> None:
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = 7


class TwoAnswers(torch.nn.Module):
    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return values.sin(), values.cos()


SPEC = {"inputs": {"values": {"shape": ["batch", "width"]}}, "outputs": ["sine", "cosine"]}


@pytest.fixture
def two_answers(tmp_path: Path) -> tuple[FactoryTask, Artefacts]:
    (tmp_path / "inputs.json").write_text(json.dumps(SPEC))
    task = FactoryTask(TwoAnswers(), read_spec(tmp_path / "inputs.json"))
    return task, write_files(task, tmp_path / "files", DEFAULT_TARGET)


def test_exchanged_outputs_fail(two_answers: tuple[FactoryTask, Artefacts]) -> None:
    task, files = two_answers
    assert verify(task=task, files=files, target=DEFAULT_TARGET).passed
    model = onnx.load(files.graph)
    exchange_two_outputs(model)
    onnx.save(model, files.graph)
    report = verify(task=task, files=files, target=DEFAULT_TARGET)
    assert not any(case.passed for case in report.cases)
    assert report.distribution["sine"].to_json()["counts"] != [0] * 30


def test_an_axis_that_became_a_number_is_refused(two_answers: tuple[FactoryTask, Artefacts]) -> None:
    task, files = two_answers
    model = onnx.load(files.graph)
    fix_an_axis(model)
    onnx.save(model, files.graph)
    with pytest.raises(
        GraphError, match=r"expected values FLOAT \['batch', 'width'\], got values FLOAT \['batch', 7\]"
    ):
        check_graph(files.graph, task.signature, DEFAULT_TARGET)
    with pytest.raises(
        VerificationError, match=r"the graph fails on the case .*the model's own code probably fixed a dimension"
    ):
        verify(task=task, files=files, target=DEFAULT_TARGET)


@needs_newest
def test_the_graph_runs_under_the_targets_own_onnx_runtime(exported: Exported) -> None:
    report = verify(task=exported.source.task, files=exported.files, target=find_target("26.07"))
    assert report.passed
    assert (report.target, report.versions["onnxruntime"]) == ("26.07", "1.27.0")


def test_vectors_of_another_length_or_without_one_are_far_from_equal() -> None:
    one = np.array([[3.0, 4.0]], dtype=np.float32)
    assert compare_embeddings(one, one)["max_abs_error"] == 0
    assert compare_embeddings(one, 2 * one)["max_relative_length_error"] == pytest.approx(1.0)
    assert np.isnan(compare_embeddings(one, 0 * one)["max_abs_error"])
    assert compare_embeddings(one, one[:, :1])["max_abs_error"] == np.inf


def test_a_graph_that_runs_zeros_is_warmed_up_with_them(exported: Exported) -> None:
    assert exported.report.refused_warmup == ""
    assert [*exported.source.task.signature.list_warmups([16])] == [
        "shortest, 1 tokens",
        "16 tokens",
        "longest, 64 tokens",
    ]


def test_the_worst_that_is_told_is_that_of_each_error_in_the_cases_that_were_judged() -> None:
    def make(name: str, cosine: float, difference: float, *, passed: bool = True) -> CaseResult:
        errors = {"max_abs_error": difference, "min_cosine": cosine}
        return CaseResult(name=name, rows=1, seq_len=1, errors=errors, passed=passed)

    cases = [make("real", 0.995, 0.01), make("another", 0.999, 0.02), make("made up", 0.68, 0.9)]
    report = VerificationReport(
        sha256={}, cases=cases, golden={}, tolerances={"min_cosine": 0.99}, texts_tokenized=0, target="24.10"
    )
    assert [case.name for case in report.judged] == ["real", "another"]
    assert report.worst_errors == {"max_abs_error": 0.02, "min_cosine": 0.995}
    failed = replace(report, cases=[*cases, make("wrong", 0.5, 0.3, passed=False)])
    assert failed.worst_errors == {"max_abs_error": 0.3, "min_cosine": 0.5}
