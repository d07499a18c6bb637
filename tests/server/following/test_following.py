"""What becomes active in the repository is served by the running server, and no request is lost on the way."""

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from followed import NAME, PARTS, Callers, activate, publish_half, read_following, wait_for
from launcher import Running, running
from nginx import NGINX, balancing

from client import Client
from export.commands.waiting import wait_until_served
from export.repository.version import Version


class ListCaller:
    """A client of the library that asks about lists, each of many requests; what it is told of is one text."""

    def __init__(self, server: Running) -> None:
        self.differences: list[float] = []
        self._server, self._ended = server, threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> "ListCaller":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _ask(self) -> None:
        with Client(f"127.0.0.1:{self._server.http}", retry_s=60) as client:
            while not self._ended.is_set():
                vectors = client.embed(["one text"] * 2000, model=NAME)
                self.differences.append(float(np.ptp(vectors, axis=0).max()))


def test_activations_back_and_forth_lose_no_request_and_mix_no_versions(served: tuple[Running, Path]) -> None:
    server, repository = served
    processes = len(server.find_stubs(f"{NAME}_model"))
    with Callers(server, repository) as callers, ListCaller(server) as lists:
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
    assert lists.differences and max(lists.differences) < 1e-4
    metrics = server.read_metrics()
    assert metrics[f'modelyard_rollouts_total{{model="{NAME}",outcome="done"}}'] == 4
    assert metrics[f'modelyard_served_version{{model="{NAME}"}}'] == 1
    # Unloading a version is not a death.
    deaths = {key: value for key, value in metrics.items() if key.startswith("modelyard_backend_deaths_total")}
    assert sum(deaths.values()) == 1


@pytest.mark.rarer
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


@pytest.mark.parametrize(
    "fault",
    [
        "another answer",
        pytest.param("a damaged file", marks=pytest.mark.rarer),
        "no file",
        pytest.param("too much memory", marks=pytest.mark.rarer),
    ],
)
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
        # Of another graph, which could be loaded, callers of version 1 would have the answers until the switch.
        for damaged in (content[:5000], (repository / f"{NAME}_model" / "2" / "model.onnx").read_bytes()):
            graph.write_bytes(damaged)
            activate(repository, 2)
            found = wait_for(server, lambda models: (models[NAME]["active"], models[NAME]["state"]) == (2, "failed"))
            assert found[NAME]["served"] == 1
            reason = found[NAME]["reason"]
            assert "version 2 of followed cannot be loaded beside version 1: expected" in reason
            assert str(graph.parent) in reason and "bring its files back" in reason
            activate(repository, 1)
            graph.write_bytes(content)
            wait_for(server, lambda models: models[NAME]["state"] == "served")
        assert set(callers.answers) == {1}
        activate(repository, 2)
        wait_for(server, lambda models: models[NAME]["served"] == 2 and models[NAME]["state"] == "served")
    assert callers.failures == []
    assert callers.answers[0] == 0


@pytest.mark.parametrize("part", ["model", pytest.param("preprocess", marks=pytest.mark.rarer)])
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
    (repository / "made.part" / "1" / "model.py").write_text("raise ValueError('broken')\n")
    (repository / "made.part" / "config.pbtxt").write_text('name: "made"\nbackend: "python"\nmax_batch_size: 4\n')
    (repository / "made.part").rename(repository / "made")
    server.wait_for_line("Tried again in 10 s", 60)
    (told,) = (line for line in server.lines if "Tried again" in line)
    assert told.startswith("ERROR: made cannot be served: expected it to load, got ")
    assert "; it is not served, mend its folder (the log tells more) or take it out of the repository. Tried" in told
    assert ".;" not in told and ";." not in told
    checked = server.check()
    assert checked.code == 1 and "made cannot be served" in checked.err


def test_a_model_in_python_that_was_made_by_hand_names_the_code_that_it_lacks(served: tuple[Running, Path]) -> None:
    server, repository = served
    (repository / "coded.part" / "1").mkdir(parents=True)
    (repository / "coded.part" / "config.pbtxt").write_text(
        'backend: "python"\nmax_batch_size: 4\n'
        'input { name: "X" data_type: TYPE_FP32 dims: [1] }\noutput { name: "Y" data_type: TYPE_FP32 dims: [1] }\n'
    )
    (repository / "coded.part").rename(repository / "coded")
    code = repository / "coded" / "1" / "model.py"
    server.wait_for_line(f"ERROR: coded cannot be served: expected whole files, got {code} is missing", 60)
    code.write_text("class TritonPythonModel:\n    def execute(self, requests):\n        return []\n")
    server.wait_for_line("coded: is served", 60)


