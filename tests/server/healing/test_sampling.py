"""Whose code a busy process runs: seen on real interpreters, with a shared libpython and with one linked in."""

import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server.healing.sampling import Code, find_code

LOOP = "while True: pass"
COMPUTE = """
import numpy as np
values = np.random.rand(600, 600)
while True:
    values @ values
"""


@contextmanager
def running(python: str, program: str) -> Iterator[int]:
    process = subprocess.Popen([python, "-c", program])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def sample(pid: int, count: int = 20) -> list[Code]:
    # It starts first.
    time.sleep(1.0)
    found = [find_code(pid) for _ in range(count)]
    return [code for code in found if code is not None]


def has_shared_libpython(python: str) -> bool:
    libraries = subprocess.run(["ldd", python], capture_output=True, text=True, check=False).stdout
    return "libpython3" in libraries


def find_pythons() -> dict[str, str]:
    """Return one interpreter of each kind that this machine has."""
    candidates = [sys.executable, *map(str, sorted(Path("/usr/bin").glob("python3.[0-9]*")))]
    pythons = [path for path in candidates if "config" not in path]
    return {"shared" if has_shared_libpython(python) else "static": python for python in reversed(pythons)}


@pytest.mark.parametrize("kind", ["shared", "static"])
def test_a_loop_in_python_is_seen_in_the_interpreter_alone(kind: str) -> None:
    python = find_pythons().get(kind)
    if python is None:
        pytest.skip(f"no Python with a {kind} libpython is installed (Debian: apt-get install python3)")
    with running(python, LOOP) as pid:
        codes = sample(pid)
    assert Code.INTERPRETER in codes
    assert Code.LIBRARY not in codes


def test_a_computation_is_seen_in_a_library() -> None:
    with running(sys.executable, COMPUTE) as pid:
        assert Code.LIBRARY in sample(pid)


def test_of_a_process_that_is_no_more_nothing_is_said() -> None:
    process = subprocess.Popen([sysconfig.get_path("scripts") + "/python", "-c", ""])
    process.wait()
    assert find_code(process.pid) is None
