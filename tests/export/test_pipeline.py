"""`python -m export run` as a whole: what it says, what it writes, and what it refuses."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from harness import CHECKOUT, Finished, Published, fingerprint, run
from rich.console import Console
from safetensors.torch import load_file, save_file
from trainers.architectures import ARCHITECTURES, Architecture, save_model
from transformers import AutoModel

from export.errors import CheckpointError
from export.options import ExportRequest
from export.pipeline import run_export
from export.progress import Detail, Progress

Cli = Callable[..., Finished]


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with something in it that no refusal may touch."""
    directory = tmp_path / "models" / "other" / "1"
    directory.mkdir(parents=True)
    (directory / "model.onnx").write_bytes(b"somebody's")
    return tmp_path / "models"


def test_it_tells_each_step_the_proof_and_the_next_command(copy: Path, repository: Path, export_cli: Cli) -> None:
    done = export_cli("run", str(copy), "--name", "tiny", "--repository", str(repository))
    assert done.code == 0
    for step, what in enumerate(
        [
            "reading checkpoint and vocabulary",
            "loading 0.5 M parameters",
            "hashing what was read",
            "exporting to ONNX",
            "verifying",
            "publishing",
        ]
    ):
        assert done.err.count(f"[{step + 1}/6] {what}") == 1
    assert "mixed lengths in one batch" in " ".join(done.err.replace("│", " ").split())
    assert "published  tiny in" in done.out
    assert "version 1, new" in done.out
    assert f"Next: python -m server --repository {repository}" in done.out
    # Nothing in this folder says how its token vectors become one.
    assert "\nWarning: the pooling is a guess (mean, normalised (default, because there is no modules.json" in done.out


def test_a_published_graph_says_what_it_was_made_of(copy: Path, repository: Path, export_cli: Cli) -> None:
    done = export_cli("run", str(copy), "--name", "tiny", "--repository", str(repository), "--precision", "bf16")
    assert done.code == 0, done.err
    lock = json.loads((repository / "tiny" / "1" / "modelyard.lock.json").read_text())
    graph = onnx.load(repository / "tiny_model" / "1" / "model.onnx", load_external_data=False)
    said = {item.key: item.value for item in graph.metadata_props}
    assert said.pop("modelyard.served_as").startswith("pooling mean, normalised")
    assert said == {
        "modelyard.task": "feature-extraction",
        "modelyard.checkpoint.sha256": lock["sources"]["checkpoint"]["sha256"],
        "modelyard.tokenizer.json.sha256": lock["artefacts"]["tokenizer.json"],
    }


def test_a_longest_sequence_without_room_for_a_text_is_refused(copy: Path, repository: Path, export_cli: Cli) -> None:
    path = copy / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 2}))
    done = export_cli("run", str(copy), "--name", "tiny", "--repository", str(repository))
    assert done.code == 1
    assert done.err.endswith(
        f"error: sequences of the model in {copy} have no room for a text: expected 3 tokens or more, 2 of them the "
        "tokenizer's own, got 2 at most; correct model_max_length in tokenizer_config.json.\n"
    )


def test_texts_are_padded_where_it_moves_none(copy: Path, repository: Path, export_cli: Cli) -> None:
    """A BERT counts positions from the left, whatever side its tokenizer was saved with."""
    path = copy / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"padding_side": "left"}))
    done = export_cli("run", str(copy), "--name", "tiny", "--repository", str(repository))
    assert done.code == 0, done.err
    tokenizer = json.loads((repository / "tiny_preprocess" / "1" / "tokenizer.json").read_text())
    assert tokenizer["padding"]["direction"] == "Right"


@pytest.mark.rarer
def test_run_again_it_publishes_nothing_new(copy: Path, repository: Path, export_cli: Cli) -> None:
    arguments = ("run", str(copy), "--name", "tiny", "--repository", str(repository), "--json")
    first = json.loads(export_cli(*arguments).out)
    before = fingerprint(repository)
    second = json.loads(export_cli(*arguments, "--again").out)
    assert first["publication"]["outcome"] == "created"
    assert second["publication"] == first["publication"] | {"outcome": "unchanged"}
    assert fingerprint(repository) == before


