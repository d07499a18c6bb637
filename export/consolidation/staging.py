"""A folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from ..file_limit import advise, is_full


@contextlib.contextmanager
def stage_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`, and give it that name when the block ends without an error.

    Otherwise the folder is removed. What an earlier run left, because it was killed, is removed first; a run that still
    goes on holds a lock on its folder and is left alone.

    Raises:
        CheckpointError: `target` exists already, or its parent does not or cannot be written to.
    """
    try:
        if target.is_symlink() or target.is_file() or (target.is_dir() and any(target.iterdir())):
            raise CheckpointError(
                f"{target} exists already", expected="a new folder", got="something there", remedy="choose another name"
            )
        parent, name = target.absolute().parent, target.absolute().name
        _remove_abandoned(parent, name)
        staged = parent / f".{name}.partial-{os.getpid()}"
        lock = _make_locked(staged)
    except OSError as exc:
        raise CheckpointError(
            f"{target} cannot be made",
            expected="a folder that can be written to",
            got=exc.strerror or str(exc),
            remedy="make the folder above it, or choose another place",
        ) from exc
    try:
        yield staged
        # Replaces `target` if that is an empty folder; fails if somebody filled it meanwhile.
        staged.rename(target)
    except OSError as exc:
        where = f" at {exc.filename}" if exc.filename else ""
        expected, remedy = advise(exc) or ("", "make room on the disk" if is_full(exc) else "")
        got = (exc.strerror or str(exc)) + where
        raise CheckpointError(f"{target} cannot be written", expected=expected, got=got, remedy=remedy) from exc
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        os.close(lock)


def _make_locked(folder: Path) -> int:
    """Make `folder` and return a descriptor that holds its lock.

    Between the two, another run may take it for abandoned and remove it; then it is made again.
    """
    while True:
        folder.mkdir()
        try:
            descriptor = _open_folder(folder)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_at(descriptor, folder):
            return descriptor
        os.close(descriptor)


def _remove_abandoned(parent: Path, name: str) -> None:
    for folder in parent.glob(f".{_escape(name)}.partial-*") if parent.is_dir() else ():
        # It may be gone by now, not be a folder, or be another user's: then it is left alone.
        try:
            descriptor = _open_folder(folder)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, folder):
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_at(descriptor: int, folder: Path) -> bool:
    """Tell whether what was opened is still what lies at `folder`."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.lstat())
    except FileNotFoundError:
        return False


def _escape(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
