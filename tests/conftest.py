"""What the tests share: the real checkpoint, a small one, a published repository, and a running server."""

import os

# As `export` itself sets it, and before torch is imported here: tests share their cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import re
import shutil
import signal
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SHARED_FOLDER, Exported, Finished, Published, make_once, run, verify_files
from rich.console import Console
from transformers import AutoTokenizer, BertConfig, BertModel

from demo.checkpoint import fetch_checkpoint
from demo.serving import ADDED_TOKENS, Addresses, serve
from export.__main__ import main as run_export_cli
from export.options import ExportRequest
from export.progress import Progress
from export.source import load_source
from export.stages import write_files
from export.targets import DEFAULT_TARGET
from export.weights.vocabulary_options import AddedToken, VocabularyOptions

# A shell that starts a job in the background has it ignore Ctrl-C, and whatever the job starts ignores it as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# How often the tritonserver of a session was started anew, as far as it is known.
_RESTARTS: dict[Addresses, int] = {}

# How a process of xdist ended, if before its time, so that tests were not run.
_CRASHED = pytest.StashKey[str]()

# By the meaning of a marker in pyproject.toml, how many tests `-m` or `-k` left out.
_LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder for what is made once; the processes that xdist starts inherit its name."""
    if not hasattr(config, "workerinput"):
        shared = tempfile.TemporaryDirectory(prefix="modelyard-tests-")
        os.environ[SHARED_FOLDER] = shared.name
        config.add_cleanup(shared.cleanup)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count what is left out by the markers' meanings, which say how it is run."""
    for item in items:
        counts = item.config.stash.setdefault(_LEFT_OUT, Counter())
        for line in item.config.getini("markers"):
            name, _, meaning = line.partition(": ")
            counts[meaning] += item.get_closest_marker(name) is not None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the counts to the process that prints the summary, where several run the tests.

    A run of which tests are missing does not end like one in which some failed: to run those again proves nothing.
    """
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = dict(session.config.stash.get(_LEFT_OUT, Counter()))
    if _CRASHED in session.config.stash:
        session.exitstatus = pytest.ExitCode.INTERRUPTED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take the counts of one of them: each has collected all tests. Note if it ended before its time."""
    if error:
        node.config.stash[_CRASHED] = str(error)
    if counts := getattr(node, "workeroutput", {}).get("left out"):
        node.config.stash[_LEFT_OUT] = Counter(counts)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    """Say below everything else what was not run, and how to have it run."""
    yield
    reports = terminalreporter.stats.get("skipped", [])
    left_out = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    left_out.update(+config.stash.get(_LEFT_OUT, Counter()))
    if left_out:
        terminalreporter.section("not run here")
    for meaning, count in left_out.most_common():
        terminalreporter.line(f"{count:>5}  {meaning}")
    if error := config.stash.get(_CRASHED, ""):
        terminalreporter.line(f"A process that runs tests ended ({error}), and tests after it were not run.")


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """Return the folder of all-MiniLM-L6-v2, trained by others."""
    return fetch_checkpoint()


@pytest.fixture(scope="session")
def tiny_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a BERT of 2 layers and 16 dimensions, with the tokenizer of the real checkpoint."""
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30522,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(directory)
    return directory


@pytest.fixture
def export_cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Return a function that runs `python -m export` inside this process."""

    def call(*arguments: str) -> Finished:
        capsys.readouterr()
        code = run_export_cli(arguments)
        captured = capsys.readouterr()
        return Finished(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def published(checkpoint: Path) -> Published:
    """Export the real checkpoint once for all tests that only read it."""

    def publish(folder: Path) -> None:
        options = ["--name", "sentence_embedding", "--repository", str(folder / "models"), "--json"]
        done = run("-m", "export", "run", str(checkpoint), *options, "--add-special-token", *ADDED_TOKENS)
        assert done.code == 0, done.err
        (folder / "result.json").write_text(done.out)
        (folder / "log").write_text(done.err)

    folder = make_once("published", publish)
    result = json.loads((folder / "result.json").read_text())
    return Published(folder / "models", result, (folder / "log").read_text())


@pytest.fixture(scope="session")
def two_versions(tiny_checkpoint: Path) -> Path:
    """Return a repository with two versions of the model `tickets`, of other weights, of which the first is active."""

    def publish(folder: Path) -> None:
        other = Path(shutil.copytree(tiny_checkpoint, folder / "other"))
        model = BertModel.from_pretrained(other)
        with torch.no_grad():
            model.embeddings.word_embeddings.weight.mul_(-1)
        model.save_pretrained(other)
        for source, *more in ((tiny_checkpoint,), (other, "--no-activate")):
            options = ["--name", "tickets", "--repository", str(folder / "models"), *more]
            done = run("-m", "export", "run", str(source), *options)
            assert done.code == 0, done.err
        assert "active  not this version but 1" in done.out
        assert done.out.rstrip().endswith(f"activate tickets 2 --repository {folder / 'models'}")

    return make_once("versions", publish) / "models"


@pytest.fixture
def models(two_versions: Path, tmp_path: Path) -> Path:
    """Return a copy of two versions that a test may change; hard links are copies in it."""
    return Path(shutil.copytree(two_versions, tmp_path / "models"))


@pytest.fixture(scope="session")
def server(published: Published) -> Iterator[Addresses]:
    """Serve the real checkpoint with the real tritonserver for all tests that only ask it."""
    with serve(published.repository) as addresses:
        yield addresses


@pytest.fixture(autouse=True)
def _restarts_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test during which the tritonserver that many ask ended, and not the one that sees it later."""
    yield
    asked = request.node.funcargs.get("server")
    if isinstance(asked, Addresses):
        with urllib.request.urlopen(f"http://{asked.status}/metrics", timeout=30) as answer:
            (count,) = re.findall(rb"^modelyard_tritonserver_restarts_total (\d+)", answer.read(), re.MULTILINE)
        before, _RESTARTS[asked] = _RESTARTS.get(asked, 0), int(count)
        assert int(count) == before, "tritonserver was started anew"


@pytest.fixture(scope="session")
def exported(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Export and verify the small checkpoint once, with one token added."""
    progress = Progress(Console(stderr=True, quiet=True))
    request = ExportRequest(
        checkpoint=tiny_checkpoint,
        name="tiny",
        repository=tmp_path_factory.mktemp("nowhere"),
        vocabulary=VocabularyOptions(added_tokens=(AddedToken(token="[NEW]", initializer="something new"),)),
    )
    source = load_source(request, progress)
    files = write_files(source.task, tmp_path_factory.mktemp("exported"), DEFAULT_TARGET)
    return Exported(source, files, verify_files(source, files.graph, files.find("tokenizer.json")))
