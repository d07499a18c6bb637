"""A temporary folder from which no program may be started, as `docker run --read-only --tmpfs /tmp` has it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from harness import CHECKOUT, Published
from launcher import mounts, running

from client import Client
from server.tritonserver.installation import find_installation

SCRIPT = 'mount -t tmpfs -o size=16m,noexec tmpfs "$1" && export TMPDIR=$1 PATH=$2:$PATH && shift 2 && exec "$@"'

pytestmark = mounts


def mount(folder: Path, programs: Path) -> list[str]:
    folder.mkdir()
    return ["unshare", "--mount", "sh", "-c", SCRIPT, "sh", str(folder), str(programs)]


def install_as_in_containers(folder: Path) -> Path:
    """Install tritonserver with one stub, inside of the Python backend, and return the folder of its program."""
    found = find_installation()
    source = found.executable.parent.parent
    root = folder / "pytriton" / "tritonserver"
    shutil.copytree(source, root, ignore=shutil.ignore_patterns("python_backend_stubs"))
    shutil.copy2(found.python_stub, root / "backends" / "python")
    (folder / "nvidia_pytriton.libs").symlink_to(source.parent.parent / "nvidia_pytriton.libs")
    return root / "bin"


def test_a_container_serves_and_heals(published: Published, tmp_path: Path) -> None:
    programs = install_as_in_containers(tmp_path / "packages")
    with running(published.repository, under=mount(tmp_path / "temporary", programs)) as server:
        server.read_until(f"starting {programs}/tritonserver (found on PATH)")
        server.read_until("serving HTTP")
        server.follow()
        with Client(f"127.0.0.1:{server.http}", retry_s=60) as client:
            client.embed(["A cat sleeps."])
            os.kill(server.find_stubs("sentence_embedding_preprocess")[0].pid, signal.SIGKILL)
            server.wait_for_line("answers again", limit_s=60)
            client.embed(["A cat sleeps."])
        assert server.stop() == 0


def test_a_wheel_names_another_folder(published: Published, tmp_path: Path) -> None:
    under = mount(tmp_path / "temporary", tmp_path)
    with running(published.repository, under=under) as server:
        assert server.finish() == 1
    (line,) = server.lines
    told = f"no program may be started from the temporary folder {tmp_path}/temporary: expected a file system that is"
    assert line.startswith(f"error: {told}")
    assert "TMPDIR" in line
    shutil.rmtree(tmp_path / "temporary")
    command = [*mount(tmp_path / "temporary", tmp_path), sys.executable, "-m", "server", "doctor", "--json"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    (finding,) = [finding for finding in json.loads(done.stdout) if finding["what"] == "temporary folder"]
    assert finding["verdict"] == "broken"
    assert finding["found"].startswith(told)
