"""What was asked of the server for a model, and what a real one makes of it."""

import itertools
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from harness import run
from launcher import Running, running

from export.__main__ import main as export_cli
from export.repository.promotion import promote

# So long that tokenising a batch takes longer than sending it: requests pile up, and wait.
LONG = "a cat sleeps " * 700
INSTANCES = 3


def build_inputs(text: str, rows: int = 32) -> list[grpc_client.InferInput]:
    texts = grpc_client.InferInput("TEXT", [rows, 1], "BYTES")
    texts.set_data_from_numpy(np.array([[text]] * rows, dtype=object))
    return [texts]


def read_metric(server: Running, name: str, model: str) -> float:
    """Return the sum of a metric of tritonserver's over a model's versions."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f'{name}{{model="{model}"'))


def ask_together(server: Running, model: str, priorities: list[int], **options: int) -> list[tuple[int, str]]:
    """Send a request of each priority at once; return each one's number and error in the order of their ends."""
    ended: list[tuple[int, str]] = []
    finished = threading.Semaphore(0)

    def end(number: int, error: Exception | None) -> None:
        ended.append((number, str(error) if error else ""))
        finished.release()

    with grpc_client.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        for number, priority in enumerate(priorities):
            client.async_infer(
                model,
                build_inputs(f"{number} {LONG}"),
                lambda result, error, number=number: end(number, error),
                priority=priority,
                **options,
            )
        for _ in priorities:
            assert finished.acquire(timeout=60)
    return ended


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the models `patient` and `strict`, published as one `modelyard.toml` says."""
    folder = tmp_path_factory.mktemp("intent")
    (folder / "modelyard.toml").write_text(
        f"""
        [models.patient]
        instances = {INSTANCES}
        warmup = [8, 16]
        timeout_action = "delay"
        priority_levels = 2
        response_cache = true
        rate_limit = {{ cores = 1 }}

        [models.strict]
        max_queue_size = 2
        default_timeout_microseconds = 1000

        [models.strict.configs.staging]
        instances = 1
        """
    )
    for name in ("patient", "strict"):
        words = ["run", str(tiny_checkpoint), "--name", name, "--repository", str(folder / "models")]
        assert export_cli([*words, "--config", str(folder / "modelyard.toml")]) == 0
    return folder


def wait_for(server: Running, model: str, **wanted: object) -> dict[str, object]:
    """Return what a running server says of a model, as soon as that is so."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.status}/versions", timeout=5) as response:
            found: dict[str, object] = json.load(response)["models"].get(model, {})
        if wanted.items() <= found.items():
            return found
        time.sleep(0.1)
    raise AssertionError(f"{model} is not {wanted} but {found}")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    settings = (f"triton,file={folder / 'trace'}", "triton,log-frequency=1", "level=TIMESTAMPS", "rate=1")
    traced = [word for setting in settings for word in ("--trace-config", setting)]
    with running(folder / "models", "--model-config-name", "staging", "--", *traced) as server:
        server.read_until("Next:")
        yield server
        assert server.process.stderr is not None
        server.process.stderr.close()


def test_there_are_as_many_instances_each_warmed_up_before_it_is_ready(server: Running) -> None:
    assert len(server.find_stubs("patient_model")) == INSTANCES
    assert len(server.find_stubs("strict_model")) == 1, "as the variant says that the server is told"
    success = "nv_inference_request_success"
    # What clients asked for came through the step before; the rest are the shortest, the longest and the two between.
    warmed = read_metric(server, success, "patient_model") - read_metric(server, success, "patient_preprocess")
    assert warmed == 4 * INSTANCES


def test_a_variant_that_no_version_has_is_refused(folder: Path) -> None:
    done = run("-m", "server", "serve", "--repository", str(folder / "models"), "--model-config-name", "stagin")
    assert done.code == 2
    assert "no version in" in done.err
    assert "expected one of staging, got 'stagin'" in done.err


def test_the_urgent_overtake_and_what_waited_too_long_is_only_delayed(server: Running) -> None:
    place, deadline = 12, time.monotonic() + 60
    # Whether any still waits when the urgent one comes is for the machine to decide.
    while place >= 11:
        assert time.monotonic() < deadline
        # A microsecond is over for all that wait.
        ended = ask_together(server, "patient", [2] * 12 + [1], timeout=1)
        assert not any(error for _, error in ended)
        place = [number for number, _ in ended].index(12)


def test_what_does_not_fit_a_queue_or_waits_too_long_is_refused(server: Running) -> None:
    missing, told = {"Exceeds maximum queue size", "timeout expired"}, set()
    deadline = time.monotonic() + 60
    # How many of them wait at once is for the machine to decide.
    while missing:
        assert time.monotonic() < deadline, (missing, told)
        ended = ask_together(server, "strict", [0] * 12)
        assert len(ended) == 12
        told |= {error for _, error in ended if error}
        missing = {words for words in missing if not any(words in error for error in told)}


def test_an_answer_that_was_given_is_given_again_without_the_model(server: Running) -> None:
    with grpc_client.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        answers, runs = [], []
        for _ in range(3):
            answers.append(client.infer("patient", build_inputs("the same", 1)).as_numpy("EMBEDDING"))
            runs.append(read_metric(server, "nv_inference_request_success", "patient_model"))
    assert runs[0] == runs[1] == runs[2]
    assert read_metric(server, "nv_cache_num_hits_per_model", "patient") >= 2
    assert all(np.array_equal(answer, answers[0]) for answer in answers)


def test_what_shares_a_resource_never_runs_at_once(server: Running, folder: Path) -> None:
    """The last test: the trace is whole when the server has ended."""
    ask_together(server, "patient", [1] * 12)
    assert server.stop() == 0
    traces = [trace for path in folder.glob("trace*") for trace in json.loads(path.read_text())]
    models = {trace["id"]: trace["model_name"] for trace in traces if "model_name" in trace}
    times: dict[int, dict[str, int]] = {}
    for trace in traces:
        for stamp in trace.get("timestamps", ()):
            times.setdefault(trace["id"], {})[stamp["name"]] = stamp["ns"]
    runs = sorted(
        (stamps["COMPUTE_START"], stamps["COMPUTE_END"])
        for trace, stamps in times.items()
        if models.get(trace) == "patient_model" and "COMPUTE_END" in stamps
    )
    assert len(runs) >= 12
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(runs))


def test_what_a_running_server_would_pass_over_is_refused(folder: Path) -> None:
    here = folder / "here"
    promote(folder / "models", "strict", 1, destination=here)
    with running(here) as server:
        server.read_until("Next:")
        # Nothing asked for the rate limiter when it started.
        promote(folder / "models", "patient", 1, destination=here)
        assert "asks for the rate limiter" in str(wait_for(server, "patient", state="failed"))
        assert server.stop() == 0
