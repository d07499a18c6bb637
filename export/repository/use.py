"""Who uses a version, told by a lock on its folder, which goes with the process that holds it and leaves no file."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def use(folder: Path) -> Iterator[None]:
    """Keep a version from being pruned while the block reads it, as a server does with what it serves.

    Raises:
        OSError: It is not there, or is being pruned.
    """
    with _open(folder) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def seize(folder: Path) -> Iterator[bool]:
    """Hold a version against all who might come to use it; False where somebody uses it already.

    Processes of this machine are seen, containers with the same folder mounted among them, and those of other
    machines where the network file system hands such locks on.
    """
    with _open(folder) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@contextlib.contextmanager
def _open(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
