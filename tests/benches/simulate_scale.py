"""A fleet of servers on paper: waiting, losses, rollouts, and how many it takes for a rate.

    python -m benches.simulate_scale [--measured FILE] [--cost FILE] [--rate 10000 --rate 1000000] [--requests 20000]

Times are in multiples of the time that a server computes one request, so that the first three tables are the same on
every machine. With what `benches.soak_cluster --json` and `benches.request_cost --json` wrote, it compares itself with
that run, and says how many servers, cores and bits it takes for a rate.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benches.soak import say

# As in docker/haproxy/haproxy.cfg: seconds until a lost server is known, and how often a request may be sent again.
CHECK_S = 0.5
RETRIES = 3

# As in a model's config.pbtxt.
QUEUE = 256

# Beyond so many servers nobody looks at all of them: the best of three by chance is taken.
_ALL_ARE_SEEN = 16


@dataclass
class Request:
    """One that is under way."""

    arrived: float
    client: int | None
    sent: int = 0


@dataclass
class Server:
    """One that computes so many requests at once, each in an exponential time, and lets others wait.

    Attributes:
        slots: How many it computes at once.
        is_alive: Whether it takes and answers requests.
        is_listed: Whether the balancer sends it any.
        life: Counts its deaths: what an earlier life was to answer is lost.
    """

    slots: int
    is_alive: bool = True
    is_listed: bool = True
    life: int = 0
    working: dict[int, Request] = field(default_factory=dict)
    waiting: deque[Request] = field(default_factory=deque)

    @property
    def load(self) -> int:
        return len(self.working) + len(self.waiting)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What is simulated.

    Attributes:
        servers: How many.
        slots: Requests that each computes at once.
        service_s: Mean time for one.
        queue: Requests that wait at each, before it refuses.
    """

    servers: int
    slots: int = 2
    service_s: float = 1.0
    queue: int = QUEUE

    @property
    def capacity(self) -> float:
        """Requests a second that it can answer at most."""
        return self.servers * self.slots / self.service_s


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the requests, the first tenth left out.

    Attributes:
        latencies: Of the answered, seconds.
        seconds: From the first to the last of them.
        repeated: Times a request was sent again.
        failed: Requests without an answer.
    """

    latencies: Sequence[float]
    seconds: float
    repeated: int
    failed: int

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def find(self, percent: float) -> float:
        """Return a percentile of the latencies."""
        return float(np.percentile(self.latencies, percent))


Happening = tuple[float, Callable[["Simulation"], None]]


class Simulation:
    """Events in the order of their time.

    Args:
        fleet: Who answers.
        requests: How many come.
        rate: So many a second, whether they are answered or not, by chance; or
        clients: so many clients, each of which waits for its answer.
        happenings: What is done to the fleet, and when.
        seed: Of chance.
    """

    def __init__(
        self,
        fleet: Fleet,
        requests: int,
        *,
        rate: float | None = None,
        clients: int = 0,
        happenings: Sequence[Happening] = (),
        seed: int = 0,
    ) -> None:
        self.fleet, self.servers = fleet, [Server(fleet.slots) for _ in range(fleet.servers)]
        self.now, self._left, self._rate = 0.0, requests, rate
        self._skipped = requests // 10
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._latencies: list[float] = []
        self._measured_from = self._repeated = self._failed = self._ended = 0.0
        for when, happen in happenings:
            self.at(when, lambda happen=happen: happen(self))  # type: ignore[misc]
        if rate:
            self.at(0.0, self._arrive)
        for client in range(clients):
            self.at(0.0, lambda client=client: self._come(client))  # type: ignore[misc]

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Have something done at a time."""
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def run(self) -> Outcome:
        """Return what became of the requests."""
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        return Outcome(
            latencies=self._latencies,
            seconds=self._ended - self._measured_from,
            repeated=int(self._repeated),
            failed=int(self._failed),
        )

    def lose(self, number: int, back_s: float) -> None:
        """Let a server die with what it holds; the balancer hears of it later, and it comes back after some time."""
        server = self.servers[number]
        lost = [*server.working.values(), *server.waiting]
        server.is_alive, server.life = False, server.life + 1
        server.working.clear()
        server.waiting.clear()
        for request in lost:
            self._send(request)
        self.at(self.now + min(CHECK_S, back_s), lambda: self._list(server, False))
        self.at(self.now + back_s, lambda: self._revive(server))

    def drain(self, number: int, back_s: float) -> None:
        """Take a server out; it answers what it holds, and comes back after some time."""
        server = self.servers[number]
        self._list(server, False)
        self.at(self.now + back_s, lambda: self._list(server, True))

    def _list(self, server: Server, is_listed: bool) -> None:
        server.is_listed = is_listed

    def _revive(self, server: Server) -> None:
        server.is_alive = server.is_listed = True

    def _arrive(self) -> None:
        assert self._rate is not None
        if self._left > 1:
            self.at(self.now + self._random.expovariate(self._rate), self._arrive)
        self._come(None)

    def _come(self, client: int | None) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        self._send(Request(self.now, client))

    def _send(self, request: Request) -> None:
        server: Server | None = None
        while request.sent <= RETRIES:
            request.sent += 1
            self._repeated += request.sent > 1
            # Not at once to the one that has just refused it, or has died with it: that one has least to do.
            listed = [other for other in self._look() if other.is_listed and other is not server]
            server = min(listed, key=lambda other: other.load, default=None)
            if server is None or not server.is_alive:
                continue
            if len(server.working) < server.slots:
                self._compute(server, request)
                return
            if len(server.waiting) < self.fleet.queue:
                server.waiting.append(request)
                return
        self._failed += 1
        self._finish(request, is_answered=False)

    def _look(self) -> list[Server]:
        if len(self.servers) <= _ALL_ARE_SEEN:
            # By chance among equals.
            return self._random.sample(self.servers, len(self.servers))
        return [server for server in self._random.sample(self.servers, 8) if server.is_listed][:3]

    def _compute(self, server: Server, request: Request) -> None:
        key, life = next(self._numbers), server.life
        server.working[key] = request
        took = self._random.expovariate(1 / self.fleet.service_s)
        self.at(self.now + took, lambda: self._answer(server, key, life))

    def _answer(self, server: Server, key: int, life: int) -> None:
        if server.life != life:
            return
        request = server.working.pop(key)
        if server.waiting:
            self._compute(server, server.waiting.popleft())
        self._finish(request, is_answered=True)

    def _finish(self, request: Request, *, is_answered: bool) -> None:
        if self._skipped > 0:
            self._skipped -= 1
            self._measured_from = self.now
        elif is_answered:
            self._latencies.append(self.now - request.arrived)
            self._ended = self.now
        if request.client is not None:
            client = request.client
            self.at(self.now, lambda: self._come(client))


