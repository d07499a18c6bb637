"""Backend processes that start one after another, while others answer.

A process takes a core for a fifth of a second before it is ready, and tritonserver starts those of all instances of a
model at once: on two cores, whoever is being answered then waits several times as long as usual. So a script stands in
the place of the Python backend's program, and lets them begin at intervals while a rollout goes on. At the start of the
server, and where a process is replaced that has died, nobody waits.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# Holds how many seconds lie between two starts, while they are to.
_INTERVAL_FILE = "interval"

# Below the program's own name it is not found by those who look for its processes.
_PROGRAM_FOLDER = "program"

# Core seconds of a start, and some for what is served beside it.
_START_CORE_S = 0.7

# No start waits longer, whatever holds the lock: tritonserver gives a process 30 s to be ready.
_SCRIPT = f"""#!/bin/sh
folder=${{0%/*}}
if [ -e "$folder/{_INTERVAL_FILE}" ] && command -v flock > /dev/null; then
    exec 9< "$folder"
    flock -w 5 9
    read -r interval < "$folder/{_INTERVAL_FILE}" && sleep "$interval"
    exec 9<&-
fi 2> /dev/null
exec "$folder/{_PROGRAM_FOLDER}/${{0##*/}}" "$@"
"""


def pace_program(program: Path) -> None:
    """Put the script in the place of a backend's program, which it then starts.

    Raises:
        OSError: There is no room.
    """
    folder = program.parent / _PROGRAM_FOLDER
    folder.mkdir()
    program.rename(folder / program.name)
    program.write_text(_SCRIPT)
    program.chmod(0o755)


@contextlib.contextmanager
def pacing(backend: Path) -> Iterator[None]:
    """Have processes of a backend start at intervals while the block runs; where there is no room to say so, at once.

    Args:
        backend: Its folder; nobody waits where `pace_program` was not asked for its program.
    """
    if not (backend / _PROGRAM_FOLDER).is_dir():
        yield
        return
    file = backend / _INTERVAL_FILE
    with contextlib.suppress(OSError):
        file.write_text(f"{_START_CORE_S / len(os.sched_getaffinity(0)):.3f}\n")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
