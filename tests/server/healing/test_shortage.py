"""A machine that has nothing left: what serves goes on serving, the launcher says what it lacks, and recovers."""

import contextlib
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from another_user import ANOTHER_USER, as_root
from harness import Published
from launcher import Running, running

from server.tritonserver.processes import list_children

INFER = "/v2/models/sentence_embedding/infer"
BODY = json.dumps({"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["Hello"]}]})
FILES = 1024


@pytest.fixture(autouse=True)
def enough_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def infer(connection: http.client.HTTPConnection) -> int:
    connection.request("POST", INFER, BODY)
    response = connection.getresponse()
    response.read()
    return response.status


def connect(server: Running) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.http, timeout=30)


def read_ready(server: Running) -> tuple[int, str]:
    """Return code and text of /ready, 0 while nobody listens."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.status, timeout=5)) as connection:
        try:
            connection.request("GET", "/ready")
            response = connection.getresponse()
            return response.status, response.read().decode()
        except ConnectionRefusedError:
            return 0, ""


def wait_for(is_true: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextlib.contextmanager
def no_files_for(pid: int) -> Iterator[None]:
    """Keep a running process from opening anything."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def test_too_few_files_to_serve_with_end_the_start_in_one_sentence(published: Published) -> None:
    for limit in (24, 64, 255):
        with running(published.repository, under=["prlimit", f"--nofile={limit}:{limit}"]) as server:
            assert server.finish() == 1
        assert server.lines == [
            f"error: one process may open too few files: expected at least 256, and one more for every connection, got "
            f"{limit}; raise the limit (ulimit -Hn, LimitNOFILE of systemd, --ulimit nofile of a container)."
        ]


def test_few_files_are_enough_to_serve_with_and_more_are_taken_where_allowed(published: Published) -> None:
    for soft, hard in ((256, 256), (64, 2000)):
        with running(published.repository, under=["prlimit", f"--nofile={soft}:{hard}"]) as server:
            server.read_until("serving HTTP")
            assert infer(connect(server)) == 200
            assert resource.prlimit(server.tritonserver, resource.RLIMIT_NOFILE) == (hard, hard)
            assert server.stop() == 0


@as_root
def test_too_few_threads_to_serve_with_end_the_start_in_one_sentence(published: Published, tmp_path: Path) -> None:
    key = ["--key-file", str(tmp_path / "control.key")]
    with running(published.repository, *key, under=["prlimit", "--nproc=100:100", *ANOTHER_USER]) as server:
        assert server.finish() == 1
    (line,) = server.lines
    assert line.startswith("error: too few threads may run: expected 128 more at least, got ")


@as_root
def test_threads_that_may_be_too_few_for_a_rollout_are_told_of_and_it_serves(
    published: Published, tmp_path: Path
) -> None:
    key = ["--key-file", str(tmp_path / "control.key")]
    # Where another user comes to: the folders of pytest are root's alone.
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(shutil.copytree(published.repository, Path(folder, "models")))
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        with running(repository, *key, under=["prlimit", "--nproc=150:150", *ANOTHER_USER]) as server:
            server.read_until("serving HTTP")
            (told,) = [line for line in server.lines if "threads" in line]
            assert re.match(
                r"warning: 1\d\d more threads may run, and \d+ backend processes, those that a rollout starts among "
                r"them, have about \d+: raise the limit \(ulimit -Hu, .*\), or serve fewer models",
                told,
            )
            assert infer(connect(server)) == 200
            assert server.stop() == 0


@as_root
def test_no_room_for_a_temporary_folder_ends_the_start_in_one_sentence(published: Published, tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" && export TMPDIR=$1 && shift && exec "$@"'
    with running(published.repository, under=["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path)]) as server:
        assert server.finish() == 1
    (line,) = server.lines
    assert line.startswith(
        f"error: no temporary folder can be made in {tmp_path}: expected a folder that this user may"
    )
    assert "No space left on device" in line


@pytest.mark.rarer
def test_a_tritonserver_that_can_accept_nobody_more_but_answers_is_left_alone(published: Published) -> None:
    with running(published.repository, under=["prlimit", f"--nofile={FILES}:{FILES}"]) as server:
        server.read_until("serving HTTP")
        server.follow()
        pid = server.tritonserver
        client = connect(server)
        assert infer(client) == 200
        with contextlib.ExitStack() as stack:
            for _ in range(FILES + 100):
                idle = stack.enter_context(socket.create_connection(("127.0.0.1", server.http)))
                idle.sendall(b"POST /v2 HTTP/1.1\r\nX: ")
            assert sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()) >= FILES - 10
            # Beyond the time after which one that gives no sign of life is told or replaced.
            for _ in range(30):
                assert infer(client) == 200
                time.sleep(0.5)
            assert read_ready(server)[0] == 503
            lines = list(server.lines)
        assert server.tritonserver == pid
        assert infer(connect(server)) == 200
        assert sum(map(len, lines)) < 20_000
        assert any("Too many open files" in line and "more lines" in line for line in lines)


@pytest.mark.parametrize(
    "port", ["http", pytest.param("grpc", marks=pytest.mark.rarer), pytest.param("metrics", marks=pytest.mark.rarer)]
)
def test_idle_connections_to_any_port_that_keep_new_callers_out_are_told_of(published: Published, port: str) -> None:
    few = 400
    with running(published.repository, under=["prlimit", f"--nofile={few}:{few}"]) as server:
        server.read_until("serving HTTP")
        server.follow()
        pid = server.tritonserver
        client = connect(server)
        assert infer(client) == 200
        assert server.read_metrics()["modelyard_lets_callers_in"] == 1
        with contextlib.ExitStack() as stack:
            for _ in range(few):
                stack.enter_context(socket.create_connection(("127.0.0.1", getattr(server, port))))
            server.wait_for_line("warning: tritonserver lets no new caller in: expected an answer on a new", 60)
            told = (
                "not ready: tritonserver lets no new caller in: expected an answer on a new connection, got none, with "
                rf"\d+ of {few} files open; close idle connections, bound them in a proxy, or raise the limit "
                r"\(ulimit -Hn\)\n"
            )
            # Busy with writing into its log that it has no descriptors, it may be slow to answer who is connected.
            deadline = time.monotonic() + 60
            while not re.fullmatch(told, (answer := read_ready(server))[1]):
                assert answer[0] == 503 and time.monotonic() < deadline, answer
                time.sleep(0.2)
            assert answer[0] == 503
            metrics = server.read_metrics()
            assert metrics["modelyard_lets_callers_in"] == metrics["modelyard_ready"] == 0
            # Who is connected is answered.
            assert infer(client) == 200
        server.wait_for_line("tritonserver lets new callers in again", 60)
        assert read_ready(server) == (200, "ready\n")
        assert infer(connect(server)) == 200
        assert server.tritonserver == pid
        assert sum("new caller" in line for line in server.lines) == 2


@pytest.mark.rarer
def test_a_server_that_lets_nobody_in_ends_when_it_is_told_to(published: Published) -> None:
    few = 400
    with running(published.repository, under=["prlimit", f"--nofile={few}:{few}"]) as server:
        server.read_until("serving HTTP")
        server.follow()
        with contextlib.ExitStack() as stack:
            for _ in range(few):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.http)))
            server.wait_for_line("warning: tritonserver lets no new caller in", 60)
            server.process.terminate()
            # Questions that nobody answered took 15 s, in which it did not hear the second time.
            time.sleep(1)
            server.process.terminate()
            server.process.wait(timeout=10)


