"""Runs an ONNX file under the ONNX Runtime of the target, which need not be the one that is installed.

Always in a process of its own: two versions of ONNX Runtime cannot live in one, and a graph that makes one abort (seen
with 1.17.3) must not take the export with it.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from ..errors import RuntimeFailure, list_some
from ..locations import CACHE
from ..targets import Target
from . import onnxruntime_worker
from .onnxruntime_worker import read_message, write_message

# How much of what a worker wrote to stderr is looked at for its last words, and how much of a message is quoted.
_STDERR_BYTES = 16384
_MESSAGE_LENGTH = 500

# `[ONNXRuntimeError] : 1 : FAIL : ` and `/onnxruntime_src/.../model.cc:180 onnxruntime::Model::Model(...) `.
_NOISE = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : |/onnxruntime_src/\S+:\d+ .*?\)(?: const)? (?=[A-Z\[])")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """An input or an output as ONNX Runtime sees it.

    Attributes:
        name: Name of the tensor.
        type: Element type in ONNX Runtime's words, such as `tensor(int64)`.
        shape: A size, the name of a dynamic axis, or None for one without a name.
    """

    name: str
    type: str
    shape: tuple[int | str | None, ...]


class TargetRuntime:
    """The target's ONNX Runtime in a process that starts with the first `load`; made by `open_runtime`.

    A process that died is restarted by the next `load`; the sessions that it held are gone. For use by one thread.
    """

    def __init__(self, target: Target, threads: int, on_progress: Callable[[str], None]) -> None:
        self._target = target
        self._threads = threads
        self._on_progress = on_progress
        self._worker: _Worker | None = None
        self.peak_bytes = 0

    def __enter__(self) -> "TargetRuntime":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(self, path: Path) -> "TargetSession":
        """Open the ONNX file at `path`, with the external data beside it, on the CPU with every optimisation.

        Raises:
            RuntimeFailure: The target's ONNX Runtime cannot be fetched, cannot load the file, or dies of it.
        """
        if self._worker is None or not self._worker.is_alive:
            self.close()
            folder = fetch_runtime(self._target, self._on_progress)
            self._worker = _Worker(self._target, self._threads, folder)
        return TargetSession(self._worker, path)

    def close(self) -> None:
        """End the process at once, whatever it does."""
        if self._worker is not None:
            self.peak_bytes = max(self.peak_bytes, self._worker.read_peak())
            self._worker.close()
            self._worker = None


def open_runtime(
    target: Target, *, threads: int = 1, on_progress: Callable[[str], None] = lambda what: None
) -> TargetRuntime:
    """Return the target's ONNX Runtime, to be used in a `with` statement, at whose end its process ends.

    Args:
        target: Triton release whose ONNX Runtime this is.
        threads: How many of them run one operator.
        on_progress: Called when a wheel must be fetched first, which takes seconds.
    """
    return TargetRuntime(target, threads, on_progress)


class TargetSession:
    """An ONNX file that the target's ONNX Runtime has loaded.

    Attributes:
        inputs: Inputs, in the graph's order.
        outputs: Outputs, in the graph's order.
    """

    def __init__(self, worker: "_Worker", path: Path) -> None:
        self._worker = worker
        self._name = path.name
        self.versions = {"onnxruntime": worker.version}
        self._number: int | None = worker.next_number()
        request = {"do": "load", "model": self._number, "path": str(path.absolute())}
        answer, _ = worker.ask(f"cannot load {self._name}", request)
        self.inputs, self.outputs = (
            [TensorInfo(name=name, type=kind, shape=tuple(shape)) for name, kind, shape in answer[side]]
            for side in ("inputs", "outputs")
        )

    def run(self, output_names: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]:
        """Return the outputs that are asked for, in that order; memory of the caller's own.

        Args:
            output_names: Names of outputs that are tensors of numbers.
            feeds: Input name → array of any numeric dtype or bool.

        Raises:
            RuntimeFailure: ONNX Runtime refuses the inputs or fails on them, or dies.
        """
        what = f"cannot run {self._name}"
        if self._number is None:
            raise RuntimeFailure(what, expected="a file that is loaded", got="a closed one")
        objects = [name for name, array in feeds.items() if array.dtype.hasobject]
        if objects:
            raise RuntimeFailure(what, expected="numbers in every input", got=f"Python objects in {list_some(objects)}")
        request = {"do": "run", "model": self._number, "outputs": list(output_names), "inputs": list(feeds)}
        _, outputs = self._worker.ask(what, request, list(feeds.values()))
        return outputs

    @property
    def peak_bytes(self) -> int:
        """The most memory that the process has held so far."""
        return self._worker.read_peak()

    def close(self) -> None:
        """Free what the model holds; closing twice does nothing."""
        if self._worker.is_alive and self._number is not None:
            self._worker.ask(f"cannot close {self._name}", {"do": "close", "model": self._number})
        self._number = None


class _Worker:
    """The process, and the two pipes to it."""

    def __init__(self, target: Target, threads: int, folder: Path | None) -> None:
        self._runtime = f"the ONNX Runtime {target.onnxruntime_version} of Triton {target.release}"
        self.version = target.onnxruntime_version
        self._numbers = count()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # Isolated: neither PYTHONPATH nor the folder of the script may put other modules in place of numpy's own.
        command = [sys.executable, "-I", onnxruntime_worker.__file__, str(theirs_in), str(theirs_out), str(threads)]
        try:
            self._process = subprocess.Popen(
                command + ([str(folder)] if folder else []),
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                # A file, not a pipe: nobody reads it while the process works.
                stderr=self._stderr,
                pass_fds=(theirs_in, theirs_out),
                # Ctrl-C is for this process alone, which then ends the worker.
                start_new_session=True,
            )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._requests: BinaryIO = open(ours_out, "wb")  # noqa: PTH123, SIM115
        self._answers: BinaryIO = open(ours_in, "rb")  # noqa: PTH123, SIM115
        hello, _ = self._exchange("cannot be started", None, ())
        version = target.onnxruntime_version
        if hello.get("onnxruntime") != version:
            self.close()
            raise RuntimeFailure(
                f"{folder or 'the installed onnxruntime'} is not {self._runtime}",
                expected=version,
                got=hello.get("onnxruntime") or _describe(hello["error"]),
                remedy=f"remove {folder}" if folder else f"pip install --force-reinstall onnxruntime=={version}",
            )

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return not self._answers.closed

    def read_peak(self) -> int:
        """Return the most memory that the process held so far, in bytes; 0 where the system does not tell."""
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii").splitlines()
            return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
        return 0

    def next_number(self) -> int:
        """Return a number that no model has yet."""
        return next(self._numbers)

    def ask(
        self, what: str, request: Mapping[str, Any], arrays: Sequence[Array] = ()
    ) -> tuple[dict[str, Any], list[Array]]:
        """Send a request and return the answer to it.

        Raises:
            RuntimeFailure: `what`, and why.
        """
        if not self.is_alive:
            raise RuntimeFailure(
                f"{self._runtime} {what}", got="a process that has ended", remedy="load the file again"
            )
        answer, outputs = self._exchange(what, request, arrays)
        if "error" in answer:
            raise RuntimeFailure(f"{self._runtime} {what}", got=_describe(answer["error"]))
        return answer, outputs

    def _exchange(
        self, what: str, request: Mapping[str, Any] | None, arrays: Sequence[Array]
    ) -> tuple[dict[str, Any], list[Array]]:
        try:
            # One whole request, then one whole answer: neither side ever writes to a side that is writing.
            if request is not None:
                write_message(self._requests, request, arrays)
            answer, outputs = read_message(self._answers)
        except (EOFError, BrokenPipeError) as exc:
            raise self._describe_end(what) from exc
        # Half a message may be under way: an array that cannot be sent, no memory for the answer, Ctrl-C.
        except BaseException:
            self.close()
            raise
        return answer, outputs

    def _describe_end(self, what: str) -> RuntimeFailure:
        code = self._process.wait()
        end = f"exit code {code}" if code >= 0 else _name_signal(-code)
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _STDERR_BYTES))
        lines = self._stderr.read().decode(errors="replace").split("\n")
        words = " / ".join(line.strip() for line in lines if line.strip())[-_MESSAGE_LENGTH:].rstrip(".")
        self.close()
        remedy = "the machine may have run out of memory" if code == -signal.SIGKILL else ""
        got = f"{end} and {words!r}" if words else end
        return RuntimeFailure(f"{self._runtime} {what}: its process died", got=got, remedy=remedy)

    def close(self) -> None:
        """Kill the process, wait for it, and free the pipes."""
        self._process.kill()
        self._process.wait()
        self._answers.close()
        # What is still in its buffer has nobody to go to.
        with contextlib.suppress(OSError):
            self._requests.close()
        self._stderr.close()


def fetch_runtime(target: Target, on_progress: Callable[[str], None] = lambda what: None) -> Path | None:
    """Return the folder that holds the target's ONNX Runtime, having fetched its wheel the first time.

    Returns:
        None where the installed one is the target's.

    Raises:
        RuntimeFailure: No folder can be written, or pip cannot fetch the wheel.
    """
    version = target.onnxruntime_version
    with contextlib.suppress(metadata.PackageNotFoundError):
        if metadata.version("onnxruntime") == version:
            return None
    # A wheel is for one Python: environments of two share a checkout.
    name = f"onnxruntime-{version}-{sys.implementation.cache_tag}"
    folder = CACHE / name
    if folder.is_dir():
        return folder
    what = f"the ONNX Runtime {version} of Triton {target.release} cannot be fetched"
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=CACHE, prefix=f"{name}.")
    except OSError as exc:
        raise RuntimeFailure(what, expected="a folder that can be written", got=str(exc)) from exc
    with temporary:
        on_progress(f"fetching ONNX Runtime {version}")
        _install(version, Path(temporary.name, "wheel"), what)
        # Renamed when complete: an interrupted download leaves no half of it. Whoever came first wins.
        with contextlib.suppress(OSError):
            Path(temporary.name, "wheel").rename(folder)
    return folder


def _install(version: str, folder: Path, what: str) -> None:
    """Install the wheel alone: what it depends on beyond numpy serves its tools, which are not used here."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    options = ["--only-binary", ":all:", "--no-compile", "--retries", "2", "--target", str(folder)]
    done = subprocess.run(
        [*pip, *options, f"onnxruntime=={version}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.split("\n") if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines
        raise RuntimeFailure(
            what,
            expected=f"pip to install onnxruntime=={version}",
            got=repr((errors or [f"exit code {done.returncode}"])[-1][:_MESSAGE_LENGTH]),
            remedy=f"connect to a package index that has it for Python {sys.version_info[0]}.{sys.version_info[1]}, "
            "or choose another target",
        )


def _describe(message: str) -> str:
    """Return the first line of ONNX Runtime's message without its codes and the places in its source."""
    return _NOISE.sub("", message.split("\n", 1)[0])[:_MESSAGE_LENGTH].rstrip(".")


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
