"""How a command of the client begins and ends: with streams to write to, and with its exit code.

It imports nothing that takes a while: Ctrl-C may come while the rest is loading.
"""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from modelyard.standard_streams import prepare

from ..printable import make_printable

# What was asked for was done, and its answer could not be written.
EXIT_UNANSWERED = 5

_INTERRUPTED = 128 + signal.SIGINT


class UnansweredError(Exception):
    """Nothing takes the answer, such as a full disk; what was asked for is done."""


def begin() -> None:
    """Prepare the process before anything else is loaded: its streams, and Ctrl-C."""
    prepare()
    # Where Ctrl-C is ignored, as under `nohup`, it stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def answer(text: str, *, end: str = "\n", flush: bool = False, done: str = "") -> None:
    """Print what was asked for.

    Args:
        text: What is printed; on a terminal, without what it would obey: a server says what it likes.
        end: What follows it.
        flush: Whether it is to be seen at once.
        done: What there is besides, to be told where the text cannot be.

    Raises:
        UnansweredError: Nothing takes it.
        BrokenPipeError: Its reader has left.
    """
    what = f"{done}, but the answer cannot be written" if done else "the answer cannot be written"
    shown = make_printable(text) if sys.stdout.isatty() else text
    _write(lambda: print(shown, end=end, flush=flush or bool(done)), what)  # noqa: T201


def _write(write: Callable[[], None], what: str = "the answer cannot be written") -> None:
    try:
        write()
    except BrokenPipeError:
        raise
    except OSError as exc:
        raise UnansweredError(
            f"{what}: expected a standard output that takes it, got '{exc.strerror}'; send it elsewhere."
        ) from exc


def end_quietly(main: Callable[[], int]) -> int:
    """Carry a command out and return its exit code: a shell's for Ctrl-C, and for a pipe whose reader has left.

    Perhaps it was `head`. What breaks towards a server is a `ClientError` before it comes here.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        # Where it is ignored, it stays so.
        if callable(before):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return main()
        finally:
            # Not on the way out of Python, which would tell of it in lines of its own.
            _write(sys.stdout.flush)
    except BrokenPipeError:
        _drop(sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except UnansweredError as exc:
        _drop(sys.stdout.fileno())
        _say(f"error: {exc}\n")
        return EXIT_UNANSWERED
    except KeyboardInterrupt:
        _say("error: interrupted before it was done.\n")
        return _INTERRUPTED
    finally:
        _say("")
        # While Python takes itself down, nobody wants a traceback of Ctrl-C either.
        if callable(before):
            signal.signal(signal.SIGINT, before)


def _leave(signal_number: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)


def _say(text: str) -> None:
    """Write to standard error, with what argparse left there, or leave it: that nobody takes it ends nothing else."""
    try:
        print(text, end="", file=sys.stderr, flush=True)  # noqa: T201
    except OSError:
        _drop(sys.stderr.fileno())


def _drop(descriptor: int) -> None:
    """Throw away what is still to be written: Python would try once more on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