def test_a_launcher_that_cannot_open_a_file_blames_nobody_for_it(published: Published) -> None:
    with running(published.repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        pid = server.tritonserver
        stubs = {stub.pid for stub in server.find_stubs("sentence_embedding_model")}
        with no_files_for(server.process.pid):
            server.wait_for_line("cannot look after tritonserver for now", 60)
            for _ in range(10):
                assert infer(connect(server)) == 200
                time.sleep(0.5)
        server.wait_for_line("can look after tritonserver again", 60)
        assert server.tritonserver == pid
        assert {stub.pid for stub in server.find_stubs("sentence_embedding_model")} == stubs
        assert server.read_metrics()['modelyard_model_revivals_total{model="sentence_embedding_model"}'] == 0
        assert server.stop() == 0


@pytest.mark.rarer
def test_a_tritonserver_that_dies_while_none_can_be_started_comes_back_when_one_can(published: Published) -> None:
    with running(published.repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        pid = server.tritonserver
        with no_files_for(server.process.pid):
            os.kill(pid, signal.SIGKILL)
            server.wait_for_line(
                "tritonserver cannot be started: expected a process, a thread, memory and descriptors", 60
            )
            # Much longer than a tritonserver that fails to start is tried for.
            time.sleep(12)
            assert server.process.poll() is None
        server.wait_for_line("answers again", 60)
        assert infer(connect(server)) == 200
        assert server.check().code == 0


@pytest.mark.rarer
def test_a_start_that_cannot_be_looked_at_comes_to_its_end_once_it_can(published: Published) -> None:
    with running(published.repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        pid = server.tritonserver
        os.kill(pid, signal.SIGKILL)
        server.wait_for_line("was killed by signal 9; starting it anew", 60)
        wait_for(lambda: list_tritonservers(server) not in ([], [pid]))
        with no_files_for(server.process.pid):
            server.wait_for_line("cannot look after tritonserver for now", 60)
            # Longer than it takes to start.
            time.sleep(8)
        server.wait_for_line("tritonserver answers again", 60)
        wait_for(lambda: read_ready(server) == (200, "ready\n"))
        assert infer(connect(server)) == 200
        # No key that opens the control endpoints, which is 64 hexadecimal digits.
        command = Path(f"/proc/{server.tritonserver}/cmdline").read_bytes()
        assert not re.search(rb"[0-9a-f]{64}", command)
        assert not [line for line in server.lines if "those that hang are not" in line]


def list_tritonservers(server: Running) -> list[int]:
    """Return the processes of the launcher that run, or begin to run, a tritonserver."""
    return [pid for pid in list_children(server.process.pid) if b"tritonserver" in read_command(pid)]


def read_command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.mark.rarer
def test_a_launcher_that_was_stopped_takes_its_own_absence_for_nobodys(published: Published) -> None:
    with running(published.repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        pid = server.tritonserver
        stubs = {stub.pid for stub in server.find_stubs("sentence_embedding_model")}
        server.process.send_signal(signal.SIGSTOP)
        # Longer than a tritonserver may be silent.
        time.sleep(12)
        server.process.send_signal(signal.SIGCONT)
        time.sleep(3)
        assert infer(connect(server)) == 200
        assert server.tritonserver == pid
        assert {stub.pid for stub in server.find_stubs("sentence_embedding_model")} == stubs
        assert not [line for line in server.lines if "anew" in line or "warning" in line]


@pytest.mark.rarer
def test_a_log_that_nobody_reads_holds_up_nothing(published: Published) -> None:
    # Everything that tritonserver says, several lines a request, into a pipe of 64 KiB.
    with running(published.repository, "--verbose", "--", "--log-verbose=1") as server:
        server.read_until("serving HTTP")
        client = connect(server)
        for _ in range(300):
            assert infer(client) == 200
        os.kill(server.find_stubs("sentence_embedding_preprocess")[0].pid, signal.SIGKILL)
        revivals = 'modelyard_model_revivals_total{model="sentence_embedding_preprocess"}'
        wait_for(lambda: server.read_metrics()[revivals] == 1)
        assert infer(connect(server)) == 200


@as_root
def test_a_log_on_a_full_disk_holds_up_nothing_and_tells_what_is_missing(published: Published, tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=64k tmpfs "$1" && log="$1/log" && shift && exec "$@" 2>> "$log"'
    with running(published.repository, under=["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path)]) as server:
        # As the server's own mount namespace has it.
        folder = Path(f"/proc/{server.process.pid}/root{tmp_path}")
        # tritonserver answers a moment before the launcher has looked at its models.
        wait_for(lambda: read_ready(server)[0] == 200)
        pid = server.tritonserver
        # A page that is begun has room on a full disk as well.
        with (folder / "log").open("ab") as file:
            file.write(b"\n" * (-file.tell() % resource.getpagesize()))
        with contextlib.suppress(OSError), (folder / "filling").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        revivals = 'modelyard_model_revivals_total{model="sentence_embedding_preprocess"}'
        for count in range(1, 4):
            # The newest: a dead one's neighbour lives on for a while after both were replaced.
            os.kill(server.find_stubs("sentence_embedding_preprocess")[-1].pid, signal.SIGKILL)
            wait_for(lambda: server.read_metrics()[revivals] == count)  # noqa: B023
            assert infer(connect(server)) == 200
        assert server.tritonserver == pid
        text = (folder / "log").read_text()
        assert "loading it anew" not in text
        (folder / "filling").unlink()
        os.kill(server.find_stubs("sentence_embedding_preprocess")[-1].pid, signal.SIGKILL)
        wait_for(lambda: "answers again" in (folder / "log").read_text())
        assert "lines of the log were lost: No space left on device" in (folder / "log").read_text()
        assert server.stop() == 0
