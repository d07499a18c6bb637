"""How long a caller of one word waits beside one of texts that are dear to tokenise, in parts of what it usually does.

    python -m benches.neighbours [--quick] [--repository DIR]

Each kind of text is sent without a pause, by one caller, for a second and a half at a time, in turns with as long
without it: both halves of a ratio are of the same minute.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
from launcher import Running, running

from demo.serving import REPOSITORY, publish_demo_model

NAME = "sentence_embedding"
TURN_S = 1.5
TIMEOUT_S = 120.0

# The rows of one request each, 1 MiB together at most.
KINDS = {
    "32 texts of 256 tokens": ["a cat sleeps " * 90] * 32,
    "1 MiB of words": ["A cat sleeps. " * 74_000],
    "1 MiB of punctuation": ["!?" * 524_000],
    "8 words of 128 kB": ["x" * 130_000] * 8,
    "32 words of 32 kB": ["x" * 32_700] * 32,
    "8 words of Hangul": ["안녕" * 21_000] * 8,
    "8 times 128 kB of blanks": [" " * 130_000] * 8,
}


class Caller:
    """One connection that asks for the vectors of the same texts again and again."""

    def __init__(self, server: Running, texts: list[str]) -> None:
        rows = b"".join(len(text).to_bytes(4, "little") + text for text in map(str.encode, texts))
        parameters = {"binary_data_size": len(rows)}
        tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [len(texts), 1], "parameters": parameters}
        head = json.dumps({"inputs": [tensor]}).encode()
        self._headers = {"Inference-Header-Content-Length": str(len(head))}
        self._body = head + rows
        self._connection = HTTPConnection("127.0.0.1", server.http, timeout=TIMEOUT_S)

    def ask(self) -> float:
        """Return the seconds until the answer."""
        start = time.perf_counter()
        self._connection.request("POST", f"/v2/models/{NAME}/infer", self._body, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"expected an answer, got {response.status} {answer[:200]!r}")
        return time.perf_counter() - start

    def ask_for(self, seconds: float) -> list[float]:
        """Ask for so long, and at least 20 times."""
        waits: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(waits) < 20:
            waits.append(self.ask())
            time.sleep(0.01)
        return waits


def measure(server: Running, texts: list[str], turns: int) -> tuple[list[float], list[float]]:
    """Return what the neighbour waited without and beside a caller of these texts."""
    neighbour, caller = Caller(server, ["Hello"]), Caller(server, texts)
    usual: list[float] = []
    beside: list[float] = []
    for _ in range(turns):
        usual += neighbour.ask_for(TURN_S)
        stopped = threading.Event()

        def send() -> None:
            while not stopped.is_set():  # noqa: B023
                caller.ask()

        thread = threading.Thread(target=send)
        thread.start()
        beside += neighbour.ask_for(TURN_S)
        stopped.set()
        thread.join()
    return usual, beside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="one turn of each kind in place of ten")
    parser.add_argument("--repository", type=Path, help="that holds the demo's model (default: published anew)")
    options = parser.parse_args()
    repository = options.repository or REPOSITORY
    if not options.repository:
        publish_demo_model()
    with running(repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        for kind, texts in KINDS.items():
            usual, beside = measure(server, texts, 1 if options.quick else 10)
            ratios = np.percentile(beside, [50, 99]) / np.percentile(usual, [50, 99])
            sys.stdout.write(f"{kind:<26} p50 {ratios[0]:5.1f} times, p99 {ratios[1]:5.1f} times the usual\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