def load_until(go: Path, server: Running, repository: Path) -> None:
    """Have a model appear, called `slow`, that is being loaded until there is a file `go`."""
    slow = (
        "import os, time\n"
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        f"        while not os.path.exists({str(go)!r}): time.sleep(0.1)\n"
    )
    config = (
        'backend: "python"\ninput { name: "X" data_type: TYPE_FP32 dims: [1] }\n'
        'output { name: "Y" data_type: TYPE_FP32 dims: [1] }\n'
    )
    (repository / "slow.part" / "1").mkdir(parents=True)
    (repository / "slow.part" / "1" / "model.py").write_text(slow)
    (repository / "slow.part" / "config.pbtxt").write_text(config)
    (repository / "slow.part").rename(repository / "slow")
    while not server.find_stubs("slow"):
        time.sleep(0.1)


@pytest.mark.rarer
def test_what_changes_while_a_model_is_loaded_for_long_is_told_and_brought_after_it(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, repository = served
    go = tmp_path / "go"
    load_until(go, server, repository)
    activate(repository, 2)
    server.wait_for_line("what has changed meanwhile waits until that ends", 60)
    told = server.lines[server.read - 1]
    assert told.startswith("slow ") and told.rpartition(": ")[2] == NAME
    assert read_following(server)[NAME]["served"] == 1
    go.touch()
    server.wait_for_line("slow: is served", 60)
    wait_for(server, lambda models: models[NAME]["served"] == 2)
    assert sum("waits until that ends" in line for line in server.lines) == 1


@pytest.mark.rarer
def test_what_waits_for_a_model_that_is_loaded_for_long_is_told_as_that(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, repository = served
    go, waits = tmp_path / "go", "waits until slow is loaded"
    as_before = read_following(server)
    load_until(go, server, repository)
    # Nothing else is to be served, whatever else is published or touched.
    shutil.copytree(repository / NAME / "1", repository / NAME / "9")
    (repository / PARTS[1] / "config.pbtxt").touch()
    half = publish_half(repository, tmp_path)
    # As a copy that keeps its times.
    os.utime(repository / half / "config.pbtxt", (0, 0))
    new = {"active": 1, "served": 0, "state": "rolling", "reason": waits}
    wait_for(server, lambda models: models == as_before | {half: new})
    activate(repository, 2)
    os.utime(repository / NAME / "config.pbtxt", (0, 0))
    rolling = {"active": 2, "served": 1, "state": "rolling", "reason": waits}
    wait_for(server, lambda models: models == {NAME: rolling, half: new})
    metrics = server.read_metrics()
    for name, active, version in ((NAME, 2, 1), (half, 1, 0)):
        assert metrics[f'modelyard_active_version{{model="{name}"}}'] == active
        assert metrics[f'modelyard_served_version{{model="{name}"}}'] == version
    checked = server.check()
    assert checked.code == 0
    assert f"version 1 is served, version 2 is active, which {waits}" in checked.err
    assert f"{half} {waits}; no version is served, version 1 is active" in checked.err
    assert f"{half} does not answer: it {waits}" in server.check("--any-version").err
    # All of it is taken back, and the model that is served taken away.
    shutil.rmtree(repository / half)
    activate(repository, 1)
    wait_for(server, lambda models: models == as_before)
    (repository / NAME).rename(tmp_path / "away")
    wait_for(server, lambda models: models == {NAME: rolling | {"active": 0}})
    (tmp_path / "away").rename(repository / NAME)
    wait_for(server, lambda models: models == as_before)
    activate(repository, 2)
    told: list[str] = []

    def follow(line: str) -> None:
        told.append(line)
        if waits in line:
            go.touch()

    golden = Version(repository=repository, name=NAME, number=2).read_golden_sum()
    assert golden
    wait_until_served(f"localhost:{server.status}", NAME, 2, follow, golden)
    assert any(line.endswith(f"rolling, version 1 answers; it {waits}") for line in told)
    assert server.read_metrics()[f'modelyard_rollouts_total{{model="{NAME}",outcome="done"}}'] == 1


@pytest.mark.rarer
def test_what_is_damaged_while_another_model_is_loaded_is_told_at_once(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, repository = served
    go, away, waits = tmp_path / "go", tmp_path / "away", "waits until slow is loaded"
    as_before = read_following(server)
    load_until(go, server, repository)

    def tell(path: Path, active: int) -> None:
        """See a model that is served at version 1 told as failed for a file, by all who tell of it."""
        models = wait_for(server, lambda models: models[NAME]["state"] == "failed")
        assert (models[NAME]["active"], models[NAME]["served"]) == (active, 1)
        assert str(path) in models[NAME]["reason"] and "version 1 of followed is served as before" in str(models)
        metrics = server.read_metrics()
        assert metrics[f'modelyard_active_version{{model="{NAME}"}}'] == active
        assert metrics[f'modelyard_served_version{{model="{NAME}"}}'] == 1
        judged, lenient = server.check(), server.check("--any-version")
        assert judged.code == 1 and f"{NAME}: " in judged.err and str(path) in judged.err
        assert lenient.code == 0 and lenient.err.startswith(f"warning: {NAME} ") and str(path) in lenient.err

    public, step = (repository / part / "config.pbtxt" for part in (NAME, f"{NAME}_model"))
    for path, active in ((public, 0), (step, 1), (repository / NAME / "1" / "SHA256SUMS", 1)):
        path.rename(away)
        tell(path, active)
        away.rename(path)
        wait_for(server, lambda models: models == as_before)
    graph = repository / f"{NAME}_model" / "1" / "model.onnx"
    whole = graph.read_bytes()
    graph.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    tell(graph, 1)
    graph.write_bytes(whole)
    wait_for(server, lambda models: models == as_before)
    # So is what waits.
    activate(repository, 2)
    rolling = {NAME: {"active": 2, "served": 1, "state": "rolling", "reason": waits}}
    for part, name in ((f"{NAME}_model", "model.onnx"), (NAME, "SHA256SUMS"), (f"{NAME}_preprocess", "tokenizer.json")):
        wait_for(server, lambda models: models == rolling)
        path = repository / part / "2" / name
        whole = path.read_bytes()
        # Versions may share it.
        path.unlink()
        path.write_bytes(whole[:-9])
        tell(path, 2)
        path.unlink()
        # A version without sums is held against its lock.
        if name != "SHA256SUMS":
            tell(path, 2)
        path.write_bytes(whole)
    wait_for(server, lambda models: models == rolling)
    # And what is served until that is loaded.
    vocabulary = repository / f"{NAME}_preprocess" / "1" / "tokenizer.json"

    def tell_of_served(path: Path) -> None:
        models = wait_for(server, lambda models: models[NAME]["state"] == "failed")
        assert (models[NAME]["active"], models[NAME]["served"]) == (2, 1) and str(path) in models[NAME]["reason"]
        checked = server.check()
        assert checked.code == 1 and str(path) in checked.err

    whole = graph.read_bytes()
    graph.write_bytes(whole[:-9])
    tell_of_served(graph)
    graph.write_bytes(whole)
    wait_for(server, lambda models: models == rolling)
    for gone in (vocabulary, vocabulary.parent, repository / NAME / "1"):
        gone.rename(away)
        tell_of_served(gone)
        away.rename(gone)
        wait_for(server, lambda models: models == rolling)
    assert not any(line.startswith("ERROR") for line in server.lines)
    go.touch()
    wait_for(server, lambda models: models[NAME]["served"] == 2 and models[NAME]["state"] == "served")


@pytest.mark.rarer
def test_what_had_failed_and_is_mended_while_another_model_is_loaded_waits_for_that(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, repository = served
    go, graph = tmp_path / "go", repository / f"{NAME}_model" / "1" / "model.onnx"
    as_before, whole = read_following(server), graph.read_bytes()
    graph.write_bytes(whole[:5000])
    failed = wait_for(server, lambda models: models[NAME]["state"] == "failed")
    load_until(go, server, repository)
    for _ in range(20):
        assert read_following(server) == failed
        time.sleep(0.1)
    graph.write_bytes(whole)
    reason = "waits until slow is loaded"
    wait_for(server, lambda models: models[NAME] == {"active": 1, "served": 1, "state": "rolling", "reason": reason})
    go.touch()
    wait_for(server, lambda models: models == as_before)


# Of the second version no process begins to answer: it ends with an error once there is a file `go`.
FAILING = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        while args["model_version"] == "2" and not os.path.exists({go!r}):
            time.sleep(0.1)
        assert args["model_version"] != "2"

    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)]) for array in given]
