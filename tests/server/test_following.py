"""What becomes active in the repository is served by the running server, and no request is lost on the way."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from harness import run
from launcher import Running, running
from nginx import NGINX, Balancer, balancing
from transformers import AutoTokenizer, BertConfig, BertModel
from tritonclient.utils import InferenceServerException

NAME = "followed"
PARTS = (f"{NAME}_preprocess", f"{NAME}_model", NAME)


@pytest.fixture(scope="module")
def repository(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with two versions of one model, whose answers have nothing in common."""
    folder = tmp_path_factory.mktemp("following")
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=30522,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=64,
        )
        BertModel(config).save_pretrained(folder / str(seed))
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder / str(seed))
        options = ["--name", NAME, "--repository", str(folder / "models")]
        done = run("-m", "export", "run", str(folder / str(seed)), *options)
        assert done.code == 0, done.err
    return folder / "models"


@pytest.fixture
def served(repository: Path, tmp_path: Path) -> Iterator[tuple[Running, Path]]:
    """Serve a copy of it that a test may change, at version 1."""
    copy = tmp_path / "models"
    shutil.copytree(repository, copy)
    activate(copy, 1)
    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        yield server, copy


def activate(repository: Path, version: int) -> None:
    """Make a version active as a publication does: steps first, the ensemble last, each config renamed into place."""
    for name in PARTS:
        path = repository / name / "config.pbtxt"
        text = re.sub(r"versions: \d+", f"versions: {version}", path.read_text())
        text = re.sub(r"model_version: \d+", f"model_version: {version}", text)
        staged = path.with_name("staging-config.pbtxt")
        staged.write_text(text)
        staged.replace(path)


def read_golden(repository: Path, version: int) -> dict[str, Any]:
    sample: dict[str, Any] = json.loads((repository / NAME / str(version) / "golden.json").read_text())["samples"][0]
    return sample


def read_following(server: Running) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.status}/versions", timeout=5) as response:
        models: dict[str, Any] = json.load(response)["models"]
    return models


def wait_for(server: Running, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        models = read_following(server)
        if condition(models):
            return models
        time.sleep(0.05)
    raise AssertionError(f"{models}\n" + "\n".join(server.lines))


class Callers:
    """Clients over HTTP and gRPC that ask as fast as they are answered, each over one connection that it keeps."""

    def __init__(self, server: Running | Balancer, repository: Path, count: int = 4) -> None:
        self.answers: Counter[int] = Counter()
        self.failures: list[str] = []
        self._server = server
        self._text = read_golden(repository, 1)["inputs"][0]["data"][0]
        vectors = {version: read_golden(repository, version)["outputs"][0]["data"] for version in (1, 2)}
        self._expected = {version: np.array(data) / np.linalg.norm(data) for version, data in vectors.items()}
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number % 2 == 0,)) for number in range(count)]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, over_http: bool) -> None:
        library = tritonclient.http if over_http else tritonclient.grpc
        port = self._server.http if over_http else self._server.grpc
        with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
            text = library.InferInput("TEXT", [1, 1], "BYTES")
            text.set_data_from_numpy(np.array([[self._text.encode()]], dtype=object))
            while not self._ended.is_set():
                try:
                    vector = client.infer(NAME, [text]).as_numpy("EMBEDDING")[0]
                except InferenceServerException as exc:
                    self.failures.append(str(exc))
                    continue
                vector = vector / np.linalg.norm(vector)
                whole = [n for n, expected in self._expected.items() if np.abs(vector - expected).max() < 1e-4]
                self.answers[whole[0] if whole else 0] += 1