def tell_waiting(requests: int) -> list[str]:
    """Return a table: fleet and use → latency."""
    lines = ["latency in multiples of one computation, p50 and p99, by how much of the fleet is used", "servers"]
    uses = (0.5, 0.7, 0.8, 0.9)
    lines[-1] += "".join(f"{f'{use:.0%}':>16}" for use in uses)
    for servers in (1, 3, 10, 100):
        fleet = Fleet(servers=servers)
        found = [Simulation(fleet, requests, rate=use * fleet.capacity).run() for use in uses]
        lines.append(f"{servers:>7}" + "".join(f"{item.find(50):>8.1f}{item.find(99):>8.1f}" for item in found))
    return lines


def tell_losses(requests: int) -> list[str]:
    """Return a table: fleet and use → what the loss of a server, and a rollout one by one, cost."""
    lines = [
        "p99 in the same multiples, requests sent again and failed: a server is lost; all are replaced, one by one"
    ]
    lines.append("servers   use     p99   again  failed      p99   again  failed")
    for servers, use in itertools.product((3, 10, 100), (0.5, 0.7, 0.9)):
        # A computation takes 10 ms, a start 10 s.
        fleet = Fleet(servers=servers, service_s=0.01)
        rate = use * fleet.capacity
        # Long enough for a start, where that is not too many.
        count = min(5 * requests, max(requests, int(rate * 40)))
        end = count / rate
        lost = [(end * 0.4, lambda simulation: simulation.lose(0, 10.0))]
        each = min(10.0, end * 0.8 / servers)
        rolled = [
            (end * 0.1 + each * n, lambda simulation, n=n, each=each: simulation.drain(n, each)) for n in range(servers)
        ]
        cells = []
        for happenings in (lost, rolled):
            item = Simulation(fleet, count, rate=rate, happenings=happenings).run()
            cells.append(f"{item.find(99) / fleet.service_s:>8.1f}{item.repeated:>8}{item.failed:>8}")
        lines.append(f"{servers:>7}{f'{use:.0%}':>6}" + " ".join(cells))
    return lines


