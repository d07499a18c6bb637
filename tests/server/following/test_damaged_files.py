"""Damaged files of published versions, recorded answers among them: each is named, and takes nothing else with it."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from harness import run
from launcher import Running, find_ports, running
from stranger import DRIPS, answering, dripping

from server.errors import CheckError, StrangerError
from server.following import agreement, check, health
from server.following.check import check_ensembles
from server.following.health import LostServerError, check_answer
from server.following.recorded import read_golden as read_golden_file


def build_golden(**changes: object) -> str:
    """Return a recorded answer with other values in its only output, in its sample, or for its bound."""
    output = {"name": "EMBEDDING", "datatype": "FP32", "shape": [1, 1], "data": [0.0], "parameters": {}}
    output |= {key: value for key, value in changes.items() if key in output}
    asked = {"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}
    sample = {"inputs": changes.get("inputs", [asked]), "outputs": changes.get("outputs", [output])}
    return json.dumps({"samples": [sample], "tolerances": {"max_abs_error": changes.get("bound", 1e-4)}})


BASE64 = {"parameters": {"encoding": "base64"}}
DAMAGED_GOLDENS = (
    *("[]", "null", "5", "{}", "[" * 500_000, '{"samples": [], "tolerances": {}}', '{"samples": [1]}'),
    *(build_golden(outputs=value) for value in ([], {}, "", 5, None, [[]])),
    *(build_golden(inputs=value) for value in (5, None, [{}])),
    *(build_golden(data=value) for value in (5, None, {}, ["a"], [None], [[0.0]], [10**400], [float("nan")])),
    *(build_golden(datatype=value) for value in (5, None, [], "FP99", "INT64")),
    *(build_golden(shape=value) for value in ([2**40], [-1, -1], [1.0], ["1"], 1, [2, 1], None)),
    *(build_golden(parameters=value) for value in ({"binary_data_size": 1 << 40}, 5)),
    *(build_golden(bound=value) for value in (float("inf"), 10**400, True, None, "x", [])),
    # tritonserver makes room for what a shape says, and ends where it cannot.
    build_golden(inputs=[{"name": "TEXT", "datatype": "INT64", "shape": [1 << 40], "data": [1]}]),
    build_golden().replace("max_abs_error", "another_bound"),
    build_golden(bound=-1),
    build_golden(inputs=[{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]} | BASE64]),
)


@pytest.mark.parametrize("content", DAMAGED_GOLDENS, ids=range(len(DAMAGED_GOLDENS)))
def test_a_recorded_answer_is_believed_if_it_is_whole(tmp_path: Path, content: str) -> None:
    path = tmp_path / "golden.json"
    path.write_text(build_golden())
    assert read_golden_file(path)["samples"]
    path.write_text(content)
    with pytest.raises(ValueError, match="golden.json is damaged"):
        read_golden_file(path)


def test_a_server_that_is_gone_is_told_as_such_and_not_as_another_answer(tmp_path: Path) -> None:
    folder = tmp_path / "tiny" / "1"
    folder.mkdir(parents=True)
    (folder / "golden.json").write_text(build_golden())
    (port,) = find_ports(1)
    with pytest.raises(LostServerError, match="refused") as caught:
        check_answer(f"http://127.0.0.1:{port}", tmp_path, "tiny", "1")
    assert "golden.json" not in str(caught.value)


@pytest.mark.parametrize("answer", ["", "{}", "[]", "5", '{"versions": []}', '{"models": {"tiny": 5}}'])
def test_a_program_that_answers_in_the_place_of_a_server_is_told_as_such(tmp_path: Path, answer: str) -> None:
    folder = tmp_path / "tiny" / "1"
    folder.mkdir(parents=True)
    (folder / "golden.json").write_text(build_golden())
    (tmp_path / "tiny" / "config.pbtxt").write_text('name: "tiny"\nversion_policy { specific { versions: 1 } }\n')
    with answering(answer) as address:
        url = f"http://{address}"
        for any_version in (False, True):
            with pytest.raises(StrangerError) as caught:
                check_ensembles(url, tmp_path, url, any_version=any_version)
            assert str(caught.value) == (
                f"another program answers on {url}/v2/models/tiny: expected tritonserver, "
                f"got {repr(answer) if answer else 'nothing'}; correct --host and --http-port."
            )
        with pytest.raises(ValueError, match="^expected tensors, got ") as refused:
            check_answer(url, tmp_path, "tiny", "1")
        assert str(refused.value).endswith(f"; what was verified is in {folder / 'golden.json'}")


WRONG_REASON = '{"models": {"tiny": {"active": 1, "served": 0, "state": "rolling", "reason": null}}}'


@pytest.mark.parametrize(
    "answer",
    ["", "{}", '{"models": [1]}', '{"models": {"tiny": 5}}', '{"models": {"tiny": {"state": "a"}}}', WRONG_REASON],
)
def test_what_another_program_says_on_the_status_port_is_no_word_of_a_launcher(answer: str) -> None:
    with answering(answer) as address:
        assert agreement.read_following(f"http://{address}") is None


def test_what_a_launcher_says_of_its_models_is_taken_as_it_is() -> None:
    told = {"tiny": {"active": 2, "served": 1, "state": "rolling", "reason": ""}}
    for models in ({}, told):
        with answering(json.dumps({"follows": True, "models": models})) as address:
            found = agreement.read_following(f"http://{address}")
            assert found and (found.models, found.follows) == (models, True)


@pytest.mark.parametrize(("beginning", "drop"), DRIPS)
def test_a_program_that_drips_in_the_place_of_a_server_is_not_waited_for(
    tmp_path: Path, beginning: bytes, drop: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (agreement, check, health):
        monkeypatch.setattr(module, "_TIMEOUT_S", 0.3)
    folder = tmp_path / "tiny" / "1"
    folder.mkdir(parents=True)
    (folder / "golden.json").write_text(build_golden())
    (tmp_path / "tiny" / "config.pbtxt").write_text('name: "tiny"\nversion_policy { specific { versions: 1 } }\n')
    with dripping(beginning, drop) as address:
        url = f"http://{address}"
        assert agreement.read_following(url) is None
        with pytest.raises(CheckError, match="expected an answer of every ensemble, got tiny: timed out; see the"):
            check_ensembles(url, tmp_path, url)
        with pytest.raises(OSError, match="^timed out; what was verified is in "):
            check_answer(url, tmp_path, "tiny", "1")


def change_answer(golden: dict[str, Any]) -> None:
    golden["samples"][0]["outputs"][0]["data"].reverse()


def ask_for_pieces(golden: dict[str, Any]) -> None:
    golden["decoupled"] = True


def bound_labels(golden: dict[str, Any]) -> None:
    output = golden["samples"][0]["outputs"][0]
    output.update(datatype="BYTES", data=["a"] * len(output["data"]))
    golden["tolerances"] = {"max_relative_error": 1e-3}


def count_beyond_floats(golden: dict[str, Any]) -> None:
    output = golden["samples"][0]["outputs"][0]
    output.update(datatype="INT64", data=[10**400] * len(output["data"]))
    golden["tolerances"] = {"max_relative_error": 1e-3}


def ask_for_another(golden: dict[str, Any]) -> None:
    golden["samples"][0]["outputs"][0]["name"] = "ANOTHER"


CHANGES = (change_answer, ask_for_pieces, bound_labels, count_beyond_floats, ask_for_another)


@pytest.mark.rarer
def test_a_recorded_answer_that_was_changed_is_not_the_models_fault(repository: Path, tmp_path: Path) -> None:
    copy = copy_at_first(repository, tmp_path / "models")
    half = publish_half(copy, tmp_path)
    goldens = {name: copy / name / "1" / "golden.json" for name in (NAME, half)}
    whole = {name: path.read_text() for name, path in goldens.items()}

    def damage(name: str, change: Callable[[dict[str, Any]], None]) -> None:
        content = json.loads(whole[name])
        change(content)
        # Other versions may share its bytes.
        goldens[name].unlink()
        goldens[name].write_text(json.dumps(content))

    damage(half, bound_labels)
    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        assert read_ready(server) == (200, "ready, 1 of 2 models\n")
        assert str(goldens[half]) in read_following(server)[half]["reason"]
        goldens[half].write_text(whole[half])
        wait_for(server, lambda models: models[half]["state"] == "served")
        for change in CHANGES:
            damage(NAME, change)
            told = server.check()
            assert told.code == 1 and f"{goldens[NAME]} has changed since it was published" in told.err
            # A container is not restarted for it.
            assert server.check("--any-version").code == 0
        goldens[NAME].write_text(whole[NAME])
        wait_for(server, lambda models: models[NAME]["state"] == "served")
        assert server.check().code == 0
    assert "Traceback" not in "\n".join(server.lines)


def test_a_damaged_recorded_answer_fails_its_version_and_nothing_else(repository: Path, tmp_path: Path) -> None:
    copy = copy_at_first(repository, tmp_path / "models")
    half = publish_half(copy, tmp_path)
    (copy / half / "1" / "golden.json").write_text(build_golden(data=5))
    golden = copy / NAME / "2" / "golden.json"
    whole = golden.read_text()
    golden.write_text(build_golden(data=[10**400]))
    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        assert read_ready(server) == (200, "ready, 1 of 2 models\n")
        assert "golden.json" in read_following(server)[half]["reason"]
        with Callers(server, repository, count=1) as callers:
            activate(copy, 2)
            wait_for(server, lambda models: models[NAME]["state"] == "failed")
            assert str(golden) in read_following(server)[NAME]["reason"]
            checked = server.check()
            assert checked.code == 1 and str(golden) in checked.err and "Traceback" not in checked.err
            golden.write_text(whole)
            wait_for(server, lambda models: models[NAME]["state"] == "served" and models[NAME]["served"] == 2)
        assert callers.failures == [] and set(callers.answers) == {1, 2}
    assert "Traceback" not in "\n".join(server.lines)


@pytest.mark.rarer
def test_a_pipe_among_the_files_of_a_version_is_named_and_waited_for_by_nobody(
    repository: Path, tmp_path: Path
) -> None:
    copy = copy_at_first(repository, tmp_path / "models")
    half = publish_half(copy, tmp_path)
    pipes = [copy / f"{half}_model" / "1" / "model.onnx", copy / f"{NAME}_preprocess" / "2" / "tokenizer.json"]
    whole = [pipe.read_bytes() for pipe in pipes]
    for pipe in pipes:
        put_pipe(pipe)
    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        assert read_ready(server) == (200, "ready, 1 of 2 models\n")
        assert f"{pipes[0]} is no regular file" in read_following(server)[half]["reason"]
        config = copy / NAME / "config.pbtxt"
        with Callers(server, copy, count=1) as callers:
            for part in PARTS:
                shutil.copy(copy / NAME / "2" / "configs" / f"{part}.pbtxt", copy / part / config.name)
            wait_for(server, lambda models: str(pipes[1]) in models[NAME]["reason"])
            # Neighbours are healed meanwhile.
            for stub in server.find_stubs(f"{NAME}_model"):
                stub.kill()
            server.wait_for_line(f"{NAME}_model: answers again", 60)
            for pipe, content in zip(pipes, whole, strict=True):
                pipe.unlink()
                pipe.write_bytes(content)
            wait_for(server, lambda models: all(item["state"] == "served" for item in models.values()))
            wait_for(server, lambda models: models[NAME]["served"] == 2)
        assert set(callers.answers) == {1, 2}


@pytest.mark.parametrize("takes", ["file", "folder"])
@pytest.mark.rarer
def test_a_pipe_that_came_while_it_was_served_is_waited_for_by_nobody_who_loads_it_anew(
    repository: Path, tmp_path: Path, takes: str
) -> None:
    copy = copy_at_first(repository, tmp_path / "models")
    half = publish_half(copy, tmp_path)
    version = copy / f"{NAME}_model" / "1"
    lost, kept = {"file": version / "model.onnx", "folder": version}[takes], tmp_path / "kept"

    def damage() -> None:
        lost.rename(kept)
        if takes == "file":
            os.mkfifo(lost)

    def mend() -> None:
        lost.unlink(missing_ok=True)
        kept.rename(lost)

    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        damage()
        wait_for(server, lambda models: str(lost) in models[NAME]["reason"] and models[NAME]["served"] == 1)
        server.find_stubs(f"{NAME}_model")[0].kill()
        server.wait_for_line("cannot be loaded anew, and is tried again", 60)
        # A neighbour is healed meanwhile.
        server.find_stubs(f"{half}_model")[0].kill()
        server.wait_for_line(f"{half}_model: answers again", 60)
        mend()
        server.wait_for_line(f"{NAME}_model: answers again", 60)
        wait_for(server, lambda models: models[NAME]["state"] == "served")
        damage()
        wait_for(server, lambda models: models[NAME]["state"] == "failed")
        os.kill(server.tritonserver, signal.SIGKILL)
        server.wait_for_line("tritonserver answers again", 60)
        wait_for(server, lambda models: read_ready(server) == (200, "ready, 1 of 2 models\n"))
        assert str(lost) in read_following(server)[NAME]["reason"]
        mend()
        wait_for(server, lambda models: read_ready(server) == (200, "ready\n"))


# root reads everything without these.
WITHOUT_RIGHTS = ("--inh-caps=-dac_override,-dac_read_search", "--bounding-set=-dac_override,-dac_read_search")


@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv is not installed; `apt-get install util-linux`")
@pytest.mark.parametrize(
    "closed",
    [NAME, f"{NAME}_model", f"{NAME}_preprocess/1"],
)
@pytest.mark.rarer
def test_a_folder_that_cannot_be_read_is_named_and_keeps_nobody_else_from_being_served(
    repository: Path, tmp_path: Path, closed: str
) -> None:
    copy = copy_at_first(repository, tmp_path / "models")
    half = publish_half(copy, tmp_path)
    under = ["setpriv", *(WITHOUT_RIGHTS if os.geteuid() == 0 else ())]
    folder = copy / closed
    folder.chmod(0)
    try:
        with running(copy, under=under) as server:
            server.read_until("serving HTTP")
            server.follow()
            assert read_ready(server) == (200, "ready, 1 of 2 models\n")
            assert f"{folder} cannot be read: Permission denied" in read_following(server)[NAME]["reason"]
            folder.chmod(0o755)
            wait_for(server, lambda models: read_ready(server) == (200, "ready\n"))
            (copy / half).chmod(0)
            wait_for(server, lambda models: models[half]["state"] == "failed" and models[half]["served"] == 1)
            # The others are followed all the same.
            for part in PARTS:
                shutil.copy(copy / NAME / "2" / "configs" / f"{part}.pbtxt", copy / part / "config.pbtxt")
            wait_for(server, lambda models: models[NAME]["served"] == 2)
            (copy / half).chmod(0o755)
            wait_for(server, lambda models: models[half]["state"] == "served")
            assert "Traceback" not in "\n".join(server.lines) and not any("Bug" in line for line in server.lines)
    finally:
        for each in (folder, copy / half):
            each.chmod(0o755)


def test_a_version_whose_folder_is_gone_is_named_at_once_and_serves_on(served: tuple[Running, Path]) -> None:
    server, copy = served
    with Callers(server, copy, count=1) as callers:
        for part in PARTS:
            # No other version is there either.
            shutil.move(copy / part, copy.parent / "whole")
            (copy / part).mkdir()
            shutil.copy(copy.parent / "whole" / "config.pbtxt", copy / part)
            # A look may fall between the steps above.
            what = f"{copy / part / '1'} is missing"
            wait_for(server, lambda models: what in models[NAME]["reason"] and models[NAME]["served"] == 1)  # noqa: B023
            assert str(copy / part / "1") in server.check().err
            # A container is not restarted for it: it might have nothing to answer with.
            lenient = server.check("--any-version")
            how = "is ready, but " if part == NAME else "answers as verified within "
            assert lenient.code == 0 and lenient.err.startswith(f"warning: {NAME} {how}")
            shutil.rmtree(copy / part)
            shutil.move(copy.parent / "whole", copy / part)
            wait_for(server, lambda models: models[NAME]["state"] == "served")
    assert callers.failures == [] and set(callers.answers) == {1}


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("followed_model/1/model.onnx", "nothing"),
        ("followed_preprocess/1/tokenizer.json", "folder"),
        pytest.param("followed_model/1/model.onnx", "folder", marks=pytest.mark.rarer),
        pytest.param("followed_preprocess/1/tokenizer.json", "nothing", marks=pytest.mark.rarer),
    ],
)
def test_a_file_that_is_gone_is_named_while_the_model_serves_on(
    served: tuple[Running, Path], tmp_path: Path, file: str, kind: str
) -> None:
    server, copy = served
    (copy / file).rename(tmp_path / "away")
    if kind == "folder":
        (copy / file).mkdir()
    wait_for(server, lambda models: models[NAME]["state"] == "failed" and models[NAME]["served"] == 1)
    what = "missing" if kind == "nothing" else "no regular file"
    told = read_following(server)[NAME]["reason"]
    assert f"{copy / file} is {what}" in told
    assert ("move the file away" in told) == (kind == "folder")
    assert str(copy / file) in server.check().err
    assert server.check("--any-version").code == 0
    if kind == "folder":
        (copy / file).rmdir()
    (tmp_path / "away").rename(copy / file)
    wait_for(server, lambda models: models[NAME]["state"] == "served")
    assert server.check().code == 0


@pytest.mark.rarer
def test_a_link_to_a_folder_that_is_away_leaves_what_is_served(served: tuple[Running, Path], tmp_path: Path) -> None:
    server, copy = served
    (copy / NAME).rename(tmp_path / "away")
    (copy / NAME).symlink_to(tmp_path / "nowhere")
    # A look may fall between the steps above.
    what = f"{copy / NAME} is a link that leads nowhere"
    wait_for(server, lambda models: what in models[NAME]["reason"] and models[NAME]["served"] == 1)
    (copy / NAME).unlink()
    (tmp_path / "away").rename(copy / NAME)
    wait_for(server, lambda models: models[NAME]["state"] == "served")


def test_a_check_passes_hidden_folders_by(served: tuple[Running, Path]) -> None:
    server, copy = served
    shutil.copytree(copy / NAME, copy / f".{NAME}.old")
    done = server.check()
    assert done.code == 0 and f".{NAME}.old" not in done.out + done.err


def test_a_damaged_model_that_lost_its_processes_is_healthy_to_nobody(served: tuple[Running, Path]) -> None:
    server, copy = served
    golden = copy / NAME / "1" / "golden.json"
    whole = golden.read_bytes()
    golden.write_bytes(whole[: len(whole) // 2])
    graph = copy / f"{NAME}_model" / "1" / "model.onnx"
    bytes_of_graph = graph.read_bytes()
    graph.write_bytes(bytes_of_graph[: len(bytes_of_graph) // 2])
    for stub in server.find_stubs(f"{NAME}_model"):
        stub.kill()
    wait_for(server, lambda models: models[NAME]["served"] == 0)
    assert (
        "served as before" not in read_following(server)[NAME]["reason"]
        or "none is served now" in (read_following(server)[NAME]["reason"])
    )
    lenient = server.check("--any-version")
    assert lenient.code == 1 and str(graph) in lenient.err
    # Who has another status port in mind asks the model, which tritonserver calls ready.
    (port,) = find_ports(1)
    lenient = server.check("--any-version", "--status-port", str(port))
    assert lenient.code == 0 and "without its status port (--status-port) nobody can tell whether it" in lenient.err
    golden.write_bytes(whole)
    lenient = server.check("--any-version", "--status-port", str(port))
    assert lenient.code == 1 and f"{graph} has changed since it was published; asked all the same" in lenient.err
    assert "is not healthy" in lenient.err
    graph.write_bytes(bytes_of_graph)
    wait_for(server, lambda models: models[NAME]["state"] == "served" and models[NAME]["served"] == 1)
    assert server.check().code == 0


@pytest.mark.rarer
def test_a_file_that_is_mended_in_place_is_noticed_at_once(served: tuple[Running, Path]) -> None:
    server, copy = served
    graph = copy / f"{NAME}_model" / "2" / "model.onnx"
    whole = graph.read_bytes()
    graph.write_bytes(whole[: len(whole) // 2])
    # As an older release published it: that it is not whole is found out by loading it.
    for name in ("SHA256SUMS", "modelyard.lock.json"):
        (copy / NAME / "2" / name).unlink()
    activate(copy, 2)
    # Tried twice: the third try by itself is 20 s away.
    server.wait_for_line("Tried again in 20 s, or once the repository changes.", 60)
    seen = len(server.lines)
    graph.write_bytes(whole)
    wait_for(server, lambda models: models[NAME]["served"] == 2)
    assert not any("Tried again in 40 s" in line for line in server.lines[seen:])


def test_a_check_of_no_repository_is_refused(served: tuple[Running, Path], tmp_path: Path) -> None:
    server, _ = served
    done = run("-m", "server", "check", "--repository", str(tmp_path / "none"), "--http-port", str(server.http))
    assert done.code == 1 and done.err.startswith(f"error: there is no repository {tmp_path / 'none'}: expected ")