def test_activations_back_and_forth_lose_no_request_and_mix_no_versions(served: tuple[Running, Path]) -> None:
    server, repository = served
    processes = len(server.find_stubs(f"{NAME}_model"))
    with Callers(server, repository) as callers:
        for version in (2, 1, 2):
            activate(repository, version)
            wait_for(server, lambda models: models[NAME]["served"] == version and models[NAME]["state"] == "served")  # noqa: B023
        # One process dies while nothing is rolled out, and the next activation works all the same. What served the
        # version before is still being ended for a moment, and its death would be none.
        deadline = time.monotonic() + 60
        while len(server.find_stubs(f"{NAME}_model")) > processes and time.monotonic() < deadline:
            time.sleep(0.05)
        server.find_stubs(f"{NAME}_model")[0].kill()
        server.wait_for_line("answers again", 60)
        activate(repository, 1)
        wait_for(server, lambda models: models[NAME]["served"] == 1 and models[NAME]["state"] == "served")
    # What the killed process had, and no more: no activation lost any.
    assert all("Stub process" in failure or "unhealthy" in failure.lower() for failure in callers.failures)
    assert callers.answers[0] == 0
    assert callers.answers[1] > 0 and callers.answers[2] > 0
    metrics = server.read_metrics()
    assert metrics[f'modelyard_rollouts_total{{model="{NAME}",outcome="done"}}'] == 4
    assert metrics[f'modelyard_served_version{{model="{NAME}"}}'] == 1
    # Unloading a version is not a death.
    deaths = {key: value for key, value in metrics.items() if key.startswith("modelyard_backend_deaths_total")}
    assert sum(deaths.values()) == 1


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed; `apt-get install nginx-light`")
def test_two_servers_behind_a_proxy_lose_no_request_while_both_change(repository: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(repository, tmp_path / "models"))
    activate(copy, 1)
    with running(copy) as first, running(copy) as second:
        for server in (first, second):
            server.read_until("serving HTTP")
            server.follow()
        with balancing([first, second]) as balancer, Callers(balancer, copy) as callers:
            for version in (2, 1):
                activate(copy, version)
                for server in (first, second):
                    wait_for(
                        server,
                        lambda models: models[NAME]["served"] == version and models[NAME]["state"] == "served",  # noqa: B023
                    )
    assert callers.failures == []
    assert callers.answers[0] == 0
    assert callers.answers[1] > 0 and callers.answers[2] > 0


def test_processes_that_serve_are_left_alone_and_those_of_the_new_version_are_started_once(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    old = {stub.pid for stub in server.find_stubs(f"{NAME}_model")}
    seen: dict[int, str] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            seen.update({stub.pid: stub.version for stub in server.find_stubs(f"{NAME}_model")})

    watching = threading.Thread(target=watch)
    watching.start()
    activate(repository, 2)
    wait_for(server, lambda models: models[NAME]["served"] == 2 and models[NAME]["state"] == "served")
    ended.set()
    watching.join()
    assert {pid for pid, version in seen.items() if version == "1"} == old
    assert len([version for version in seen.values() if version == "2"]) == len(old)


@pytest.mark.parametrize("fault", ["another answer", "a damaged file", "no file", "too much memory"])
def test_a_version_that_cannot_be_served_leaves_the_one_before_it_serving(
    fault: str, served: tuple[Running, Path]
) -> None:
    server, repository = served
    graph = repository / f"{NAME}_model" / "2" / "model.onnx"
    if fault == "another answer":
        path = repository / NAME / "2" / "golden.json"
        golden = json.loads(path.read_text())
        for sample in golden["samples"]:
            sample["outputs"][0]["data"] = sample["outputs"][0]["data"][::-1]
        path.write_text(json.dumps(golden))
    elif fault == "a damaged file":
        graph.write_bytes(graph.read_bytes()[:5000])
    elif fault == "no file":
        graph.unlink()
    else:
        want_memory(graph)
    with Callers(server, repository) as callers:
        activate(repository, 2)
        found = wait_for(server, lambda models: models[NAME]["state"] == "failed")[NAME]
        assert (found["active"], found["served"]) == (2, 1)
        assert "version 2 of followed cannot be served" in found["reason"]
        activate(repository, 1)
        wait_for(server, lambda models: models[NAME]["state"] == "served")
    assert callers.failures == []
    assert set(callers.answers) == {1}
    assert server.check().code == 0


def want_memory(path: Path) -> None:
    """Have a graph need more memory, before it can be run, than any process can have."""
    model = onnx.load(path)
    graph, name = model.graph, model.graph.output[0].name
    (node,) = (node for node in graph.node if name in node.output)
    node.output[:] = ["small" if output == name else output for output in node.output]
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([2**46]), "shape"))
    graph.node.extend(
        [
            onnx.helper.make_node("ConstantOfShape", ["shape"], ["large"]),
            onnx.helper.make_node("ReduceMax", ["large"], ["nothing"], keepdims=0),
            onnx.helper.make_node("Add", ["small", "nothing"], [name]),
        ]
    )
    onnx.save(model, path)


