"""A tritonserver that comes to grief while it loads is started anew, and one that stands still is found."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from followed import read_following, read_ready, wait_for
from harness import Published
from launcher import IMPATIENT, Running, running

from server.tritonserver import stillness
from server.tritonserver.backend_processes import STUB
from server.tritonserver.processes import is_handling, list_children, read_stat
from server.tritonserver.stillness import STILL_LOOKS, LoadWatch, Stillness, list_server

READS = "import sys, time\nfile = open('/dev/zero', 'rb', 0)\nwhile True:\n    file.read(1)\n    time.sleep(0.001)"
COMPUTES = "while True: pass"
WAITS = "import time; time.sleep(1000)"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@contextmanager
def child_that(does: str) -> Iterator[int]:
    """Run a program whose child does something; yield its id once the child does it."""
    with subprocess.Popen([sys.executable, "-c", PARENT, does], start_new_session=True) as parent:
        try:
            # Twice the same: both have begun, and wait if that is what they do.
            seen: list[int] = []
            while len(seen) < 20 or (does == WAITS and len(set(seen[-20:])) > 1):
                stats = [read_stat(pid) for pid in (parent.pid, *list_children(parent.pid))]
                if len(stats) == 2:
                    seen.append(sum(stat.cpu_ticks for stat in stats if stat))
                    signal.sigtimedwait([], 0.02)
            yield parent.pid
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def look(pid: int, pause_s: float) -> Stillness:
    found = Stillness(partial(list_server, pid))
    for _ in range(STILL_LOOKS + 1):
        found.look()
        signal.sigtimedwait([], pause_s)
    return found


def test_one_whose_processes_all_wait_stands_still() -> None:
    with child_that(WAITS) as pid:
        assert look(pid, 0).is_over


@pytest.mark.parametrize("does", [COMPUTES, READS], ids=["computes", "reads"])
def test_one_whose_child_gets_on_does_not(does: str) -> None:
    with child_that(does) as pid:
        assert not look(pid, 0.02).is_over


# Computes for less than a tick whenever it is told to, without a byte read.
BLINKS = """
import signal, time
while True:
    signal.sigwait([signal.SIGUSR1])
    end = time.process_time() + 0.004
    while time.process_time() < end: pass
    print(flush=True)
"""


def test_many_that_idle_are_as_still_as_one() -> None:
    # Those that a program is started with are blocked in it as well.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    processes = [subprocess.Popen([sys.executable, "-c", BLINKS], stdout=subprocess.PIPE) for _ in range(10)]
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    found = Stillness(lambda: [process.pid for process in processes])
    try:
        looks = 0
        while not found.lasts(5) and looks < 200:
            looks += 1
            for process in processes:
                process.send_signal(signal.SIGUSR1)
            for process in processes:
                assert process.stdout is not None
                process.stdout.readline()
            signal.sigtimedwait([], 0.005)
            found.look()
        assert found.lasts(5)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("does", "stops"), [(WAITS, True), (COMPUTES, False), pytest.param(READS, False, marks=pytest.mark.rarer)]
)
def test_a_load_is_waited_for_as_long_as_what_was_started_for_it_gets_on(
    does: str, stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stillness, "_LOAD_LOOK_S", 0)
    monkeypatch.setattr(stillness, "_LAST_WORD_S", 0)
    # As a stub is told what it loads: <repository>/<model>/<version>/<file>.
    code = tmp_path / "slow" / "1" / "model.py"
    code.parent.mkdir(parents=True)
    code.write_text(does)
    stub = tmp_path / STUB
    stub.symlink_to(sys.executable)
    # What was there before does what it does, and so does what comes for another model.
    with child_that(COMPUTES):
        watch = LoadWatch(os.getpid(), "slow")
        with child_that(COMPUTES), subprocess.Popen([stub, code]) as loading:
            looks = 0
            while not (stopped := watch.has_stopped()) and looks < (20_000 if stops else 400):
                looks += 1
                signal.sigtimedwait([], 0.002 if stops else 0.005)
            assert stopped == stops
            if stops:
                assert loading.wait(10) == -signal.SIGKILL, "tritonserver would wait for it"
            assert (loading.poll() is not None) == stops
            loading.kill()


# Ends the tritonserver that loads it.
DEADLY = """
import os, signal, time

