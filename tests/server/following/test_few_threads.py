"""Where few threads may run, what is served goes on: tritonserver would abort with all of it."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from another_user import ANOTHER_USER, USER, as_root
from followed import NAME, Callers, activate, copy_at_first, wait_for
from launcher import Running, running

from client import Client

_MANY, _SPARE = 600, 20
_TAKE = """
import sys, threading
ended = threading.Event()
for _ in range(int(sys.argv[1])):
    threading.Thread(target=ended.wait).start()
print("taken", flush=True)
sys.stdin.read()
ended.set()
"""


@pytest.fixture
def served(repository: Path, tmp_path: Path) -> Iterator[tuple[Running, Path]]:
    key = ["--key-file", str(tmp_path / "control.key")]
    # Where another user comes to: the folders of pytest are root's alone.
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_at_first(repository, Path(folder, "models"))
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        with running(copy, *key, under=["prlimit", f"--nproc={_MANY}:{_MANY}", *ANOTHER_USER]) as server:
            server.read_until("serving HTTP")
            server.follow()
            yield server, copy


def count_threads() -> int:
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        # One may end meanwhile.
        with contextlib.suppress(OSError):
            found += sum(1 for _ in (process / "task").iterdir()) if process.stat().st_uid == USER else 0
    return found


@contextlib.contextmanager
def few_left(spare: int = _SPARE) -> Iterator[None]:
    """Leave but a few threads to the user, for another program has the rest."""
    command = [*ANOTHER_USER, sys.executable, "-c", _TAKE, str(_MANY - spare - count_threads() - 1)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin and program.stdout and program.stdout.readline() == "taken\n"
        yield
        program.stdin.close()


@as_root
def test_a_version_with_too_few_threads_left_for_it_waits_while_the_one_before_it_answers(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    pid = server.tritonserver
    with Callers(server, repository) as callers:
        with few_left():
            activate(repository, 2)
            models = wait_for(server, lambda models: models[NAME]["state"] == "failed")
            assert models[NAME]["served"] == 1
            assert "got too few threads may run: expected " in models[NAME]["reason"]
            assert "; version 1 is served as before, mend that, and it is tried again" in models[NAME]["reason"]
            assert callers.answers.keys() == {1}
        wait_for(server, lambda models: models[NAME]["served"] == 2 and models[NAME]["state"] == "served")
    assert callers.failures == [] and callers.answers.keys() == {1, 2}
    assert server.tritonserver == pid


@as_root
def test_a_model_of_which_a_process_died_is_reloaded_in_place_of_the_others_where_no_more_threads_may_run(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    pid = server.tritonserver
    with few_left():
        for step in (f"{NAME}_preprocess", f"{NAME}_model"):
            server.find_stubs(step)[0].kill()
            server.wait_for_line(f"{step}: answers again", 60)
            with Callers(server, repository) as callers:
                wait_for(server, lambda _: callers.answers[1] > 20)
            assert callers.failures == []
    assert server.tritonserver == pid
    assert server.stop() == 0


@as_root
def test_several_texts_are_tokenized_at_once_where_no_thread_can_start(served: tuple[Running, Path]) -> None:
    server, _ = served
    texts = [f"text {number}" for number in range(8)]
    assert len(server.find_stubs(f"{NAME}_preprocess")) > 1
    with few_left(0), ThreadPoolExecutor(8) as pool:

        def embed(_: int) -> tuple[int, ...]:
            with Client(f"127.0.0.1:{server.http}", model=NAME) as client:
                return client.embed(texts).shape

        # Each of the processes has a first time.
        assert set(pool.map(embed, range(64))) == {(8, 16)}
