"""The lock that every change of a repository holds, and what can be checked before anything is read."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import RepositoryError
from .contents import check_owners, find_active_version
from .names import check_name
from .use import explain_no_locks

# A publication holds the lock while it writes, which takes as long as the disk needs for a model's files. Until it is
# begun, waiting is cheap to give up; at its end a whole export hangs on it.
EARLY_PATIENCE_S = 10.0
PATIENCE_S = 120.0

_POLL_S = 0.1


def check_destination(
    repository: Path,
    name: str,
    tell: Callable[[str], None] = lambda sentence: None,
    patience_s: float = EARLY_PATIENCE_S,
) -> None:
    """Refuse, before anything is read, what a publication of `name` would be refused for at its end.

    Args:
        repository: Where it is to be published.
        name: The public model.
        tell: Told at once that another change is being waited for.
        patience_s: How long.

    Raises:
        RepositoryError: The name cannot be used or is another model's, its configuration cannot be read, the repository
            cannot be written, or something else holds it.
    """
    check_name(name)
    _check_writable(repository)
    if repository.is_dir():
        with hold(repository, patience_s, tell):
            check_owners(repository, name, [name])
            find_active_version(repository, name)


@contextlib.contextmanager
def hold(
    repository: Path, patience_s: float = PATIENCE_S, tell: Callable[[str], None] = lambda sentence: None
) -> Iterator[None]:
    """Hold the repository against every other change; the lock goes with the process and leaves no file.

    Args:
        repository: The repository, which exists.
        patience_s: How long another holder is waited for.
        tell: Told at once that it is.

    Raises:
        RepositoryError: It is still held then, was removed meanwhile, or lies where nothing can be locked.
    """
    descriptor = os.open(repository, os.O_RDONLY | os.O_DIRECTORY)
    try:
        is_free = _acquire(descriptor, repository, 0)
        if not is_free:
            tell(f"another change is at work in {repository}; waiting up to {patience_s:g} s for its end")
        if not is_free and not _acquire(descriptor, repository, patience_s):
            raise RepositoryError(
                f"another change is at work in {repository}",
                expected=f"the repository for itself within {patience_s:g} s",
                got="a lock",
                remedy="wait until it has ended, then do it again",
            )
        if not repository.is_dir() or not os.path.samestat(os.fstat(descriptor), repository.stat()):
            raise RepositoryError(
                f"{repository} was removed by a publication that failed",
                expected="the folder that was there",
                got="another or none",
                remedy="do it again",
            )
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, repository: Path, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        except OSError as exc:
            raise explain_no_locks(repository, exc) from exc
        else:
            return True


def _check_writable(repository: Path) -> None:
    nearest = next(path for path in (repository.absolute(), *repository.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise RepositoryError(
            f"{repository} cannot be a repository",
            expected="a folder, or a place for one",
            got=f"{nearest}, which is not a folder",
            remedy="choose another place",
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise RepositoryError(
            f"{repository} cannot be written",
            expected=f"the right to write in {nearest}",
            got="none",
            remedy="correct the permissions, or choose another place",
        )
