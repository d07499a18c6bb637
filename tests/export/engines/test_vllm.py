"""Decoders published for Triton's vLLM backend: everything but vLLM itself, which needs a GPU."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import CHECKOUT
from safetensors.torch import load_file, save_file
from trainers.writers import build_writer, train_bpe
from transformers import AutoModelForCausalLM, AutoTokenizer

from export.__main__ import main
from export.artefacts import Artefacts, list_model
from export.checkpoints import open_checkpoint
from export.engines.vllm_arguments import MOUNT
from export.engines.vllm_engine import VLLM
from export.errors import VerificationError
from export.lint.linter import lint
from export.proof.weights import verify_weights
from export.repository.config_file import parse_config
from export.targets import find_target
from export.tasks.base import TaskSource
from export.tasks.building import build_task
from export.weights.torch_model import load_config
from export.weights.transforms import CastToFloat32

TARGET = "25.09"
ADDED = "[ORDER]"


def save_opt(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    tokenizer = train_bpe()
    build_writer("opt", len(tokenizer)).to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def publish(checkpoint: Path, repository: Path, *options: str, name: str = "writer") -> int:
    asked = ["run", str(checkpoint), "--name", name, "--repository", str(repository), "--engine", "vllm"]
    return main([*asked, "--target", TARGET, *options])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_opt(tmp_path_factory.mktemp("opt") / "checkpoint")


@pytest.fixture(scope="module")
def repository(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions: as the checkpoint is, and with a token added, in bf16."""
    repository = tmp_path_factory.mktemp("vllm") / "models"
    assert publish(checkpoint, repository) == 0
    assert publish(checkpoint, repository, "--precision", "bf16", "--add-token", f"{ADDED}=mean") == 0
    return repository


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_version_is_a_whole_checkpoint_that_transformers_opens_and_vllm_is_pointed_to(
    checkpoint: Path, repository: Path
) -> None:
    first, second = repository / "writer" / "1", repository / "writer" / "2"
    assert read_json(first / "model.json") == {"model": "/models/writer/1", "dtype": "float32", "max_model_len": 4096}
    assert read_json(second / "model.json") == {"model": "/models/writer/2", "dtype": "bfloat16", "max_model_len": 4096}
    stored, wanted = load_file(first / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert stored.keys() == wanted.keys()
    assert all(torch.equal(stored[name], wanted[name]) for name in wanted)
    assert {tensor.dtype for tensor in load_file(second / "model.safetensors").values()} == {torch.bfloat16}
    model, info = AutoModelForCausalLM.from_pretrained(second, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(second)
    assert tokenizer.convert_tokens_to_ids(ADDED) == model.config.vocab_size - 1 == 600
    assert tokenizer.chat_template == train_bpe().chat_template
    # An older transformers in the image knows neither today's class nor today's key.
    assert read_json(second / "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert read_json(second / "config.json")["torch_dtype"] == "bfloat16"


def test_the_next_step_is_the_image_that_serves_it(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(checkpoint, tmp_path / "models", name="poet") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Next: MODELYARD_MODEL=poet docker compose --profile vllm up server-vllm"


def test_the_recorded_texts_are_those_that_transformers_writes(checkpoint: Path, repository: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    samples = read_json(repository / "writer" / "1" / "golden.json")["samples"]
    assert len(samples) >= 6
    for sample in samples:
        asked = {tensor["name"]: tensor["data"][0] for tensor in sample["inputs"]}
        ids = tokenizer(asked["text_input"], return_tensors="pt")
        tokens = json.loads(asked["sampling_parameters"])["max_tokens"]
        with torch.no_grad():
            made = model.generate(**ids, do_sample=False, max_new_tokens=tokens, pad_token_id=0)
        text = tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert sample["outputs"][0]["data"] == [text]


def test_the_configuration_says_all_that_the_backend_would_complete(repository: Path) -> None:
    config = parse_config((repository / "writer" / "config.pbtxt").read_text())
    assert (config.backend, config.max_batch_size, config.model_transaction_policy.decoupled) == ("vllm", 0, True)
    assert [each.kind for each in config.instance_group] == [config.instance_group[0].KIND_MODEL]
    assert [tensor.name for tensor in config.input if not tensor.optional] == ["text_input"]
    assert {tensor.name for tensor in config.output} == {
        *("text_output", "finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    }
    assert lint(repository, find_target(TARGET)) == []


def test_versions_go_forth_and_back_and_elsewhere_and_stay_whole(
    checkpoint: Path, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The number is taken there, so the copy has another, and its place with it.
    there = tmp_path / "there"
    assert publish(save_opt(tmp_path / "other", torch.bfloat16), there) == 0
    for number in (2, 3):
        assert publish(checkpoint, there, "--precision", "bf16", "--add-token", f"[{number}]=mean") == 0
    assert main(["promote", "writer", "1", "--repository", str(repository), "--to", str(there)]) == 0
    assert read_json(there / "writer" / "4" / "model.json")["model"] == f"{MOUNT}/writer/4"
    assert main(["verify-repository", "--repository", str(there)]) == 0
    assert lint(there, find_target(TARGET)) == []
    # What is there already is not copied again.
    assert main(["promote", "writer", "1", "--repository", str(repository), "--to", str(there)]) == 0
    assert sorted(path.name for path in (there / "writer").iterdir() if path.is_dir()) == ["1", "2", "3", "4"]
    assert main(["activate", "writer", "2", "--repository", str(there)]) == 0
    capsys.readouterr()
    (there / "writer" / "2" / "model.json").write_text('{"model": "/models/writer/1"}')
    assert main(["verify-repository", "--repository", str(there)]) == 1
    assert "model.json has changed" in capsys.readouterr().out
    assert [finding.rule for finding in lint(there, find_target(TARGET))] == ["vllm-place"]


def test_what_differs_by_one_bit_is_refused(checkpoint: Path, repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "written"
    shutil.copytree(repository / "writer" / "1", folder, ignore=shutil.ignore_patterns("configs"))
    stored, config = open_checkpoint(checkpoint), load_config(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    source = TaskSource(
        directory=checkpoint,
        config=config,
        weights=CastToFloat32(source=stored),
        tokenizer=tokenizer,
        max_length=4096,
        options={},
    )
    asked: dict[str, Any] = {
        "task": build_task("text-generation", source),
        "files": Artefacts(model=list_model(folder / VLLM.model_file)),
        "target": find_target(TARGET),
        "engine": VLLM(),
        "precision": "fp32",
    }
    assert verify_weights(**asked).passed
    tensors = load_file(folder / "model.safetensors")
    name = "model.decoder.layers.1.fc1.weight"
    tensors[name].view(torch.int32)[3, 5] ^= 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(VerificationError, match=f"not the checkpoint's: {name}"):
        verify_weights(**asked)


def test_a_release_whose_backend_says_less_and_a_precision_that_it_does_not_take_are_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["run", str(checkpoint), "--name", "w", "--repository", str(tmp_path), "--engine", "vllm"]
    assert main(asked) == 1
    assert "expected a release from 24.12 on, got 24.10" in " ".join(capsys.readouterr().err.split())
    assert publish(checkpoint, tmp_path, "--precision", "int8") == 1
    assert "vLLM does not serve int8" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_compose_mounts_the_repository_where_model_json_looks_for_it() -> None:
    service = yaml.safe_load((CHECKOUT / "compose.yaml").read_text())["services"]["server-vllm"]
    assert [volume.rsplit(":", 2)[1] for volume in service["volumes"]] == [MOUNT]
    assert f"--model-repository={MOUNT}" in service["command"]
    release = service["image"].split(":")[1].split("-")[0]
    VLLM().check("fp32", find_target(release))


def test_plain_weights_are_not_published_as_quantized_ones(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(checkpoint, tmp_path / "said")) / "config.json"
    path.write_text(json.dumps(read_json(path) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    assert publish(path.parent, tmp_path / "models") == 0
    assert "quantization_config" not in read_json(tmp_path / "models" / "writer" / "1" / "config.json")
    assert "Warning: config.json of" in capsys.readouterr().out


def test_a_byte_order_mark_in_the_generations_settings_is_named(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(checkpoint, tmp_path / "marked")) / "generation_config.json"
    path.write_text("{}", encoding="utf-8-sig")
    assert publish(path.parent, tmp_path / "models") == 1
    assert "generation_config.json cannot be read: expected UTF-8, got a byte order mark" in capsys.readouterr().err
