"""One activation after another under load: failed requests, mixed answers, latency beside idle, memory.

    python -m benches.soak_rollouts [--activations 100] [--rate 8] [--repository DIR]

Publishes two versions of a small model whose answers have nothing in common, starts `python -m server`, and activates
them in turns while eight clients, half of them over pooled HTTP connections and half over gRPC, each send at a steady
rate. Before every tenth activation one backend process is killed, and the activation waits until it is back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import tritonclient.grpc
import tritonclient.http
from benches.soak import Memory, describe, say
from harness import run
from launcher import Running, running
from transformers import AutoTokenizer, BertConfig, BertModel
from tritonclient.utils import InferenceServerException

from demo.checkpoint import fetch_checkpoint
from export.repository.activation import activate

NAME = "rolled"
CLIENTS = 8
KILL_EVERY = 10

# Answers of one version are nearer than this to the recorded one, those of the other a hundred times as far.
NEAR = 1e-3

PATIENCE_S = 120.0
SETTLING_S = 20.0


@dataclass
class Phase:
    """What came of the requests of one phase.

    Attributes:
        latencies: Of the answered, seconds.
        versions: Version → answers that are wholly of it; 0 for those that are of none.
        errors: What the client says, and whether a backend had been killed since the activation before.
    """

    latencies: list[float] = field(default_factory=list)
    versions: Counter[int] = field(default_factory=Counter)
    errors: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def describe(self, name: str) -> str:
        p50, p99 = np.percentile(self.latencies, [50, 99]) * 1000
        kinds = ", ".join(
            f"{count} of version {version}" for version, count in sorted(self.versions.items()) if version
        )
        return (
            f"{name}: {len(self.latencies)} answered in p50 {p50:.1f} ms, p99 {p99:.1f} ms, at most "
            f"{max(self.latencies) * 1000:.0f} ms; {kinds}, {self.versions[0]} of neither; "
            f"{sum(self.errors.values())} failed"
        )


class Callers:
    """Clients that each send at a steady rate over one connection that they keep."""

    def __init__(self, server: Running, repository: Path, rate: float) -> None:
        golden = {n: json.loads((repository / NAME / str(n) / "golden.json").read_text())["samples"][0] for n in (1, 2)}
        self._text = golden[1]["inputs"][0]["data"][0]
        self._expected = {n: np.array(sample["outputs"][0]["data"]) for n, sample in golden.items()}
        self._server, self._interval_s = server, 1 / rate
        self.phase = Phase()
        self.is_wounded = False
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def begin(self) -> Phase:
        """Count what comes from now on by itself."""
        self.phase = Phase()
        return self.phase

    def _send(self, number: int) -> None:
        library = tritonclient.http if number % 2 else tritonclient.grpc
        port = self._server.http if number % 2 else self._server.grpc
        with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
            text = library.InferInput("TEXT", [1, 1], "BYTES")
            text.set_data_from_numpy(np.array([[self._text.encode()]], dtype=object))
            while not self._ended.wait(self._interval_s):
                phase, start = self.phase, time.monotonic()
                try:
                    vector = client.infer(NAME, [text]).as_numpy("EMBEDDING")[0]
                except InferenceServerException as exc:
                    phase.errors[exc.message()[:120], self.is_wounded] += 1
                    continue
                phase.latencies.append(time.monotonic() - start)
                near = [n for n, expected in self._expected.items() if np.abs(vector - expected).max() < NEAR]
                phase.versions[near[0] if near else 0] += 1


def publish_two(folder: Path) -> Path:
    """Publish two versions of a small model and return the repository."""
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=30522, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
        )
        BertModel(config).save_pretrained(folder / str(seed))
        AutoTokenizer.from_pretrained(fetch_checkpoint()).save_pretrained(folder / str(seed))
        done = run(
            "-m", "export", "run", str(folder / str(seed)), "--name", NAME, "--repository", str(folder / "models")
        )
        assert done.code == 0, done.err
    return folder / "models"


def wait_until_served(server: Running, version: int) -> None:
    """Wait until the launcher says that it serves this version.

    Raises:
        TimeoutError: It does not come to that.
    """
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{server.status}/versions") as answer,
        ):
            found = json.load(answer)["models"][NAME]
            if found["served"] == version and found["state"] == "served":
                return
        time.sleep(0.05)
    raise TimeoutError(f"version {version} was not served within {PATIENCE_S:g} s: {found}")


def wound(server: Running, callers: Callers) -> None:
    """Kill a backend process, and wait until a new one is there in its place."""
    callers.is_wounded = True
    # The newest: older ones may be of the version that is being unloaded, whose end is no death.
    server.find_stubs(f"{NAME}_model")[-1].kill()
    server.wait_for_line("answers again", PATIENCE_S)
    # What it held is answered with an error by now; what comes after is none of its doing.
    time.sleep(1)
    callers.is_wounded = False


@contextlib.contextmanager
def serving(repository: Path) -> Iterator[Running]:
    with running(repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        yield server


def roll(server: Running, repository: Path, rate: float, activations: int) -> tuple[Phase, Phase, Memory]:
    """Return what came of the requests while nothing was rolled out, and while `activations` were."""
    memory = Memory(server)
    activate(repository, NAME, 2)
    wait_until_served(server, 2)
    with Callers(server, repository, rate) as callers:
        time.sleep(3)
        idle = callers.begin()
        time.sleep(15)
        rolled = callers.begin()
        memory.look()
        start = time.monotonic()
        for number in range(activations):
            if number % KILL_EVERY == KILL_EVERY - 1:
                wound(server, callers)
            version = 1 + number % 2
            activate(repository, NAME, version)
            wait_until_served(server, version)
            if number % 10 == 9:
                memory.look()
                took = (time.monotonic() - start) / (number + 1)
                say(f"  {number + 1:>4} activations, {took:.1f} s each, {describe(memory.rows[-1][1])}")
        # The last version before it ends some seconds after the new one is served.
        time.sleep(SETTLING_S)
        memory.look()
    return idle, rolled, memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--activations", type=int, default=100)
    parser.add_argument(
        "--repository", type=Path, help=f"that holds versions 1 and 2 of {NAME!r} (default: published anew)"
    )
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second of each of the eight clients")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="modelyard-soak-"))
    try:
        repository = options.repository or publish_two(folder)
        with serving(repository) as server:
            idle, rolled, memory = roll(server, repository, options.rate, options.activations)
            metrics = server.read_metrics()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(idle.describe("idle"))
    say(rolled.describe(f"{options.activations} activations"))
    for (what, is_wounded), count in rolled.errors.most_common():
        say(f"  {count:>6}  {what}{' (a process was killed)' if is_wounded else ''}")
    first, last = memory.rows[0][1], memory.rows[-1][1]
    say(f"memory at first {describe(first)}\nmemory at last  {describe(last)}")
    say(f"growth: {(sum(last.values()) / sum(first.values()) - 1) * 100:+.1f} %")
    failed = sum(count for (_, is_wounded), count in rolled.errors.items() if not is_wounded)
    rollouts = {name: value for name, value in metrics.items() if "rollouts_total" in name}
    say(f"failed without a killed process: {failed}; {rollouts}")
    return 1 if failed or rolled.versions[0] else 0


if __name__ == "__main__":
    sys.exit(main())
