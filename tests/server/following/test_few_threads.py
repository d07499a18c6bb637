"""Where few threads may run, what is served goes on: tritonserver would abort with all of it."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from another_user import ANOTHER_USER, USER, as_root
from followed import NAME, Callers, activate, copy_at_first, wait_for
from harness import CHECKOUT
from launcher import IMPATIENT, Running, running

from client import Client
from server.tritonserver.processes import count_own_bytes, list_children

_MANY, _SPARE = 600, 20
_TAKE = """
import select, sys, threading
ended = threading.Event()
wanted = int(sys.argv[1])

def take():
    global wanted
    try:
        while wanted:
            threading.Thread(target=ended.wait).start()
            wanted -= 1
    except RuntimeError:
        pass

take()
print("taken", flush=True)
# What others end, if all are wanted.
while wanted and not select.select([sys.stdin], [], [], 0.01)[0]:
    take()
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
    """Leave but a few threads to the user, for another program has the rest; with none, also what ends meanwhile."""
    wanted = _MANY - spare - count_threads() - 1 if spare else _MANY
    command = [*ANOTHER_USER, sys.executable, "-c", _TAKE, str(wanted)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin and program.stdout and program.stdout.readline() == "taken\n"
        yield
        program.stdin.close()


def check_that_a_version_waits(
    server: Running, repository: Path, shortage: contextlib.AbstractContextManager[None], told: str
) -> None:
    pid = server.tritonserver
    with Callers(server, repository) as callers:
        with shortage:
            activate(repository, 2)
            models = wait_for(server, lambda models: models[NAME]["state"] == "failed")
            assert models[NAME]["served"] == 1
            assert f"got {told}: expected " in models[NAME]["reason"]
            assert "; version 1 is served as before, mend that, and it is tried again" in models[NAME]["reason"]
            assert callers.answers.keys() == {1}
        wait_for(server, lambda models: models[NAME]["served"] == 2 and models[NAME]["state"] == "served")
    assert callers.failures == [] and callers.answers.keys() == {1, 2}
    assert server.tritonserver == pid


@as_root
def test_a_version_with_too_few_threads_left_for_it_waits_while_the_one_before_it_answers(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    check_that_a_version_waits(server, repository, few_left(), "too few threads may run")


@as_root
def test_a_model_of_which_a_process_died_is_reloaded_in_place_of_the_others_where_no_more_threads_may_run(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    pid = server.tritonserver
    with few_left(32):
        for step in (f"{NAME}_preprocess", f"{NAME}_model"):
            server.find_stubs(step)[0].kill()
            server.wait_for_line(f"{step}: answers again", 60)
            with Callers(server, repository) as callers:
                wait_for(server, lambda _: callers.answers[1] > 20)
            assert callers.failures == []
    assert server.tritonserver == pid
    assert server.stop() == 0


@as_root
def test_what_is_left_of_a_model_answers_where_it_could_not_be_reloaded_in_their_place_either(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    pid = server.tritonserver
    for step in (f"{NAME}_preprocess", f"{NAME}_model"):
        with few_left(1):
            kill_one_of(step, server, repository, "too few threads may run")
        server.wait_for_line(f"{step}: answers again", 60)
    assert server.tritonserver == pid


def kill_one_of(step: str, server: Running, repository: Path, shortage: str) -> None:
    """End one process of a step, which cannot be reloaded for want of something, and see that the others answer."""
    first, *others = server.find_stubs(step)
    first.kill()
    server.wait_for_line(f"{step} cannot be loaded: expected room for its processes, got {shortage}", 60)
    with Callers(server, repository) as callers:
        wait_for(server, lambda _: callers.answers[1] > 200)
    # Now and then tritonserver 2.51 gives the process that ended a request.
    assert all("is not healthy" in failure for failure in callers.failures)
    assert len(callers.failures) * 10 < callers.answers[1]
    assert {stub.pid for stub in server.find_stubs(step)} >= {stub.pid for stub in others}


@as_root
def test_threads_that_tritonserver_keeps_of_the_dead_are_given_back(served: tuple[Running, Path]) -> None:
    """2.51 keeps some threads for ever of each model of which a request has failed for a dead process."""
    server, repository = served
    step, exhausted = f"{NAME}_model", "keeps threads of backend processes that were replaced, "
    with few_left(60), Callers(server, repository) as callers:
        for _ in range(20):
            answered = callers.answers[1]
            wait_for(server, lambda _, answered=answered: callers.answers[1] > answered + 20)
            # What is left of a model would go on answering, and is left alone.
            for stub in server.find_stubs(step):
                stub.kill()
            server.wait_for_line((f"{step}: answers again", exhausted), 60)
            if exhausted in server.lines[server.read - 1]:
                break
        server.wait_for_line("tritonserver answers again", 60)
        answered = callers.answers[1]
        wait_for(server, lambda _: callers.answers[1] > answered + 100)


class MemoryGroup:
    """A control group with a limit on the memory of those who are in it."""

    def __init__(self, name: str) -> None:
        old = Path("/sys/fs/cgroup/memory")
        self._root = old if old.is_dir() else old.parent
        self.path = self._root / name
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old.is_dir() else ("memory.max", "memory.current")
        self._limit, self._taken = (self.path / file for file in files)
        self._unlimited = "-1" if old.is_dir() else "max"
        self._prefix = "total_" if old.is_dir() else ""

    def leave(self, spare_bytes: int) -> None:
        """Let those who are in it take but so much more, for which the cache of files is given up."""
        taken = int(self._taken.read_text())
        words = (self.path / "memory.stat").read_text().split()
        for state in ("active", "inactive"):
            taken -= int(words[words.index(f"{self._prefix}{state}_file") + 1])
        # A file of the kernel's, there only where the controller is on.
        with self._limit.open("r+") as file:
            file.write(str(taken + spare_bytes))

    def lift(self) -> None:
        self._limit.write_text(self._unlimited)

    def leave_it(self) -> None:
        for pid in (self.path / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (self._root / "cgroup.procs").write_text(pid)


@contextlib.contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup]:
    group = MemoryGroup(name)
    try:
        group.path.mkdir()
        group.leave(1 << 40)
    except OSError as exc:
        wait_until_gone(group.path)
        pytest.skip(f"no control group of memory can be made here: {exc.strerror}")
    try:
        yield group
    finally:
        group.lift()
        group.leave_it()
        wait_until_gone(group.path)


@contextlib.contextmanager
def little_memory(server: Running, spare_bytes: int) -> Iterator[None]:
    """Leave but so many bytes to a launcher and all that it has started, in a control group."""
    with memory_group(f"modelyard_{server.tritonserver}") as group:
        group.leave(spare_bytes)
        launcher = server.process.pid
        # What they have taken so far stays with the group that they were in.
        for pid in (launcher, *list_descendants(launcher)):
            (group.path / "cgroup.procs").write_text(str(pid))
        yield


def list_descendants(pid: int) -> list[int]:
    children = list_children(pid)
    return [*children, *(each for child in children for each in list_descendants(child))]


def wait_until_gone(group: Path) -> None:
    end = time.monotonic() + 30
    while group.exists() and time.monotonic() < end:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.2)


@as_root
def test_what_is_left_of_a_model_answers_where_too_little_memory_is_left_to_reload_it(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    pid, step = server.tritonserver, f"{NAME}_preprocess"
    with little_memory(server, 40 << 20):
        kill_one_of(step, server, repository, "too little memory may be taken")
    server.wait_for_line(f"{step}: answers again", 60)
    assert server.tritonserver == pid


@as_root
def test_a_version_with_too_little_memory_left_for_it_waits_while_the_one_before_it_answers(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    check_that_a_version_waits(server, repository, little_memory(server, 40 << 20), "too little memory may be taken")


@as_root
def test_a_model_of_which_nothing_is_left_waits_until_there_is_memory_for_it(served: tuple[Running, Path]) -> None:
    server, _ = served
    pid, step = server.tritonserver, f"{NAME}_preprocess"
    with little_memory(server, 40 << 20):
        for stub in server.find_stubs(step):
            stub.kill()
        server.wait_for_line(f"{step} cannot be loaded: expected room for its processes, got too little memory", 60)
    server.wait_for_line(f"{step}: answers again", 60)
    assert server.tritonserver == pid


@as_root
def test_a_process_that_tritonserver_forgets_gives_its_memory_to_the_reload_of_its_model(
    repository: Path, tmp_path: Path
) -> None:
    """2.51 never releases what is left of a model of which a request has failed for a dead process."""
    copy = copy_at_first(repository, tmp_path / "models")
    with memory_group(f"modelyard_{tmp_path.parent.name}_{tmp_path.name}") as group:
        inside = f'echo $$ > {group.path}/cgroup.procs && exec "$@"'
        with running(copy, under=["sh", "-c", inside, "sh"]) as server:
            server.read_until("serving HTTP")
            server.follow()
            pid, step = server.tritonserver, f"{NAME}_preprocess"
            with Callers(server, copy, count=8) as callers:
                wait_for(server, lambda _: callers.answers[1] > 100)
                first, *others = server.find_stubs(step)
                # Enough for what is unloaded first, and not for both beside what is left.
                group.leave(int((0.6 + len(others) / 2) * count_own_bytes(first.pid)))
                first.kill()
                server.wait_for_line(f"{step}: answers again", 60)
                answered = callers.answers[1]
                wait_for(server, lambda _: callers.answers[1] > answered + 100)
            assert server.tritonserver == pid
            assert not {stub.pid for stub in server.find_stubs(step)} & {stub.pid for stub in others}


# Of 60 threads one is its own, and two processes have 24.
_KEEP = """
import os, resource
from server.errors import ShortageError
from server.following.room import Room
os.setresuid(54321, 54321, 54321)
resource.setrlimit(resource.RLIMIT_NPROC, (60, 60))
room = Room()
with room.keep(2):
    try:
        with room.keep(2):
            pass
    except ShortageError as exc:
        print(exc)
with room.keep(2):
    print("kept")
"""


@as_root
def test_what_is_started_at_once_does_not_count_on_the_same_threads() -> None:
    done = subprocess.run([sys.executable, "-c", _KEEP], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    refused, kept = done.stdout.splitlines()
    assert refused.startswith("too few threads may run: expected 64 more at least, got 59; ") and kept == "kept"


# Two processes want 40 threads; those that ended give back 16.
_ANEW = """
import os, resource, sys
from server.limits import frees_enough_threads
free, held, whole = map(int, sys.argv[1:])
os.setresuid(54321, 54321, 54321)
resource.setrlimit(resource.RLIMIT_NPROC, (free + 1, free + 1))
print(frees_enough_threads(2, 2, held, whole))
"""


@as_root
@pytest.mark.parametrize(
    ("free", "held", "whole", "is_enough"),
    [
        (20, 140, 150, True),
        (20, 140, 170, False),
        # The dead give back enough, however many there were.
        (30, 140, 999, True),
        # A start takes more.
        (20, 100, 110, False),
        (30, 90, 999, False),
        # Enough are free already.
        (60, 140, 150, False),
    ],
)
def test_a_tritonserver_is_ended_for_its_threads_only_where_the_next_one_has_enough(
    free: int, held: int, whole: int, is_enough: bool
) -> None:
    command = [sys.executable, "-c", _ANEW, str(free), str(held), str(whole)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{is_enough}\n"


@as_root
def test_what_was_activated_while_no_thread_could_start_is_served_once_one_can(served: tuple[Running, Path]) -> None:
    server, repository = served
    with few_left(0):
        activate(repository, 2)
        server.wait_for_line("cannot look after tritonserver for now: ", 60)
    wait_for(server, lambda models: models[NAME]["served"] == 2 and models[NAME]["state"] == "served")


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


# Has another program take all threads but two for some seconds, once; tritonserver wants four for each instance.
_HUNGRY = """
import pathlib, subprocess

_TAKE = '''
import contextlib, pathlib, sys, threading, time

def count_free():
    found = 0
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += len([*(process / "task").iterdir()]) if process.stat().st_uid == {user} else 0
    return {limit} - found

end, is_told = time.monotonic() + 5, False
while time.monotonic() < end:
    with contextlib.suppress(RuntimeError):
        for _ in range(count_free() - 2):
            threading.Thread(target=time.sleep, args=(end - time.monotonic(),)).start()
    if not is_told:
        is_told = True
        print("taken", flush=True)
'''

class TritonPythonModel:
    def initialize(self, args):
        fuse = pathlib.Path({fuse!r})
        if fuse.exists():
            fuse.unlink()
            program = subprocess.Popen([{python!r}, "-c", _TAKE], stdout=subprocess.PIPE)
            program.stdout.readline()
"""
_CONFIG = """
name: "hungry"
backend: "python"
input {{ name: "X" data_type: TYPE_FP32 dims: [1] }}
output {{ name: "Y" data_type: TYPE_FP32 dims: [1] }}
instance_group {{ kind: KIND_CPU }}
version_policy {{ specific {{ versions: {version} }} }}
"""


@as_root
def test_a_tritonserver_that_hangs_over_threads_that_it_could_not_start_is_started_anew() -> None:
    with tempfile.TemporaryDirectory() as folder:
        repository, fuse = Path(folder, "models"), Path(folder, "open", "fuse")
        fuse.parent.mkdir()
        hungry = _HUNGRY.format(user=USER, fuse=str(fuse), limit=_MANY, python=sys.executable)
        for version in ("1", "2"):
            (repository / "hungry" / version).mkdir(parents=True)
            (repository / "hungry" / version / "model.py").write_text(hungry)
        config = repository / "hungry" / "config.pbtxt"
        config.write_text(_CONFIG.format(version=1))
        subprocess.run(["chmod", "-R", "a+rwX", folder], check=True)
        under = ["prlimit", f"--nproc={_MANY}:{_MANY}", *ANOTHER_USER]
        with running(repository, "--key-file", f"{folder}/control.key", under=under, program=IMPATIENT) as server:
            server.read_until("serving HTTP")
            server.follow()
            hang = "tritonserver still loads hungry, whose processes have ended; starting it anew"
            # Where other threads end meanwhile it gets its four.
            for version in (2, 1) * 3:
                fuse.touch()
                config.write_text(_CONFIG.format(version=version))
                server.wait_for_line((hang, "hungry: is served"), 60)
                if hang in server.lines[server.read - 1]:
                    break
                time.sleep(5)
            assert hang in server.lines[server.read - 1]
            server.wait_for_line("tritonserver answers again", 60)
            wait_for(server, lambda models: "hungry" not in models)
            assert not fuse.exists() and server.stop() == 0
