"""The demo's model, published and served for the length of a block."""

import contextlib
import itertools
import json
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from demo.checkpoint import fetch_checkpoint

CHECKOUT = Path(__file__).resolve().parent.parent
REPOSITORY = CHECKOUT / "model_repository"
NAME = "sentence_embedding"
ADDED_TOKENS = ("[ENT_START]=start of entity", "[ENT_END]=end of entity")

_START_TIMEOUT_S = 120


class ServingError(Exception):
    """The server did not start, or did not end well."""


# Below those that the system gives to clients, one of which would take a port between the look and the server's start.
_PORTS = range(20_000, 32_000)


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where the server listens, host:port."""

    http: str
    grpc: str
    metrics: str
    status: str


def run_python(*arguments: str) -> None:
    """Run a part of the project as its user would.

    Raises:
        subprocess.CalledProcessError: It fails; it has said why.
    """
    subprocess.run([sys.executable, *arguments], check=True, cwd=CHECKOUT)


def publish_demo_model() -> None:
    """Export the demo's checkpoint into the repository of this checkout.

    Raises:
        subprocess.CalledProcessError: The checkpoint cannot be fetched, or the export refuses.
    """
    options = ["--name", NAME, "--repository", str(REPOSITORY), "--add-special-token", *ADDED_TOKENS]
    run_python("-m", "export", "run", str(fetch_checkpoint()), *options)


@contextlib.contextmanager
def serve(repository: Path) -> Iterator[Addresses]:
    """Run `python -m server` on free ports, from the first answered inference to the end of the block.

    Raises:
        ServingError: It does not answer in time, or does not end with exit code 0.
    """
    addresses = _find_free_addresses()
    ports = {
        "--http-port": addresses.http,
        "--grpc-port": addresses.grpc,
        "--metrics-port": addresses.metrics,
        "--status-port": addresses.status,
    }
    options = [word for option, address in ports.items() for word in (option, address.rsplit(":", 1)[1])]
    server = subprocess.Popen([sys.executable, "-m", "server", "--repository", str(repository), *options], cwd=CHECKOUT)
    try:
        _wait_for_answer(addresses.http, server)
        yield addresses
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGINT)
        code = server.wait()
    if code != 0:
        raise ServingError(f"the server ended with exit code {code}, expected 0")


def read_served_version(http: str) -> str:
    """Return the version of the demo's model that the server at `http` answers with."""
    with urllib.request.urlopen(f"http://{http}/v2/models/{NAME}") as response:
        return str(json.load(response)["versions"][-1])


def _wait_for_answer(http: str, server: "subprocess.Popen[bytes]") -> None:
    """Wait until the ensemble answers an inference; ready alone does not mean that it does."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    tensor = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["Are you there?"]}
    body = json.dumps({"inputs": [tensor]}).encode()
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{http}/v2/models/{NAME}/infer", data=body):
            return
        time.sleep(0.2)
    raise ServingError(f"{NAME} did not answer: see the server's log above")


def _find_free_addresses() -> Addresses:
    """Return ports that are free now, so that this runs beside whatever listens on 8000."""
    free = (port for port in random.sample(_PORTS, len(_PORTS)) if is_free(port))
    http, grpc, metrics, status = (f"localhost:{port}" for port in itertools.islice(free, 4))
    return Addresses(http=http, grpc=grpc, metrics=metrics, status=status)


def is_free(port: int) -> bool:
    """Tell whether a server could listen on a port of this machine now."""
    with socket.socket() as listener:
        # Connections that ended a moment ago keep a server from nothing.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
