import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import CHECKOUT, Finished, fingerprint, run
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from trainers.task_checkpoints import build_dense_embedder

from export.checkpoints import open_checkpoint
from export.commands import consolidate as verb
from export.commands.consolidate import parse_size
from export.commands.inspect_checkpoint import inspect_checkpoint
from export.consolidation.consolidate import consolidate
from export.errors import CheckpointError
from export.options import ExportRequest
from export.progress import Progress
from export.signature import SEQ_LEN
from export.source import load_source
from export.tasks.texts.encoding import Question
from export.tasks.texts.pooling import FeatureExtraction
from export.tasks.texts.sentence_settings import find_default_prompt

# What the format promises whatever the model's size; measured at 22 MB on Python 3.11.
ANONYMOUS_LIMIT_BYTES = 100 * 10**6


def make_checkpoint(folder: Path, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    weight = torch.randn(20, 5)
    state = {
        "embed.weight": weight,
        "head.weight": weight,
        "transposed": torch.randn(6, 8).t(),
        "half": torch.randn(9).to(torch.bfloat16),
        "count": torch.tensor(3),
        "flags": torch.tensor([True, False, True]),
        **more,
    }
    folder.mkdir()
    torch.save({"model": state}, folder / "checkpoint.pt")
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", "text_config": {"torch_dtype": "float16"}}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "spiece.model").write_bytes(b"\x00\x01")
    (folder / "optimizer_notes.txt").write_text("stays behind")
    return state


def test_a_folder_within_the_checkpoint_is_refused(tmp_path: Path, export_cli: Callable[..., Finished]) -> None:
    for node in ("in", "other"):
        make_checkpoint(tmp_path / node)
    (tmp_path / "link").symlink_to("in")
    before = fingerprint(tmp_path)
    for words in (("in", "in/sub"), ("in", "link/sub"), ("link", "in/a/b"), ("other", "in", "--output", "in/sub")):
        done = export_cli("consolidate", *(word if word[0] == "-" else str(tmp_path / word) for word in words))
        assert (done.code, done.err.count("\n")) == (1, 1)
        assert " lies in the checkpoint: expected a folder outside of it, got one in " in done.err
    assert fingerprint(tmp_path) == before
    # Beside a file that is passed by itself there is nothing to be confused with.
    assert export_cli("consolidate", str(tmp_path / "in" / "checkpoint.pt"), str(tmp_path / "in" / "sub")).code == 0


def test_a_place_that_is_a_link_to_itself_is_refused(tmp_path: Path, export_cli: Callable[..., Finished]) -> None:
    make_checkpoint(tmp_path / "in")
    (tmp_path / "loop").symlink_to("loop")
    for out, sentence in (("loop", "loop exists already: "), ("loop/x", "loop/x cannot be made: ")):
        done = export_cli("consolidate", str(tmp_path / "in"), str(tmp_path / out))
        assert done.code == 1 and done.err.startswith(f"error: {tmp_path}/{sentence}") and done.err.count("\n") == 1


def test_every_byte_arrives_and_what_belongs_to_the_model_comes_along(tmp_path: Path) -> None:
    state = make_checkpoint(tmp_path / "in")
    done = consolidate(tmp_path / "in", tmp_path / "out")
    assert done.files == ("config.json", "model.safetensors", "spiece.model", "tokenizer.json")
    assert (done.tensors, done.tied) == (5, 1)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == state.keys() - {"head.weight"}
    assert all(torch.equal(tensor, state[name]) for name, tensor in written.items())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


# What transformers 5.23 and Sentence-Transformers 5 save beside weights, and what trainers leave there.
BELONGING = (
    "config_sentence_transformers.json", "generation_config.json", "gpt2-merges.txt", "gpt2-vocab.json", "merges.txt",
    "sentence_bert_config.json", "sentence_roberta_config.json", "source.spm", "special_tokens_map.json",
    "spiece.model", "target_vocab.json", "tokenizer.json", "vocab.json",
)  # fmt: skip
LEFT_BEHIND = ("all_results.json", "optimizer.bin", "README.md", "trainer_state.json", "zero_to_fp32.py")


def test_what_belongs_to_a_model_is_told_from_what_the_trainer_left(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "in")
    for name in (*BELONGING, *LEFT_BEHIND):
        (tmp_path / "in" / name).write_text("{}")
    done = consolidate(tmp_path / "in", tmp_path / "out")
    assert done.files == tuple(sorted(("config.json", "model.safetensors", *BELONGING)))


@pytest.mark.parametrize("inner", ["", "0_Transformer"])
def test_an_embedding_model_stays_the_same_model(checkpoint: Path, tmp_path: Path, inner: str) -> None:
    home = build_dense_embedder(tmp_path / "in", checkpoint)
    (home / "sentence_bert_config.json").write_text('{"max_seq_length": 17}')
    source = home / inner
    if inner:
        # The layout before Sentence-Transformers 2.0.
        files = [path for path in home.iterdir() if path.is_file() and path.name != "modules.json"]
        source.mkdir()
        for path in files:
            path.rename(source / path.name)
        modules = (home / "modules.json").read_text()
        (home / "modules.json").write_text(modules.replace('"path": ""', f'"path": "{inner}"'))
    prompts = {"prompts": {"q": "query: "}, "default_prompt_name": "q"}
    (home / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    done = consolidate(source, tmp_path / "out")
    assert find_default_prompt(tmp_path / "out") == "query: "
    assert {"modules.json", "1_Pooling/config.json", "2_Dense/config.json"} <= {*done.files}
    assert [name for name in done.files if "2_Dense/" in name][1:] == ["2_Dense/model.safetensors"]
    before, after = ask_embedder(source), ask_embedder(tmp_path / "out")
    assert before == after
    assert before.startswith("last, 1 Dense, normalised, 17 tokens: [")
    # `--dtype` is the layer's as well.
    consolidate(source, tmp_path / "half", dtype="bfloat16")
    (layer,) = {tensor.dtype for tensor in load_file(tmp_path / "half" / "2_Dense" / "model.safetensors").values()}
    assert layer == torch.bfloat16


def ask_embedder(folder: Path) -> str:
    """Return how the model in `folder` is pooled, its longest text, and its vector for one."""
    request = ExportRequest(checkpoint=folder, name="x", repository=folder)
    task = load_source(request, Progress(Console(quiet=True))).task
    assert isinstance(task, FeatureExtraction)
    pooling = str(task.pooling).partition(" (")[0]
    vector = task.answer(Question(text="A cat sleeps."))["EMBEDDING"]
    return f"{pooling}, {task.signature.longest[SEQ_LEN]} tokens: {vector}"


def test_shards_and_index_are_those_that_transformers_reads(tmp_path: Path) -> None:
    state = make_checkpoint(tmp_path / "in")
    consolidate(tmp_path / "in", tmp_path / "out", max_shard_bytes=300)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    assert index["metadata"]["total_size"] == 400 + 192 + 18 + 8 + 3
    assert index["metadata"]["head.weight"] == "embed.weight"
    checkpoint = open_checkpoint(tmp_path / "out")
    assert all(torch.equal(checkpoint.read(name), state[name]) for name in index["weight_map"])
    assert len(index["weight_map"]) == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_cast_is_torchs_own_and_the_configuration_says_so(tmp_path: Path, dtype: str) -> None:
    state = make_checkpoint(tmp_path / "in")
    consolidate(tmp_path / "in", tmp_path / "out", dtype=dtype)
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        expected = state[name].to(getattr(torch, dtype)) if state[name].is_floating_point() else state[name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"dtype": dtype, "text_config": {"torch_dtype": dtype}}


def test_a_cast_that_overflows_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "in", large=torch.tensor([1e6]))
    with pytest.raises(CheckpointError, match="large does not fit float16: expected finite numbers after the cast"):
        consolidate(tmp_path / "in", tmp_path / "out", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_folder_that_exists_is_not_touched(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "in")
    (tmp_path / "out").mkdir()
    consolidate(tmp_path / "in", tmp_path / "out")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    with pytest.raises(CheckpointError, match="out exists already: expected a new folder, got something there; choose"):
        consolidate(tmp_path / "in", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before
    with pytest.raises(CheckpointError, match="cannot be made: expected a folder that can be written to, got No such"):
        consolidate(tmp_path / "in", tmp_path / "nowhere" / "out")


def test_tensors_that_overlap_to_fill_a_disk_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    whole = torch.zeros(1000)
    torch.save({f"w{start}": whole[start:] for start in range(100)}, tmp_path / "in" / "x.pt")
    with pytest.raises(
        CheckpointError,
        match=r"share their bytes: .*: expected at most four times the 4000 bytes that they lie in, got 380200; clone",
    ):
        consolidate(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("max_shard_bytes", [10**9, 300])
def test_what_was_written_is_written_again_byte_for_byte(tmp_path: Path, max_shard_bytes: int) -> None:
    # Ties of a width that comes last in the file, out of the order of the model.
    half = torch.randn(8).to(torch.bfloat16)
    state = make_checkpoint(tmp_path / "in", zz=half, b=half, a=half, last=torch.randn(30))
    consolidate(tmp_path / "in", tmp_path / "one", max_shard_bytes=max_shard_bytes)
    done = consolidate(tmp_path / "one", tmp_path / "two", max_shard_bytes=max_shard_bytes)
    first = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()} == first
    assert done.tied == 3
    found = inspect_checkpoint(tmp_path / "one")
    assert sorted(map(sorted, found.tied)) == [["a", "b", "zz"], ["embed.weight", "head.weight"]]
    checkpoint = open_checkpoint(tmp_path / "one")
    assert checkpoint.specs().keys() == state.keys()
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in state.items())


def test_a_zero_size_parameter_of_any_name_is_written_and_read_again(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    names = ["a b", 'c"d', "plain"]
    metadata = {"format": "pt", "zero_size_parameters": json.dumps(names)}
    state = {"w": torch.ones(2), **{name: torch.empty(0, 3) for name in names}}
    save_file(state, tmp_path / "in" / "model.safetensors", metadata=metadata)
    consolidate(tmp_path / "in", tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").zero_size == set(names)


def test_a_name_that_safetensors_has_no_place_for_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "in", __metadata__=torch.ones(2))
    with pytest.raises(CheckpointError, match="no place for a tensor called __metadata__: expected another name"):
        consolidate(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("name", ["format", "zero_size_parameters"])
def test_a_tied_name_with_another_meaning_in_the_metadata_is_refused(tmp_path: Path, name: str) -> None:
    weight = torch.ones(3)
    (tmp_path / "tied").mkdir()
    torch.save({"a": weight, name: weight}, tmp_path / "tied" / "x.pt")
    with pytest.raises(
        CheckpointError, match=f"{name} cannot be recorded as a tied name: .*, which shares the bytes of a;"
    ):
        consolidate(tmp_path / "tied", tmp_path / "out")
    (tmp_path / "holder").mkdir()
    torch.save({name: weight, "a": weight}, tmp_path / "holder" / "x.pt")
    consolidate(tmp_path / "holder", tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").tied == {"a": name}


def test_an_embedding_model_is_taken_from_the_cache_of_downloads(checkpoint: Path, tmp_path: Path) -> None:
    home = build_dense_embedder(tmp_path / "models--a--b" / "snapshots" / "1f3a", checkpoint)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, path in enumerate([path for path in home.rglob("*") if path.is_file()]):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))
    done = consolidate(home, tmp_path / "out")
    assert {"modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"} <= {*done.files}
    (tmp_path / "secret").write_text("{}")
    (home / "1_Pooling" / "config.json").unlink()
    (home / "1_Pooling" / "config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json is a link that leads outside"):
        consolidate(home, tmp_path / "other")


def test_the_configuration_may_not_lead_outside(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").unlink()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "in" / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link that leads outside"):
        consolidate(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# What is looked for, and does without where it is not there.
OPTIONAL = ("modules.json", "generation_config.json", "sentence_bert_config.json", "config_sentence_transformers.json")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", *OPTIONAL])
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: path.write_text("[" * 200_000), r"cannot be read: expected JSON, got .* nested too deeply"),
        (lambda path: path.write_bytes(b"\xff\xfe\x80"), "cannot be read: expected JSON, got 3 bytes"),
        (lambda path: path.write_text('{"model": {"vo'), "cannot be read: expected JSON, got 14 bytes"),
        (os.mkfifo, "is not a regular file: expected a file, got a FIFO"),
        (lambda path: path.symlink_to("/dev/urandom"), "is not a regular file: .*a device|leads outside"),
        (lambda path: path.symlink_to("gone"), "cannot be opened: expected a file, got No such file or directory"),
        (Path.mkdir, "is not a regular file: expected a file, got a folder"),
        (lambda path: path.write_text("null"), "expected a JSON object, got null; copy|expected a list of modules, "),
    ],
)
def test_what_describes_the_model_is_refused_where_it_cannot_be_read(
    make: Callable[[Path], object], found: str, name: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "in")
    path = tmp_path / "in" / name
    path.unlink(missing_ok=True)
    make(path)
    for refused in (lambda: consolidate(tmp_path / "in", tmp_path / "out"), lambda: inspect_checkpoint(path.parent)):
        with pytest.raises(CheckpointError, match=found) as caught:
            refused()
        assert str(path) in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["vocab.json", "spiece.model", "merges.txt", "additional_chat_templates/a.jinja"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("gone")])