def test_a_version_whose_files_are_damaged_while_it_is_served_is_named_and_serves_on(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    graph = repository / f"{NAME}_model" / "1" / "model.onnx"
    content = graph.read_bytes()
    with Callers(server, repository) as callers:
        graph.write_bytes(content[:5000])
        activate(repository, 2)
        found = wait_for(server, lambda models: models[NAME]["state"] == "failed")[NAME]
        assert (found["active"], found["served"]) == (2, 1)
        assert "version 2 of followed cannot be loaded beside version 1: expected" in found["reason"]
        assert str(graph.parent) in found["reason"] and "bring its files back" in found["reason"]
        activate(repository, 1)
        wait_for(server, lambda models: models[NAME]["state"] == "served")
        graph.write_bytes(content)
        activate(repository, 2)
        wait_for(server, lambda models: models[NAME]["served"] == 2 and models[NAME]["state"] == "served")
    assert callers.failures == []
    assert callers.answers[0] == 0


@pytest.mark.parametrize("part", ["model", "preprocess"])
def test_a_process_killed_while_it_loads_a_new_version_fails_the_rollout_and_nothing_else(
    part: str, served: tuple[Running, Path]
) -> None:
    """tritonserver itself waits for such a process without end, and loads no version of the model meanwhile."""
    server, repository = served
    step = f"{NAME}_{part}"
    old = {stub.pid for stub in server.find_stubs(step)}
    with Callers(server, repository, count=2) as callers:
        activate(repository, 2)
        deadline = time.monotonic() + 60
        while not (new := [stub for stub in server.find_stubs(step) if stub.pid not in old]):
            assert time.monotonic() < deadline
        new[0].kill()
        found = wait_for(server, lambda models: models[NAME]["state"] != "rolling")[NAME]
        # It may have loaded its model just before; then it is brought back like any other.
        assert found["state"] == "served" or "version 2 of followed cannot be served" in found["reason"]
        for version in (1, 2):
            activate(repository, version)
            wait_for(server, lambda models: models[NAME]["served"] == version and models[NAME]["state"] == "served")  # noqa: B023
    assert all("Stub process" in failure or "unhealthy" in failure.lower() for failure in callers.failures)
    assert callers.answers[0] == 0


def test_a_model_that_appears_is_served_and_one_that_goes_is_unloaded(served: tuple[Running, Path]) -> None:
    server, repository = served
    for name in PARTS:
        shutil.copytree(repository / name, repository / f"new{name}.part")
    for name in PARTS:
        path = repository / f"new{name}.part" / "config.pbtxt"
        path.write_text(path.read_text().replace(f'"{NAME}', f'"new{NAME}'))
    for name in PARTS:
        (repository / f"new{name}.part").rename(repository / f"new{name}")
    wait_for(server, lambda models: models.get(f"new{NAME}", {}).get("served") == 1)
    # It is watched like those that were there at the start.
    server.find_stubs(f"new{NAME}_model")[0].kill()
    server.wait_for_line("answers again", 60)
    for name in reversed(PARTS):
        shutil.rmtree(repository / f"new{name}")
    wait_for(server, lambda models: f"new{NAME}" not in models)
    deadline = time.monotonic() + 30
    while server.find_stubs(f"new{NAME}_model") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not server.find_stubs(f"new{NAME}_model")


def test_a_model_that_was_made_by_hand_and_cannot_be_loaded_is_named_without_a_version(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    (repository / "made.part" / "1").mkdir(parents=True)
    (repository / "made.part" / "config.pbtxt").write_text('name: "made"\nbackend: "python"\nmax_batch_size: 4\n')
    (repository / "made.part").rename(repository / "made")
    server.wait_for_line("Tried again in 10 s", 60)
    (told,) = (line for line in server.lines if "Tried again" in line)
    assert told.startswith("ERROR: made cannot be served: expected it to load, got ")
    assert "; it is not served, mend its folder or take it out of the repository. Tried again" in told
    assert ".;" not in told and ";." not in told


def test_a_tritonserver_that_is_started_anew_serves_what_was_proven_and_not_what_failed(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    graph = repository / f"{NAME}_model" / "2" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:5000])
    activate(repository, 2)
    wait_for(server, lambda models: models[NAME]["state"] == "failed")
    os.kill(server.tritonserver, signal.SIGKILL)
    server.wait_for_line("tritonserver answers again", 60)
    with Callers(server, repository, count=2) as callers:
        while sum(callers.answers.values()) < 20:
            time.sleep(0.05)
    assert callers.failures == []
    assert set(callers.answers) == {1}


def test_a_tritonserver_that_is_killed_in_a_rollout_is_followed_by_one_that_serves_the_new_version(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    shown = Path(f"/proc/{server.tritonserver}/cmdline").read_text().split("--model-repository=")[1].split("\0")[0]
    processes = len(server.find_stubs(f"{NAME}_model"))
    # From the moment on at which the new version is the one that clients are to be answered by.
    for number, later_s in enumerate((0.0, 0.005, 0.01, 0.02, 0.03)):
        version = 2 - number % 2
        activate(repository, version)
        deadline = time.monotonic() + 60
        while f"model_version : {version}" not in Path(shown, NAME, "config.pbtxt").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(later_s)
        os.kill(server.tritonserver, signal.SIGKILL)
        server.wait_for_line("tritonserver answers again", 60)
        wanted = {"active": version, "served": version, "state": "served", "reason": ""}
        wait_for(server, lambda models, wanted=wanted: models[NAME] == wanted)  # type: ignore[misc]
        deadline = time.monotonic() + 60
        while len(server.find_stubs(f"{NAME}_model")) != processes and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(server.find_stubs(f"{NAME}_model")) == processes, "of the new version alone"


def test_a_server_that_does_not_follow_stays_with_what_it_started_with(repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "models"
    shutil.copytree(repository, copy)
    activate(copy, 1)
    with running(copy, "--follow", "off") as server:
        server.read_until("serving HTTP")
        activate(copy, 2)
        time.sleep(2)
        assert read_following(server)[NAME] == {"active": 1, "served": 1, "state": "served", "reason": ""}


def test_a_model_whose_file_is_away_comes_back_with_it_and_what_still_answers_goes_on(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    graph = repository / f"{NAME}_model" / "1" / "model.onnx"
    content = graph.read_bytes()
    graph.write_bytes(content[:5000])
    first, second = server.find_stubs(f"{NAME}_model")
    first.kill()
    server.wait_for_line("cannot be loaded anew, and is tried again", 60)
    # Longer than five attempts took, after which it used to be given up and unloaded.
    time.sleep(10)
    # Rarely tritonserver 2.51 itself crashes in a load that fails, and is started anew with all of its models.
    crashed = any("tritonserver was killed by signal 11" in line for line in server.lines)
    assert crashed or second.pid in {stub.pid for stub in server.find_stubs(f"{NAME}_model")}
    graph.write_bytes(content)
    server.wait_for_line((f"{NAME}_model: answers again", "tritonserver answers again"), 60)
    with Callers(server, repository, count=2) as callers:
        while sum(callers.answers.values()) < 20:
            time.sleep(0.05)
    assert callers.failures == []
    assert not any("given up" in line for line in server.lines)


def test_it_is_not_ready_from_the_last_process_of_its_only_model_to_the_next_that_answers(
    repository: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "models"
    shutil.copytree(repository, copy)
    activate(copy, 1)
    graph = copy / f"{NAME}_model" / "1" / "model.onnx"
    content = graph.read_bytes()
    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        graph.write_bytes(content[:5000])
        for stub in server.find_stubs(f"{NAME}_model"):
            stub.kill()
        wait_for(server, lambda models: read_ready(server)[0] == 503)
        # New processes begin meanwhile, and fail.
        looks = 0
        while looks < 20 or not any("cannot be loaded anew" in line for line in server.lines):
            assert read_ready(server)[0] == 503
            looks += 1
            time.sleep(0.2)
        graph.write_bytes(content)
        wait_for(server, lambda models: read_ready(server)[0] == 200)
        with Callers(server, copy, count=1) as callers:
            while not callers.answers and not callers.failures:
                time.sleep(0.05)
        assert callers.failures == []


@pytest.mark.parametrize("follow", ["on", "off"])
def test_what_a_tritonserver_that_was_started_anew_cannot_load_is_said_and_tried_again(
    repository: Path, tmp_path: Path, follow: str
) -> None:
    copy = tmp_path / "models"
    shutil.copytree(repository, copy)
    activate(copy, 1)
    graph = copy / f"{NAME}_model" / "1" / "model.onnx"
    with running(copy, "--follow", follow) as server:
        server.read_until("serving HTTP")
        server.follow()
        graph.rename(tmp_path / "away")
        os.kill(server.tritonserver, signal.SIGKILL)
        wait_for(server, lambda models: models[NAME]["state"] == "failed" and models[NAME]["served"] == 0)
        assert "model.onnx" in read_following(server)[NAME]["reason"]
        assert read_ready(server)[0] == 503
        (tmp_path / "away").rename(graph)
        wait_for(server, lambda models: models[NAME]["state"] == "served")
        with Callers(server, copy, count=1) as callers:
            while not callers.answers and not callers.failures:
                time.sleep(0.05)
        assert callers.failures == [] and set(callers.answers) == {1}


def test_ready_says_how_many_models_answer(repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "models"
    shutil.copytree(repository, copy)
    activate(copy, 1)
    for name in PARTS:
        shutil.copytree(copy / name, copy / f"half{name}")
        path = copy / f"half{name}" / "config.pbtxt"
        path.write_text(path.read_text().replace(f'"{NAME}', f'"half{NAME}'))
    graph = copy / f"half{NAME}_model" / "1" / "model.onnx"
    content = graph.read_bytes()
    graph.write_bytes(content[:5000])
    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        assert read_ready(server) == (200, "ready, 1 of 2 models\n")
        assert server.read_metrics()["modelyard_models_served"] == 1
        assert read_following(server)[f"half{NAME}"]["state"] == "failed"
        # What it lacked is there again: it is tried by itself.
        graph.write_bytes(content)
        wait_for(server, lambda models: models[f"half{NAME}"]["state"] == "served")
        wait_for(server, lambda models: read_ready(server) == (200, "ready\n"))
        for name in PARTS:
            shutil.rmtree(copy / name)
            shutil.rmtree(copy / f"half{name}")
        wait_for(server, lambda models: not models)
        wait_for(server, lambda models: read_ready(server) == (503, "not ready: none of 0 models is served\n"))
        assert server.read_metrics()["modelyard_ready"] == 0


def test_a_configuration_that_is_mended_or_removed_is_missed_no_more(repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "models"
    shutil.copytree(repository, copy)
    activate(copy, 1)
    config = copy / f"{NAME}_preprocess" / "config.pbtxt"
    whole = config.read_text()
    config.write_text(whole[: len(whole) // 2])
    shutil.copytree(copy / f"{NAME}_model", copy / "other")
    path = copy / "other" / "config.pbtxt"
    path.write_text(path.read_text().replace(f'"{NAME}_model"', '"other"'))
    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        assert read_ready(server) == (200, "ready, 1 of 2 models\n")
        config.write_text(whole)
        wait_for(server, lambda models: models.get(NAME, {}).get("state") == "served")
        wait_for(server, lambda models: read_ready(server) == (200, "ready\n"))
        (copy / "third").mkdir()
        (copy / "third" / "1").mkdir()
        (copy / "third" / "config.pbtxt").write_text('name: "third" backend: "none"')
        wait_for(server, lambda models: read_ready(server) == (200, "ready, 2 of 3 models\n"))
        shutil.rmtree(copy / "third")
        wait_for(server, lambda models: read_ready(server) == (200, "ready\n"))


def write_garbage(path: Path) -> None:
    path.write_text("gar {{")


def cut_short(path: Path) -> None:
    # Ends with a whole field: it is a configuration, and no longer says whose.
    path.write_text(path.read_text().split("parameters")[0].split("version_policy")[0])


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [write_garbage, cut_short, put_folder, Path.unlink])
@pytest.mark.parametrize("part", [NAME, f"{NAME}_preprocess"])
def test_what_cannot_be_read_is_served_as_before(
    served: tuple[Running, Path], part: str, damage: Callable[[Path], object]
) -> None:
    server, copy = served
    if (part, damage) == (NAME, Path.unlink):
        pytest.skip("a model without a configuration has no active version, and is not served")
    if part != NAME and damage is cut_short:
        pytest.skip("a step does not say by itself how it should be configured")
    path = copy / part / "config.pbtxt"
    whole = path.read_text()
    with Callers(server, copy, count=1) as callers:
        damage(path)
        wait_for(server, lambda models: models[NAME]["state"] == "failed" and models[NAME]["served"] == 1)
        assert str(path) in read_following(server)[NAME]["reason"]
        assert read_ready(server) == (200, "ready\n")
        checked = server.check()
        assert checked.code == 1 and str(path) in checked.err
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.write_text(whole)
        wait_for(server, lambda models: models[NAME]["state"] == "served")
    assert callers.failures == [] and set(callers.answers) == {1}
    assert server.check().code == 0
    assert "Traceback" not in "\n".join(server.lines)


def test_another_configuration_of_a_step_is_served_at_once_or_not_at_all(served: tuple[Running, Path]) -> None:
    server, copy = served
    path = copy / f"{NAME}_preprocess" / "config.pbtxt"
    whole = path.read_text()
    url = f"http://127.0.0.1:{server.http}/v2/models/{NAME}_preprocess/config"
    with Callers(server, copy, count=1) as callers:
        path.write_text(whole.replace("max_queue_size: 256", "max_queue_size: 99"))
        # Nothing is waited for that will not come: the version that answered before is the one that answers.
        server.wait_for_line(f"{NAME}: version 1 is served", 30)
        with urllib.request.urlopen(url, timeout=5) as response:
            assert json.load(response)["dynamic_batching"]["default_queue_policy"]["max_queue_size"] == 99
        path.write_text(whole.replace('"python_preprocess"', '"none"'))
        wait_for(server, lambda models: models[NAME]["state"] == "failed" and models[NAME]["served"] == 1)
        path.write_text(whole)
        wait_for(server, lambda models: models[NAME]["state"] == "served")
    assert callers.failures == [] and set(callers.answers) == {1}


@pytest.mark.parametrize("lost", [f"{NAME}/1/golden.json", f"{NAME}_model/1", f"{NAME}_preprocess/config.pbtxt"])
def test_what_is_not_whole_at_the_start_is_named_and_served_once_it_is(
    repository: Path, tmp_path: Path, lost: str
) -> None:
    copy = tmp_path / "models"
    shutil.copytree(repository, copy)
    activate(copy, 1)
    for name in PARTS:
        shutil.copytree(copy / name, copy / f"half{name}")
        path = copy / f"half{name}" / "config.pbtxt"
        path.write_text(path.read_text().replace(f'"{NAME}', f'"half{NAME}'))
    (copy / f"half{lost}").rename(tmp_path / "away")
    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        assert read_ready(server) == (200, "ready, 1 of 2 models\n")
        known = read_following(server)[f"half{NAME}"]
        assert (known["served"], known["state"]) == (0, "failed") and lost in known["reason"]
        assert server.read_metrics()["modelyard_models_served"] == 1
        checked = server.check()
        assert checked.code == 1 and lost in checked.err
        (tmp_path / "away").rename(copy / f"half{lost}")
        wait_for(server, lambda models: models[f"half{NAME}"]["state"] == "served")
        wait_for(server, lambda models: read_ready(server) == (200, "ready\n"))
        assert server.check().code == 0


def read_ready(server: Running) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.status, timeout=5)) as connection:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        return response.status, response.read().decode()
