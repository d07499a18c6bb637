"""The status port under everything that may connect to it: it answers who asks, and takes nothing from what serves."""

import contextlib
import json
import resource
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Published
from launcher import Running, running

from server.following.follower import Following, State
from server.status import Lapse, Status
from server.status_port import MAX_CONNECTIONS

# What a shell allows by default, and more connections than that.
FILES = 1024
CONNECTIONS = 1100


def test_nothing_is_told_to_be_served_before_tritonserver_answers() -> None:
    status = Status()
    status.follow("a", Following(active=2, served=2, state="served"))
    status.follow("b", Following(active=2, served=1, state="failed", reason="why"))
    for is_up in (False, True):
        status.ready = is_up
        models = json.loads(status.render_versions())["models"]
        assert (models["a"]["active"], models["a"]["served"]) == (2, 2 * is_up)
        assert models["a"]["state"] == ("served" if is_up else "rolling")
        assert models["b"] == {"active": 2, "served": int(is_up), "state": "failed", "reason": "why"}
        assert f'modelyard_served_version{{model="a"}} {2 * is_up}\n' in status.render()


def test_what_could_not_be_served_is_told_of_while_it_is_tried_again() -> None:
    status = Status()
    status.ready = True
    states: tuple[State, ...] = ("failed", "rolling", "failed")
    for state in states:
        status.follow("made", Following(active=0, served=0, state=state))
        told = {"active": 0, "served": 0, "state": state, "reason": ""}
        assert json.loads(status.render_versions())["models"] == {"made": told}
    status.follow("made", Following(active=0, served=0, state="served"))
    assert json.loads(status.render_versions())["models"] == {}


def test_a_version_that_is_refused_before_it_is_loaded_is_a_rollout_that_failed() -> None:
    status = Status()
    status.follow("a", Following(active=1, served=1, state="served"))
    # What is served has changed: nothing is rolled out.
    status.follow("a", Following(active=1, served=1, state="failed", reason="touched"))
    assert 'modelyard_rollouts_total{model="a",outcome="failed"} 0\n' in status.render()
    for _ in range(2):
        status.follow("a", Following(active=2, served=1, state="failed", reason="damaged"))
        assert 'modelyard_rollouts_total{model="a",outcome="failed"} 1\n' in status.render()


def test_what_was_missing_before_a_rollout_is_not_missing_after_it() -> None:
    def tell() -> tuple[str, str]:
        known = json.loads(status.render_versions())["models"]["a"]
        return known["state"], known["reason"]

    status = Status()
    status.ready = True
    states: tuple[State, ...] = ("served", "rolling")
    for state in states:
        status.follow("a", Following(active=2, served=1, state=state))
        status.tell_lapses({"a": Lapse(reason="unloaded", answers=False, seen_at=time.monotonic())})
        assert tell() == (("failed", "unloaded") if state == "served" else ("rolling", ""))
    status.follow("a", Following(active=2, served=2, state="served"))
    assert tell() == ("served", "")
    status.tell_lapses({"a": Lapse(reason="unloaded", answers=False, seen_at=time.monotonic())})
    assert tell() == ("failed", "unloaded")


def test_what_is_served_after_it_had_failed_is_a_rollout_that_is_done() -> None:
    status = Status()
    status.follow("a", Following(active=2, served=1, state="rolling"))
    status.follow("a", Following(active=2, served=1, state="failed", reason="no file"))
    status.follow("a", Following(active=2, served=2, state="served"))
    for outcome in ("failed", "done"):
        assert f'modelyard_rollouts_total{{model="a",outcome="{outcome}"}} 1\n' in status.render()


def test_what_is_served_later_is_counted_from_zero_and_what_was_counted_stays() -> None:
    status = Status()
    status.expect(["a"])
    status.count_death("a", "died")
    status.expect(["a", "b"])
    assert 'modelyard_backend_deaths_total{model="a",reason="died"} 1\n' in status.render()
    assert 'modelyard_backend_deaths_total{model="b",reason="died"} 0\n' in status.render()


