"""What tests and benches hold in their hands: how a command ended, a published repository, an exported model."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import warm
from filelock import FileLock

from export.artefacts import Artefacts, list_model
from export.proof.verify import VerificationReport, verify
from export.source import Source
from export.targets import DEFAULT_TARGET

CHECKOUT = Path(__file__).resolve().parent.parent

needs_newest = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="ONNX Runtime 1.27 has no wheel for Python 3.10; take 3.11 or 3.12"
)


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str


# What loads torch.
_WARM = {("-m", "export", verb) for verb in ("run", "inspect", "consolidate")}


def run(*arguments: str, cwd: Path = CHECKOUT, **options: object) -> Finished:
    """Run a command with this Python and wait for it; an export of the checkout in a process that is warm."""
    command = [sys.executable, *arguments]
    if arguments[:3] in _WARM and cwd == CHECKOUT and not options:
        command, options = warm.command(arguments[1:]), {"env": os.environ | warm.keep_warm()}
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    return Finished(result.returncode, result.stdout, result.stderr)


def make(target: str) -> "subprocess.CompletedProcess[str]":
    """Run a target of the Makefile in the environment that the tests run in."""
    command = ["make", target, f"VENV={sys.prefix}"]
    return subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


# The folder that all processes of one run share, which the first of them makes and removes.
SHARED_FOLDER = "MODELYARD_TESTS_SHARED"


def make_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that one of this run's processes fills for all of them, which only read it."""
    made = Path(os.environ[SHARED_FOLDER], name)
    with FileLock(f"{made}.lock"):
        whole = made.with_name(f"{name}.whole")
        if not whole.exists():
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            make(made)
            whole.touch()
    return made


def fingerprint(directory: Path) -> dict[str, str]:
    """Return every path below `directory` with the hash of its bytes, folders included."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(directory.rglob("*"))
    }


@dataclass(frozen=True)
class Published:
    """The demo's model as `python -m export run --json` published it."""

    repository: Path
    result: dict
    log: str


@dataclass(frozen=True)
class Exported:
    """The small checkpoint's source of truth and its exported files, verified."""

    source: Source
    files: Artefacts
    report: VerificationReport

    @property
    def model_file(self) -> Path:
        return self.files.graph

    @property
    def tokenizer_file(self) -> Path:
        return self.files.find("tokenizer.json")


def verify_files(source: Source, model_file: Path, tokenizer_file: Path) -> VerificationReport:
    """Run the parity gate on files that may differ from what the source would export."""
    steps = {"preprocess": (tokenizer_file,)}
    files = Artefacts(model=list_model(model_file), steps=steps)
    return verify(task=source.task, files=files, target=DEFAULT_TARGET)


def load_backend(folder: str, module: str) -> ModuleType:
    """Return a module of a Python-based backend, which Triton imports as a top-level one, under its own name.

    So are those beside it that it imports.
    """
    if module not in sys.modules:
        beside = CHECKOUT / "backends" / folder
        spec = importlib.util.spec_from_file_location(module, beside / f"{module}.py")
        assert spec and spec.loader
        sys.modules[module] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(beside))
        try:
            spec.loader.exec_module(sys.modules[module])
        finally:
            sys.path.remove(str(beside))
    return sys.modules[module]
