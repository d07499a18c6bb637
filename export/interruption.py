"""Ctrl-C while the command line is still loading, before there is anything to undo."""

import os
import signal
from types import FrameType


def leave_at_once() -> None:
    """End the process on Ctrl-C with a sentence in place of a traceback, until `raise_again`.

    Where Ctrl-C is ignored, as under `nohup`, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt` again, as Python has it, unless it is ignored."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(signal_number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted; nothing was begun.\n")
    os._exit(128 + signal.SIGINT)
