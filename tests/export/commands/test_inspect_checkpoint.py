import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import Finished, Published
from safetensors.torch import save_file
from trainers.zero_checkpoints import find_checkpoint

from export.checkpoints.storage.byte_ranges import OpenFiles
from export.commands import inspect_checkpoint as verb
from export.commands.inspect_checkpoint import format_inspection, inspect_checkpoint


def test_it_says_what_the_run_was() -> None:
    found = inspect_checkpoint(find_checkpoint("z3_bf16"))
    assert found.format == "DeepSpeed ZeRO stage 3, 2 ranks"
    assert found.trainer is not None and found.trainer.startswith("DeepSpeed 0.")
    assert (found.world_size, found.stage, found.step) == (2, 3, 2)
    # 370 + 77 + 110 + 11 + 22 + 110 + 2: without the head, which is tied, and the buffers.
    assert found.parameters == 702
    assert found.dtypes == {"float32": 10, "int64": 2, "bool": 1, "bfloat16": 3}
    assert found.tied == [["embed.weight", "head.weight"]]
    assert found.missing == [
        "proof that the files of all ranks are of one run: no gathered copy lies beside them",
        "fp32 weights of frozen.bias, frozen.weight: saved as bfloat16 only",
    ]
    assert len(found.files) == 4
    assert found.tensors["embed.weight"] == {"dtype": "float32", "shape": [37, 10]}
    assert found.memory["onnxruntime"]["fp32"]["export_bytes"] > found.estimates["consolidate_memory_bytes"]


def test_the_times_are_what_was_measured(checkpoint: Path) -> None:
    estimates = inspect_checkpoint(checkpoint).estimates
    assert estimates["export_s"] == pytest.approx(34, rel=0.05)
    assert estimates["consolidate_memory_bytes"] == 1e8


def test_the_text_names_every_fact_and_where_asked_for_every_tensor() -> None:
    found = inspect_checkpoint(find_checkpoint("z2_fp32"))
    brief = format_inspection(found)
    assert "embed.weight  float32" not in brief
    assert "(--tensors lists them)" in brief
    for engine, precisions in found.memory.items():
        for precision in precisions:
            assert f"memory       {engine} {precision}: " in brief
    assert len(brief.splitlines()) < 25
    lines = format_inspection(found, lists_tensors=True).splitlines()
    assert lines[1] == "format       DeepSpeed ZeRO stage 2, 2 ranks"
    assert "tied         embed.weight = head.weight" in lines
    assert "parameters   702" in lines
    assert "missing      nothing" in lines
    assert "  embed.weight  float32 [37, 10]" in lines


def test_an_architecture_that_is_not_exported_is_told_as_run_refuses_it(
    tmp_path: Path, export_cli: Callable[..., Finished]
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlnet", "architectures": ["XLNetModel"]}))
    found = inspect_checkpoint(tmp_path)
    refused = export_cli("run", str(tmp_path), "--name", "x", "--repository", str(tmp_path / "models"))
    assert f"error: {found.not_exported}\n" in refused.err
    assert "cannot be exported: expected one that docs/architectures.md lists, got xlnet; " in found.not_exported
    assert found.memory == {} and "export_s" not in found.estimates
    text = format_inspection(found)
    assert f"export       {found.not_exported}\n" in text and "memory  " not in text


def test_only_a_model_of_texts_uses_tokens(tmp_path: Path) -> None:
    # wav2vec 2.0 has a vocabulary too, of what it hears.
    for config, has_texts in (
        ({"vocab_size": 37}, True),
        ({"vocab_size": 37, "conv_dim": [8]}, False),
        ({"vocab_size": 37, "num_mel_bins": 80}, False),
        ({"image_size": 32}, False),
    ):
        save_file({"head.weight": torch.zeros(37, 10)}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = inspect_checkpoint(tmp_path)
        assert ("once texts have used every token" in format_inspection(found)) == has_texts
        assert ("instance_used_bytes" in found.memory["onnxruntime"]["fp32"]) == has_texts


def test_json_is_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(["inspect", str(find_checkpoint("z0_fp32")), "--json"])
    assert args.run(args) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stage"] == 0
    assert found["tied"] == [["embed.weight", "head.weight"]]


def test_the_text_holds_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    torch.save({"a\x1b]0;b\x07\nc": torch.ones(3)}, tmp_path / "x.pt")
    text = format_inspection(inspect_checkpoint(tmp_path), lists_tensors=True)
    assert "\n  a\\x1b]0;b\\x07\\nc  float32 [3]\n" in text


def test_a_head_that_is_tied_by_the_configuration_is_said_to_be(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert "tied         none in the files\n" in format_inspection(inspect_checkpoint(tmp_path))
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    text = format_inspection(inspect_checkpoint(tmp_path))
    assert "tied         the head is the embeddings, as config.json says\n" in text


@pytest.mark.parametrize(
    ("architecture", "has_head"),
    [
        *[(name, True) for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "MarianMTModel")],
        *[(name, True) for name in ("T5ForConditionalGeneration", "BertForPreTraining")],
        *[(name, False) for name in ("BertModel", "BertForSequenceClassification", "RobertaForQuestionAnswering")],
    ],
)
def test_a_model_without_a_head_over_words_ties_none(architecture: str, has_head: bool, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    config = {"tie_word_embeddings": True, "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = "the head is the embeddings, as config.json says" if has_head else ""
    found = inspect_checkpoint(tmp_path)
    assert found.tied_by == said
    assert f"tied         {said or 'none in the files'}\n" in format_inspection(found)


def test_a_published_model_tells_its_versions(published: Published, export_cli: Callable[..., Finished]) -> None:
    name = published.result["publication"]["name"]
    told = export_cli("inspect", str(published.repository / name))
    assert told.code == 0, told.err
    version = published.result["publication"]["version"]
    assert f"{name} in {published.repository}\n" in told.out
    assert f"version {version} (active)\n" in told.out
    cases = len(published.result["report"]["cases"])
    assert f"  proof        {cases} cases, all passed\n" in told.out
    assert "  made as      fp32, for Triton 24.10\n" in told.out
    step = json.loads(export_cli("inspect", str(published.repository / f"{name}_model"), "--json").out)
    assert (step["name"], step["active"]) == (name, version)
    assert len(step["versions"][-1]["checkpoint_sha256"]) == 64


def test_no_tensor_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.full((3,), float("nan"))}, tmp_path / "x.pt")
    read = []
    monkeypatch.setattr(OpenFiles, "read_into", lambda *args: read.append(args))
    assert inspect_checkpoint(tmp_path).parameters == 3
    assert read == []
