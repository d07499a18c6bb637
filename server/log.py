"""The launcher's log: what it says and what tritonserver says, on stderr, and never in the way of serving.

Lines are written by a thread of their own, so a reader that stopped reading, a full disk or a closed terminal holds up
nobody. What could not be written is counted, and reported once writing works again.
"""

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable

from .errors import ShortageError

# Lines of tritonserver that are equal but for numbers, within this time, of which only the first few are written.
_WINDOW_S = 10.0
_MAX_EQUAL = 5

# Lines of tritonserver of whatever kind within that time.
_MAX_LINES = 2_000

# Lines that wait to be written; beyond that they are dropped.
_MAX_WAITING = 10_000

_NUMBER = re.compile(rb"\d+")


class LineLimiter:
    """Writes the first few of equal lines and counts the others.

    tritonserver 2.51 writes tens of thousands of lines a second while it cannot accept a connection.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._window_end = 0.0
        self._lines = 0
        self._equal: dict[bytes, int] = {}
        self._left_out: dict[bytes, int] = {}

    def admit(self, line: bytes) -> list[bytes]:
        """Return what to write now that `line` has come: what was counted and is due, and `line` unless it is."""
        due = self.close_window() if self._clock() >= self._window_end else []
        # Lines differ by time, process, address and the like.
        kind = _NUMBER.sub(b"0", line)
        self._equal[kind] = self._equal.get(kind, 0) + 1
        self._lines += 1
        if self._equal[kind] <= _MAX_EQUAL and self._lines <= _MAX_LINES:
            return [*due, line]
        shown = kind if self._lines <= _MAX_LINES else b""
        self._left_out[shown] = self._left_out.get(shown, 0) + 1
        return due

    def close_window(self) -> list[bytes]:
        """Return what was counted, as lines, and start counting again."""
        counts, self._left_out = self._left_out, {}
        self._equal, self._lines, self._window_end = {}, 0, self._clock() + _WINDOW_S
        return [
            b"(left out: %d more lines within %d s%s)\n"
            % (count, _WINDOW_S, b" like: " + kind.strip() if kind else b" of many kinds")
            for kind, count in counts.items()
        ]


class Log:
    """Writes lines to a descriptor without ever failing or waiting.

    Args:
        descriptor: File descriptor to write to.

    Raises:
        ShortageError: There is no thread for it.
    """

    def __init__(self, descriptor: int = 2) -> None:
        self._descriptor = descriptor
        self._limiter = LineLimiter()
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._reason = ""
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._write_lines, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as exc:
            raise ShortageError("the log cannot be written", expected="a thread for it", got=f"'{exc}'") from exc

    def say(self, text: str) -> None:
        """Log a line of the launcher's own."""
        self._add([f"{text}\n".encode(errors="backslashreplace")])

    def relay(self, line: bytes) -> None:
        """Log a line of tritonserver's, unless there were many like it just now."""
        self._add(self._limiter.admit(line))

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what still waits, for so long at most."""
        self._add(self._limiter.close_window())
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _add(self, lines: list[bytes]) -> None:
        with self._changed:
            for line in lines:
                if len(self._waiting) < _MAX_WAITING:
                    self._waiting.append(line)
                else:
                    self._lose("nobody reads them")
            self._changed.notify()

    def _lose(self, reason: str) -> None:
        self._lost, self._reason = self._lost + 1, reason

    def _write_lines(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ended:
                    self._changed.wait()
                if not self._waiting:
                    return
                line = self._waiting.popleft()
                if self._lost:
                    line = b"warning: %d lines of the log were lost: %s\n" % (self._lost, self._reason.encode()) + line
                lost = self._lost
            try:
                _write(self._descriptor, line)
            except OSError as exc:
                with self._changed:
                    self._lose(exc.strerror or "they could not be written")
            else:
                with self._changed:
                    self._lost -= lost


def _write(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]
