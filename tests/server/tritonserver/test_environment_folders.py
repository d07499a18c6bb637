"""Empty folders that the Python backend makes in /tmp go when their tritonserver has ended, and no others.

A user of their own keeps them apart from those of other tests.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from harness import Published
from launcher import Running, running

TMP = Path("/tmp")
USER = 12346
RIGHTS = "-all,+dac_override,+dac_read_search"
UNDER = ["setpriv", "--reuid", str(USER), "--clear-groups", f"--inh-caps={RIGHTS}"]
UNDER += [f"--ambient-caps={RIGHTS}", f"--bounding-set={RIGHTS}"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="changes its user")


def list_folders() -> set[Path]:
    return {folder for folder in TMP.glob("python_env_*") if folder.lstat().st_uid == USER}


def make_folder(name: str) -> Path:
    folder = TMP / f"python_env_{name}"
    folder.mkdir(mode=0o700)
    os.chown(folder, USER, -1)
    return folder


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    for folder in list_folders():
        shutil.rmtree(folder)
    yield
    for folder in list_folders():
        shutil.rmtree(folder)


@pytest.fixture
def home(published: Published) -> Iterator[Path]:
    """A folder that the user may reach, with the repository: tritonserver asks access(2), which grants no rights."""
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(published.repository, Path(name, "models"), symlinks=True)
        subprocess.run(["chown", "-R", str(USER), name], check=True)
        yield Path(name)


def start(home: Path) -> AbstractContextManager[Running]:
    key = ["--key-file", str(home / "control.key")]
    return running(home / "models", *key, under=UNDER, environment={"TMPDIR": str(home)})


def test_they_go_at_the_end_and_what_was_there_before_or_holds_something_stays(home: Path) -> None:
    before = make_folder("before")
    with start(home) as server:
        server.read_until("serving HTTP")
        assert list_folders() - {before}
        filled = make_folder("filled")
        (filled / "file").touch()
        others_name = make_folder("of_another_program")
        assert server.stop() == 0
    assert list_folders() == {before, filled, others_name}


def test_those_of_a_killed_launcher_go_at_the_next_start(home: Path) -> None:
    with start(home) as server:
        server.read_until("serving HTTP")
        left = list_folders()
        tritonserver = server.tritonserver
        os.kill(tritonserver, signal.SIGSTOP)
        server.process.kill()
        server.process.wait()
        assert left
        with start(home) as second:
            second.read_until("serving HTTP")
            assert not left & list_folders()
            assert second.stop() == 0
    assert not list_folders()


def test_those_that_a_living_tritonserver_may_have_made_stay_until_its_end(home: Path) -> None:
    with start(home) as first:
        first.read_until("serving HTTP")
        with start(home) as second:
            second.read_until("serving HTTP")
            all_of_them = list_folders()
            assert second.stop() == 0
        assert list_folders() == all_of_them
        assert first.stop() == 0
    assert not list_folders()
