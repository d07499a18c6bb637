"""Processes of a backend that begin at intervals, by the script that stands in the place of their program."""

import itertools
import subprocess
import time
from pathlib import Path

from server.tritonserver.paced_starts import pace_program, pacing

# Says when it begins, in seconds, and with which arguments.
PROGRAM = '#!/bin/sh\ndate +%s.%N\necho "$@"\n'


def start(program: Path, count: int) -> list[float]:
    """Start so many at once, and return when each of them began, in the order of time."""
    # As the Python backend does it.
    command = ["bash", "-c", f"exec {program} 'a word' '$HOME'"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    said = [process.communicate(timeout=60)[0].splitlines() for process in running]
    assert [lines[1] for lines in said] == ["a word $HOME"] * count
    return sorted(float(lines[0]) for lines in said)


def install(folder: Path) -> Path:
    program = folder / "backend_program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    pace_program(program)
    return program


def test_processes_begin_at_intervals_during_a_rollout_and_at_once_otherwise(tmp_path: Path) -> None:
    program = install(tmp_path)
    with pacing(tmp_path):
        interval = float((tmp_path / "interval").read_text())
        begun = start(program, 4)
    assert 0 < interval <= 0.7
    assert all(later - earlier > 0.9 * interval for earlier, later in itertools.pairwise(begun))
    assert not (tmp_path / "interval").exists()
    (tmp_path / "interval").write_text("nonsense\n")
    # What cannot be read paces nobody.
    start(program, 2)


def test_a_program_begins_though_nobody_gives_the_lock_back(tmp_path: Path) -> None:
    program = install(tmp_path)
    with pacing(tmp_path), subprocess.Popen(["flock", tmp_path, "sleep", "60"]) as holder:
        time.sleep(0.2)
        assert len(start(program, 1)) == 1
        holder.terminate()
