"""What is missing or damaged, at the start or later: what was served serves on, and what is said of the rest is so."""

import json
import os
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from followed import (
    NAME,
    PARTS,
    Callers,
    activate,
    copy_at_first,
    publish_half,
    put_pipe,
    read_following,
    read_ready,
    wait_for,
)
from launcher import Running, find_ports, running


@pytest.mark.rarer
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


def test_what_a_signal_stops_while_a_model_cannot_be_loaded_anew_does_not_pass_for_what_answers(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    graph = repository / f"{NAME}_model" / "1" / "model.onnx"
    away = graph.rename(graph.with_name("away"))
    first, second = server.find_stubs(f"{NAME}_model")
    first.kill()
    # It is refused without a load, in which tritonserver 2.51 now and then crashes.
    server.wait_for_line("cannot be loaded anew, and is tried again ever more rarely", 60)
    assert any(f"{graph} is missing" in line for line in server.lines)
    os.kill(second.pid, signal.SIGSTOP)
    wait_for(server, lambda models: read_ready(server)[0] == 503)
    assert second.is_dead or second.pid not in {stub.pid for stub in server.find_stubs(f"{NAME}_model")}
    away.rename(graph)
    wait_for(server, lambda models: read_ready(server)[0] == 200)
    with Callers(server, repository, count=2) as callers:
        while sum(callers.answers.values()) < 20:
            time.sleep(0.05)
    assert callers.failures == []


def test_it_is_not_ready_from_the_last_process_of_its_only_model_to_the_next_that_answers(
    repository: Path, tmp_path: Path
) -> None:
    copy = copy_at_first(repository, tmp_path / "models")
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
        wait_for(server, lambda models: (models[NAME]["served"], models[NAME]["state"]) == (0, "failed"))
        reason = read_following(server)[NAME]["reason"]
        assert str(graph) in reason and str(graph) in server.check().err
        graph.write_bytes(content)
        wait_for(server, lambda models: read_ready(server)[0] == 200)
        wait_for(server, lambda models: (models[NAME]["served"], models[NAME]["state"]) == (1, "served"))
        with Callers(server, copy, count=1) as callers:
            while not callers.answers and not callers.failures:
                time.sleep(0.05)
        assert callers.failures == []


@pytest.mark.parametrize("follow", ["on", pytest.param("off", marks=pytest.mark.rarer)])
def test_what_a_tritonserver_that_was_started_anew_cannot_load_is_said_and_tried_again(
    repository: Path, tmp_path: Path, follow: str
) -> None:
    copy = copy_at_first(repository, tmp_path / "models")
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
    copy = copy_at_first(repository, tmp_path / "models")
    half = publish_half(copy, tmp_path)
    graph = copy / f"half{NAME}_model" / "1" / "model.onnx"
    content = graph.read_bytes()
    graph.write_bytes(content[:5000])
    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        assert read_ready(server) == (200, "ready, 1 of 2 models\n")
        assert server.read_metrics()["modelyard_models_served"] == 1
        assert read_following(server)[half]["state"] == "failed"
        # A container is not restarted for it.
        judged, lenient = server.check(), server.check("--any-version")
        assert judged.code == 1 and f"{half}: {graph} has changed since it was published" in judged.err
        assert lenient.code == 0 and f"warning: {half} does not answer: {graph} has changed" in lenient.err
        assert f"{NAME} answers as verified within" in lenient.err
        # What it lacked is there again: it is tried by itself.
        graph.write_bytes(content)
        wait_for(server, lambda models: models[half]["state"] == "served")
        wait_for(server, lambda models: read_ready(server) == (200, "ready\n"))
        for name in PARTS:
            shutil.rmtree(copy / name)
            shutil.rmtree(copy / f"half{name}")
        wait_for(server, lambda models: not models)
        wait_for(server, lambda models: read_ready(server) == (503, "not ready: none of 0 models is served\n"))
        assert server.read_metrics()["modelyard_ready"] == 0


@pytest.mark.rarer
def test_a_new_model_that_cannot_be_loaded_is_no_reason_to_restart_a_container(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, copy = served
    publish_own(tmp_path / "slow", "import nothing_of_the_kind\n").rename(copy / "slow")
    # What Python has compiled of it is a change of its folder, for which it is tried once more at once.
    server.wait_for_line("Tried again in 20 s", 60)
    judged, lenient = server.check(), server.check("--any-version")
    assert judged.code == 1 and "slow: version 1 of slow cannot be served: " in judged.err
    assert lenient.code == 0 and "warning: slow does not answer: version 1 of slow cannot be served: " in lenient.err
    assert f"{NAME} answers as verified within" in lenient.err
    # tritonserver says itself that it does not have it.
    (port,) = find_ports(1)
    judged, lenient = (server.check("--status-port", str(port), *more) for more in ((), ("--any-version",)))
    assert judged.code == 1 and f"is not known: the status port could not be asked at 127.0.0.1:{port}" in judged.err
    assert lenient.code == 0 and "warning: slow does not answer: " in lenient.err
    assert read_ready(server) == (200, "ready, 1 of 2 models\n")


def test_a_new_model_is_told_as_being_loaded_until_it_answers(served: tuple[Running, Path], tmp_path: Path) -> None:
    server, copy = served
    go = tmp_path / "go"
    wait = f"    def initialize(self, args):\n        while not os.path.exists({str(go)!r}): time.sleep(0.1)\n"
    publish_own(tmp_path / "slow", f"import os, time\n{IDENTITY}{wait}").rename(copy / "slow")
    while not server.find_stubs("slow"):
        time.sleep(0.1)
    judged, lenient = server.check(), server.check("--any-version")
    assert judged.code == lenient.code == 0
    assert "slow is being loaded; no version is served, version 1 is active\n" in judged.err
    assert "warning: slow does not answer: it is being loaded\n" in lenient.err
    for name in PARTS:
        (copy / name).rename(tmp_path / name)
    # Nothing else is asked for that would answer.
    for done in (server.check(), server.check("--any-version")):
        assert done.code == 1 and "got slow: it is being loaded; see the server's log" in done.err
    for name in reversed(PARTS):
        (tmp_path / name).rename(copy / name)
    go.touch()
    server.wait_for_line("slow: version 1 is served", 60)
    assert "slow answers as verified within 0.0e+00; version 1 is served" in server.check().err


@pytest.mark.rarer
def test_a_configuration_that_is_mended_or_removed_is_missed_no_more(repository: Path, tmp_path: Path) -> None:
    copy = copy_at_first(repository, tmp_path / "models")
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


def link_to_endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def borrow_step(path: Path) -> None:
    # The step of a neighbour, which was published with it.
    path.write_text(path.read_text().replace(f'"{NAME}_model"', f'"half{NAME}_model"'))


def empty(path: Path) -> None:
    path.write_text("")


def leave_quote(path: Path) -> None:
    path.write_text(path.read_text() + '"')


def name_version_before_all(path: Path) -> None:
    path.write_text(path.read_text().replace("versions: 1", "versions: -1"))


# In the place of any configuration, and in that of the public model, which says whose it is and what its steps are.
ANY_DAMAGES = (write_garbage, empty, leave_quote, put_folder, put_pipe, link_to_endless, Path.unlink)
PUBLIC_DAMAGES = (*ANY_DAMAGES, cut_short, borrow_step, name_version_before_all)


@pytest.mark.parametrize(
    ("part", "damages"),
    [(NAME, PUBLIC_DAMAGES), pytest.param(f"{NAME}_preprocess", ANY_DAMAGES, marks=pytest.mark.rarer)],
)
def test_what_cannot_be_read_is_served_as_before(
    served: tuple[Running, Path], tmp_path: Path, part: str, damages: Sequence[Callable[[Path], object]]
) -> None:
    server, copy = served
    half = publish_half(copy, tmp_path)
    wait_for(server, lambda models: models.get(half, {}).get("state") == "served")
    path = copy / part / "config.pbtxt"
    whole = path.read_text()
    with Callers(server, copy, count=1) as callers:
        for damage in damages:
            damage(path)
            wait_for(server, lambda models: models[NAME]["state"] == "failed" and models[NAME]["served"] == 1)
            assert str(path) in read_following(server)[NAME]["reason"]
            assert read_ready(server) == (200, "ready\n")
            checked = server.check()
            assert checked.code == 1 and str(path) in checked.err
            assert read_following(server)[half]["state"] == "served" and f"{half}: " not in checked.err
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
        # It answers as verified, and would not if it were started anew.
        refused = read_following(server)[NAME]["reason"].rstrip(".")
        judged, lenient = server.check(), server.check("--any-version")
        assert judged.code == 1 and refused in judged.err
        assert lenient.code == 0 and lenient.err.startswith("warning: ") and refused in lenient.err
        path.write_text(whole)
        wait_for(server, lambda models: models[NAME]["state"] == "served")
    assert callers.failures == [] and set(callers.answers) == {1}


def test_a_repository_whose_mount_is_gone_takes_nothing_with_it(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository, tmp_path / "kept")
    activate(tmp_path / "kept", 1)
    copy = tmp_path / "models"
    (tmp_path / "kept").rename(copy)
    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        with Callers(server, copy, count=1) as callers:
            # As the folder under a mount, which is empty and another one.
            copy.rename(tmp_path / "kept")
            copy.mkdir()
            server.wait_for_line("is another folder than before, and empty; what is served stays", 30)
            before = sum(callers.answers.values())
            while sum(callers.answers.values()) < before + 20:
                time.sleep(0.05)
            copy.rmdir()
            (tmp_path / "kept").rename(copy)
            # Followed as ever.
            for part in PARTS:
                shutil.copy(copy / NAME / "2" / "configs" / f"{part}.pbtxt", copy / part / "config.pbtxt")
            wait_for(server, lambda models: models[NAME]["served"] == 2)
        assert callers.failures == []


@pytest.mark.parametrize(
    "lost",
    [
        f"{NAME}/1/golden.json",
        pytest.param(f"{NAME}_model/1", marks=pytest.mark.rarer),
        pytest.param(f"{NAME}_preprocess/config.pbtxt", marks=pytest.mark.rarer),
    ],
)
def test_what_is_not_whole_at_the_start_is_named_and_served_once_it_is(
    repository: Path, tmp_path: Path, lost: str
) -> None:
    copy = copy_at_first(repository, tmp_path / "models")
    half = publish_half(copy, tmp_path)
    (copy / f"half{lost}").rename(tmp_path / "away")
    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        assert read_ready(server) == (200, "ready, 1 of 2 models\n")
        known = read_following(server)[half]
        assert (known["served"], known["state"]) == (0, "failed") and lost in known["reason"]
        assert server.read_metrics()["modelyard_models_served"] == 1
        checked = server.check()
        assert checked.code == 1 and lost in checked.err
        (tmp_path / "away").rename(copy / f"half{lost}")
        wait_for(server, lambda models: models[half]["state"] == "served")
        wait_for(server, lambda models: read_ready(server) == (200, "ready\n"))
        assert server.check().code == 0


IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)]) for array in given]
"""
TENSORS = """
input { name: "X" data_type: TYPE_FP32 dims: [1] }
output { name: "Y" data_type: TYPE_FP32 dims: [1] }
"""
OWN_ENSEMBLE = """
name: "whole" platform: "ensemble" ensemble_scheduling { step { model_name: "part" model_version: -1
input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } }
"""


def publish_own(folder: Path, code: str) -> Path:
    """Publish a model of Python that answers with what it is asked, in one version; return its folder."""
    tensor = {"datatype": "FP32", "shape": [1], "data": [7.0]}
    sample = {"inputs": [{"name": "X", **tensor}], "outputs": [{"name": "Y", **tensor}]}
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code)
    (folder / "1" / "golden.json").write_text(json.dumps({"samples": [sample], "tolerances": {"max_abs_error": 0.0}}))
    owner = f'parameters {{ key: "modelyard_owner" value {{ string_value: "{folder.name}" }} }}'
    policy = "version_policy { specific { versions: 1 } }"
    (folder / "config.pbtxt").write_text(f'name: "{folder.name}" backend: "python" {policy} {owner} {TENSORS}')
    return folder


def test_an_ensemble_that_was_written_by_hand_is_served_with_its_steps(tmp_path: Path) -> None:
    for name in ("whole", "part"):
        (tmp_path / name / "1").mkdir(parents=True)
    (tmp_path / "part" / "1" / "model.py").write_text(IDENTITY)
    (tmp_path / "part" / "config.pbtxt").write_text(f'name: "part" backend: "python" {TENSORS}')
    (tmp_path / "whole" / "config.pbtxt").write_text(OWN_ENSEMBLE + TENSORS)
    body = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [7.0]}]}).encode()
    with running(tmp_path) as server:
        server.read_until("serving HTTP")
        server.follow()
        server.wait_for_line(f"Next: curl localhost:{server.http}/v2/models/part ", 10)
        for name in ("whole", "part"):
            url = f"http://127.0.0.1:{server.http}/v2/models/{name}/infer"
            with urllib.request.urlopen(urllib.request.Request(url, body), timeout=10) as response:
                assert json.load(response)["outputs"][0]["data"] == [7.0]
        assert read_ready(server) == (200, "ready\n")
        # What they should answer nobody knows: they are ready, and not verified.
        checked, lenient = server.check(), server.check("--any-version")
        assert checked.code == 1 and "no ensemble with a golden.json" in checked.err
        assert lenient.code == 0 and lenient.err == "ready; no model has a recorded answer to be asked for\n"
        (tmp_path / "raises.part" / "1").mkdir(parents=True)
        (tmp_path / "raises.part" / "1" / "model.py").write_text("raise RuntimeError('über ' * 20_000)\n")
        (tmp_path / "raises.part" / "config.pbtxt").write_text(f'name: "raises" backend: "python" {TENSORS}')
        (tmp_path / "raises.part").rename(tmp_path / "raises")
        server.wait_for_line("raises cannot be served", 60)
        # However long the reason is, it is that, and is told in part.
        told = server.lines[server.read - 1]
        assert "RuntimeError: über über" in told and "Tried again in" in told and len(told) < 2_000
        checked, lenient = server.check(), server.check("--any-version")
        assert checked.code == 1 and "raises cannot be served" in checked.err
        assert lenient.code == 0 and "warning: raises does not answer" in lenient.err
