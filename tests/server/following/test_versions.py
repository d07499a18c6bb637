"""The verbs beside a running server: it is waited for, it keeps what it serves, and `check` tells where it stands."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from harness import Finished, run
from launcher import find_ports, running

from export.commands.waiting import wait_until_served
from export.errors import ServingError
from server.following.agreement import Told, find_disagreement, is_being_loaded
from server.following.overlay import Overlay


def call(*words: object) -> Finished:
    return run("-m", "export", *map(str, words))


def test_what_a_publication_is_about_to_rename_is_not_shown_to_tritonserver(tmp_path: Path) -> None:
    model = tmp_path / "models" / "m"
    (model / "1").mkdir(parents=True)
    for name in ("config.pbtxt", "staging-config.pbtxt.0123abcd", "inactive-config.pbtxt", "labels.txt"):
        (model / name).touch()
    Overlay(tmp_path / "overlay").show("m", "", model, [1])
    assert sorted(path.name for path in (tmp_path / "overlay" / "m").iterdir()) == ["1", "config.pbtxt", "labels.txt"]


@pytest.mark.rarer
def test_a_server_is_waited_for_forth_and_back_and_tells_why_it_cannot_follow(
    two_versions: Path, tmp_path: Path
) -> None:
    models = Path(shutil.copytree(two_versions, tmp_path / "models"))
    here = ("--repository", models)
    with running(models) as server:
        server.read_until("serving HTTP")
        server.follow()
        wait = (*here, "--wait", f"localhost:{server.status}")
        for version in (2, 1):
            done = call("activate", "tickets", version, *wait)
            assert (done.code, done.out.splitlines()[1:]) == (0, [f"served by localhost:{server.status}"]), done.err
        # Of a version without sums, `activate` looks at the graph and the tokenizer alone: the server finds out.
        golden = models / "tickets" / "2" / "golden.json"
        content = json.loads(golden.read_text())
        for sample in content["samples"]:
            sample["outputs"][0]["data"].reverse()
        golden.write_text(json.dumps(content))
        for record in ("SHA256SUMS", "publication.json"):
            (models / "tickets" / "2" / record).unlink()
        done = call("activate", "tickets", 2, *wait)
        assert done.code == 3
        assert "expected version 2, got version 1, for: version 2 of tickets cannot be served" in done.err
        assert "expected the verified EMBEDDING within" in done.err
        failed = server.check()
        assert (
            failed.code == 1
            and "version 1 is served, and version 2 is active in the repository: version 2" in failed.err
        )
        # A server that answers is not to be restarted for it.
        healthy = server.check("--any-version")
        assert healthy.code == 0
        assert "warning: tickets answers as verified within" in healthy.err
        assert "version 1 is served, and version 2 is active in the repository: version 2" in healthy.err
        # Who cannot ask the launcher does not know of a rollout, nor that it has failed.
        (port,) = find_ports(1)
        asked = server.check("--status-port", str(port))
        assert asked.code == 0
        assert (
            "version 1 is served, version 2 is active; whether it is being rolled out is not known: the status port "
            f"could not be asked at 127.0.0.1:{port}; pass --status-port\n"
        ) in asked.err
        config = models / "tickets" / "config.pbtxt"
        os.utime(config, (time.time(), config.stat().st_mtime - 3600))
        asked = server.check("--status-port", str(port))
        assert asked.code == 1 and " s, and whether it is being rolled out is not known: " in asked.err
        assert call("activate", "tickets", 1, *wait).code == 0
        assert "version 1 is served, version 1 is active" in server.check().err
        # A model that nobody serves any more is unloaded, and the server stays.
        assert call("remove", "tickets", *here).code == 0
        server.wait_for_line("is no longer in the repository; unloaded", 60)
    assert list(models.iterdir()) == []


def test_a_wait_that_is_interrupted_does_not_say_that_nothing_was_done(two_versions: Path) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with running(two_versions) as server:
        server.read_until("serving HTTP")
        url = f"localhost:{server.status}"
        with pytest.raises(
            ServingError, match=f"version 9 of tickets is active in the repository: .* `curl {url}/vers"
        ):
            wait_until_served(url, "tickets", 9, interrupt)


def test_a_model_that_has_just_come_is_to_be_loaded_whatever_its_times(two_versions: Path, tmp_path: Path) -> None:
    models = Path(shutil.copytree(two_versions, tmp_path / "models"))
    os.utime(models / "tickets" / "config.pbtxt", (0, 0))
    assert is_being_loaded(models, "tickets", Told())


def test_a_version_that_is_served_is_not_pruned_and_check_tells_that_it_stays_behind(
    two_versions: Path, tmp_path: Path
) -> None:
    models = Path(shutil.copytree(two_versions, tmp_path / "models"))
    here = ("--repository", models)
    with running(models, "--follow", "off") as server:
        server.read_until("serving HTTP")
        server.follow()
        done = call("activate", "tickets", 2, *here, "--wait", f"localhost:{server.status}")
        assert done.code == 3 and "does not follow it: expected a server with --follow on" in done.err
        done = call("prune", "--keep", 0, *here)
        assert (
            done.out
            == "tickets: removed nothing; kept versions 1, 2, version 1 only because a server still serves it\n"
        )
        checked = server.check()
        assert checked.code == 1 and "version 1 is served, and version 2 is active in the repository; " in checked.err
    assert "removed version 1" in call("prune", "--keep", 0, *here).out


def test_what_nobody_tells_is_a_rollout_for_as_long_as_one_takes_to_be_noticed(
    two_versions: Path, tmp_path: Path
) -> None:
    models = Path(shutil.copytree(two_versions, tmp_path / "models"))
    config = models / "tickets" / "config.pbtxt"
    config.touch()
    assert find_disagreement(models, "tickets", 2, 1, Told()) == ""
    os.utime(config, (time.time(), config.stat().st_mtime - 3600))
    assert "version 2 is active in the repository for 36" in find_disagreement(models, "tickets", 2, 1, Told())
