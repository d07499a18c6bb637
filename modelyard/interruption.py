"""Ctrl-C while the command is still loading. It imports nothing that takes a while."""

import os
import signal
from types import FrameType


def leave_at_once() -> None:
    """End the process on Ctrl-C with a sentence in place of a traceback.

    Where Ctrl-C is ignored, as under `nohup`, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(signal_number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted; nothing was begun.\n")
    os._exit(128 + signal.SIGINT)
