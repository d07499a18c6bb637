"""Contenders are prepared, started, asked and stopped."""

import contextlib
import json
import os
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benches.serving import usage
from benches.serving.contenders import (
    CORES,
    OURS_PROTOCOL,
    PEERS_FOLDER,
    REFERENCE,
    Contender,
    Limit,
    Ours,
    Peer,
    Protocol,
    encode_bodies,
    find_version,
)
from harness import CHECKOUT
from launcher import find_ports
from tokenizers import Tokenizer

from demo.checkpoint import fetch_checkpoint
from demo.serving import NAME

WARM_S = 1.0
# Of the first window: engines compile what a length needs when they first meet it, and OpenVINO whole graphs.
FIRST_WARM_S = 5.0
START_LIMIT_S = 90.0
_STOP_LIMIT_S = 15.0

# Peers compute in fp32, ours in what their names say.
_LEAST_COSINE = 0.98
_CHECKED_TEXTS = 8

_UV = CHECKOUT / ".cache" / "uv" / "bin" / "uv"
_COUNTS = struct.Struct("<4q")


class ContenderError(Exception):
    """A contender cannot be prepared, does not start, or answers wrongly."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What everybody is asked, in this order.

    Attributes:
        texts: Real texts.
        vectors: The right answers to the first of them.
    """

    texts: Sequence[str]
    vectors: Sequence[Sequence[float]] = ()


@dataclass
class Window:
    """What was seen of one contender in one window."""

    connections: int
    texts_per_s: float
    p50_ms: float
    p99_ms: float
    errors: int
    cpu_ms: dict[str, float]
    clients_cpu_ms: float = 0.0
    others_cores: float = 0.0
    memory_mb: float = 0.0
    mean_batch: float | None = None
    padding: float | None = None


@dataclass(kw_only=True)
class Server:
    """A contender that runs."""

    process: "subprocess.Popen[bytes]"
    port: int
    protocol: Protocol
    counts: Path
    start_s: float = 0.0
    model: str = ""
    padding: float | None = None
    log: Path = field(default_factory=Path)

    def read_counts(self) -> "np.ndarray[Any, Any]":
        """Return runs, rows, tokens and padded tokens so far; zeros for what is not known."""
        if self.model:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v2/models/{self.model}/stats") as response:
                found = json.load(response)["model_stats"][0]
            return np.array([found["execution_count"], found["inference_count"], 0, 0])
        files = [path for path in self.counts.iterdir() if path.is_file() and path.name.isdecimal()]
        return np.sum([_COUNTS.unpack(path.read_bytes()) for path in files], axis=0) if files else np.zeros(4)


def prepare(contender: Contender, *, again: bool) -> None:
    """See to it that a contender can be started.

    Raises:
        ContenderError: It cannot be exported or installed.
    """
    if isinstance(contender, Ours):
        command = [sys.executable, "-m", "export", "run", str(fetch_checkpoint()), "--name", NAME]
        command += ["--repository", str(contender.repository), *contender.options, *(["--again"] if again else [])]
        _run(command, f"{contender.name} cannot be exported")
    elif isinstance(contender, Peer):
        _install(contender)


def _install(peer: Peer) -> None:
    wanted = (PEERS_FOLDER / f"{peer.packages}.txt").read_text()
    mark = peer.folder / "installed"
    if mark.is_file() and mark.read_text() == wanted:
        return
    shutil.rmtree(peer.folder, ignore_errors=True)
    failed = f"{peer.name} cannot be installed"
    _run([str(_UV), "venv", "--no-config", "--python", sys.executable, str(peer.folder)], failed)
    install = [str(_UV), "pip", "install", "--no-config", "--python", str(peer.folder / "bin" / "python")]
    _run([*install, "--no-deps", "--requirement", str(PEERS_FOLDER / f"{peer.packages}.txt")], failed)
    if peer.has_torch:
        _run([*install, "--requirement", str(CHECKOUT / "requirements" / "torch.txt")], failed)
    mark.write_text(wanted)