def test_what_bears_the_name_of_a_models_file_does_not_stay_behind(
    make: Callable[[Path], object], name: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "in")
    path = tmp_path / "in" / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    make(path)
    for refused in (
        lambda: consolidate(tmp_path / "in", tmp_path / "out"),
        lambda: inspect_checkpoint(tmp_path / "in"),
    ):
        with pytest.raises(CheckpointError, match=rf"{name} (is not a regular file|cannot be opened): expected a file"):
            refused()


@pytest.mark.parametrize("content", ["[" * 200_000, "null"])
def test_the_settings_of_a_module_are_refused_where_they_cannot_be_read(
    content: str, checkpoint: Path, tmp_path: Path
) -> None:
    home = build_dense_embedder(tmp_path / "in", checkpoint)
    path = home / "1_Pooling" / "config.json"
    path.write_text(content)
    for refused in (lambda: consolidate(home, tmp_path / "out"), lambda: inspect_checkpoint(home)):
        with pytest.raises(CheckpointError, match=rf"{path} cannot be read: expected"):
            refused()


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("folder", "is not a regular file: expected a file, got a folder"),
        ("dangling", "cannot be opened: expected a file, got No such file or directory"),
        ("half a character", "holds what is not text: expected Unicode, got half a character"),
    ],
)
def test_a_configuration_that_cannot_be_carried_over_is_refused(tmp_path: Path, kind: str, found: str) -> None:
    make_checkpoint(tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to("gone.json")
    else:
        path.write_text('{"dtype": "float16", "name": "\\ud800"}')
    with pytest.raises(CheckpointError, match=found):
        consolidate(tmp_path / "in", tmp_path / "out", dtype="bfloat16")
    assert not (tmp_path / "out").exists()


def start(source: Path, target: Path, *, pause_s: float) -> subprocess.Popen[bytes]:
    """A run of the verb that stops for `pause_s` after its first bytes."""
    script = (
        "import sys, time, export.consolidation.safetensors_output as output\n"
        "write = output.SafetensorsOutput.write\n"
        f"output.SafetensorsOutput.write = lambda *args: (write(*args), time.sleep({pause_s}))\n"
        "from export.__main__ import main\n"
        "sys.exit(main(['consolidate', *sys.argv[1:]]))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script, str(source), str(target)], cwd=CHECKOUT, stderr=subprocess.PIPE
    )


def wait_for(pattern: str, folder: Path) -> Path:
    for _ in range(500):
        found = list(folder.glob(pattern))
        if found:
            return found[0]
        time.sleep(0.02)
    raise AssertionError(f"no {pattern} in {folder}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    make_checkpoint(tmp_path / "in")
    run = start(tmp_path / "in", tmp_path / "out", pause_s=0.5)
    wait_for(".out.partial-*/model.safetensors", tmp_path)
    run.send_signal(number)
    assert run.wait(20) != 0
    run.communicate()
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_killed_run_is_repeated_without_cleaning_up(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "in")
    run = start(tmp_path / "in", tmp_path / "out", pause_s=30)
    left = wait_for(".out.partial-*", tmp_path)
    run.kill()
    run.communicate()
    assert left.is_dir()
    consolidate(tmp_path / "in", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_run_that_still_goes_on_is_let_be(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "in")
    run = start(tmp_path / "in", tmp_path / "out", pause_s=0.5)
    left = wait_for(".out.partial-*/model.safetensors", tmp_path).parent
    consolidate(tmp_path / "in", tmp_path / "out")
    assert left.is_dir()
    assert run.wait(20) != 0
    assert b"out cannot be written: got Directory not empty" in run.communicate()[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_memory_stays_small_whatever_the_models_size(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    state = {f"w{index}": torch.ones(20_000_000, dtype=torch.float32) for index in range(4)}
    torch.save({**state, "t": torch.ones(4000, 2500).t()}, tmp_path / "in" / "x.pt")
    script = (
        "import sys, threading, time\n"
        "from pathlib import Path\n"
        "from export.consolidation.consolidate import consolidate\n"
        "peak = 0\n"
        "def watch():\n"
        "    global peak\n"
        "    while True:\n"
        "        lines = Path('/proc/self/status').read_text().splitlines()\n"
        "        peak = max(peak, next(int(line.split()[1]) for line in lines if line.startswith('RssAnon')))\n"
        "        time.sleep(0.005)\n"
        "threading.Thread(target=watch, daemon=True).start()\n"
        "consolidate(Path(sys.argv[1]), Path(sys.argv[2]), dtype='bfloat16')\n"
        "print(peak * 1024)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 180_000_000
    assert int(done.stdout) < ANONYMOUS_LIMIT_BYTES


def test_what_was_written_is_told_to_programs(tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = run("-m", "export", "consolidate", str(tiny_checkpoint), str(tmp_path / "out"), "--json")
    told = json.loads(done.out)
    assert (done.code, told["folder"], told["missing"]) == (0, str(tmp_path / "out"), [])
    assert told["tensors"] == len(load_file(tmp_path / "out" / "model.safetensors"))
    assert sorted(told["files"]) == sorted(path.name for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("300 mb", 3 * 10**8), ("1.5K", 1500), ("7", 7)])
def test_sizes_are_read_as_save_pretrained_reads_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 PB", "-3", "0"])
def test_a_size_that_is_none_is_a_usage_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(["consolidate", "in", "out", f"--max-shard-size={text}"])
    assert stopped.value.code == 2
    assert f"{text!r} is not a size; write 5GB or 300MB" in capsys.readouterr().err
