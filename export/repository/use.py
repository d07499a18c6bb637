"""Who uses a version, told by a lock on its folder, which goes with the process that holds it and leaves no file."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import RepositoryError
from .contents import list_models, list_versions


@contextlib.contextmanager
def use(folder: Path) -> Iterator[None]:
    """Keep a version from being pruned while the block reads it, as a server does with what it serves.

    Raises:
        OSError: It is not there, or is being pruned.
        RepositoryError: It lies where nothing can be locked.
    """
    with _open(folder) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as exc:
            raise explain_no_locks(folder, exc) from exc
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


def is_served(repository: Path, new: Path | None) -> bool:
    """Tell whether somebody uses a version in a repository, as a server does that then follows what is published.

    Args:
        repository: The model repository.
        new: The folder of a version that a server may begin to use just now, if there is one: it is not looked at, for
            while it is, it could not be held.
    """
    for name in list_models(repository):
        folders = (repository / name / str(number) for number in list_versions(repository / name))
        for folder in (each for each in folders if each != new):
            # One that is just being removed is used by nobody.
            with contextlib.suppress(OSError), seize(folder) as is_free:
                if not is_free:
                    return True
    return False


def explain_no_locks(folder: Path, exc: OSError) -> RepositoryError:
    """Return what to say where the file system of a folder refuses a lock that nobody else holds."""
    return RepositoryError(
        f"{folder} cannot be locked against other changes",
        expected="a file system with locks (flock)",
        got=exc.strerror or str(exc),
        remedy="mount it with locks (NFS without nolock, Lustre with flock), or do it in a repository on a disk that "
        "has them and copy that",
    )


@contextlib.contextmanager
def _open(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