def _run(command: Sequence[str], failed: str) -> None:
    # uv looks for wheels where pip was told to.
    links = {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}
    try:
        done = subprocess.run(
            command, cwd=CHECKOUT, env=os.environ | links, capture_output=True, text=True, check=False, timeout=900
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ContenderError(f"{failed}: {exc}") from exc
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise ContenderError(f"{failed}: {next((line for line in lines if 'error' in line.lower()), lines[-1:])}")


def measure(
    contender: Contender, texts: Texts, levels: Sequence[int], seconds: float
) -> tuple[list[Window], dict[str, float]]:
    """Start a contender, measure it at each number of connections, stop it; return windows and facts of the start.

    Raises:
        ContenderError: It does not start, or answers wrongly.
    """
    if isinstance(contender, Limit):
        return [measure_limit(contender, texts, seconds)], {}
    with started(contender) as server:
        check_answers(server, texts)
        if isinstance(contender, Ours):
            server.padding = find_padding(contender, texts.texts)
        memory = usage.read_memory_bytes(server.process.pid)
        waits = [FIRST_WARM_S] + [WARM_S] * (len(levels) - 1)
        windows = [measure_level(server, texts, *each, seconds) for each in zip(levels, waits, strict=True)]
    return windows, {"start_s": server.start_s, "memory_mb": memory / 1e6}


def find_padding(ours: Ours, texts: Sequence[str]) -> float:
    """Return the share of padding in what a model of ours runs: requests of one text each are padded for no other."""
    tokenizer = Tokenizer.from_file(str(find_version(REFERENCE) / "tokenizer.json"))
    tokenizer.no_padding()
    sizes = [len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))]
    lengths = ours.lengths or read_own_lengths(find_version(ours))
    padded = [next((length for length in lengths if length >= size), size) for size in sizes]
    return 1 - sum(sizes) / sum(padded)


def read_own_lengths(version: Path) -> Sequence[int]:
    """Return the lengths that an engine has a graph of its own for, which it pads to."""
    path = version / "openvino.json"
    return json.loads(path.read_text())["lengths"] if path.is_file() else ()


@contextlib.contextmanager
def started(contender: Ours | Peer) -> Iterator[Server]:
    """Run a contender's server from its first answer to the end of the block.

    Raises:
        ContenderError: It does not answer in time.
    """
    with tempfile.TemporaryDirectory(prefix="modelyard-bench-") as folder:
        ports = find_ports(4)
        log, counts = Path(folder, "log"), Path(folder, "counts")
        counts.mkdir()
        command, cwd, environment = _build_command(contender, ports, counts)
        begun = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=cwd, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        is_ours = isinstance(contender, Ours)
        server = Server(
            process=process,
            port=ports[0],
            protocol=OURS_PROTOCOL if is_ours else contender.protocol,
            counts=counts,
            model=contender.model if is_ours else "",
            log=log,
        )
        try:
            _wait(server, contender.name)
            server.start_s = time.monotonic() - begun
            yield server
        finally:
            _stop(process)


def _build_command(
    contender: Ours | Peer, ports: Sequence[int], counts: Path
) -> tuple[list[str], Path, dict[str, str]]:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if isinstance(contender, Ours):
        options = zip(("--http-port", "--grpc-port", "--metrics-port", "--status-port"), map(str, ports), strict=True)
        command = [sys.executable, "-m", "server", "--repository", str(contender.repository)]
        return [*command, *(word for pair in options for word in pair)], CHECKOUT, environment
    folder = contender.folder / "bin"
    values = {"port": ports[0], "checkpoint": fetch_checkpoint()}
    program, *words = (word.format_map(values) for word in contender.command)
    environment |= {
        "PATH": f"{folder}{os.pathsep}{environment['PATH']}",
        "PYTHONPATH": str(PEERS_FOLDER),
        "BENCH_MODEL": str(find_version(REFERENCE)),
        "BENCH_COUNTS": str(counts),
        "BENCH_PORT": str(ports[0]),
        "BENCH_SECOND_PORT": str(ports[1]),
        "BENCH_THIRD_PORT": str(ports[2]),
        # Nobody is told that this ran, and nothing is fetched.
        "DO_NOT_TRACK": "1",
        "INFINITY_ANONYMOUS_USAGE_STATS": "0",
        "BENTOML_DO_NOT_TRACK": "True",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        **contender.environment,
    }
    return [str(folder / program), *words], PEERS_FOLDER, environment


def _wait(server: Server, name: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while server.process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError):
            ask(server, "Are you there?")
            return
        time.sleep(0.1)
    lines = [line for line in server.log.read_text(errors="replace").splitlines() if line.strip()]
    raise ContenderError(
        f"{name} did not answer within {START_LIMIT_S:.0f} s; it said at last: {' / '.join(lines[-4:])}"
    )


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a server and, if any is left then, everything that it started."""
    tree = usage.list_started(process.pid)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_LIMIT_S)
    usage.kill_all(tree)
    process.wait()


def ask(server: Server, text: str) -> Sequence[float]:
    """Return the vector of a text."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{server.protocol.path}",
        encode_bodies(server.protocol, [text])[0].encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return server.protocol.vector(json.load(response))


def check_answers(server: Server, texts: Texts) -> None:
    """Refuse a server that answers something else: how fast that is says nothing.

    Raises:
        ContenderError: It does.
    """
    for text, right in zip(texts.texts, texts.vectors, strict=False):
        got = np.array(ask(server, text))
        cosine = float(got @ np.array(right) / (np.linalg.norm(got) * np.linalg.norm(right)))
        if not cosine >= _LEAST_COSINE:
            raise ContenderError(f"a wrong answer to {text[:40]!r}: cosine {cosine:.4f}, expected {_LEAST_COSINE}")


