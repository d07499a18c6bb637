"""Processes that a signal stops while a model is loaded: the load ends, is tried again, and holds up nobody."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from followed import NAME, PARTS, activate, copy_at_first, wait_for
from launcher import Running, running

from server.tritonserver.processes import list_children, read_arguments

STUB = "triton_python_backend_stub"
MODEL = PARTS[1]


def is_shell(arguments: list[str]) -> bool:
    return arguments[0].endswith("sh") and any(STUB in word for word in arguments)


def is_process(arguments: list[str]) -> bool:
    return arguments[0].endswith(STUB)


def stop_next(
    server: Running, known: Collection[int], is_meant: Callable[[list[str]], bool], *, after_s: float = 0.0
) -> None:
    """Stop the first process of a kind that tritonserver starts, or that such a one waits for."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        # It may not have been started, or be gone.
        with contextlib.suppress(ValueError, ProcessLookupError):
            children = [pid for pid in list_children(server.tritonserver) if pid not in known]
            several = [*children, *(pid for child in children for pid in list_children(child))]
            for pid in several:
                if (arguments := read_arguments(pid)) and is_meant(arguments):
                    time.sleep(after_s)
                    os.kill(pid, signal.SIGSTOP)
                    return
    raise AssertionError("\n".join(server.lines))


@pytest.mark.parametrize(
    "is_meant",
    [
        is_shell,
        pytest.param(is_process, marks=pytest.mark.rarer),
        pytest.param(lambda arguments: arguments[0] == "sleep", marks=pytest.mark.rarer),
    ],
    ids=["shell", "process", "pause"],
)
def test_a_rollout_goes_on_whatever_of_it_is_stopped(
    served: tuple[Running, Path], is_meant: Callable[[list[str]], bool]
) -> None:
    server, repository = served
    known = list_children(server.tritonserver)
    activate(repository, 2)
    stop_next(server, known, is_meant)
    server.wait_for_line("was stopped by a signal while a model was loaded, and was ended", 60)
    wait_for(server, lambda models: (models[NAME]["state"], models[NAME]["served"]) == ("served", 2))
    assert server.check().code == 0


def test_a_process_that_is_stopped_as_it_takes_the_place_of_a_dead_one_is_replaced(
    served: tuple[Running, Path],
) -> None:
    server, _ = served
    known = list_children(server.tritonserver)
    server.find_stubs(MODEL)[0].kill()
    stop_next(server, known, is_process)
    server.wait_for_line("was stopped by a signal while a model was loaded, and was ended", 60)
    server.wait_for_line(f"{MODEL}: answers again", 60)
    assert server.check().code == 0


@pytest.mark.rarer
def test_a_process_that_is_stopped_at_the_start_leaves_its_model_to_be_tried_again(
    repository: Path, tmp_path: Path
) -> None:
    with running(copy_at_first(repository, tmp_path / "models")) as server:
        # Of one that has just begun tritonserver may try whether it can run, and start another.
        stop_next(server, (), is_process, after_s=0.1)
        server.read_until("serving HTTP")
        server.follow()
        wait_for(server, lambda models: (models[NAME]["state"], models[NAME]["served"]) == ("served", 1))
        assert any("was stopped by a signal while a model was loaded" in line for line in server.lines)
        assert server.check().code == 0