def test_the_demos_export_is_as_tight_as_promised(published: Published) -> None:
    result = published.result
    assert result["parameters"] == 22_713_984
    vocabulary = result["vocabulary"]
    assert (vocabulary["rows_before"], vocabulary["rows_after"], vocabulary["tokens"]) == (30522, 30524, 30524)
    assert (vocabulary["rows_in_config"], vocabulary["rows_unused"]) == (30522, 0)
    assert vocabulary["tokens_added"] == ["[ENT_START]", "[ENT_END]"]
    assert vocabulary["tables"] == ["embeddings.word_embeddings.weight"]
    assert result["max_length"] == 256
    assert result["report"]["passed"] is True
    assert max(case["max_abs_error"] for case in result["report"]["cases"]) <= 1e-5
    assert {"1 token", "2 tokens", "127 tokens", "256 tokens", "new token [ENT_START]"} <= {
        case["name"] for case in result["report"]["cases"]
    }


@pytest.mark.rarer
def test_sharded_safetensors_bin_and_sharded_bin_are_published_with_the_same_bytes(
    copy: Path, tmp_path: Path, export_cli: Cli
) -> None:
    weights = load_file(copy / "model.safetensors")
    names = sorted(weights)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    hashes = set()
    for kind in ("model.safetensors", "sharded.safetensors", "pytorch_model.bin", "sharded.bin"):
        directory = Path(shutil.copytree(copy, tmp_path / kind))
        (directory / "model.safetensors").unlink()
        stem, suffix = ("model", "safetensors") if kind.endswith("safetensors") else ("pytorch_model", "bin")
        shards = dict(zip([f"{stem}-1.{suffix}", f"{stem}-2.{suffix}"], halves, strict=True))
        if not kind.startswith("sharded"):
            shards = {f"{stem}.{suffix}": names}
        for file_name, members in shards.items():
            content = {name: weights[name] for name in members}
            if suffix == "bin":
                torch.save(content, directory / file_name)
            else:
                save_file(content, directory / file_name)
        if len(shards) == 2:
            index = {"weight_map": {name: file_name for file_name, members in shards.items() for name in members}}
            (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
        done = export_cli(
            "run", str(directory), "--name", "tiny", "--repository", str(tmp_path / f"m-{kind}"), "--json"
        )
        assert done.code == 0, done.err
        hashes.add(json.loads(done.out)["report"]["sha256"]["model.onnx"])
    assert len(hashes) == 1


def test_a_zero_3_training_checkpoint_is_published_with_the_bytes_of_its_live_weights(
    tiny_checkpoint: Path, tmp_path: Path, export_cli: Cli
) -> None:
    trained = run(str(CHECKOUT / "tests" / "trainers" / "train_bert.py"), str(tiny_checkpoint), str(tmp_path))
    assert trained.code == 0, trained.err
    refused = export_cli("run", str(tmp_path / "zero"), "--name", "tiny", "--repository", str(tmp_path / "models"))
    assert refused.code == 1
    assert "has no config.json" in refused.err
    assert "with --base." in refused.err
    graphs = []
    for source, options in ((tmp_path / "truth", []), (tmp_path / "zero", ["--base", str(tiny_checkpoint)])):
        repository = tmp_path / f"models-{source.name}"
        done = export_cli("run", str(source), "--name", "tiny", "--repository", str(repository), "--json", *options)
        assert done.code == 0, done.err
        graph = onnx.load(repository / "tiny_model" / "1" / "model.onnx")
        # Of the checkpoint's files, which are others.
        del graph.metadata_props[:]
        graphs.append(graph.SerializeToString(deterministic=True))
    told = json.loads(done.out)
    assert told["checkpoint"] == "DeepSpeed ZeRO stage 3, 2 ranks"
    unproven = [
        "proof of the order of ranks 000, 001: no gathered copy lies beside them",
        "proof that the files of all ranks are of one run: no gathered copy lies beside them",
    ]
    assert told["missing"] == unproven
    assert graphs[0] == graphs[1]
    again = export_cli("run", str(source), "--name", "tiny", "--repository", str(repository), *options)
    assert f"missing  {'; '.join(unproven)}" in again.out.replace("\n", " ")


@pytest.mark.rarer
def test_an_adapter_that_only_zero_3_files_hold_is_merged_as_peft_merges_it(
    tiny_checkpoint: Path, tmp_path: Path, export_cli: Cli
) -> None:
    trained = run(str(CHECKOUT / "tests" / "trainers" / "train_lora.py"), str(tiny_checkpoint), str(tmp_path))
    assert trained.code == 0, trained.err
    hashes = []
    for source, options in ((tmp_path / "truth", []), (tmp_path / "zero", ["--base", str(tiny_checkpoint)])):
        repository = tmp_path / f"models-{source.name}"
        done = export_cli("run", str(source), "--name", "tiny", "--repository", str(repository), "--json", *options)
        assert done.code == 0, done.err
        hashes.append(json.loads(done.out)["report"]["sha256"]["model.onnx"])
    assert hashes[0] == hashes[1]


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def remove_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def remove_rows(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    name = "embeddings.word_embeddings.weight"
    save_file(weights | {name: weights[name][:30500].clone()}, directory / "model.safetensors")


def poison(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["encoder.layer.0.output.dense.weight"][0, 0] = np.nan
    save_file(weights, directory / "model.safetensors")


def take_another_tokenizer(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"mask_token_id": 4}))


def hide_the_task(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["BertForPreTraining"]}))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (take_another_tokenizer, "belongs to another model: expected the special ids and the vocabulary that config"),
        (hide_the_task, "is to be served as cannot be determined: expected an architecture that ends in"),
        (truncate, "model.safetensors cannot be read: expected a whole weight file, got 100000 bytes"),
        (
            remove_config,
            "has no config.json: expected the model's configuration beside the weights, got model.safetensors, token",
        ),
        (remove_rows, "the tokenizer reaches beyond embeddings.word_embeddings.weight: expected ids below its 30500"),
        (poison, "are NaN or infinite: encoder.layer.0.output.dense.weight"),
    ],
)
def test_a_bad_checkpoint_is_refused_in_one_sentence_and_nothing_is_touched(
    damage: Callable[[Path], None], sentence: str, copy: Path, repository: Path, export_cli: Cli
) -> None:
    damage(copy)
    before = fingerprint(repository)
    done = export_cli("run", str(copy), "--name", "tiny", "--repository", str(repository))
    assert done.code == 1
    assert done.out == ""
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert sentence in error
    assert error.endswith(".")
    assert fingerprint(repository) == before


