"""What this machine lacks when something cannot even be tried: of that nothing follows for what was to be tried."""

import contextlib
import errno
from collections.abc import Callable, Iterator

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


class ShortageNotice:
    """Says once that tritonserver cannot be looked after for want of something, and once that it can again.

    Args:
        say: Takes a line for the log.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._is_short = False

    @contextlib.contextmanager
    def of_shortage(self) -> Iterator[None]:
        """Leave the block early, with a word about it, where something is lacking to go on with it."""
        try:
            yield
        except (OSError, MemoryError, RuntimeError) as exc:
            if not is_shortage(exc):
                raise
            if not self._is_short:
                self._say(f"warning: cannot look after tritonserver for now: {exc}; what serves goes on serving")
            self._is_short = True
        else:
            if self._is_short:
                self._say("can look after tritonserver again")
            self._is_short = False
