"""The streams that a verb finds, and the one that takes its answer."""

import contextlib
import io
import os
import sys

from modelyard.standard_streams import prepare as prepare_streams

from ..errors import UnansweredError


def prepare() -> None:
    """Prepare the process before anything else is loaded."""
    prepare_streams()
    sys.stderr = _Messages()


class _Messages(io.TextIOWrapper):
    """Standard error, as far as it takes anything: nobody's work is undone for a word about it."""

    def __init__(self) -> None:
        # Unbuffered: what was not taken is not tried again on the way out of Python.
        super().__init__(
            io.FileIO(sys.stderr.fileno(), "w", closefd=False),
            encoding=sys.stderr.encoding,
            errors="backslashreplace",
            write_through=True,
        )

    def write(self, text: str) -> int:
        """Write, or leave it."""
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)


def write_answer(text: str, done: str = "") -> None:
    """Write an answer to stdout, all of it now.

    Args:
        text: The answer.
        done: What the verb has done, which is told where the answer cannot be.

    Raises:
        UnansweredError: Nothing takes it.
        BrokenPipeError: Its reader has left.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as exc:
        raise UnansweredError(
            f"{done}, but the answer cannot be written" if done else "the answer cannot be written",
            expected="a standard output that takes it",
            got=f"'{exc.strerror}'",
            remedy="send it elsewhere",
        ) from exc


def drop_answer() -> None:
    """Throw away what is still to be written to stdout: Python would try once more on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
