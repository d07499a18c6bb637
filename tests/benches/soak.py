"""More than the server can answer for a long time, then half of it, and what became of answers, latency and memory.

    python -m benches.soak [--minutes 20] [--repository DIR]

Starts `python -m server`, measures how much it answers with clients that wait for their answers, then sends at a fixed
rate whether it answers or not: `minutes` at 1.5 times that much, and half as long at half of it. Every answer is
compared with the verified one. Clients and server share the machine, so capacity is what is left beside the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tritonclient.grpc.aio
import tritonclient.http.aio
from launcher import Running, read_golden_texts, running
from tritonclient.utils import InferenceServerException

from demo.serving import REPOSITORY, publish_demo_model
from server.tritonserver.processes import list_children

NAME = "sentence_embedding"
CAPACITY_CLIENTS = 16

# A request without an answer for this long is an error of its own, so that every loop below ends.
TIMEOUT_S = 60.0

# So many in flight at most: two full queues of 256, and what is on its way.
MAX_IN_FLIGHT = 2048

OVERLOADED = ("503", "StatusCode.UNAVAILABLE")


@dataclass(kw_only=True)
class Phase:
    """What came of the requests of one phase.

    Attributes:
        name: For people.
        rate: Requests a second that were meant to be sent; 0 where clients waited for their answers.
        seconds: It took, the last answers left out.
        latencies: Of the answered, seconds.
        wrong: Answers that differ from the verified one.
        errors: By status and the words of the message.
    """

    name: str
    rate: float = 0.0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def sent(self) -> int:
        return len(self.latencies) + self.wrong + self.errors.total()

    @property
    def is_sound(self) -> bool:
        """Whether every answer is right and every error says that the server is overloaded."""
        return not self.wrong and all(what.startswith(OVERLOADED) for what in self.errors)

    def describe(self) -> str:
        p50, p99 = np.percentile(self.latencies, [50, 99]) * 1000 if self.latencies else (np.nan, np.nan)
        lines = [
            f"{self.name}: {self.seconds:.0f} s, {self.sent} sent ({self.sent / self.seconds:.0f}/s), "
            f"{len(self.latencies)} answered ({len(self.latencies) / self.seconds:.0f}/s), {self.wrong} wrong, "
            f"{self.errors.total()} errors; answered in p50 {p50:.0f} ms, p99 {p99:.0f} ms"
        ]
        return "\n".join([*lines, *(f"  {count:>8}  {what}" for what, count in self.errors.most_common())])


class Clients:
    """One over each protocol, that send verified texts in turns."""

    def __init__(self, server: Running, repository: Path) -> None:
        samples, self._tolerance = read_golden_texts(repository, NAME)
        http = tritonclient.http.aio.InferenceServerClient(f"127.0.0.1:{server.http}", conn_limit=0)
        grpc = tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{server.grpc}")
        self.clients = ((tritonclient.http, http, {}), (tritonclient.grpc, grpc, {"client_timeout": TIMEOUT_S}))
        self._turns = itertools.cycle(list(itertools.product(samples, self.clients)))

    async def ask(self, phase: Phase) -> None:
        """Send the next text, wait for what becomes of it, and note that in `phase`."""
        (text, expected), (library, client, limit) = next(self._turns)
        tensor = library.InferInput("TEXT", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[text]], dtype=np.object_))
        start = time.monotonic()
        try:
            answer = await asyncio.wait_for(client.infer(NAME, [tensor], **limit), TIMEOUT_S)
        except InferenceServerException as exc:
            phase.errors[f"{exc.status()} {exc.message()}"[:150]] += 1
            return
        except (OSError, asyncio.TimeoutError) as exc:
            phase.errors[f"{type(exc).__name__} {exc}"[:150]] += 1
            return
        if np.abs(answer.as_numpy("EMBEDDING")[0] - expected).max() <= self._tolerance:
            phase.latencies.append(time.monotonic() - start)
        else:
            phase.wrong += 1


@contextlib.asynccontextmanager
async def open_clients(server: Running, repository: Path) -> AsyncIterator[Clients]:
    clients = Clients(server, repository)
    try:
        yield clients
    finally:
        for _, client, _ in clients.clients:
            await client.close()


async def saturate(clients: Clients, seconds: float) -> Phase:
    """Send with a few clients that wait for their answers, for so long."""
    phase = Phase(name="capacity")
    start = time.monotonic()

    async def send() -> None:
        while time.monotonic() < start + seconds:
            await clients.ask(phase)

    await asyncio.gather(*(send() for _ in range(CAPACITY_CLIENTS)))
    phase.seconds = time.monotonic() - start
    return phase


async def drive(clients: Clients, name: str, rate: float, seconds: float) -> Phase:
    """Send `rate` requests a second for so long, whatever comes back."""
    phase = Phase(name=name, rate=rate)
    in_flight: set[asyncio.Task[None]] = set()
    start = time.monotonic()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
        if len(in_flight) >= MAX_IN_FLIGHT:
            await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.create_task(clients.ask(phase))
        in_flight.add(task)
        task.add_done_callback(in_flight.discard)
    phase.seconds = time.monotonic() - start
    await asyncio.gather(*in_flight)
    return phase


@dataclass
class Memory:
    """The resident memory of the launcher, tritonserver and the backend processes, over time."""

    server: Running
    start: float = field(default_factory=time.monotonic)
    rows: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    def look(self) -> dict[str, int]:
        tritonserver = self.server.tritonserver
        pids = {"launcher": [self.server.process.pid], "tritonserver": [tritonserver]}
        pids["backends"] = list_children(tritonserver)
        found = {name: sum(read_resident_bytes(pid) for pid in group) for name, group in pids.items()}
        self.rows.append((time.monotonic() - self.start, found))
        return found

    async def watch(self, interval_s: float) -> None:
        while True:
            elapsed, found = self.rows[-1] if self.rows else (0.0, self.look())
            say(f"  {elapsed / 60:6.1f} min  {describe(found)}")
            await asyncio.sleep(interval_s)
            self.look()


def read_resident_bytes(pid: int) -> int:
    """Return what of process `pid` is in memory; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def describe(memory: dict[str, int]) -> str:
    parts = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in memory.items())
    return f"{sum(memory.values()) / 1e6:.1f} MB ({parts})"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def soak(server: Running, repository: Path, seconds: float) -> tuple[list[Phase], Memory]:
    """Measure the capacity, overload for `seconds`, rest for half as long; tell of each as it ends."""
    memory = Memory(server)
    async with open_clients(server, repository) as clients:
        # Memory is compared with that of a server that has worked.
        warm = await saturate(clients, min(30.0, seconds / 4))
        capacity = await saturate(clients, min(30.0, seconds / 4))
        rate = len(capacity.latencies) / capacity.seconds
        say(capacity.describe())
        memory.look()
        watch = asyncio.create_task(memory.watch(max(5.0, seconds / 20)))
        phases = [warm, capacity]
        try:
            for name, factor, length in (("1.5 times capacity", 1.5, seconds), ("half of capacity", 0.5, seconds / 2)):
                phases.append(await drive(clients, name, rate * factor, length))
                say(phases[-1].describe())
        finally:
            watch.cancel()
    memory.look()
    return phases, memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--repository", type=Path, help="that holds the demo's model (default: published anew)")
    options = parser.parse_args()
    repository = options.repository or REPOSITORY
    if not options.repository:
        publish_demo_model()
    with running(repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        phases, memory = asyncio.run(soak(server, repository, options.minutes * 60))
        # The launcher's own counters: none of them moves while all is well.
        deaths = {name: value for name, value in server.read_metrics().items() if value and "ready" not in name}
    # The queues are full from the second look on.
    first, full, last = (memory.rows[index][1] for index in (0, 1, -1))
    peak = max((row for _, row in memory.rows), key=lambda row: sum(row.values()))
    say(f"memory at first {describe(first)}\nmemory at most  {describe(peak)}\nmemory at last  {describe(last)}")
    for when, then in (("it was overloaded", first), ("its queues were first full", full)):
        say(f"growth since {when}: {(sum(last.values()) / sum(then.values()) - 1) * 100:+.1f} %")
    say(f"deaths and restarts: {deaths or 'none'}")
    # What makes it fail does not depend on the machine: a wrong answer, an error that is not a refusal, a death.
    return 1 if deaths or not all(phase.is_sound for phase in phases) else 0


if __name__ == "__main__":
    sys.exit(main())
