"""How a command of the client ends: with its exit code, and quietly where nobody reads its answer any more."""

import os
import signal
import sys
from collections.abc import Callable


def end_quietly(main: Callable[[], int]) -> int:
    """Carry a command out and return its exit code: a shell's for a closed pipe, where the reader has left.

    Perhaps it was `head`. What breaks towards a server is a `ClientError` before it comes here.
    """
    try:
        try:
            return main()
        finally:
            # Not on the way out of Python, which would tell of it in lines of its own.
            sys.stdout.flush()
    except BrokenPipeError:
        # Python would try once more to write what is left, on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
