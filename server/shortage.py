"""What this machine lacks when something cannot even be tried: of that nothing follows for what was to be tried."""

import errno

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


def is_shortage(error: BaseException) -> bool:
    """Tell whether `error` says that something could not be tried, and so nothing of what was to be asked."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno in _SHORTAGES
    # threading has no error of its own for it.
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)
