import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import CHECKOUT, Finished, run
from safetensors.torch import save_file
from trainers.writers import save_writer

from export.commands import inspect_checkpoint


def run_verb(*arguments: object, wrap: tuple[str, ...] = (), **options: object) -> subprocess.CompletedProcess[str]:
    command = [*wrap, sys.executable, "-m", "export", *map(str, arguments)]
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command, cwd=CHECKOUT, text=True, **({"stderr": subprocess.PIPE} | options)
    )


def test_an_error_of_the_system_is_one_sentence_and_a_bug_is_none(
    export_cli: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: Exception) -> Callable[..., None]:
        def raise_it(*_: object, **__: object) -> None:
            raise error

        return raise_it

    monkeypatch.setattr(inspect_checkpoint, "inspect_checkpoint", fail(PermissionError(13, "Permission denied", "/x")))
    finished = export_cli("inspect", "x")
    assert (finished.code, finished.err) == (
        1,
        "error: a file at /x cannot be used: expected the right to it, got Permission denied; let this user read and "
        "write it, and enter the folders that it is in.\n",
    )
    monkeypatch.setattr(inspect_checkpoint, "inspect_checkpoint", fail(OSError(28, "No space left on device", "/x")))
    assert export_cli("inspect", "x").err.startswith(
        "error: a file at /x cannot be written: expected room for it, got No space left on device; make room there, or "
    )
    monkeypatch.setattr(inspect_checkpoint, "inspect_checkpoint", fail(OSError(27, "File too large", "/x")))
    # The file system's own limit: nothing is set for this process.
    assert export_cli("inspect", "x").err == (
        "error: a file at /x cannot be written: expected a file system that takes files of any size, got File too "
        "large; write to another file system.\n"
    )
    monkeypatch.setattr(inspect_checkpoint, "inspect_checkpoint", fail(KeyError("x")))
    with pytest.raises(KeyError):
        export_cli("inspect", "x")