class TritonPythonModel:
    def initialize(self, args):
        os.kill(os.getppid(), signal.{signal})
        time.sleep(5)
"""
HARMLESS = """
class TritonPythonModel:
    pass
"""
# Is loaded once a file is gone.
WAITING = """
import os, time

class TritonPythonModel:
    def initialize(self, args):
        while os.path.exists("{fuse}"):
            time.sleep({pause_s})
"""
DEADLY_CONFIG = """
name: "deadly"
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [1] }
output { name: "Y" data_type: TYPE_FP32 dims: [1] }
instance_group { kind: KIND_CPU }
"""


ACTIVE = "version_policy {{ specific {{ versions: {} }} }}\n"


@pytest.mark.rarer
def test_what_tritonserver_does_not_survive_is_not_tried_again_and_again(published: Published, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    shutil.copytree(published.repository, repository)
    with running(repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        staged = tmp_path / "deadly"
        (staged / "1").mkdir(parents=True)
        (staged / "1" / "model.py").write_text(DEADLY.format(signal="SIGABRT"))
        (staged / "config.pbtxt").write_text(DEADLY_CONFIG)
        staged.rename(repository / "deadly")
        server.wait_for_line("as it was loaded. Tried again in 10 s", 60)
        server.wait_for_line("tritonserver answers again", 60)
        seen = server.read
        server.wait_for_line("active: tritonserver crashed 2 times as it was loaded", 60)
        server.wait_for_line("tritonserver answers again", 60)
        assert not any("Tried again in" in line for line in server.lines[seen:])
        assert server.check().code == 1
        assert "sentence_embedding answers as verified" in server.check("--any-version").err
        # Longer than until the next try.
        signal.sigtimedwait([], 25)
        assert server.read_metrics()["modelyard_tritonserver_restarts_total"] == 2
        config = repository / "deadly" / "config.pbtxt"
        known = read_following(server)["deadly"]
        assert known["state"] == "failed" and f"`touch {config}`" in known["reason"]
        # Mended, it is tried by itself; so it is as it was once it is touched.
        config.touch()
        server.wait_for_line("active: tritonserver crashed 3 times as it was loaded", 60)
        (config.parent / "1" / "model.py").write_text(HARMLESS)
        wait_for(server, lambda models: "deadly" not in models and read_ready(server) == (200, "ready\n"))


@pytest.mark.rarer
def test_a_model_whose_loading_others_cut_off_is_tried_until_it_is_loaded(published: Published, tmp_path: Path) -> None:
    repository, fuse = tmp_path / "models", tmp_path / "fuse"
    shutil.copytree(published.repository, repository)
    with running(repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        staged = tmp_path / "slow"
        (staged / "1").mkdir(parents=True)
        fuse.touch()
        (staged / "1" / "model.py").write_text(WAITING.format(fuse=str(fuse), pause_s=0.05))
        (staged / "config.pbtxt").write_text(DEADLY_CONFIG.replace("deadly", "slow"))
        staged.rename(repository / "slow")
        for _ in range(2):
            while not server.find_stubs("slow"):
                time.sleep(0.05)
            os.kill(server.tritonserver, signal.SIGKILL)
            server.wait_for_line("tritonserver answers again", 60)
            reason = wait_for(server, lambda models: "was killed" in models["slow"]["reason"])["slow"]["reason"]
            assert "got the end of tritonserver (" in reason and "tritonserver was killed by signal 9." in reason
        fuse.unlink()
        wait_for(server, lambda models: "slow" not in models and read_ready(server) == (200, "ready\n"))
        assert not any("Not tried again" in line for line in server.lines)


def copy_with_slow(published: Published, repository: Path, fuse: Path, pause_s: float = 0.05) -> Path:
    """Copy a repository, with a model whose version 2 is loaded once `fuse` is gone; return its configuration."""
    shutil.copytree(published.repository, repository)
    folder = repository / "slow"
    for version, text in (("1", HARMLESS), ("2", WAITING.format(fuse=str(fuse), pause_s=pause_s))):
        (folder / version).mkdir(parents=True)
        (folder / version / "model.py").write_text(text)
    config = folder / "config.pbtxt"
    config.write_text(DEADLY_CONFIG.replace("deadly", "slow") + ACTIVE.format(1))
    fuse.touch()
    return config


def test_a_neighbour_is_healed_while_a_version_of_another_is_loaded_for_long(
    published: Published, tmp_path: Path
) -> None:
    repository, fuse = tmp_path / "models", tmp_path / "fuse"
    config = copy_with_slow(published, repository, fuse)
    with running(repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        processes = len(server.find_stubs("slow"))
        config.write_text(config.read_text().replace("versions: 1", "versions: 2"))
        while len(server.find_stubs("slow")) == processes:
            time.sleep(0.05)
        server.find_stubs("sentence_embedding_model")[0].kill()
        server.wait_for_line("sentence_embedding_model: answers again", 60)
        assert "slow_model: answers" not in "".join(server.lines) and fuse.exists()
        fuse.unlink()
        wait_for(server, lambda models: read_ready(server) == (200, "ready\n"))


@pytest.mark.rarer
def test_a_load_that_does_nothing_is_ended_and_tried_again_from_the_beginning(
    published: Published, tmp_path: Path
) -> None:
    repository, fuse = tmp_path / "models", tmp_path / "fuse"
    config = copy_with_slow(published, repository, fuse, pause_s=1)
    with running(repository, program=IMPATIENT) as server:
        server.read_until("serving HTTP")
        server.follow()
        config.write_text(config.read_text().replace("versions: 1", "versions: 2"))
        for _ in range(2):
            server.wait_for_line("ERROR: slow cannot be served", 60)
        assert read_following(server)["slow"]["state"] == "failed", "also while it is tried again"
        fuse.unlink()
        wait_for(server, lambda models: "slow" not in models and read_ready(server) == (200, "ready\n"))


def add_versions(repository: Path, name: str, *codes: str) -> None:
    """Add a model, made by hand, of whose versions the first is active."""
    for number, code in enumerate(codes, 1):
        (repository / name / str(number)).mkdir(parents=True)
        (repository / name / str(number) / "model.py").write_text(code)
    (repository / name / "config.pbtxt").write_text(DEADLY_CONFIG.replace("deadly", name) + ACTIVE.format(1))


def activate(repository: Path, name: str, version: int) -> None:
    (repository / name / "config.pbtxt").write_text(DEADLY_CONFIG.replace("deadly", name) + ACTIVE.format(version))


def hang(server: Running, repository: Path, name: str) -> None:
    """Make a version active that does nothing as it is loaded; return once it does."""
    activate(repository, name, 2)
    while len(server.find_stubs(name)) < 2:
        time.sleep(0.05)


@pytest.mark.rarer
def test_what_waits_for_a_load_that_does_nothing_is_brought_before_that_is_tried_again(tmp_path: Path) -> None:
    repository, fuse = tmp_path / "models", tmp_path / "fuse"
    fuse.touch()
    add_versions(repository, "first", HARMLESS, WAITING.format(fuse=fuse, pause_s=1))
    add_versions(repository, "second", HARMLESS, HARMLESS)
    with running(repository, program=IMPATIENT) as server:
        server.read_until("serving HTTP")
        server.follow()
        hang(server, repository, "first")
        activate(repository, "second", 2)
        server.wait_for_line("ERROR: first cannot be served", 60)
        told = server.lines[server.read - 1]
        assert "got first stands still while it is loaded: expected one of its processes to compute or to read" in told
        assert "got nothing done in 4 looks, so they were ended" in told and told.endswith("the repository changes.")
        server.wait_for_line(("ERROR: first", "second: is served"), 60)
        assert "second: is served" in server.lines[server.read - 1]
        server.wait_for_line("ERROR: first cannot be served", 60)


def test_what_is_still_being_loaded_as_tritonserver_starts_is_named(tmp_path: Path) -> None:
    repository, fuse = tmp_path / "models", tmp_path / "fuse"
    fuse.touch()
    add_versions(repository, "first", WAITING.format(fuse=fuse, pause_s=0.1))
    add_versions(repository, "second", HARMLESS)
    with running(repository) as server:
        server.read_until("loading models, 5 s, first among them")
        fuse.unlink()
        server.read_until("serving HTTP")


@pytest.mark.rarer
def test_what_does_nothing_as_tritonserver_starts_keeps_no_other_model_from_being_served(tmp_path: Path) -> None:
    repository, fuse = tmp_path / "models", tmp_path / "fuse"
    fuse.touch()
    for name in ("first", "second"):
        add_versions(repository, name, WAITING.format(fuse=fuse, pause_s=1))
    for name in ("third", "fourth"):
        add_versions(repository, name, HARMLESS)
    with running(repository, program=IMPATIENT) as server:
        server.read_until("serving HTTP")
        server.follow()
        assert sum("starting it anew" in line for line in server.lines) == 1
        assert read_ready(server) == (200, "ready, 2 of 4 models\n")
        known = read_following(server)
        assert {*known} == {"first", "second"} and {each["state"] for each in known.values()} == {"failed"}
        assert "first stands still while it is loaded: " in known["first"]["reason"]
        assert "got nothing done in 8 looks; it is not served" in known["first"]["reason"]
        # Each is tried again like a rollout.
        server.read = len(server.lines)
        for name in ("first", "second"):
            server.wait_for_line(f"ERROR: {name} cannot be served", 60)
            assert "nothing done in 4 looks, so they were ended" in server.lines[server.read - 1]
        fuse.unlink()
        wait_for(server, lambda models: not models and read_ready(server) == (200, "ready\n"))


@pytest.mark.parametrize(
    "is_removed", [pytest.param(False, id="set back", marks=pytest.mark.rarer), pytest.param(True, id="removed")]
)
def test_of_a_load_that_ends_when_nobody_wants_it_any_more_no_further_try_is_promised(
    is_removed: bool, tmp_path: Path
) -> None:
    repository, fuse = tmp_path / "models", tmp_path / "fuse"
    fuse.touch()
    add_versions(repository, "first", HARMLESS, WAITING.format(fuse=fuse, pause_s=1))
    add_versions(repository, "second", HARMLESS)
    with running(repository, program=IMPATIENT) as server:
        server.read_until("serving HTTP")
        server.follow()
        hang(server, repository, "first")
        if is_removed:
            (repository / "first").rename(tmp_path / "away")
        else:
            activate(repository, "first", 1)
        server.wait_for_line("ERROR: first cannot be served", 60)
        told = server.lines[server.read - 1]
        assert told.endswith(". It is no longer what the repository has.") and "as before" not in told
        wait_for(server, lambda models: "first" not in models and read_ready(server) == (200, "ready\n"))


def test_where_nothing_can_be_served_no_further_try_is_promised(published: Published, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    shutil.copytree(published.repository, repository)
    (repository / "sentence_embedding_model" / "1" / "model.onnx").write_bytes(b"cut")
    with running(repository) as server:
        server.read_until("can be served: expected at least one of sentence_embedding to load, got none")
        assert server.process.wait(30) == 1
    assert any("ERROR: version 1 of sentence_embedding cannot be served: " in line for line in server.lines)
    assert not any("Tried again" in line for line in server.lines)


@pytest.mark.rarer
def test_what_tritonserver_does_not_survive_at_its_start_keeps_no_other_model_from_being_served(
    published: Published, tmp_path: Path
) -> None:
    repository = tmp_path / "models"
    shutil.copytree(published.repository, repository)
    (repository / "deadly" / "1").mkdir(parents=True)
    (repository / "deadly" / "1" / "model.py").write_text(DEADLY.format(signal="SIGABRT"))
    (repository / "deadly" / "config.pbtxt").write_text(DEADLY_CONFIG)
    with running(repository) as server:
        server.read_until("loading one model after another")
        server.follow()
        server.wait_for_line("sentence_embedding: version 1 is served", 60)
        server.wait_for_line("active: tritonserver crashed 2 times as it was loaded", 90)
        server.wait_for_line("tritonserver answers again", 60)
        assert server.check().code == 1
        assert "sentence_embedding answers as verified" in server.check("--any-version").err
        assert server.read_metrics()["modelyard_models_served"] == 1


def test_what_is_loaded_alone_waits_for_its_turn_and_has_not_failed(tmp_path: Path) -> None:
    repository, fuse = tmp_path / "models", tmp_path / "fuse"
    fuse.touch()
    add_versions(repository, "any", WAITING.format(fuse=fuse, pause_s=0.05))
    add_versions(repository, "deadly", DEADLY.format(signal="SIGABRT"))
    add_versions(repository, "other", HARMLESS)
    with running(repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        while not server.find_stubs("any"):
            time.sleep(0.05)
        known = read_following(server)
        assert {each["state"] for each in known.values()} == {"rolling"} and known["any"]["reason"] == ""
        waits = "waits until it is its turn to be loaded alone, for tritonserver did not start with all models"
        assert known["deadly"]["reason"] == known["other"]["reason"] == waits
        fuse.unlink()
        server.wait_for_line("as it was loaded. Tried again in 10 s", 60)
        server.wait_for_line(("other: is served", "ERROR: deadly"), 60)
        assert "other: is served" in server.lines[server.read - 1]
        wait_for(server, lambda models: {*models} == {"deadly"} and models["deadly"]["state"] == "failed")


# What tritonserver's handler of a deadly signal ends with, and where it stays if its memory is corrupt.
STAYS = "#include <unistd.h>\nint raise(int number) { (void)number; for (;;) pause(); }\n"


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler: apt install gcc")
def test_a_tritonserver_that_crashes_and_does_not_end_is_started_anew(published: Published, tmp_path: Path) -> None:
    (tmp_path / "stays.c").write_text(STAYS)
    library = tmp_path / "stays.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "stays.c"], check=True)
    with running(published.repository, environment={"LD_PRELOAD": str(library)}) as server:
        server.read_until("serving HTTP")
        server.follow()
        os.kill(server.tritonserver, signal.SIGABRT)
        server.wait_for_line(f"tritonserver crashed with signal {signal.SIGABRT:d} and did not end", 30)
        server.wait_for_line("tritonserver answers again", 120)
        assert server.check().code == 0


@pytest.mark.parametrize(
    ("blocked", "handles"),
    [("{}", False), ("{signal.SIGABRT}", True), ("{signal.SIGSEGV}", False), ("signal.valid_signals()", False)],
    ids=["none", "it", "another", "all"],
)
def test_a_process_that_handles_a_signal_is_told_from_one_that_does_not(blocked: str, handles: bool) -> None:
    code = (
        f"import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, {blocked}); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = is_handling(process.pid, signal.SIGABRT)
        process.kill()
    assert found == handles


def test_a_tritonserver_that_is_killed_before_it_serves_is_started_anew(published: Published) -> None:
    with running(published.repository) as server:
        while not any(map(list_children, list_children(server.process.pid))):
            signal.sigtimedwait([], 0.01)
        os.kill(server.tritonserver, signal.SIGABRT)
        server.read_until("got signal 6; see its log above.")
        server.read_until("serving HTTP")


@pytest.mark.skipif("MODELYARD_KILLS" not in os.environ, reason="takes two minutes: make kills")
def test_a_tritonserver_that_waits_for_a_stopped_backend_process_is_started_anew(published: Published) -> None:
    with running(published.repository) as server:
        while not any(map(list_children, list_children(server.process.pid))):
            signal.sigtimedwait([], 0.01)
        (stub, *_) = list_children(server.tritonserver)
        os.kill(stub, signal.SIGSTOP)
        server.read_until("stands still while it loads models")
        server.read_until("serving HTTP")
        stat = read_stat(stub)
        assert stat is None or stat.has_ended
