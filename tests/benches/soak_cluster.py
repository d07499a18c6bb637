"""Three servers on one repository behind HAProxy: one is killed, one drains, all roll; and what one to three answer.

    python -m benches.soak_cluster [--quick] [--json FILE]

32 clients, half of them over HTTP and half over gRPC, each on a connection of its own, send one request after another
and repeat nothing themselves. What HAProxy repeats is said in docker/haproxy/haproxy.cfg.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from benches.soak import say
from benches.soak_rollouts import NAME, publish_two
from harness import CHECKOUT
from launcher import Running, find_ports
from tritonclient.utils import InferenceServerException

from export.repository.activation import activate
from server.tritonserver.processes import list_children

HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")

SERVERS = 3
CLIENTS = 32

# Answers of one version are nearer than this to the recorded one, those of the other a hundred times as far.
NEAR = 1e-3

TIMEOUT_S = 30.0
PATIENCE_S = 120.0


@dataclass
class Phase:
    """What came of the requests that were sent in one phase.

    Attributes:
        name: For people.
        seconds: It took.
        latencies: Of the answered, seconds.
        versions: Version → answers that are wholly of it; 0 for those that are of none.
        errors: What the client says.
    """

    name: str
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    versions: Counter[int] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.latencies) / self.seconds

    @property
    def is_sound(self) -> bool:
        """Whether there were answers, each of one version, and no failed request."""
        return bool(self.latencies) and not self.errors and not self.versions[0]

    def describe(self) -> str:
        p50, p99 = np.percentile(self.latencies, [50, 99]) * 1000 if self.latencies else (np.nan, np.nan)
        kinds = ", ".join(f"{count} of version {version}" for version, count in sorted(self.versions.items()))
        lines = [
            f"{self.name}: {len(self.latencies)} answered ({self.rate:.0f}/s; {kinds}) in p50 {p50:.0f} ms, p99 "
            f"{p99:.0f} ms; {self.errors.total()} failed"
        ]
        return "\n".join([*lines, *(f"  {count:>8}  {what}" for what, count in self.errors.most_common())])


class Callers:
    """Clients, each on its own connection to a proxy, that send one request after another until they are told to stop.

    Args:
        http: The proxy's port.
        grpc: The proxy's port for gRPC.
        repository: Holds versions 1 and 2 of the model.
        name: The model, which makes an `EMBEDDING` of a `TEXT`.
        clients: How many; every second one over gRPC.
    """

    def __init__(self, http: int, grpc: int, repository: Path, name: str, clients: int) -> None:
        golden = {n: json.loads((repository / name / str(n) / "golden.json").read_text())["samples"][0] for n in (1, 2)}
        self._text = golden[1]["inputs"][0]["data"][0]
        self._expected = {n: np.array(sample["outputs"][0]["data"]) for n, sample in golden.items()}
        self._http, self._grpc, self._name, self._clients = http, grpc, name, clients
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send_all()))
        self._begin("warm")

    def __enter__(self) -> Callers:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def during(self, name: str, act: Callable[[], object]) -> Phase:
        """Return what came of the requests that were sent while `act` ran; of the last it is known later."""
        phase = self._begin(name)
        act()
        self._begin("between")
        return phase

    def _begin(self, name: str) -> Phase:
        now = time.monotonic()
        if hasattr(self, "_phase"):
            self._phase.seconds = now - self._started
        self._phase, self._started = Phase(name), now
        return self._phase

    async def _send_all(self) -> None:
        await asyncio.gather(*(self._send(number) for number in range(self._clients)))

    async def _send(self, number: int) -> None:
        if number % 2:
            # Or all channels to one address would share a connection.
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
            library = tritonclient.grpc
            client = library.aio.InferenceServerClient(f"127.0.0.1:{self._grpc}", channel_args=options)
        else:
            library = tritonclient.http
            client = library.aio.InferenceServerClient(f"127.0.0.1:{self._http}", conn_limit=1)
        text = library.InferInput("TEXT", [1, 1], "BYTES")
        text.set_data_from_numpy(np.array([[self._text.encode()]], dtype=object))
        async with client:
            while not self._ended.is_set():
                phase, start = self._phase, time.monotonic()
                try:
                    answer = await asyncio.wait_for(client.infer(self._name, [text]), TIMEOUT_S)
                except Exception as exc:
                    what = exc.message() if isinstance(exc, InferenceServerException) else str(exc)
                    phase.errors[f"{library.__name__} {type(exc).__name__} {what}"[:160]] += 1
                    await asyncio.sleep(0.05)
                    continue
                vector = answer.as_numpy("EMBEDDING")[0]
                near = [n for n, expected in self._expected.items() if np.abs(vector - expected).max() < NEAR]
                phase.latencies.append(time.monotonic() - start)
                phase.versions[near[0] if near else 0] += 1


class Cluster:
    """Servers on one repository behind HAProxy; they keep their ports when they are started anew."""

    def __init__(self, repository: Path, folder: Path, name: str) -> None:
        self.repository, self.name = repository, name
        self._folder = folder
        self.http, self.grpc, self.status = find_ports(3)
        self._ports = [find_ports(4) for _ in range(SERVERS)]
        self.servers: list[Running | None] = [None] * SERVERS
        self._haproxy: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cluster:
        text = (CHECKOUT / "docker" / "haproxy" / "haproxy.cfg").read_text()
        for old, new in (("bind :8000", self.http), ("bind :8001", self.grpc), ("bind :8404", self.status)):
            assert old in text
            text = text.replace(old, f"bind 127.0.0.1:{new}")
        for number, (http, grpc, _, status) in enumerate(self._ports, start=1):
            for old, new in (("8000", f"{http} port {status}"), ("8001", f"{grpc}")):
                assert f"server-{number}:{old}" in text
                text = text.replace(f"server-{number}:{old}", f"127.0.0.1:{new}")
        (self._folder / "haproxy.cfg").write_text(text)
        assert HAPROXY is not None, "HAProxy is not installed"
        self._haproxy = subprocess.Popen([HAPROXY, "-q", "-f", str(self._folder / "haproxy.cfg")])
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self.servers:
            if server is not None and server.process.poll() is None:
                server.process.terminate()
        for server in self.servers:
            if server is not None:
                server.process.wait(timeout=60)
        assert self._haproxy is not None
        self._haproxy.terminate()
        self._haproxy.wait(timeout=30)

    def start(self, *numbers: int) -> None:
        """Start servers, from 0, and wait until HAProxy sends requests to them."""
        for number in numbers:
            http, grpc, metrics, status = self._ports[number]
            ports = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics, "--status-port", status]
            key = ["--key-file", str(self._folder / f"{number}.key")]
            server = Running(self.repository, *map(str, ports), *key)
            server.http, server.grpc, server.metrics, server.status = self._ports[number]
            self.servers[number] = server
        for number in numbers:
            self.find(number).read_until("serving HTTP")
            self.find(number).follow()
        self._wait(lambda: all(self.is_up(number) for number in numbers))

    def find(self, number: int) -> Running:
        """Return a server that was started."""
        server = self.servers[number]
        assert server is not None
        return server

    def is_up(self, number: int) -> bool:
        """Tell whether HAProxy sends requests to a server."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.status}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        name = ("first", "second", "third")[number]
        states = re.findall(rf'haproxy_server_status{{[^}}]*server="{name}",state="UP"}} (\d)', text)
        return len(states) == 2 and set(states) == {"1"}

    def read_proxy_s(self) -> float:
        """Return the seconds that HAProxy has been on a core."""
        assert self._haproxy is not None
        fields = Path(f"/proc/{self._haproxy.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self, number: int) -> None:
        """Kill everything of a server at once, as when its machine dies."""
        server = self.find(number)
        pids = [server.process.pid]
        for pid in pids:
            pids += list_children(pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.process.wait(timeout=30)

    def drain(self, number: int) -> None:
        """Stop a server as Kubernetes does, and wait for its end.

        Raises:
            AssertionError: It did not answer everything.
        """
        server = self.find(number)
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(timeout=60)
        assert code == 0, server.lines[-5:]

    def roll(self, version: int, numbers: tuple[int, ...] = tuple(range(SERVERS))) -> None:
        """Make a version the active one, and wait until these servers serve it."""
        activate(self.repository, self.name, version)
        self.wait_for_version(version, numbers)

    def wait_for_version(self, version: int, numbers: tuple[int, ...]) -> None:
        """Wait until these servers serve a version."""
        self._wait(lambda: all(self._read_version(number) == (version, "served") for number in numbers))

    def _read_version(self, number: int) -> tuple[int, str]:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self.find(number).status}/versions", timeout=10) as answer,
        ):
            found = json.load(answer)["models"].get(self.name, {"served": 0, "state": ""})
            return found["served"], found["state"]
        return 0, ""

    def _wait(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            assert self._haproxy is not None and self._haproxy.poll() is None, "HAProxy has ended"
            with contextlib.suppress(OSError):
                if is_done():
                    return
            time.sleep(0.1)
        lines = [line for server in self.servers if server for line in server.lines[-5:]]
        raise TimeoutError(f"it did not come to that within {PATIENCE_S:g} s:\n" + "\n".join(lines))


@contextlib.contextmanager
def stand(repository: Path, name: str) -> Iterator[Cluster]:
    """Run HAProxy, and servers once they are started, on a repository that changes."""
    with (
        tempfile.TemporaryDirectory(prefix="modelyard-cluster-") as folder,
        Cluster(repository, Path(folder), name) as cluster,
    ):
        yield cluster


def lose_two(cluster: Cluster, version: int) -> None:
    """Kill one server and drain another, while the third rolls to a version."""
    draining = threading.Thread(target=cluster.drain, args=(1,))
    draining.start()
    cluster.kill(0)
    cluster.roll(version, (2,))
    draining.join()
    assert cluster.find(1).process.returncode == 0


def run_scenario(cluster: Cluster, callers: Callers, rest_s: float) -> list[Phase]:
    """Kill, drain and roll, one after another and then at once; three servers of version 1 stand."""

    def kill_and_replace() -> None:
        cluster.kill(0)
        time.sleep(rest_s)
        cluster.start(0)

    def drain_and_replace() -> None:
        cluster.drain(1)
        cluster.start(1)

    def lose_two_and_replace() -> None:
        lose_two(cluster, 1)
        cluster.start(0, 1)
        cluster.wait_for_version(1, (0, 1, 2))

    return [
        callers.during("one is killed and comes back", kill_and_replace),
        callers.during("one drains and comes back", drain_and_replace),
        callers.during("all roll to version 2", lambda: cluster.roll(2)),
        callers.during("at rest on version 2", lambda: time.sleep(rest_s)),
        callers.during("one is killed, one drains, the third rolls to version 1", lose_two_and_replace),
        callers.during("at rest on version 1", lambda: time.sleep(rest_s)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--quick", action="store_true", help="short phases, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured here as well")
    options = parser.parse_args()
    rest_s = 2.0 if options.quick else 15.0
    folder = Path(tempfile.mkdtemp(prefix="modelyard-cluster-"))
    measured = {}
    try:
        repository = publish_two(folder)
        activate(repository, NAME, 1)
        with stand(repository, NAME) as cluster:
            for number in range(SERVERS):
                cluster.start(number)
                for clients in (1, options.clients):
                    with Callers(cluster.http, cluster.grpc, repository, NAME, clients) as callers:
                        time.sleep(rest_s / 3)
                        used_s = cluster.read_proxy_s()
                        phase = callers.during(f"{number + 1} servers, {clients} clients", lambda: time.sleep(rest_s))
                        used_s = cluster.read_proxy_s() - used_s
                    say(phase.describe())
                    assert phase.is_sound
                    p50 = float(np.percentile(phase.latencies, 50))
                    measured[f"{number + 1}x{clients}"] = {"rate": phase.rate, "p50_s": p50}
                    proxy_core_s = used_s / len(phase.latencies)
            with Callers(cluster.http, cluster.grpc, repository, NAME, options.clients) as callers:
                phases = run_scenario(cluster, callers, rest_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for phase in phases:
        say(phase.describe())
    one = measured[f"1x{options.clients}"]["rate"]
    ratios = ", ".join(f"{n}: {measured[f'{n}x{options.clients}']['rate'] / one:.2f}" for n in range(1, SERVERS + 1))
    say(f"answers a second beside one server's, on the same cores: {ratios}")
    is_sound = all(phase.is_sound for phase in phases)
    if options.json:
        failed = sum(phase.errors.total() for phase in phases)
        found = {"clients": options.clients, "measured": measured, "proxy_core_s": proxy_core_s, "failed": failed}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
