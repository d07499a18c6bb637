"""What memory this process may still take: of the machine, and of the control groups that it is in."""

from __future__ import annotations

from pathlib import Path

# Of a control group, in either version: limit, what is taken, and what of that are files in the cache, which are given
# up before anything is killed.
_VERSIONS = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
_GROUPS = Path("/sys/fs/cgroup")


def read_free_memory() -> int | None:
    """Return the bytes that can be taken before something is killed or swapped; None where the system does not tell."""
    rooms = [room for folder in list_groups("memory") for room in _read_rooms(folder)]
    machine = _read_number(Path("/proc/meminfo"), "MemAvailable:")
    rooms += [] if machine is None else [1024 * machine]
    return min(rooms, default=None)


def list_groups(controller: str) -> list[Path]:
    """Return the folders of the groups that this process is in for `controller`, from its own up to the one of all."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers in ("", controller):
            # In a container the path is that of the host, where nothing lies; its own group is the root.
            own = _GROUPS / controllers / path.lstrip("/")
            found += [own, *(each for each in own.parents if each.is_relative_to(_GROUPS / controllers))]
    return found


def _read_rooms(folder: Path) -> list[int]:
    """Return what a group may still take; empty where it has no limit."""
    rooms = []
    for limit_file, taken_file, cache in _VERSIONS:
        limit, taken = (_read_number(folder / name) for name in (limit_file, taken_file))
        if limit is not None and taken is not None:
            rooms.append(limit - taken + sum(_read_number(folder / "memory.stat", key) or 0 for key in cache))
    return rooms


def _read_number(path: Path, key: str = "") -> int | None:
    """Return the number in a file, or the one behind `key`; None where there is none, as of `max`."""
    try:
        words = path.read_text(encoding="utf-8").split()
        return int(words[words.index(key) + 1 if key else 0])
    except (OSError, ValueError, IndexError):
        return None
