"""How a command begins and ends: with streams to write to, and with its exit code.

It imports nothing that takes a while: Ctrl-C may come while the rest is loading.
"""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from modelyard.standard_streams import prepare

# What was asked for was done, and its answer could not be written.
EXIT_UNANSWERED = 5

_INTERRUPTED = 128 + signal.SIGINT


class _UnansweredError(Exception):
    """Nothing takes the answer, for this reason."""


def begin() -> None:
    """Prepare the process before anything else is loaded: its streams, and Ctrl-C."""
    prepare()
    # Where Ctrl-C is ignored, as under `nohup`, it stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def answer(text: str, end: str = "\n") -> None:
    """Print what was asked for."""
    try:
        print(text, end=end, flush=True)  # noqa: T201
    except OSError as exc:
        raise _UnansweredError(exc.strerror) from exc


def end_quietly(main: Callable[[], int]) -> int:
    """Carry a command out and return its exit code: a shell's for Ctrl-C, and for a pipe whose reader has left."""
    try:
        if callable(signal.getsignal(signal.SIGINT)):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return main()
        finally:
            # Not on the way out of Python, which would tell of it in lines of its own.
            _flush()
    except _UnansweredError as exc:
        _drop(sys.stdout.fileno())
        if isinstance(exc.__cause__, BrokenPipeError):
            return 128 + signal.SIGPIPE
        sentence = "the answer cannot be written: expected a standard output that takes it"
        _say(f"error: {sentence}, got '{exc}'; send it elsewhere.\n")
        return EXIT_UNANSWERED
    except KeyboardInterrupt:
        _say("error: interrupted before it was done.\n")
        return _INTERRUPTED
    finally:
        _say("")


def _leave(signal_number: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)


def _flush() -> None:
    try:
        sys.stdout.flush()
    except OSError as exc:
        raise _UnansweredError(exc.strerror) from exc


def _say(text: str) -> None:
    """Write to standard error, with what argparse left there, or leave it: that nobody takes it ends nothing else."""
    try:
        print(text, end="", file=sys.stderr, flush=True)  # noqa: T201
    except OSError:
        _drop(sys.stderr.fileno())


def _drop(descriptor: int) -> None:
    """Throw away what is still to be written: Python would try once more on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
