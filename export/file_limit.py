"""A file that may not become as large as it has to: the disk may have room enough."""

import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path

_BEYOND_ROOM = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT)


def advise(error: BaseException) -> tuple[str, str] | None:
    """Return what was expected and what can be done where a file would be too large; None for any other error."""
    if not isinstance(error, OSError) or error.errno != errno.EFBIG:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return "a file system that takes files of any size", "write to another file system"
    return "no limit on the size of a file", f"raise the limit on file sizes (ulimit -f), which is {limit:,} bytes"


def is_full(error: BaseException) -> bool:
    """Tell whether a disk has no room left, or this user none of it."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def writing_to(target: Path) -> Iterator[None]:
    """Have an error of a full disk in the block name what is written, where a copy names what it reads."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _BEYOND_ROOM:
            exc.filename = str(target)
        raise


@contextlib.contextmanager
def locating(folder: Path) -> Iterator[None]:
    """Have an error of writing in the block that names no file, as `write` itself raises it, name the folder."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _BEYOND_ROOM and exc.filename is None:
            exc.filename = str(folder)
        raise