def compare(measured: dict[str, Any], requests: int) -> list[str]:
    """Return a table: the run of the three servers beside the simulation, which knows the first of them alone.

    The servers of that run share their cores: each of `n` has an n-th of what one alone has.
    """
    clients = measured["clients"]
    alone, full = measured["measured"]["1x1"], measured["measured"][f"1x{clients}"]
    slots = max(1, round(full["rate"] * alone["p50_s"]))
    lines = [f"the local run ({clients} clients, {slots} computed at once) beside the simulation", "servers  rate  p50"]
    for servers in (1, 2, 3):
        found = measured["measured"][f"{servers}x{clients}"]
        fleet = Fleet(servers=servers, slots=slots, service_s=servers * slots / full["rate"])
        item = Simulation(fleet, requests, clients=clients).run()
        lines.append(f"{servers:>7}{item.rate / found['rate']:>6.2f}{item.find(50) / found['p50_s']:>6.2f}")
    return [*lines, "1 is equal; the first line holds by construction"]


def plan(rate: float, per_server: float, use: float = 0.7, spare: int = 2) -> int:
    """Return how many servers a rate takes: used so much at the peak, with some that may be lost or be replaced."""
    return math.ceil(rate / (per_server * use)) + spare


def tell_plan(rates: Sequence[float], measured: dict[str, Any], cost: dict[str, Any]) -> list[str]:
    """Return a table: rate → servers, cores of them and of the proxies, bits on the wire."""
    clients = measured["clients"]
    per_server = measured["measured"][f"1x{clients}"]["rate"]
    (busy,) = [parts for title, parts in cost.items() if title.endswith("in flight") and not title.startswith("one ")]
    cores = sum(value for key, value in busy.items() if key.startswith("cores of "))
    proxy, size = measured["proxy_core_s"], cost["bytes"]
    lines = ["     rate  servers  their cores  proxies' cores  Gbit/s in   out  as JSON, out"]
    for rate in rates:
        sent, got, as_json = (8e-9 * rate * size[key] for key in ("request", "answer", "answer, JSON"))
        lines.append(
            f"{rate:>9.0f}{plan(rate, per_server):>9}{rate * cores / 0.7:>13.0f}{rate * proxy:>16.0f}"
            f"{sent:>11.2f}{got:>6.2f}{as_json:>14.2f}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=20_000, help="simulated for each cell (default: %(default)s)")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="what benches.soak_cluster --json wrote")
    parser.add_argument("--cost", type=Path, metavar="FILE", help="what benches.request_cost --json wrote")
    parser.add_argument("--rate", type=float, action="append", help="requests a second (default: 10000 and 1000000)")
    options = parser.parse_args()
    tables = [tell_waiting(options.requests), tell_losses(options.requests)]
    if options.measured:
        measured = json.loads(options.measured.read_text())
        tables.append(compare(measured, options.requests))
        if options.cost:
            tables.append(tell_plan(options.rate or [1e4, 1e6], measured, json.loads(options.cost.read_text())))
    say("\n\n".join("\n".join(table) for table in tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
