"""What launchers that were killed left behind: their folder, and a tritonserver that outlives them.

A tritonserver is told to stop when its launcher dies, but it stays for ten seconds, holding its ports, and one that is
stopped by a signal stays for ever. Each launcher holds a lock in its folder: one whose lock is free belongs to nobody.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .environment_folders import remove_environment_folders
from .processes import kill, read_arguments, read_stat

PREFIX = "modelyard-server-"

_LOCK_FILE = "launcher.lock"

# A process that was killed needs some time to give its memory back, and holds its ports until then.
_END_S = 10.0

_SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def own(folder: Path) -> Iterator[None]:
    """Keep others from taking `folder` for left behind while the block runs, or for as long as this process lives.

    Raises:
        OSError: There is no room for the lock.
    """
    # Not inherited: the tritonserver that outlives us must not hold it.
    with (folder / _LOCK_FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_orphans() -> list[str]:
    """End and remove what killed launchers of this user left behind, and return a sentence about each.

    Folders without a lock, folders and processes of other users, and whatever lies elsewhere are left alone.
    """
    removed = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        # Whatever cannot be opened, locked or removed stays: it keeps nobody from starting.
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with (folder / _LOCK_FILE).open("r") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                ended = _end_processes(folder)
                # The lock was made before the first tritonserver.
                remove_environment_folders(os.fstat(file.fileno()).st_mtime)
                shutil.rmtree(folder, ignore_errors=True)
            told = f" and ended the {ended} processes that still ran from it" if ended else ""
            removed.append(f"removed {folder}, left behind by a launcher that was killed,{told}".rstrip(","))
    return removed


def _end_processes(folder: Path) -> int:
    """End the processes of this user that run from `folder`, wait for their end, and return how many there were."""
    found = {}
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdecimal()):  # noqa: PTH208
        # Of others, and of what has ended since, we learn nothing.
        with contextlib.suppress(OSError):
            stat, arguments = read_stat(pid), read_arguments(pid)
            if stat and Path(f"/proc/{pid}").stat().st_uid == os.geteuid() and _runs_from(folder, arguments):
                found[pid, stat.started] = arguments
    for pid, started in found:
        kill(pid, started)
    deadline = time.monotonic() + _END_S
    while any(_is_alive(*process) for process in found) and time.monotonic() < deadline:
        time.sleep(0.01)
    for arguments in found.values():
        _remove_shared_memory(arguments)
    return len(found)


def _runs_from(folder: Path, arguments: list[str]) -> bool:
    """Tell whether this is the command line of a tritonserver on `folder`, or of a backend process of one."""
    if not arguments:
        return False
    if Path(arguments[0]).name == "tritonserver":
        return f"--backend-directory={folder / 'backends'}" in arguments
    return arguments[0].startswith(f"{folder}/")


def _is_alive(pid: int, started: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.started == started and not stat.has_ended


def _remove_shared_memory(arguments: list[str]) -> None:
    """Remove what a backend process shared with its tritonserver: it is named by an argument, and by nobody else."""
    for name in arguments:
        if "_backend_shm_region_" in name and "/" not in name:
            (_SHARED_MEMORY / name).unlink(missing_ok=True)
