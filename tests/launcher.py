"""A real `python -m server` for the tests that stop, kill or starve one."""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from harness import CHECKOUT, Finished, run

from demo.serving import is_free
from server.healing.stubs import Stub, StubTable
from server.tritonserver.installation import find_installation
from server.tritonserver.processes import list_children

# Below those that the system gives to clients (ip_local_port_range): between a look and a server's start, some client
# would have taken one. Several processes of tests look in places of their own.
_FIRST_PORT, _PORTS = 12_000, 4_000
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_CANDIDATES = itertools.cycle(
    random.sample(range(_FIRST_PORT + _WORKER * _PORTS, _FIRST_PORT + (_WORKER + 1) * _PORTS), _PORTS)
)


# For a test that gives a server a /dev/shm of its own.
mounts = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"),
    reason="mounts a small /dev/shm of its own; run as root, with util-linux's unshare",
)


def find_ports(count: int = 4) -> list[int]:
    """Return ports on which nobody listens."""
    return list(itertools.islice(filter(is_free, _CANDIDATES), count))


class Running:
    """A `python -m server` with its output."""

    def __init__(
        self,
        repository: Path,
        *options: str,
        program: Sequence[str] = (sys.executable, "-m", "server"),
        cwd: Path = CHECKOUT,
        environment: dict[str, str] | None = None,
        under: Sequence[str] = (),
        ports: Sequence[int] = (),
    ) -> None:
        self.http, self.grpc, self.metrics, self.status = ports or find_ports()
        listening = ["--http-port", self.http, "--grpc-port", self.grpc]
        listening += ["--metrics-port", self.metrics, "--status-port", self.status]
        self.options = [*map(str, listening), "--repository", str(repository)]
        # `under` is a program that runs it with fewer rights or lower limits, and becomes it.
        command = [*under, *program, *self.options, *options]
        self.process = subprocess.Popen(
            command, cwd=cwd, env=os.environ | (environment or {}), stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self.read = 0
        self._reader: threading.Thread | None = None

    def read_until(self, text: str) -> None:
        """Read what it says until `text` is among it; whatever takes longer than five minutes is ended."""
        assert self.process.stderr is not None
        end = threading.Timer(300, self.process.kill)
        end.start()
        try:
            for line in self.process.stderr:
                self.lines.append(line.rstrip("\n"))
                if text in line:
                    return
        finally:
            end.cancel()
        raise AssertionError(f"{text!r} was never said:\n" + "\n".join(self.lines))

    def follow(self) -> None:
        """Read what it says from now on in the background."""

        def read() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.lines.append(line.rstrip("\n"))

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()

    def wait_for_line(self, texts: str | tuple[str, ...], limit_s: float) -> None:
        """Wait until it says one of `texts`, after whatever this has already found; `follow` comes first."""
        texts = (texts,) if isinstance(texts, str) else texts
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for index in range(self.read, len(self.lines)):
                if any(text in self.lines[index] for text in texts):
                    self.read = index + 1
                    return
            time.sleep(0.01)
        raise AssertionError(f"{texts} was not said within {limit_s} s:\n" + "\n".join(self.lines))

    def stop(self, signal_number: int = signal.SIGINT) -> int:
        self.process.send_signal(signal_number)
        return self.finish()

    def finish(self) -> int:
        assert self.process.stderr is not None
        self.lines += self.process.stderr.read().splitlines()
        return self.process.wait()

    def close(self) -> None:
        """End it, if it has not ended, and leave no descriptor open."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=30)
        assert self.process.stderr is not None
        if self._reader:
            # What it left behind may hold the other end.
            self._reader.join(timeout=2)
        if not self._reader or not self._reader.is_alive():
            self.process.stderr.close()

    def check(self, *options: str) -> Finished:
        """Run the check that a deployment is judged by, and with `--any-version` a container's health."""
        return run("-m", "server", "check", *self.options, *options)

    @property
    def tritonserver(self) -> int:
        """The id of the process."""
        (pid,) = list_children(self.process.pid)
        return pid

    def find_stubs(self, model: str) -> list[Stub]:
        """Return the living backend processes of a model, oldest first."""
        found = [stub for stub in StubTable(self.tritonserver).refresh() if stub.model == model and not stub.is_dead]
        return sorted(found, key=lambda stub: stub.started)

    def read_metrics(self) -> dict[str, float]:
        """Return what the launcher itself counts."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.status}/metrics", timeout=5) as response:
            lines = response.read().decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def install_as_in_containers(root: Path) -> dict[str, str]:
    """Install tritonserver as NVIDIA's image has it, and return the environment in which it is found.

    It is on PATH, with the stub inside of the Python backend and other backends beside that.
    """
    wheel = find_installation()
    (root / "bin").mkdir(parents=True)
    shutil.copy(wheel.executable, root / "bin")
    shutil.copytree(wheel.backends / "python", root / "backends" / "python")
    shutil.copy(wheel.python_stub, root / "backends" / "python")
    return {
        "PATH": f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, wheel.libraries)),
    }


# Waits for seconds where others wait for minutes.
IMPATIENT = (
    sys.executable,
    "-c",
    "import server.tritonserver.stillness as stillness\nstillness._STILL_LOAD_LOOKS, stillness.STILL_LOOKS = 4, 8\n"
    "from server.__main__ import main\nraise SystemExit(main())",
)


@contextlib.contextmanager
def running(repository: Path, *arguments: str, **options: object) -> Iterator[Running]:
    server = Running(repository, *arguments, **options)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.close()


def read_golden_texts(repository: Path, name: str) -> tuple[list[tuple[str, np.ndarray]], float]:
    """Return the texts in the `golden.json` of version 1, each with the vector that answers it, and its tolerance."""
    golden = json.loads((repository / name / "1" / "golden.json").read_text())
    texts = [(sample["inputs"][0]["data"][0], np.array(sample["outputs"][0]["data"])) for sample in golden["samples"]]
    return texts, golden["tolerances"]["max_abs_error"]


def write_older_golden(path: Path) -> None:
    """Rewrite a `golden.json` as modelyard 0.1.0 wrote it for an ensemble of texts."""
    golden = json.loads(path.read_text())
    samples = [
        {"text": sample["inputs"][0]["data"][0], "expected": sample["outputs"][0]["data"]}
        for sample in golden["samples"]
    ]
    path.write_text(json.dumps({"input": "TEXT", "output": "EMBEDDING", **golden, "samples": samples}))