def read_vectors(texts: Sequence[str]) -> Texts:
    """Return texts with the right answers to some, which the graph that was proven gives."""
    with started(REFERENCE) as server:
        return Texts(texts=texts, vectors=[ask(server, text) for text in texts[:_CHECKED_TEXTS]])


def measure_level(server: Server, texts: Texts, connections: int, warm_s: float, seconds: float) -> Window:
    """Return what was seen with so many connections, each with one request in flight, after so long."""
    plan = {
        "port": server.port,
        "path": server.protocol.path,
        "bodies": encode_bodies(server.protocol, texts.texts),
        "connections": connections,
        "warm_s": warm_s,
        "seconds": seconds,
        "pid": server.process.pid,
    }
    before = server.read_counts()
    command = [sys.executable, "-m", "benches.serving.http_load"]
    environment = os.environ | {"PYTHONPATH": f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'tests'}"}
    limit = warm_s + seconds + 60
    try:
        done = subprocess.run(
            command, cwd=CHECKOUT, env=environment, input=json.dumps(plan).encode(), capture_output=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise ContenderError(f"{connections} connections were not answered within {limit:.0f} s") from None
    if done.returncode:
        raise ContenderError(f"the clients failed: {done.stderr.decode().strip().splitlines()[-1]}")
    seen = json.loads(done.stdout)
    runs, rows, tokens, padded = (server.read_counts() - before).tolist()
    latencies = seen["latencies_ms"]
    if not latencies:
        raise ContenderError(f"no answer from {connections} connections: {sorted(set(seen['errors']))}")
    return Window(
        connections=connections,
        texts_per_s=len(latencies) / seen["seconds"],
        p50_ms=float(np.percentile(latencies, 50)),
        p99_ms=float(np.percentile(latencies, 99)),
        errors=len(seen["errors"]),
        cpu_ms={name: 1000 * used / len(latencies) for name, used in sorted(seen["cpu_s"].items()) if used > 0},
        clients_cpu_ms=1000 * seen["clients_cpu_s"] / len(latencies),
        others_cores=seen["others_cores"],
        memory_mb=seen["memory_bytes"] / 1e6,
        mean_batch=rows / runs if runs else None,
        padding=1 - tokens / padded if padded else server.padding,
    )


def measure_limit(limit: Limit, texts: Texts, seconds: float) -> Window:
    """Return what an engine does without a server, a process a core.

    Raises:
        ContenderError: It cannot be run.
    """
    environment = os.environ | {"PYTHONPATH": f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'tests'}"}
    streams = [
        subprocess.Popen(
            limit.command,
            cwd=CHECKOUT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(CORES)
    ]
    try:
        for number, stream in enumerate(streams):
            plan = {
                "tokenizer": str(find_version(REFERENCE) / "tokenizer.json"),
                "texts": list(texts.texts),
                "first": number * len(texts.texts) // CORES,
                "seconds": seconds,
            }
            _tell(stream, json.dumps(plan))
        if [stream.stdout.readline().strip() for stream in streams if stream.stdout] != ["ready"] * CORES:
            raise ContenderError(f"{limit.name} cannot be run: its file was proven on another kind of machine")
        before, begun = usage.read_machine_cpu_s(), time.monotonic()
        memory = sum(usage.read_memory_bytes(stream.pid) for stream in streams)
        for stream in streams:
            _tell(stream, "go")
        seen = [json.loads(stream.stdout.readline() or "null") for stream in streams if stream.stdout]
        used, wall = usage.read_machine_cpu_s() - before, time.monotonic() - begun
    except OSError as exc:
        raise ContenderError(f"{limit.name} cannot be run: {exc}") from exc
    finally:
        for stream in streams:
            stream.kill()
            stream.communicate()
    if None in seen:
        raise ContenderError(f"{limit.name} ended in the middle")
    latencies = [latency for each in seen for latency in each["latencies_ms"]]
    cpu_s = sum(each["cpu_s"] for each in seen)
    return Window(
        connections=0,
        texts_per_s=sum(len(each["latencies_ms"]) / each["seconds"] for each in seen),
        p50_ms=statistics.median(latencies),
        p99_ms=float(np.percentile(latencies, 99)),
        errors=0,
        cpu_ms={"engine": 1000 * cpu_s / len(latencies)},
        others_cores=max(0.0, (used - cpu_s) / wall),
        memory_mb=memory / 1e6,
        mean_batch=1.0,
        padding=0.0,
    )


def _tell(stream: "subprocess.Popen[str]", line: str) -> None:
    assert stream.stdin is not None
    stream.stdin.write(f"{line}\n")
    stream.stdin.flush()
