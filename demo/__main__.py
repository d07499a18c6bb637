"""Checkpoint, export, server, clients: each part is run as its user would run it."""

import subprocess
import sys
import time
from pathlib import Path

from demo.serving import (
    CHECKOUT,
    NAME,
    REPOSITORY,
    ServingError,
    publish_demo_model,
    read_served_version,
    run_python,
    serve,
)

_SENTENCES = Path(__file__).with_name("sentences.txt")


def main() -> int:
    """Run the demo and return the exit code."""
    start = time.monotonic()
    try:
        _run_demo()
    except (ServingError, subprocess.CalledProcessError) as exc:
        _say(f"error: the demo stopped: {exc}")
        return 1
    except KeyboardInterrupt:
        return 130
    _say(f"\nDone in {time.monotonic() - start:.0f} s. Next: make serve, and in another terminal:")
    _say('      .venv/bin/python client/infer.py --url localhost:8000 --text "Hello" --text "Good morning"')
    return 0


def _run_demo() -> None:
    _say("== Export all-MiniLM-L6-v2: two special tokens added, proven equal, published")
    publish_demo_model()
    _say("\n== Serve it with the real tritonserver")
    with serve(REPOSITORY) as addresses:
        _say("\n== Ask over HTTP, then over gRPC")
        infer = [str(CHECKOUT / "client" / "infer.py"), "--file", str(_SENTENCES)]
        run_python(*infer, "--url", addresses.http)
        run_python(*infer, "--url", addresses.grpc, "--protocol", "grpc")
        _say("\n== The export's check once more, through the server")
        golden = REPOSITORY / NAME / read_served_version(addresses.http) / "golden.json"
        urls = ["--url", addresses.http, "--grpc-url", addresses.grpc]
        run_python("-m", "client.parity", "--golden", str(golden), *urls)
        _say("\n== Stop")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
