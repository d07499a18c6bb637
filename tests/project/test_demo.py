"""`make demo` and `make serve`, as the README's first page promises them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import CHECKOUT, Published, make

from demo.serving import NAME, REPOSITORY
from export.repository.names import ModelNames


def test_the_demo_ends_well_and_run_again_publishes_nothing_new() -> None:
    make("demo")
    done = make("demo")
    assert done.returncode == 0, done.stdout
    assert "already holds exactly this; nothing was written" in done.stdout
    assert done.stdout.count("cosine similarities") == 2
    for transport in ("HTTP JSON", "HTTP binary", "gRPC"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(transport)]
        assert line.endswith("ok")
    assert "\nstopped\n" in done.stdout
    assert "Next: make serve" in done.stdout


def test_the_demos_configurations_are_tracked_as_they_are_generated(published: Published) -> None:
    for name in ModelNames(name=NAME).all:
        tracked = subprocess.run(
            ["git", "show", f"HEAD:model_repository/{name}/config.pbtxt"], cwd=CHECKOUT, capture_output=True, text=True
        )
        assert tracked.stdout == (published.repository / name / "config.pbtxt").read_text()


def test_make_serve_stays_until_ctrl_c() -> None:
    if not (REPOSITORY / NAME / "1").is_dir():
        make("demo")
    process = subprocess.Popen(
        ["make", "serve", f"VENV={sys.prefix}"], cwd=CHECKOUT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "serving HTTP on 127.0.0.1:8000" in line:
            break
    else:
        pytest.fail("".join(lines))
    # As a terminal does: to everyone in the foreground.
    os.killpg(process.pid, signal.SIGINT)
    rest = process.stderr.read()
    process.wait(timeout=60)
    assert "stopping: answering what is in flight" in rest
    assert "stopped" in rest
    assert not list(Path("/proc").glob(f"{process.pid}/task"))
