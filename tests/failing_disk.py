"""A disk that fails, for a forked process: from some call on, the kernel itself refuses every call of a kind.

A seccomp filter answers the system calls with an error, so nothing in Python is replaced: buffered bytes are lost,
files stay truncated and what undoes a failure fails as well. Needs no rights and no compiler.
"""

import ctypes
import errno
import io
import os
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType

# System call numbers of x86-64 (the kernel's arch/x86/entry/syscalls/syscall_64.tbl).
_WRITES = (1, 18, 20, 40, 77, 285, 296, 326)  # write, pwrite64, writev, sendfile, ftruncate, fallocate, pwritev, ...
_SYNCS = (74, 75)  # fsync, fdatasync
_RENAMES = (82, 264, 316)
_LINKS = (86, 265)
_MAKES = (83, 258)  # mkdir, mkdirat
_REMOVES = (84, 87, 263)  # rmdir, unlink, unlinkat
_MODES = (90, 91, 268)  # chmod, fchmod, fchmodat
_FLOCK = 73

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_ANY, _RETURN = 0x20, 0x15, 0x45, 0x06
CHANGESOW, _ERRNO = 0x7FFF0000, 0x00050000
_OPENAT, _FLAGS_OFFSET = 257, 32


@dataclass(frozen=True)
class Failure:
    """A way in which a disk fails.

    Attributes:
        calls: Numbers of the system calls that are refused.
        error: What they are refused with.
        functions: Names of the C functions of Python that make these calls, one of which is where it begins.
        opens: Whether files can no longer be opened for writing either.
    """

    calls: tuple[int, ...]
    error: int
    functions: tuple[str, ...]
    opens: bool = False


_WRITERS = ("write", "close", "__exit__", "sendfile", "open")
_RENAMERS, _LINKERS, _MAKERS = ("rename", "replace"), ("link",), ("mkdir",)
_REMOVERS = ("unlink", "rmdir", "remove")
CHANGES = (*_WRITERS, "fsync", *_RENAMERS, *_LINKERS, *_MAKERS, *_REMOVERS, "chmod")

FAILURES = {
    "the disk is full": Failure((*_WRITES, *_MAKES, *_LINKS), errno.ENOSPC, (*_WRITERS, *_MAKERS, *_LINKERS)),
    "writing fails": Failure(_WRITES, errno.EIO, _WRITERS),
    "syncing fails": Failure(_SYNCS, errno.EIO, ("fsync",)),
    "renaming fails": Failure(_RENAMES, errno.EIO, _RENAMERS),
    "linking fails": Failure(_LINKS, errno.EIO, _LINKERS),
    "removing fails": Failure(_REMOVES, errno.EIO, _REMOVERS),
    "it is mounted anew without the right to write": Failure(
        (*_WRITES, *_SYNCS, *_RENAMES, *_LINKS, *_MAKES, *_REMOVES, *_MODES), errno.EROFS, CHANGES, opens=True
    ),
}
NEVER = 77

NO_LINKS = Failure(_LINKS, errno.EPERM, _LINKERS)
NO_LOCKS = Failure((_FLOCK,), errno.ENOLCK, ("flock",))


def refuse_calls(failure: Failure) -> None:
    """Have the kernel refuse these calls of this thread for good."""
    program = [(_LOAD, 0, 0, 0)]
    tail = 4 if failure.opens else 1
    for index, call in enumerate(failure.calls):
        program.append((_JUMP_IF_EQUAL, len(failure.calls) - index - 1 + tail, 0, call))
    if failure.opens:
        program += [
            (_JUMP_IF_EQUAL, 0, 2, _OPENAT),
            (_LOAD, 0, 0, _FLAGS_OFFSET),
            (_JUMP_IF_ANY, 1, 0, os.O_WRONLY | os.O_RDWR | os.O_CREAT),
        ]
    program += [(_RETURN, 0, 0, CHANGESOW), (_RETURN, 0, 0, _ERRNO | failure.error)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def run_forked(
    action: Callable[[], object],
    moments: Mapping[int, Callable[[], None]],
    functions: tuple[str, ...] = CHANGES,
    judge: Callable[[BaseException], int] = lambda error: 1,
) -> int:
    """Run `action` in a forked process, where something happens before some of its calls.

    Args:
        action: What is tried.
        moments: Number of a call of one of `functions`, from 1 on → what happens before it.
        functions: Names of Python's C functions whose calls are counted.
        judge: Given what `action` raised, returns the exit code.

    Returns:
        0 where `action` returned, `NEVER` where it did so before the first of the moments, or the negative number of
        the signal that ended the process.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seen = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal seen
        # What is written in memory is written by methods of the same names, and a lock is closed but not written.
        held = getattr(argument, "__self__", None)
        if event != "c_call" or isinstance(held, io.StringIO | io.BytesIO) or argument is os.close:
            return
        if getattr(argument, "__name__", "") in functions:
            seen += 1
            moments.get(seen, lambda: None)()

    sys.setprofile(count)
    try:
        action()
        code = 0 if seen >= min(moments) else NEVER
    except BaseException as error:
        code = judge(error)
    # No clean-up of the parent's, and no output, which the kernel would perhaps refuse.
    os._exit(code)


def fail_once() -> None:
    """Fail as a single call does on a disk that then goes on working."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def kill() -> None:
    """End this process as nothing that can be caught does."""
    os.kill(os.getpid(), signal.SIGKILL)