def test_a_base_without_a_configuration_is_not_taken_for_the_weights(
    copy: Path, tmp_path: Path, repository: Path, export_cli: Cli
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    shutil.copy(copy / "tokenizer.json", base)
    arguments = ("run", str(copy), "--base", str(base), "--name", "tiny", "--repository", str(repository))
    refused = export_cli(*arguments)
    told = (
        f"{base}, which --base names, has no config.json: expected the configuration of the model that the checkpoint "
        "was trained from, got tokenizer.json; copy that model's config.json there, or pass its own folder"
    )
    assert f"error: {told}, or leave --base out: there is one beside the weights.\n" in refused.err
    remove_config(copy)
    assert f"error: {told}.\n" in export_cli(*arguments).err
    with_token = export_cli(
        *("consolidate", str(copy), str(tmp_path / "out"), "--base", str(base)), "--add-token", "[NEW]=cat"
    )
    assert f"error: {told}.\n" in with_token.err
    for place, got in ((base / "none", "none"), (base / "tokenizer.json", "a file")):
        refused = export_cli(*(str(place) if part == str(base) else part for part in arguments))
        assert f"error: {place} is no folder: expected one with config.json and tokenizer, got {got};" in refused.err


def test_a_model_that_fails_the_gate_is_not_published(copy: Path, repository: Path, export_cli: Cli) -> None:
    """Weights that are not numbers, accepted on request, give answers that equal nothing."""
    poison(copy)
    before = fingerprint(repository)
    arguments = ("run", str(copy), "--name", "tiny", "--repository", str(repository))
    done = export_cli(*arguments, "--allow-non-finite")
    assert done.code == 1
    assert "FAILED" in done.err
    assert "error: the ONNX model is not equal to the checkpoint in 18 of 18 cases, worst in '1 token'" in done.err
    assert "where padding stands beside it" not in done.err
    assert fingerprint(repository) == before


WITHOUT_PADDING = """
from transformers import AutoConfig, ConvBertModel


class Vectors(ConvBertModel):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]


def build():
    return Vectors(AutoConfig.from_pretrained({folder!r}, attn_implementation="eager"))
"""
TOKENS = {"shape": ["batch", "tokens"], "dtype": "int64"}
INPUTS = {
    "inputs": {
        "input_ids": {**TOKENS, "values": {"integers": [0, 600]}},
        "attention_mask": {**TOKENS, "values": "mask"},
    },
    "outputs": ["vectors"],
    "dims": {"tokens": {"min": 1, "max": 32}},
}


def test_a_model_that_sees_the_padding_is_refused_with_what_never_pads(tmp_path: Path, export_cli: Cli) -> None:
    """ConvBERT's convolutions see the token beside another, whatever the mask says."""
    folder, repository = tmp_path / "conv", tmp_path / "models"
    save_model(Architecture("ConvBertModel", {**ARCHITECTURES["bert features"].options, "embedding_size": 64}), folder)
    done = export_cli("run", str(folder), "--name", "conv", "--repository", str(repository))
    assert done.code == 1
    assert "in torch the checkpoint itself answers a row otherwise where padding stands beside it (max abs " in done.err
    assert "so pass --factory with its module" in done.err
    assert not repository.exists()
    module, spec = tmp_path / "model.py", tmp_path / "inputs.json"
    module.write_text(WITHOUT_PADDING.format(folder=str(folder)))
    spec.write_text(json.dumps(INPUTS))
    own = ("--factory", f"{module}:build", "--inputs", str(spec))
    done = export_cli("run", str(folder), *own, "--name", "conv", "--repository", str(repository))
    assert done.code == 0, done.err
    assert "so tokens must not be padded" in done.err + done.out


@pytest.mark.parametrize("name", ["a/b", ".hidden", ""])
def test_a_bad_name_is_refused_before_any_work(name: str, copy: Path, repository: Path, export_cli: Cli) -> None:
    before = fingerprint(repository)
    done = export_cli("run", str(copy), "--name", name, "--repository", str(repository))
    assert done.code == 1
    assert done.err == (
        f"error: the model's name cannot be used: expected letters, digits, '_', '-' and '.', a letter or digit first, "
        f"at most 200, got {name!r}; pass another --name.\n"
    )
    assert fingerprint(repository) == before


def test_what_cannot_be_published_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    step = tmp_path / "models" / "tiny_model"
    step.mkdir(parents=True)
    (step / "config.pbtxt").write_text('name: "tiny_model"\nplatform: "onnxruntime_onnx"\n')
    (tmp_path / "file").touch()
    for options, sentence in (
        (["--name", "a/b"], "the model's name cannot be used"),
        (["--name", "tiny_model"], "is not a part of the model tiny_model: expected nothing there, or what was"),
        (["--name", "tiny", "--repository", str(tmp_path / "file")], "cannot be a repository: expected a folder"),
        (["--name", "tiny", "--target", "1.2"], "the target '1.2' is not a known Triton release"),
    ):
        done = run(
            *("-m", "export", "run", "x", "--repository", str(tmp_path / "models"), *options),
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("error: ")
        assert sentence in done.err
        assert done.err.count("\n") == 1


def test_a_step_that_is_anothers_is_told_before_the_weights_are_read(
    copy: Path, repository: Path, export_cli: Cli
) -> None:
    (repository / "tiny_preprocess" / "1").mkdir(parents=True)
    (repository / "tiny_preprocess" / "config.pbtxt").write_text('name: "tiny_preprocess"\n')
    before = fingerprint(repository)
    done = export_cli("run", str(copy), "--name", "tiny", "--repository", str(repository))
    assert done.code == 1
    assert "tiny_preprocess is not a part of the model tiny" in done.err
    assert "loading" not in done.err
    assert fingerprint(repository) == before


def test_wrong_usage_is_exit_2_and_help_shows_examples() -> None:
    assert run("-m", "export", "run", "x", "--name", "n", "--add-special-token", "[A]").code == 2
    assert run("-m", "export", "run", "x", "--name", "n", "--taks", "feature-extraction").code == 2
    done = run("-m", "export", "run", "--help")
    assert done.code == 0
    assert "examples:" in done.out


class Hasty(Progress):
    """Calls a function as a step begins."""

    def __init__(self, act: Callable[[], object], during: str = "hashing") -> None:
        super().__init__(Console(quiet=True))
        self._act, self._during = act, during

    def step(self, what: str) -> contextlib.AbstractContextManager[Detail]:
        if what.startswith(self._during):
            self._act()
        return super().step(what)


def test_what_others_write_beside_a_checkpoint_while_it_is_exported_does_not_matter(
    copy: Path, repository: Path
) -> None:
    for place in ("trainer_state.json", "log.txt", "checkpoint-500/config.json"):
        (copy / place).parent.mkdir(exist_ok=True)
        (copy / place).write_text("{}")

    def write() -> None:
        (copy / "trainer_state.json").write_text('{"step": 1}')
        (copy / "log.txt").write_text("step 1")
        shutil.rmtree(copy / "checkpoint-500")

    run_export(ExportRequest(checkpoint=copy, name="tiny", repository=repository), Hasty(write), lambda *_: None)


def test_a_shard_that_is_saved_again_while_the_graph_is_made_is_not_published(
    tiny_checkpoint: Path, copy: Path, repository: Path
) -> None:
    (copy / "model.safetensors").unlink()
    AutoModel.from_pretrained(tiny_checkpoint).save_pretrained(copy, max_shard_size="1MB")
    shards = sorted(copy.glob("model-*"))
    assert len(shards) > 1
    before = fingerprint(repository)

    def save() -> None:
        shutil.copyfile(shards[-1], copy / "again")
        (copy / "again").replace(shards[-1])

    request = ExportRequest(checkpoint=copy, name="tiny", repository=repository)
    with pytest.raises(CheckpointError, match="was written while it was read"):
        run_export(request, Hasty(save, "verifying"), lambda *_: None)
    assert fingerprint(repository) == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_what_is_saved_over_while_it_is_exported_is_not_published(copy: Path, repository: Path, name: str) -> None:
    before = fingerprint(repository)
    request = ExportRequest(checkpoint=copy, name="tiny", repository=repository)

    def save() -> None:
        shutil.copyfile(copy / name, copy / "again")
        (copy / "again").replace(copy / name)

    with pytest.raises(CheckpointError, match=f"{name} was written while it was read"):
        run_export(request, Hasty(save), lambda *_: None)
    assert fingerprint(repository) == before


def test_a_terminated_export_leaves_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "export", "run", str(tiny_checkpoint), "--name", "tiny"]
    repository = tmp_path / "models"
    process = subprocess.Popen(
        [*command, "--repository", str(repository)],
        stderr=subprocess.PIPE,
        text=True,
        env={"TMPDIR": str(tmp_path), "PATH": ""},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "exporting to ONNX" in line:
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stderr.read()
    assert process.wait() == 130
    assert "error: interrupted; everything is as it was." in rest
    assert not repository.exists()
    assert not list(tmp_path.glob("modelyard-*"))


def test_auto_proves_and_measures_each_engine_takes_the_fastest_and_keeps_it(
    copy: Path, repository: Path, export_cli: Cli
) -> None:
    arguments = ("run", str(copy), "--name", "tiny", "--repository", str(repository), "--engine", "auto")
    done = export_cli(*arguments)
    assert done.code == 0, done.err
    for what in ("ONNX Runtime 1.19.2 against torch", "OpenVINO 2026.4.1 against torch", "measuring engines"):
        assert what in done.err
    report = json.loads((repository / "tiny" / "1" / "verification.json").read_text())
    engines = report["engines"]
    trials = {trial["engine"]: trial["ms"] for trial in engines["trials"]}
    assert set(trials) == {"onnxruntime", "openvino"}
    assert engines["chosen"] == min(trials, key=lambda name: trials[name][0])
    assert all(0 < least <= median <= most for median, least, most in trials.values())
    assert engines["chosen"] in report["versions"], "the proof is the one of the engine that was taken"
    backend = {"onnxruntime": "onnxruntime", "openvino": "python_openvino"}[engines["chosen"]]
    assert f'backend: "{backend}"' in (repository / "tiny_model" / "config.pbtxt").read_text()
    page = (repository / "tiny" / "1" / "verification.html").read_text()
    assert "<h2>Engines</h2>" in page
    assert f"engine  the fastest for a text or row alone on one thread, CPU time: {engines['chosen']} " in done.out
    # Whatever would be the fastest next time: one name keeps its engine.
    assert "already holds exactly this" in export_cli(*arguments).out
    again = export_cli(*arguments, "--again", "--json")
    second = json.loads(again.out)["report"]["engines"]
    assert second["chosen"] == engines["chosen"]
    ((other, refused),) = ((trial["engine"], trial["refused"]) for trial in second["trials"] if trial["refused"])
    assert {other, second["chosen"]} == trials.keys()
    assert "engine" in refused
    # The steps of an engine that was left out are no steps.
    ((step, steps),) = re.findall(r"\[(\d+)/(\d+)\] publishing\n", again.err)
    assert step == steps


@pytest.mark.rarer
def test_auto_leaves_out_what_does_not_serve_the_precision(copy: Path, repository: Path, export_cli: Cli) -> None:
    arguments = ("run", str(copy), "--name", "tiny", "--repository", str(repository), "--engine", "auto")
    done = export_cli(*arguments, "--precision", "fp16", "--json")
    engines = json.loads(done.out)["report"]["engines"]
    assert engines["chosen"] == "onnxruntime"
    assert engines["trials"][1]["refused"].startswith(
        "OpenVINO does not serve fp16: expected one of bf16, fp32, int8, got"
    )


def test_auto_has_nothing_to_choose_from_for_a_decoder(copy: Path, repository: Path, export_cli: Cli) -> None:
    before = fingerprint(repository)
    arguments = ("--name", "tiny", "--repository", str(repository), "--engine", "auto", "--task", "text-generation")
    done = export_cli("run", str(copy), *arguments)
    assert (done.code, fingerprint(repository)) == (1, before)
    assert "no engine can be chosen for this task: expected one of openvino-genai" in " ".join(done.err.split())
