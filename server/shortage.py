"""What this machine lacks when something cannot even be tried: of that nothing follows for what was to be tried."""

import errno
import resource

# No descriptor left here or in the whole system, no memory, no buffer, no process, no port of our own to ask from.
_SHORTAGES = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOBUFS,
    errno.EAGAIN,
    errno.EADDRNOTAVAIL,
    errno.ENOSPC,
    errno.EDQUOT,
}

# What tritonserver, its backend processes and this launcher were seen to open for one model is well below; with 64
# tritonserver 2.51 neither starts nor ends, and fills its log.
MIN_OPEN_FILES = 256


def is_shortage(error: BaseException) -> bool:
    """Tell whether `error` says that something could not be tried, and so nothing of what was to be asked."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno in _SHORTAGES
    # threading has no error of its own for it.
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def raise_open_files() -> int:
    """Let this process and what it starts open as many files as it may, and return how many that is.

    A connection is an open file, and the usual soft limit of 1,024 is for programs that use select(2).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
