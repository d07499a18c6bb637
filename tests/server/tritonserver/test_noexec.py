"""A temporary folder from which no program may be started, as `docker run --read-only --tmpfs /tmp` has it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from harness import CHECKOUT, Published
from launcher import install_as_in_containers, mounts, running

from client import Client

SCRIPT = 'mount -t tmpfs -o size=16m,noexec tmpfs "$1" && export TMPDIR=$1 && shift && exec "$@"'

pytestmark = mounts


def mount(folder: Path) -> list[str]:
    folder.mkdir()
    return ["unshare", "--mount", "sh", "-c", SCRIPT, "sh", str(folder)]


def examine(folder: Path, **environment: str) -> dict[str, str]:
    """Return what `doctor` says of such a folder."""
    command = [*mount(folder), sys.executable, "-m", "server", "doctor", "--json"]
    done = subprocess.run(
        command, cwd=CHECKOUT, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    (finding,) = [finding for finding in json.loads(done.stdout) if finding["what"] == "temporary folder"]
    return finding


def test_a_container_serves_and_heals(published: Published, tmp_path: Path) -> None:
    environment = install_as_in_containers(tmp_path / "tritonserver")
    under = mount(tmp_path / "temporary")
    with running(published.repository, under=under, environment=environment) as server:
        server.read_until("(found on PATH)")
        server.read_until("serving HTTP")
        server.follow()
        with Client(f"127.0.0.1:{server.http}", retry_s=60) as client:
            client.embed(["A cat sleeps."])
            os.kill(server.find_stubs("sentence_embedding_preprocess")[0].pid, signal.SIGKILL)
            server.wait_for_line("answers again", limit_s=60)
            client.embed(["A cat sleeps."])
        assert server.stop() == 0
    finding = examine(tmp_path / "doctor", **environment)
    assert (finding["verdict"], finding["remedy"]) == ("warning", "mount it with exec, or name another in TMPDIR")


def test_a_wheel_names_another_folder(published: Published, tmp_path: Path) -> None:
    under = mount(tmp_path / "temporary")
    with running(published.repository, under=under) as server:
        assert server.finish() == 1
    (line,) = server.lines
    told = f"no program may be started from the temporary folder {tmp_path}/temporary: expected a file system that is"
    assert line.startswith(f"error: {told}")
    assert "TMPDIR" in line
    finding = examine(tmp_path / "doctor")
    assert finding["verdict"] == "broken"
    assert finding["found"].startswith(told.replace(f"{tmp_path}/temporary", f"{tmp_path}/doctor"))
