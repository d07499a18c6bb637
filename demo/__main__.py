"""Checkpoint, export, server, clients: each part is run as its user would run it."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from demo.checkpoint import fetch_checkpoint

CHECKOUT = Path(__file__).resolve().parent.parent
REPOSITORY = CHECKOUT / "model_repository"
NAME = "sentence_embedding"
SENTENCES = Path(__file__).with_name("sentences.txt")

_START_TIMEOUT_S = 120


class DemoError(Exception):
    """The demo cannot go on."""


def main() -> int:
    """Run the demo and return the exit code."""
    start = time.monotonic()
    try:
        _run_demo()
    except (DemoError, subprocess.CalledProcessError) as exc:
        _say(f"error: the demo stopped: {exc}")
        return 1
    _say(f"\nDone in {time.monotonic() - start:.0f} s. Next: make serve, and in another terminal:")
    _say('      .venv/bin/python client/infer.py --url localhost:8000 --text "Hello" --text "Good morning"')
    return 0


def _run_demo() -> None:
    _say("== The checkpoint: all-MiniLM-L6-v2")
    checkpoint = fetch_checkpoint()
    _say("== Export: two special tokens added, proven equal, published")
    tokens = ["[ENT_START]=start of entity", "[ENT_END]=end of entity"]
    added = [argument for token in tokens for argument in ("--add-special-token", token)]
    _run("-m", "export", "run", str(checkpoint), "--name", NAME, "--repository", str(REPOSITORY), *added)
    _say("\n== Serve: the real tritonserver")
    ports = _find_free_ports(3)
    http, grpc = f"localhost:{ports[0]}", f"localhost:{ports[1]}"
    with _serve(ports):
        _wait_for_answer(http)
        _say("\n== Ask over HTTP, then over gRPC")
        infer = [str(CHECKOUT / "client" / "infer.py"), "--file", str(SENTENCES)]
        _run(*infer, "--url", http)
        _run(*infer, "--url", grpc, "--protocol", "grpc")
        _say("\n== The export's check once more, through the server")
        golden = REPOSITORY / NAME / _read_served_version(http) / "golden.json"
        _run("-m", "client.parity", "--golden", str(golden), "--url", http, "--grpc-url", grpc)
        _say("\n== Stop")


@contextlib.contextmanager
def _serve(ports: list[int]) -> Iterator[None]:
    """Run `python -m server` for the length of the block, and demand that it ends cleanly."""
    http, grpc, metrics = map(str, ports)
    options = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    command = [sys.executable, "-m", "server", "--repository", str(REPOSITORY), *options]
    server = subprocess.Popen(command, cwd=CHECKOUT)
    try:
        yield
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGINT)
        code = server.wait()
    if code != 0:
        raise DemoError(f"the server ended with exit code {code}, expected 0")


def _wait_for_answer(url: str) -> None:
    """Wait until the ensemble answers an inference; ready alone does not mean that it does."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    tensor = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["Are you there?"]}
    body = json.dumps({"inputs": [tensor]}).encode()
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{url}/v2/models/{NAME}/infer", data=body):
            return
        time.sleep(0.2)
    raise DemoError(f"{NAME} did not answer within {_START_TIMEOUT_S} s")


def _read_served_version(url: str) -> str:
    with urllib.request.urlopen(f"http://{url}/v2/models/{NAME}") as response:
        return str(json.load(response)["versions"][-1])


def _find_free_ports(count: int) -> list[int]:
    """Return ports that are free now, so that the demo runs beside whatever listens on 8000."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, cwd=CHECKOUT)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
