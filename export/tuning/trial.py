"""A published version, served in another way by a server of its own, and measured. Needs no torch."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from ..errors import ServingError
from ..repository.config_file import CONFIG_FILE, render_config
from ..repository.contents import CONFIGS_FOLDER
from ..repository.version import Version
from .search import Figures

_LISTENS = "serving HTTP"

# Requests of the shortest of the three windows that perf_analyzer averages, per request in flight.
_REQUESTS_PER_CONNECTION = 8
_FEWEST_REQUESTS = 60


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a way to serve is measured under.

    Attributes:
        connections: Requests in flight.
        protocol: `http` or `grpc`.
    """

    connections: int
    protocol: str


def measure(version: Version, configs: Mapping[str, pb.ModelConfig], load: Load, length: int) -> Figures:
    """Serve a version as other configurations say, and return how it answers real text.

    Args:
        version: What is served; its files are linked or copied, and only read.
        configs: Triton model → configuration.
        load: What it is measured under.
        length: How many times the shortest measurement to take.

    Raises:
        ServingError: It cannot be served so, or a request fails.
        OSError: There is no space for a copy.
    """
    with tempfile.TemporaryDirectory(prefix="modelyard-tune-") as folder:
        repository = Path(folder)
        for name, config in configs.items():
            _lay_out(version.find_folder(name), repository / name, config)
        # What the launcher reads of a version that is active.
        kept = repository / version.name / str(version.number) / CONFIGS_FOLDER
        for name, config in configs.items():
            (kept / f"{name}.pbtxt").write_text(render_config(config), encoding="utf-8")
        with _serve(repository) as ports:
            return _ask(version.name, ports, load, length)


def _lay_out(source: Path, to: Path, config: pb.ModelConfig) -> None:
    """Make the folder of a Triton model with one version, whose files are those of `source`."""
    shutil.copytree(source, to / source.name, copy_function=_link, ignore=shutil.ignore_patterns(CONFIGS_FOLDER))
    if (source / CONFIGS_FOLDER).is_dir():
        (to / source.name / CONFIGS_FOLDER).mkdir()
    (to / CONFIG_FILE).write_text(render_config(config), encoding="utf-8")


def _link(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:
        # The temporary folder is often on another disk, which a link does not reach; what only points there does.
        os.symlink(Path(source).resolve(), to)  # noqa: PTH211


@contextlib.contextmanager
def _serve(repository: Path) -> Iterator[Mapping[str, int]]:
    """Serve a repository; yield protocol → port.

    Raises:
        ServingError: It cannot be served.
    """
    ports = dict(zip(("http", "grpc", "metrics", "status"), _find_ports(4), strict=True))
    options = [word for name, port in ports.items() for word in (f"--{name}-port", str(port))]
    command = [sys.executable, "-m", "modelyard", "serve", "--repository", str(repository), "--follow", "off", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as server:
        try:
            _wait_until_served(server)
            yield ports
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate()


def _wait_until_served(server: "subprocess.Popen[str]") -> None:
    assert server.stderr is not None
    said: list[str] = []
    for line in server.stderr:
        said.append(line.strip())
        if line.startswith(_LISTENS):
            return
    raise ServingError(
        "a server for a trial did not start",
        expected=f"it to say that it is {_LISTENS}",
        got=repr(next((line for line in reversed(said) if line), "nothing")),
        remedy="see whether `serve` serves the repository",
    )


def _ask(name: str, ports: Mapping[str, int], load: Load, length: int) -> Figures:
    requests = length * max(_FEWEST_REQUESTS, _REQUESTS_PER_CONNECTION * load.connections)
    command = [sys.executable, "-m", "modelyard", "bench", "--json", "--model", name, "--protocol", load.protocol]
    command += ["--url", f"localhost:{ports['http']}", "--grpc-url", f"localhost:{ports['grpc']}"]
    command += ["--concurrency", str(load.connections), "--requests", str(requests)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServingError(f"{name} cannot be measured", got=done.stderr.strip().rpartition("error: ")[2])
    (found,) = json.loads(done.stdout)
    return Figures(requests_per_s=found["inferences_per_s"], p50_ms=found["p50_ms"], p99_ms=found["p99_ms"])


def _find_ports(count: int) -> list[int]:
    """Return ports on which nobody listens now."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]