@pytest.fixture(scope="module")
def server(published: Published) -> Iterator[Running]:
    with running(published.repository, under=["prlimit", f"--nofile={FILES}:{FILES}"]) as server:
        server.read_until("serving HTTP")
        server.follow()
        yield server


@pytest.fixture(autouse=True)
def enough_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(server: Running, sent: bytes = b"GET /ready HTTP/1.1\r\nX: ") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.status), timeout=10)
    connection.sendall(sent)
    return connection


def ask(server: Running, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.status}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


def count_entries(pid: int, kind: str) -> int:
    """Return how many open files ("fd") or threads ("task") a process has."""
    return sum(1 for _ in Path(f"/proc/{pid}/{kind}").iterdir())


def read_to_end(connection: socket.socket) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(10_000):
            answer += piece
    return answer


@pytest.mark.rarer
def test_more_idle_connections_than_files_take_nothing_from_those_who_ask_nor_from_what_serves(server: Running) -> None:
    tritonserver = server.tritonserver
    threads = count_entries(server.process.pid, "task")
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in range(CONNECTIONS)]
        # As long as the old launcher took to end the service.
        for _ in range(14):
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.send(b"x")
            assert ask(server, "/ready") == (200, "ready\n")
            time.sleep(1.5)
        assert count_entries(server.process.pid, "fd") < 2 * MAX_CONNECTIONS
        # Answers wait for no thread: there is one for all of them. The others ask tritonserver and heal.
        assert count_entries(server.process.pid, "task") <= threads + 1
    assert server.process.poll() is None
    assert server.tritonserver == tritonserver
    assert server.check().code == 0


def test_a_flood_of_connections_takes_no_more_descriptors_than_that(server: Running) -> None:
    most, kept = 0, []
    address = ("127.0.0.1", server.status)
    for number in range(6000):
        connection = socket.socket()
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            connection.connect(address)
        with contextlib.suppress(OSError):
            connection.send(b"GET /ready HTTP/1.1\r\nX: ")
        kept.append(connection)
        if number % 20 == 0:
            most = max(most, count_entries(server.process.pid, "fd"))
        while len(kept) > CONNECTIONS:
            kept.pop(0).close()
    for connection in kept:
        connection.close()
    assert most < 3 * MAX_CONNECTIONS
    assert ask(server, "/ready") == (200, "ready\n")


def test_who_sends_a_byte_now_and_then_is_cut_off_all_the_same(server: Running) -> None:
    with connect(server) as connection, pytest.raises(OSError):
        # Several times as long as it may take.
        for _ in range(100):
            connection.sendall(b"x")
            time.sleep(0.2)


def test_breaking_off_leaves_no_line_in_the_log(server: Running) -> None:
    lines = len(server.lines)
    for _ in range(200):
        for sent in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n"):
            connection = connect(server, sent)
            # Closed at once and with a reset, while the answer is being written.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
    assert ask(server, "/ready")[0] == 200
    assert server.lines[lines:] == []


def test_it_answers_what_it_knows_and_refuses_the_rest(server: Running) -> None:
    assert ask(server, "/ready?verbose") == (200, "ready\n")
    assert "modelyard_ready 1\n" in ask(server, "/metrics")[1]
    assert ask(server, "/metrics", "HEAD") == (200, "")
    assert ask(server, "/ready", "DELETE")[0] == 405
    assert ask(server, "/models")[0] == 404
    for nonsense in (
        b"\r\n\r\n",
        b"GET /ready\r\n\r\n",
        b"\xff\xfe\0 \x80 HTTP/1.1\r\n\r\n",
        b"GET /ready FTP/1.1\r\n\r\n",
    ):
        with connect(server, nonsense) as connection:
            assert read_to_end(connection)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 405")
    with connect(server, b"GET /ready HTTP/1.1\r\nX: " + b"x" * 100_000) as connection:
        assert read_to_end(connection) == b""


def test_labels_are_escaped_as_prometheus_reads_them() -> None:
    status = Status()
    status.expect(['q"x\\y\nz'])
    assert r'modelyard_model_given_up{model="q\"x\\y\nz"} 0' in status.render().splitlines()