"""


def publish_failing(go: Path, repository: Path) -> Path:
    """Publish three versions of a model that comes before all others, the first active; return its configuration."""
    tensor = {"datatype": "FP32", "shape": [1], "data": [7.0]}
    sample = {"inputs": [{"name": "X", **tensor}], "outputs": [{"name": "Y", **tensor}]}
    folder = repository / "a.part"
    for version in ("1", "2", "3"):
        (folder / version).mkdir(parents=True)
        (folder / version / "model.py").write_text(FAILING.format(go=str(go)))
        golden = {"samples": [sample], "tolerances": {"max_abs_error": 0.0}}
        (folder / version / "golden.json").write_text(json.dumps(golden))
    (folder / "config.pbtxt").write_text(
        'name: "a" backend: "python" version_policy { specific { versions: 1 } }\n'
        'parameters { key: "modelyard_owner" value { string_value: "a" } }\n'
        'input { name: "X" data_type: TYPE_FP32 dims: [1] }\noutput { name: "Y" data_type: TYPE_FP32 dims: [1] }\n'
    )
    folder.rename(repository / "a")
    return repository / "a" / "config.pbtxt"


def load_failing(go: Path, server: Running, repository: Path) -> Path:
    """Have the second version of that model begin to be loaded; return its configuration."""
    config = publish_failing(go, repository)
    wait_for(server, lambda models: models.get("a", {}).get("state") == "served")
    config.write_text(config.read_text().replace("versions: 1", "versions: 2"))
    wait_for(server, lambda models: bool(server.find_stubs("a.candidate")))
    return config


@pytest.mark.rarer
def test_what_waits_is_told_as_that_until_it_is_brought_also_after_a_load_that_failed(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, repository = served
    go = tmp_path / "go"
    config = load_failing(go, server, repository)
    activate(repository, 2)
    config.write_text(config.read_text().replace("versions: 2", "versions: 3"))
    waits = ("rolling", "waits until version 2 of a is loaded")
    wait_for(server, lambda models: all((each["state"], each["reason"]) == waits for each in models.values()))
    go.touch()
    told: dict[str, set[tuple[int, int, str]]] = {"a": set(), NAME: set()}
    active = set()

    def have_come(models: dict[str, dict[str, object]]) -> bool:
        metrics = server.read_metrics()
        for name, each in models.items():
            told[name].add((each["active"], each["served"], each["state"]))  # type: ignore[arg-type]
            active.add((name, metrics[f'modelyard_active_version{{model="{name}"}}']))
        return models["a"]["served"] == 3 and models[NAME]["served"] == 2

    wait_for(server, have_come)
    assert told == {
        "a": {(3, 1, "rolling"), (3, 3, "served")},
        NAME: {(2, 1, "rolling"), (2, 2, "served")},
    }
    assert active == {("a", 3), (NAME, 2)}
    assert sum("ERROR: version 2 of a cannot be served" in line for line in server.lines) == 1


@pytest.mark.rarer
def test_what_goes_while_another_model_is_loaded_is_unloaded_after_it(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, repository = served
    go = tmp_path / "go"
    load_failing(go, server, repository)
    (repository / NAME).rename(tmp_path / "away")
    wait_for(server, lambda models: models[NAME]["active"] == 0)
    go.touch()
    wait_for(server, lambda models: NAME not in models)
    server.wait_for_line(f"{NAME}: is no longer in the repository; unloaded", 60)
    (tmp_path / "away").rename(repository / NAME)
    wait_for(server, lambda models: models.get(NAME, {}).get("served") == 1)


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


@pytest.mark.rarer
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
        wait_for(server, lambda models, wanted=wanted: models[NAME].items() >= wanted.items())  # type: ignore[misc]
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
        golden = hashlib.sha256(Path(copy, NAME, "1", "golden.json").read_bytes()).hexdigest()
        told = {"active": 1, "served": 1, "state": "served", "reason": "", "golden": golden}
        assert read_following(server)[NAME] == told
        done = server.check()
        assert done.code == 1
        assert "version 2 is active in the repository; the server does not follow it (--follow off), so" in done.err
        assert server.check("--any-version").code == 0


def test_a_model_that_is_removed_is_named_where_the_server_does_not_follow(repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "models"
    shutil.copytree(repository, copy)
    activate(copy, 1)
    half = publish_half(copy, tmp_path)
    with running(copy, "--follow", "off") as server:
        server.read_until("serving HTTP")
        assert server.check().code == 0
        config = copy / half / "config.pbtxt"
        config.rename(tmp_path / "away")
        lost = server.check()
        assert lost.code == 1 and f"got {half}: {config} is missing; see" in lost.err
        (tmp_path / "away").rename(config)
        (copy / half).rename(tmp_path / half)
        judged, lenient = server.check(), server.check("--any-version")
        told = (
            "version 1 is served, and the model is no longer in the repository; the server does not follow it "
            "(--follow off), so start it anew"
        )
        assert judged.code == 1 and f"got {half}: {told}; see" in judged.err
        assert lenient.code == 0 and f"warning: {half} is ready, but {told}\n" in lenient.err
        (tmp_path / half).rename(copy / half)
        assert server.check().code == 0
