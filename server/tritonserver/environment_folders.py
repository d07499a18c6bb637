"""Empty folders that the Python backend of tritonserver leaves in /tmp.

It makes one for each backend that it runs, /tmp/python_env_ and six characters of mkdtemp(3), whatever TMPDIR says, and
a tritonserver that is ended at once leaves them. Nothing in them says whose they are. One that lives may yet unpack
something into its own, so a folder goes only where no process that lives can have made it.
"""

import contextlib
import os
import time
from pathlib import Path

from .processes import TICKS_PER_S, read_stat

_PARENT = Path("/tmp")
_PATTERN = "python_env_" + 6 * "[0-9A-Za-z]"

# Who has this mapped makes them: tritonserver, and programs that hold one as a library.
_MAKER = b"/libtriton_python.so"

# Clocks of files and of processes are read one after the other, and tick.
_SLACK_S = 1.0


def remove_environment_folders(since: float) -> None:
    """Remove the empty ones that were made for this user's tritonservers, all of them ended, from a time on.

    Folders that hold something, those of other users, and those that a living process may have made are left alone.

    Args:
        since: When the tritonserver that left them was started, in seconds since the epoch.
    """
    # Before the look at processes: who starts after this has made none of them.
    ages = {folder: _read_age(folder, since) for folder in _PARENT.glob(_PATTERN)}
    oldest_maker = _find_oldest_maker() if any(age is not None for age in ages.values()) else 0.0
    for folder, age in ages.items():
        if age is not None and age > oldest_maker + _SLACK_S:
            # Of a folder that holds something, the kernel removes nothing.
            with contextlib.suppress(OSError):
                folder.rmdir()


def _read_age(folder: Path, since: float) -> float | None:
    """Return for how many seconds it has been as it is; None where it is another's, or older than `since`."""
    with contextlib.suppress(OSError):
        found = folder.lstat()
        if found.st_uid == os.geteuid() and found.st_mtime >= since:
            return time.time() - found.st_mtime
    return None


def _find_oldest_maker() -> float:
    """Return for how many seconds the oldest process of this user that makes such folders has run; below 0 for none."""
    ages = [-_SLACK_S]
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdecimal()):  # noqa: PTH208
        # Of others, and of what has ended since, we learn nothing.
        with contextlib.suppress(OSError):
            process = Path(f"/proc/{pid}")
            if process.stat().st_uid == os.geteuid() and _MAKER in (process / "maps").read_bytes():
                stat = read_stat(pid)
                ages += [time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started / TICKS_PER_S] if stat else []
    return max(ages)
