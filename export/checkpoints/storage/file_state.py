"""What tells that a file is still the one that was opened: a trainer may save over what is being read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ..remedies import find_remedy


@dataclass(frozen=True)
class FileState:
    """Size and time of the last change. Not the inode: file systems in user space number a file anew as they please."""

    size: int
    modified_ns: int


def read_state(file: int | Path) -> FileState:
    """Return the state of an open file, or of the one that a path leads to.

    Raises:
        OSError: There is none.
    """
    status = file.stat() if isinstance(file, Path) else os.fstat(file)
    return FileState(status.st_size, status.st_mtime_ns)


def refuse_changed(path: Path, opened: FileState, file: int | None = None) -> None:
    """Refuse a file that is not any more what it was as its header was read.

    Args:
        path: The file.
        opened: What it was.
        file: Its descriptor; the path is looked at where None.

    Raises:
        CheckpointError: It is another one, or is gone.
    """
    try:
        now = read_state(path if file is None else file)
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read", got=exc.strerror or str(exc), remedy=find_remedy(exc)) from exc
    if now != opened:
        raise CheckpointError(
            f"{path} was written while it was read",
            expected=f"the file that was opened, of {opened.size} bytes",
            got="other bytes" if now.size == opened.size else f"one of {now.size} bytes",
            remedy="wait until whoever saves there is done, and repeat this",
        )


def refuse_any_changed(opened: Mapping[Path, FileState]) -> None:
    """Refuse files of which one is not any more what it was; see `refuse_changed`."""
    for path, state in opened.items():
        refuse_changed(path, state)


def refuse_late_save(weights: Mapping[Path, FileState]) -> None:
    """Refuse weights of several files of which one was written since: a save may have begun before, and gone on.

    Of a single file, what was read is whole, whatever comes after it.

    Raises:
        CheckpointError: One was.
    """
    if len(weights) > 1:
        refuse_any_changed(weights)
