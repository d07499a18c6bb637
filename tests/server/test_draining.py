"""How it stops: what is in flight is answered, idle connections hold nothing up, and the exit code tells."""

import contextlib
import http.client
import json
import os
import queue
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from harness import Published
from launcher import Running, running

from server.tritonserver.process import EXIT_TIMEOUT_S

# Takes as many seconds over each request as it is told.
SLOW = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            seconds = pb_utils.get_input_tensor_by_name(request, "SECONDS").as_numpy()
            end = time.monotonic() + float(seconds[0])
            while time.monotonic() < end:
                time.sleep(0.05)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("DONE", seconds)]))
        return answers
"""
SLOW_CONFIG = """
name: "slow"
backend: "python"
max_batch_size: 0
input [ { name: "SECONDS" data_type: TYPE_FP32 dims: [1] } ]
output [ { name: "DONE" data_type: TYPE_FP32 dims: [1] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""


@pytest.fixture
def slow_repository(tmp_path: Path) -> Path:
    (tmp_path / "models" / "slow" / "1").mkdir(parents=True)
    (tmp_path / "models" / "slow" / "1" / "model.py").write_text(SLOW)
    (tmp_path / "models" / "slow" / "config.pbtxt").write_text(SLOW_CONFIG)
    return tmp_path / "models"


def ask(library: object, port: int, seconds: float, outcomes: list[object]) -> None:
    client = library.InferenceServerClient(f"127.0.0.1:{port}")  # type: ignore[attr-defined]
    tensor = library.InferInput("SECONDS", [1], "FP32")  # type: ignore[attr-defined]
    tensor.set_data_from_numpy(np.array([seconds], dtype=np.float32))
    try:
        outcomes.append(float(client.infer("slow", [tensor]).as_numpy("DONE").item()))
    except Exception as exc:
        outcomes.append(exc)


def start_requests(server: Running, seconds: float) -> tuple[list[threading.Thread], list[object]]:
    outcomes: list[object] = []
    ports = [(tritonclient.http, server.http), (tritonclient.grpc, server.grpc)]
    threads = [threading.Thread(target=ask, args=(*port, seconds, outcomes)) for port in ports]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    return threads, outcomes


def test_an_idle_connection_does_not_hold_up_the_stop(published: Published) -> None:
    with running(published.repository) as server:
        server.read_until("serving HTTP")
        idle = http.client.HTTPConnection("127.0.0.1", server.http)
        idle.request("GET", "/v2/health/ready")
        idle.getresponse().read()
        start = time.monotonic()
        assert server.stop(signal.SIGTERM) == 0
        assert time.monotonic() - start < EXIT_TIMEOUT_S / 2
        idle.close()


@pytest.mark.parametrize(
    "others", [0, pytest.param(2, marks=pytest.mark.rarer)], ids=["alone", "beside clients that go on asking"]
)
def test_a_stream_that_was_answered_and_stays_open_does_not_hold_up_the_stop(published: Published, others: int) -> None:
    name = published.result["publication"]["name"]
    tensor = tritonclient.grpc.InferInput("TEXT", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[b"hello"]], dtype=object))
    body = json.dumps({"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["hello"]}]})
    heard: queue.Queue[tuple[object, object]] = queue.Queue()
    cut: list[Exception] = []
    with running(published.repository) as server, contextlib.ExitStack() as stack:
        server.read_until("serving HTTP")
        client = stack.enter_context(tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}"))
        client.start_stream(lambda result, error: heard.put((result, error)))
        client.async_stream_infer(name, [tensor])
        assert heard.get(timeout=10)[1] is None

        def keep_asking() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=30)
            status = 200
            while status in (200, 404):
                try:
                    connection.request("POST", f"/v2/models/{name}/infer", body)
                    response = connection.getresponse()
                    status = response.status
                    response.read()
                except (OSError, http.client.HTTPException) as exc:
                    # One that was answered with a refusal is cut off in the end; one with an answer is not.
                    if status == 200:
                        cut.append(exc)
                    return
                time.sleep(0.02)

        threads = [threading.Thread(target=keep_asking) for _ in range(others)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        start = time.monotonic()
        assert server.stop(signal.SIGTERM) == 0
        assert time.monotonic() - start < EXIT_TIMEOUT_S
        for thread in threads:
            thread.join()
    assert not cut


def test_readiness_goes_first_then_new_connections_and_the_waiting_are_answered(slow_repository: Path) -> None:
    with running(slow_repository) as server:
        server.read_until("serving HTTP")
        ready = f"http://127.0.0.1:{server.status}/ready"
        assert urllib.request.urlopen(ready, timeout=5).status == 200
        # Two at once on one instance: the second waits in the queue for a second and a half.
        threads, outcomes = start_requests(server, 1.5)
        server.process.send_signal(signal.SIGTERM)
        server.read_until("stopping")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(ready, timeout=5)
        time.sleep(0.5)
        # Refused, reset or closed without a word: never left waiting.
        with pytest.raises((OSError, http.client.HTTPException)):
            urllib.request.urlopen(f"http://127.0.0.1:{server.http}/v2/health/ready", timeout=5)
        assert server.finish() == 0
        for thread in threads:
            thread.join()
    assert outcomes == [1.5, 1.5]


@pytest.mark.parametrize("library", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_clients_that_never_hang_up_are_refused_in_words_once_all_that_was_accepted_is_answered(
    slow_repository: Path, library: ModuleType
) -> None:
    outcomes: list[list[object]] = [[] for _ in range(4)]
    with running(slow_repository) as server:
        server.read_until("serving HTTP")
        port = {"http": server.http, "grpc": server.grpc}[library.__name__.split(".")[-1]]
        ended = threading.Event()

        def keep_asking(outcomes: list[object]) -> None:
            client = library.InferenceServerClient(f"127.0.0.1:{port}")
            tensor = library.InferInput("SECONDS", [1], "FP32")
            tensor.set_data_from_numpy(np.array([0.05], dtype=np.float32))
            while not ended.is_set():
                try:
                    outcomes.append(float(client.infer("slow", [tensor]).as_numpy("DONE").item()))
                except Exception as exc:
                    outcomes.append(exc)

        threads = [threading.Thread(target=keep_asking, args=(own,)) for own in outcomes]
        for thread in threads:
            thread.start()
        # Each has an open connection by now.
        while not all(outcomes):
            time.sleep(0.05)
        assert server.stop(signal.SIGTERM) == 0
        ended.set()
        for thread in threads:
            thread.join()
    assert server.lines[-1] == "stopped"
    assert not any("Exit timeout expired" in line or "Signal (11)" in line for line in server.lines)
    refused = []
    for own in outcomes:
        answered = [outcome for outcome in own if isinstance(outcome, float)]
        assert own[: len(answered)] == answered, "an answer came after a refusal"
        # One that had no core for a moment may come to ask no more.
        refused += map(str, own[len(answered) :][:1])
    # One that sends nothing for a moment may find the connection closed instead.
    assert any("Request for unknown model: 'slow'" in text for text in refused), refused


def test_what_takes_longer_than_the_grace_period_is_cut_and_the_exit_code_says_so(slow_repository: Path) -> None:
    with running(slow_repository) as server:
        server.read_until("serving HTTP")
        threads, outcomes = start_requests(server, 30.0)
        start = time.monotonic()
        assert server.stop(signal.SIGTERM) == 4
        assert time.monotonic() - start < EXIT_TIMEOUT_S + 5
        assert not [line for line in server.lines if "Exit timeout expired" in line or "terminate called" in line]
        assert server.lines[-1] == "stopped before everything in flight was answered"
        for thread in threads:
            thread.join()
    assert all(isinstance(outcome, Exception) for outcome in outcomes)


def test_one_that_a_signal_has_stopped_answers_what_is_in_flight_and_ends(slow_repository: Path) -> None:
    with running(slow_repository) as server:
        server.read_until("serving")
        threads, outcomes = start_requests(server, 1.0)
        time.sleep(0.3)
        os.kill(server.tritonserver, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(timeout=60)
        assert (outcomes, server.process.wait(timeout=60)) == ([1.0, 1.0], 0)


def test_a_second_signal_stops_it_at_once(slow_repository: Path) -> None:
    with running(slow_repository) as server:
        server.read_until("serving HTTP")
        threads, _ = start_requests(server, 30.0)
        server.process.send_signal(signal.SIGINT)
        server.read_until("stopping")
        start = time.monotonic()
        assert server.stop() == 4
        assert time.monotonic() - start < EXIT_TIMEOUT_S
        for thread in threads:
            thread.join()


def test_the_check_tells_a_server_that_answers_from_one_that_does_not(published: Published) -> None:
    with running(published.repository) as server:
        server.read_until("serving HTTP")
        done = server.check()
        assert done.code == 0
        assert done.err.startswith("sentence_embedding answers as verified within ")
        with urllib.request.urlopen(f"http://127.0.0.1:{server.http}/v2/models/sentence_embedding") as response:
            assert json.load(response)["platform"] == "ensemble"
    done = server.check()
    assert done.code == 1
    assert "cannot be reached" in done.err and "Connection refused" in done.err and "--http-port" in done.err
    assert done.err.count("\n") == 1
