"""One activation after another under load: failed requests, mixed answers, latency beside idle, memory.

    python -m benches.soak_rollouts [--activations 100] [--rate 8] [--servers 1] [--repository DIR] [--logs DIR]

Publishes two versions of a small model whose answers have nothing in common, starts `python -m server`, and activates
them in turns while eight clients (over pooled HTTP connections, gRPC, and gRPC streams) each send at a steady rate.
Before every tenth activation one backend process is killed, and the activation waits until it is back. Between every
five activations there is a while without any, so that latencies are compared with those of the same minutes. Several
servers on the one repository stand behind nginx.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import queue
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tritonclient.grpc
import tritonclient.http
from benches.soak import Memory, describe, say
from harness import run
from launcher import Running, running
from nginx import Balancer, balancing
from transformers import AutoTokenizer, BertConfig, BertModel
from tritonclient.utils import InferenceServerException

from demo.checkpoint import fetch_checkpoint
from export.repository.activation import activate

NAME = "rolled"
STEPS = ("preprocess", "model")
CLIENTS = 8
KILL_EVERY = 10

# Activations in a row, and the seconds without any before them.
ROW = 5
IDLE_S = 8.0

# Answers of one version are nearer than this to the recorded one, those of the other a hundred times as far.
NEAR = 1e-3

PATIENCE_S = 120.0


@dataclass
class Phase:
    """What came of the requests of one kind of time.

    Attributes:
        latencies: Of the answered, seconds.
        versions: Version → answers that are wholly of it; 0 for those that are of none.
        errors: What the client says, and whether a process had just been killed.
    """

    latencies: list[float] = field(default_factory=list)
    versions: Counter[int] = field(default_factory=Counter)
    errors: Counter[tuple[str, bool]] = field(default_factory=Counter)

    @property
    def p99(self) -> float:
        return float(np.percentile(self.latencies, 99)) if self.latencies else float("nan")

    @property
    def lost(self) -> int:
        """How many failed that no killed process held."""
        return sum(count for (_, is_wounded), count in self.errors.items() if not is_wounded)

    def describe(self, name: str) -> str:
        p50 = np.percentile(self.latencies, 50) * 1000
        kinds = ", ".join(
            f"{count} of version {version}" for version, count in sorted(self.versions.items()) if version
        )
        lines = [
            f"{name}: {len(self.latencies)} answered in p50 {p50:.1f} ms, p99 {self.p99 * 1000:.1f} ms, at most "
            f"{max(self.latencies) * 1000:.0f} ms; {kinds}, {self.versions[0]} of neither; "
            f"{sum(self.errors.values())} failed"
        ]
        for (what, is_wounded), count in self.errors.most_common():
            lines.append(f"  {count:>6}  {what}{' (a process was killed)' if is_wounded else ''}")
        return "\n".join(lines)


Ask = Callable[[str], Any]


@contextlib.contextmanager
def asking_over(library: Any, port: int) -> Iterator[Ask]:
    """Ask one request at a time, each answered before the next, over one connection that is kept."""
    with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
        yield lambda text: client.infer(NAME, [make_input(library, text)])


@contextlib.contextmanager
def streaming(port: int) -> Iterator[Ask]:
    """The same over one gRPC stream that is kept."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def ask(text: str) -> Any:
        client.async_stream_infer(NAME, [make_input(tritonclient.grpc, text)])
        try:
            result, error = answers.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise InferenceServerException(f"no answer within {PATIENCE_S:g} s") from None
        if error is not None:
            raise error
        return result

    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        yield ask


def make_input(library: Any, text: str) -> Any:
    tensor = library.InferInput("TEXT", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=object))
    return tensor


class Callers:
    """Clients that each send at a steady rate over one connection that they keep.

    Args:
        entry: The server, or what stands before several.
        repository: That holds versions 1 and 2 of the model.
        rate: Requests a second of each.
    """

    def __init__(self, entry: Running | Balancer, repository: Path, rate: float) -> None:
        golden = {n: json.loads((repository / NAME / str(n) / "golden.json").read_text())["samples"][0] for n in (1, 2)}
        self._text = golden[1]["inputs"][0]["data"][0]
        self._expected = {n: np.array(sample["outputs"][0]["data"]) for n, sample in golden.items()}
        self._interval_s = 1 / rate
        self.phase = Phase()
        self.is_wounded = False
        self._ended = threading.Event()
        kinds = (
            lambda: asking_over(tritonclient.http, entry.http),
            lambda: asking_over(tritonclient.grpc, entry.grpc),
            lambda: streaming(entry.grpc),
        )
        self._threads = [
            threading.Thread(target=self._send, args=(kinds[number % len(kinds)],)) for number in range(CLIENTS)
        ]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _send(self, connect: Callable[[], contextlib.AbstractContextManager[Ask]]) -> None:
        # A stream ends with its first error: what was asked over it last is lost, and another one is begun.
        while not self._ended.is_set():
            with connect() as ask:
                while not self._ended.wait(self._interval_s) and self._send_one(ask):
                    pass

    def _send_one(self, ask: Ask) -> bool:
        """Send a request, count what comes of it, and return whether it was answered."""
        phase, start = self.phase, time.monotonic()
        try:
            vector = ask(self._text).as_numpy("EMBEDDING")[0]
        except InferenceServerException as exc:
            phase.errors[exc.message()[:120], self.is_wounded] += 1
            return False
        phase.latencies.append(time.monotonic() - start)
        near = [n for n, expected in self._expected.items() if np.abs(vector - expected).max() < NEAR]
        phase.versions[near[0] if near else 0] += 1
        return True


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


