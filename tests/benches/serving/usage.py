"""CPU time and memory of a process and of everything that it started, and of the whole machine."""

import contextlib
import os
from collections import Counter
from pathlib import Path

from server.tritonserver.processes import TICKS_PER_S, kill, list_children, read_arguments, read_stat

_STUB = "triton_python_backend_stub"

# Of its arguments, the model's name.
_STUB_INSTANCE = 8


def list_tree(pid: int) -> list[int]:
    """Return the ids of a process and of its descendants."""
    found = [pid]
    for known in found:
        with contextlib.suppress(OSError):
            found += list_children(known)
    return found


def read_cpu_s(pid: int) -> dict[int, tuple[str, float]]:
    """Return process → what it is called and the seconds that it has used of the cores, for a tree."""
    found = {}
    for each in list_tree(pid):
        stat = read_stat(each)
        if stat is not None:
            found[each] = (name_process(each), stat.cpu_ticks / TICKS_PER_S)
    return found


def subtract(after: dict[int, tuple[str, float]], before: dict[int, tuple[str, float]]) -> dict[str, float]:
    """Return name → seconds used in between by all processes of that name."""
    used: Counter[str] = Counter()
    for pid, (name, seconds) in after.items():
        used[name] += seconds - before.get(pid, (name, 0.0))[1]
    return dict(used)


def name_process(pid: int) -> str:
    """Return what a process is called in tables: a backend process after its model."""
    arguments = read_arguments(pid)
    if arguments and Path(arguments[0]).name == _STUB and len(arguments) > _STUB_INSTANCE:
        return arguments[_STUB_INSTANCE].rsplit("_", 2)[0]
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "ended"


def read_memory_bytes(pid: int) -> int:
    """Return what a tree holds in memory, what processes share counted once."""
    total = 0
    for each in list_tree(pid):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            total += next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
    return total


def read_machine_cpu_s() -> float:
    """Return the seconds that the machine's cores have worked, for whomever."""
    user, nice, system, _idle, _iowait, irq, softirq = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:8]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def list_started(pid: int) -> list[tuple[int, int]]:
    """Return id and moment of start of each process of a tree, which name it for good."""
    return [(each, stat.started) for each in list_tree(pid) if (stat := read_stat(each)) is not None]


def kill_all(processes: list[tuple[int, int]]) -> None:
    """End whatever is left of these processes at once."""
    for pid, started in processes:
        kill(pid, started)