VERBS = (
    *("inspect", "consolidate", "run", "versions", "activate", "promote", "prune", "remove"),
    *("verify-repository", "lint"),
)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_examples_that_its_own_command_line_takes(
    verb: str, export_cli: Callable[..., Finished], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        export_cli(verb, "--help")
    text = capsys.readouterr().out.replace(" \\\n", " ")
    assert end.value.code == 0
    assert "exit codes: 0 " in text
    examples = [line.strip() for line in text.split("\nexamples:\n")[1].split("\n\n")[0].splitlines()]
    assert len(examples) >= 3
    for example in examples:
        words = shlex.split(re.split(" [>|] ", example)[0].removeprefix("python -m export "))
        assert words[0] == verb
        # Read by argparse, then refused, for nothing of that name is there.
        assert export_cli(*words).code == 1, example


def test_help_answers_without_loading_what_is_heavy() -> None:
    code = (
        "import sys; from export.__main__ import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: sys.stderr.write(' '.join({'torch', 'transformers', 'onnx', 'onnxruntime'} & {*sys.modules}))"
    )
    for words in ([], *([verb] for verb in VERBS)):
        done = run("-c", code, *words, "--help")
        assert (done.code, done.err) == (0, ""), words
        assert done.out.startswith("usage: python -m export")


def test_wrong_usage_is_told_in_one_line() -> None:
    done = run("-m", "export", "run", "checkpoint", "--name", "x", "--task", "generate")
    assert done.code == 2
    assert done.err.startswith("python -m export run: error: argument --task: invalid choice: 'generate' (choose from ")
    assert done.err.endswith("; see python -m export run --help\n")
    assert done.err.count("\n") == 1


def test_a_refusal_is_coloured_on_a_terminal_alone(tmp_path: Path) -> None:
    plain = run_verb("inspect", tmp_path / "none")
    assert plain.returncode == 1
    assert plain.stderr.startswith("error: ") and "\x1b" not in plain.stderr
    ours, theirs = os.openpty()
    environment = os.environ | {"TERM": "xterm"}
    command = [sys.executable, "-m", "export", "inspect", str(tmp_path / "none")]
    subprocess.run(command, cwd=CHECKOUT, stderr=theirs, env=environment, check=False)
    os.close(theirs)
    shown = os.read(ours, 4096)
    os.close(ours)
    assert b"\x1b[31merror: " in shown


def test_an_answer_that_nothing_takes_is_an_error(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:  # noqa: PTH123
        finished = run_verb("inspect", tmp_path, stdout=full, env=environment)
        written = run_verb(
            "consolidate", tmp_path, tmp_path.with_name(f"{tmp_path.name}-out"), stdout=full, env=environment
        )
    fault = "the answer cannot be written: expected a standard output that takes it, got 'No space left on device'"
    assert (finished.returncode, finished.stderr) == (5, f"error: {fault}; send it elsewhere.\n")
    told = f"error: {tmp_path}-out is written, but {fault}; send it elsewhere.\n"
    assert (written.returncode, written.stderr) == (5, told)
    assert (tmp_path.with_name(f"{tmp_path.name}-out") / "model.safetensors").is_file()


def test_a_standard_error_that_takes_nothing_undoes_no_work(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    telling = (
        "from export.commands import standard_streams, verb; standard_streams.prepare(); "
        "verb.open_console().print('half way'); verb.say('done'); standard_streams.write_answer('answer')"
    )
    with open("/dev/full", "w") as full:  # noqa: PTH123
        told = subprocess.run(
            [sys.executable, "-c", telling], cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=full, text=True, check=False
        )
        untold = run_verb("consolidate", tmp_path, tmp_path.with_name(f"{tmp_path.name}-out"), stdout=full, stderr=full)
    assert (told.returncode, told.stdout) == (0, "answer")
    assert untold.returncode == 5


def test_a_closed_standard_output_takes_no_answer_either(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    out = tmp_path.with_name(f"{tmp_path.name}-out")
    fault = "the answer cannot be written: expected a standard output that takes it, got 'Bad file descriptor'"
    for words, done in ((("inspect", tmp_path), ""), (("consolidate", tmp_path, out), f"{out} is written, but ")):
        finished = run_verb(*words, wrap=("bash", "-c", 'exec "$@" >&-', "bash"))
        assert (finished.returncode, finished.stderr) == (5, f"error: {done}{fault}; send it elsewhere.\n")
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


def test_a_working_folder_that_was_removed_is_told(tmp_path: Path) -> None:
    wrap = ("bash", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(tmp_path / "gone"))
    for words in (("consolidate", tmp_path, tmp_path / "out"), ("run", tmp_path, "--name", "x")):
        (tmp_path / "gone").mkdir()
        finished = run_verb(*words, wrap=wrap, env=os.environ | {"PYTHONPATH": str(CHECKOUT)})
        assert (finished.returncode, finished.stderr) == (
            1,
            "error: the working folder cannot be used: expected one that is there, got 'No such file or directory'; "
            "change into another one.\n",
        )


def test_what_is_no_place_to_read_or_to_publish_is_refused(
    tiny_checkpoint: Path, export_cli: Callable[..., Finished]
) -> None:
    before = sorted(tiny_checkpoint.iterdir())
    done = export_cli("run", str(tiny_checkpoint), "--name", "x", "--repository", f"{tiny_checkpoint}/.")
    assert done.code == 1 and "is the checkpoint: expected a repository in another folder, got the same; " in done.err
    assert sorted(tiny_checkpoint.iterdir()) == before
    for words in (("inspect", ""), ("consolidate", "", "out"), ("run", "", "--name", "x")):
        done = export_cli(*words)
        assert (
            done.err == "error: no checkpoint is named: expected a folder or an address, got an empty word; name it.\n"
        )


@pytest.mark.rarer
def test_a_limit_on_file_sizes_is_named_with_the_place_where_it_was_met(tiny_checkpoint: Path, tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    limits = ("bash", "-c", 'ulimit -f 30; exec "$@"', "bash")
    environment = os.environ | {"TMPDIR": str(room)}
    finished = run_verb(
        *("run", tiny_checkpoint, "--name", "tiny", "--repository", tmp_path / "models"), wrap=limits, env=environment
    )
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1] == (
        f"error: a file at {room} cannot be written: expected no limit on the size of a file, got File too large; "
        "raise the limit on file sizes (ulimit -f), which is 30,720 bytes."
    )
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("size", [100, 1_000_000], ids=["what belongs to the weights", "the weights"])
def test_a_limit_on_file_sizes_is_named_where_weights_are_written(size: int, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_file({"w": torch.ones(size)}, checkpoint / "model.safetensors")
    (checkpoint / "vocab.txt").write_text("word\n" * 20_000)
    limits = ("bash", "-c", 'ulimit -f 30; exec "$@"', "bash")
    finished = run_verb("consolidate", checkpoint, tmp_path.with_name(f"{tmp_path.name}-out"), wrap=limits)
    assert finished.returncode == 1
    assert " cannot be written: expected no limit on the size of a file, got File too large" in finished.stderr
    assert str(tmp_path) in finished.stderr
    assert finished.stderr.endswith("; raise the limit on file sizes (ulimit -f), which is 30,720 bytes.\n")


def test_an_interruption_while_loading_is_one_sentence(tmp_path: Path) -> None:
    # What is loaded from here sends Ctrl-C to the process that loads it.
    (tmp_path / "rich.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    finished = run_verb("inspect", tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (finished.returncode, finished.stderr) == (130, "error: interrupted; nothing was begun.\n")


def test_a_folder_beside_the_weights_that_may_not_be_read_is_no_matter(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "lost+found").mkdir(mode=0)
    wrap: tuple[str, ...] = ()
    if os.geteuid() == 0:
        # Root reads everything until it gives that up.
        os.chown(tmp_path / "lost+found", 1234, 1234)
        rights = "-dac_override,-dac_read_search"
        wrap = (shutil.which("setpriv") or "setpriv", "--bounding-set", rights, "--inh-caps", rights)
    assert (
        run_verb(
            "consolidate", tmp_path, tmp_path.with_name(f"{tmp_path.name}-out"), wrap=wrap, stdout=subprocess.PIPE
        ).stderr
        == ""
    )
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "global_step1" / "mp_rank_00_model_states.pt").mkdir()
    (tmp_path / "lost+found").rename(tmp_path / "global_step2")
    # It may be the latest one.
    finished = run_verb("inspect", tmp_path, wrap=wrap)
    sentence = (
        f"error: {tmp_path}/global_step2 cannot be read: expected the files of a checkpoint, got Permission denied; "
        "let this user read it, and enter the folders that it is in."
    )
    assert (finished.returncode, finished.stderr) == (1, sentence + "\n")


@pytest.mark.rarer
def test_what_a_log_holds_can_be_read_and_the_next_step_typed(tmp_path: Path) -> None:
    save_writer("gpt2", tmp_path / "writer")
    repository = tmp_path / "my models"
    words = ("run", tmp_path / "writer", "--name", "writer", "--repository", repository)
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    first, again = (run_verb(*words, env=environment, stdout=subprocess.PIPE) for _ in range(2))
    # The table with the most columns, each case on one line.
    assert "│ prompts in one batch, padded left │" in first.stderr, first.stderr
    assert "already holds exactly this" in again.stdout
    for finished in (first, again):
        serve = shlex.split(finished.stdout.splitlines()[-1])
        assert serve == ["Next:", "python", "-m", "server", "--repository", str(repository)]