def wait_until_served(status_port: int, version: int) -> None:
    """Wait until the launcher with this status port says that it serves this version.

    Raises:
        TimeoutError: It does not come to that.
    """
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{status_port}/versions") as answer,
        ):
            found = json.load(answer)["models"][NAME]
            if found["served"] == version and found["state"] == "served":
                return
        time.sleep(0.05)
    raise TimeoutError(f"version {version} was not served within {PATIENCE_S:g} s: {found}")


def count_processes(server: Running) -> int:
    """Return how many backend processes the steps of the model have, of all versions."""
    return sum(len(server.find_stubs(f"{NAME}_{step}")) for step in STEPS)


def wait_until_alone(server: Running, processes: int) -> None:
    """Wait until no process of the version before is left."""
    deadline = time.monotonic() + PATIENCE_S
    while count_processes(server) > processes and time.monotonic() < deadline:
        time.sleep(0.1)


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
def serving(
    repository: Path, count: int, logs: Path | None = None
) -> Iterator[tuple[list[Running], Running | Balancer]]:
    """Serve a repository by so many servers; yield them, and whom clients ask. What they say is written to `logs`."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running(repository)) for _ in range(count)]
        for server in servers:
            server.read_until("serving HTTP")
            server.follow()
        if logs is not None:
            stack.callback(write_logs, servers, logs)
        yield servers, servers[0] if count == 1 else stack.enter_context(balancing(servers))


def write_logs(servers: Sequence[Running], folder: Path) -> None:
    """Write what each server has said to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, server in enumerate(servers):
        (folder / f"server-{number}.log").write_text("\n".join(server.lines) + "\n", encoding="utf-8")


@dataclass
class Soaked:
    """What came of it.

    Attributes:
        idle: Of the requests while nothing was rolled out.
        rolled: Of those while something was.
        healed: Of those from the death of a process until its model was whole again.
        memory: Of each server, from the first row of activations to the last.
    """

    idle: Phase
    rolled: Phase
    healed: Phase
    memory: list[Memory]

    def growth(self) -> list[float]:
        """Return by which part the memory of each server has grown."""
        return [sum(memory.rows[-1][1].values()) / sum(memory.rows[0][1].values()) - 1 for memory in self.memory]


def soak(
    servers: Sequence[Running], callers: Callers, repository: Path, activations: int, *, idle_s: float = IDLE_S
) -> Soaked:
    """Activate versions 2 and 1 in turns, so often, while the callers send."""
    # In a process of its own, as its user has it: in this one the callers would wait for the interpreter's lock.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as elsewhere:
        return _soak(servers, callers, repository, activations, idle_s, elsewhere)


def _soak(
    servers: Sequence[Running],
    callers: Callers,
    repository: Path,
    activations: int,
    idle_s: float,
    elsewhere: ProcessPoolExecutor,
) -> Soaked:
    found = Soaked(Phase(), Phase(), Phase(), [Memory(server) for server in servers])
    # The first of such a process imports what it needs.
    elsewhere.submit(activate, repository, NAME, 1).result()
    processes = count_processes(servers[0])
    for number in range(activations):
        if number % ROW == 0:
            for server in servers:
                wait_until_alone(server, processes)
            for memory in found.memory:
                memory.look()
            callers.phase = found.idle
            time.sleep(idle_s)
            callers.phase = found.rolled
        if number % KILL_EVERY == KILL_EVERY - 1:
            callers.phase = found.healed
            wound(servers[0], callers)
            callers.phase = found.rolled
        version = 2 - number % 2
        elsewhere.submit(activate, repository, NAME, version).result()
        for server in servers:
            elsewhere.submit(wait_until_served, server.status, version).result()
        if number % KILL_EVERY == KILL_EVERY - 1:
            ratio = found.rolled.p99 / found.idle.p99
            say(f"  {number + 1:>4} activations, p99 {ratio:.1f} times that of idle, {found.rolled.lost} lost")
    for server in servers:
        wait_until_alone(server, processes)
    for memory in found.memory:
        memory.look()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--activations", type=int, default=100)
    parser.add_argument("--servers", type=int, default=1, help="on the one repository; several stand behind nginx")
    parser.add_argument(
        "--repository", type=Path, help=f"that holds versions 1 and 2 of {NAME!r} (default: published anew)"
    )
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second of each of the eight clients")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="write there what the servers say")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="modelyard-soak-"))
    try:
        repository = options.repository or publish_two(folder)
        activate(repository, NAME, 1)
        with (
            serving(repository, options.servers, options.logs) as (servers, entry),
            Callers(entry, repository, options.rate) as callers,
        ):
            time.sleep(3)
            found = soak(servers, callers, repository, options.activations)
            metrics = [server.read_metrics() for server in servers]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(found.idle.describe("idle"))
    say(found.rolled.describe(f"{options.activations} activations"))
    if found.healed.latencies:
        say(found.healed.describe("processes killed"))
    say(f"p99 is {found.rolled.p99 / found.idle.p99:.1f} times that of idle")
    for memory, growth, counted in zip(found.memory, found.growth(), metrics, strict=True):
        say(f"memory at first {describe(memory.rows[0][1])}\nmemory at last  {describe(memory.rows[-1][1])}")
        rollouts = {name: value for name, value in counted.items() if "rollouts_total" in name}
        say(f"growth: {growth * 100:+.1f} %; {rollouts}")
    phases = (found.idle, found.rolled, found.healed)
    lost = sum(phase.lost for phase in phases)
    say(f"failed without a killed process: {lost}")
    return 1 if lost or any(phase.versions[0] for phase in phases) else 0


if __name__ == "__main__":
    sys.exit(main())
