"""The command `modelyard` itself: what it prints, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import CHECKOUT

FAULT = "the answer cannot be written: expected a standard output that takes it, got 'No space left on device'"


def run_command(*words: str, **options: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "modelyard", *words]
    # argparse lets an error pass where it writes each line by itself.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options = {"env": environment} | options
    return subprocess.run(command, cwd=CHECKOUT, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    "words", [("--help",), ("--version",), ("versions", "--help"), ("doctor",), ("infer", "-h"), ("gateway", "-h")]
)
def test_what_becomes_of_its_standard_output_is_no_traceback(words: tuple[str, ...]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = run_command(*words, stdout=writes)
    os.close(writes)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = run_command(*words, stdout=full)
    assert (done.returncode, done.stderr) == (5, f"error: {FAULT}; send it elsewhere.\n")
    done = run_command(*words, preexec_fn=lambda: os.close(1))
    closed = FAULT.replace("No space left on device", "Bad file descriptor")
    assert (done.returncode, done.stderr) == (5, f"error: {closed}; send it elsewhere.\n")


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", r"na\u00efve \u6a21\u578b \ud83d\ude00"),
        ("latin-1", r"naïve \u6a21\u578b \ud83d\ude00"),
        ("utf-8", "naïve 模型 😀"),
    ],
)
def test_what_an_encoding_lacks_is_written_as_an_escape_that_json_reads(
    tmp_path: Path, encoding: str, shown: str
) -> None:
    repository = tmp_path / "naïve 模型 😀"
    (repository / "x").mkdir(parents=True)
    for words, code in ((["doctor", "--repository"], 1), (["lint"], 0)):
        for more in ((), ("--json",)):
            command = [sys.executable, "-m", "modelyard", *words, str(repository), *more]
            environment = os.environ | {"PYTHONIOENCODING": encoding}
            done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True)
            assert (done.returncode, done.stderr) == (code, b"")
            text = done.stdout.decode(encoding)
            assert str(repository) in str(json.loads(text)) if more else shown in text


@pytest.mark.parametrize("is_unbuffered", [True, pytest.param(False, marks=pytest.mark.rarer)])
@pytest.mark.parametrize(
    "words",
    [("modelyard",), ("export", "run"), ("export", "versions", "list"), ("server", "serve"), ("client.infer",),
     *(pytest.param((name,), marks=pytest.mark.rarer) for name in ("client.parity", "client.bench", "gateway"))],
)  # fmt: skip
def test_the_exit_code_tells_which_of_the_streams_took_nothing(words: tuple[str, ...], is_unbuffered: bool) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": "1" if is_unbuffered else ""}
    wrong = "frob" if words == ("modelyard",) else "--frob"
    for word, code, streams in (
        ("--help", 5, ">/dev/full"),
        ("--help", 5, ">/dev/full 2>&1"),
        # Of wrong usage nothing is said there.
        (wrong, 2, ">/dev/full"),
        (wrong, 2, "2>/dev/full"),
    ):
        command = ["bash", "-c", f'exec "$@" {streams}', "bash", sys.executable, "-m", *words, word]
        done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), (word, streams, done.stderr)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (
            "run --precison int8",
            "run: error: there is no option --precison, did you mean --precision; see modelyard run",
        ),
        ("run CK --nmae=a", "run: error: there is no option --nmae, did you mean --name; see modelyard run"),
        ("run CK --name a b", "run: error: unrecognized arguments: b; see modelyard run"),
        ("activate NAME --json 1", "activate: error: unrecognized arguments: 1; put it in front of the options; see"),
        ("activate NAME 1 --json 2", "activate: error: unrecognized arguments: 2; see modelyard activate"),
        ("run CK --name a -z", "run: error: unrecognized arguments: -z; see modelyard run"),
        (
            "versions list --jsn",
            "versions list: error: there is no option --jsn, did you mean --json; see modelyard ver",
        ),
        (
            "serve --repositry X",
            "serve: error: there is no option --repositry, did you mean --repository; see modelyard",
        ),
        ("serve X", "serve: error: unrecognized arguments: X; see modelyard serve"),
        ("doctor --http-port x", "doctor: error: argument --http-port: invalid int value: 'x'; see modelyard doctor"),
        ("infer --txt x", "infer: error: there is no option --txt, did you mean --text; see modelyard infer"),
        ("parity --frob", "parity: error: there is no option --frob; see modelyard parity"),
        ("bench --frob", "bench: error: there is no option --frob; see modelyard bench"),
        ("gateway --prot 1", "gateway: error: there is no option --prot, did you mean --port; see modelyard gateway"),
    ],
)
def test_a_slip_in_an_option_is_one_line_with_the_verb_and_what_was_meant(words: str, refusal: str) -> None:
    done = run_command(*words.split(), stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"modelyard {refusal}") and done.stderr.endswith(" --help\n")


def test_the_readme_names_each_verb_beside_the_extra_that_it_needs() -> None:
    code = "from modelyard.__main__ import VERBS\nfor group in VERBS.values():\n"
    code += "    for verb in group: print(verb.name, verb.extra)"
    verbs = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, check=True)
    rows = re.findall(r"^\| .*?`(\w+)` \| (.*?) \|", (CHECKOUT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {extra: re.findall(r"`([\w-]+)`", verbs) for extra, verbs in rows}
    for verb, extra in map(str.split, verbs.stdout.splitlines()):
        assert verb in named[extra], verb


@pytest.mark.parametrize("verb", ["run", "serve", "infer", "gateway"])
def test_what_begins_like_an_option_and_is_none_is_left_to_the_verb(verb: str) -> None:
    done = run_command(verb, "--frob", "--help", stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout.startswith(f"usage: modelyard {verb} ")) == (0, True)
    if verb == "infer":
        done = run_command(
            verb, "--url", "localhost:19499", "--time", "1", "--text", "--a text", "-", stdout=subprocess.PIPE
        )
        assert done.returncode == 1 and "no server can be reached" in done.stderr


@pytest.mark.parametrize("module", ["difflib", "dataclasses", "numpy", "rich", "ctypes"])
def test_an_interruption_while_a_part_is_loading_is_one_sentence(module: str, tmp_path: Path) -> None:
    # What is loaded from here sends Ctrl-C to the process that loads it.
    (tmp_path / f"{module}.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    verb = {"rich": "inspect", "ctypes": "check"}.get(module, "infer")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{CHECKOUT}"}
    for command in ([sys.executable, "-m", "modelyard"], [str(Path(sys.executable).with_name("modelyard"))]):
        done = subprocess.run([*command, verb, "x"], cwd=CHECKOUT, env=environment, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (130, "error: interrupted; nothing was begun.\n")
    if module == "ctypes":
        command = [sys.executable, "-m", "server", verb]
        done = subprocess.run(command, cwd=CHECKOUT, env=environment, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (130, "")
