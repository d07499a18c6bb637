"""What the kinds of files have in common: columns, pieces of a file, and the lock of whoever writes."""

import fcntl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import UsageError
from ..outputs import Arrays


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Where the texts of a row are.

    Attributes:
        text: Name of the text.
        pair: Name of the second text, where the model takes pairs.
        has_pairs: Whether every row must have one.
        second: Second text of each row that has none of its own.
    """

    text: str = "text"
    pair: str = "pair"
    has_pairs: bool = False
    second: str | None = None


class Chunk(Protocol):
    """Rows of a file that are asked together."""

    @property
    def texts(self) -> list[str]:
        """The first text of each."""

    @property
    def pairs(self) -> list[str]:
        """The second text of each that has one."""

    @property
    def where(self) -> str:
        """The file, and the first of them, in words."""

    def to_rows(self) -> list[dict[str, Any]]:
        """Return everything that each holds."""


class Source(Protocol):
    """A file that is asked about, opened."""

    def __init__(self, path: Path, columns: Columns) -> None:
        """Open it; raises a UsageError where it does not hold what `columns` names."""

    def close(self) -> None:
        """Close it."""

    def pass_over(self, count: int) -> tuple[int, str]:
        """Go behind the rows that have an answer; return how many there are, and the text of the last one."""

    def read(self, most: int) -> Iterator[Chunk]:
        """Yield what follows, at most `most` rows at a time."""


class Target(Protocol):
    """A file that answers are written into, opened and locked.

    Attributes:
        done: Rows that it holds.
    """

    done: int

    def __init__(self, path: Path, columns: Columns) -> None:
        """Open it, and throw away what was written in part; raises a UsageError where it is something else."""

    def close(self) -> None:
        """Close it, and leave the lock to others."""

    def read_last(self) -> str | None:
        """Return the text of the last answer; None where the row is of another form."""

    def add(self, chunk: Chunk, arrays: Arrays) -> None:
        """Write the answers to a chunk; when this returns they are on the disk."""

    def finish(self) -> None:
        """Make the file whole: there are no more rows."""


def lock(descriptor: int, path: Path) -> None:
    """Let nobody else write there; the lock goes with the process, however it ends.

    Raises:
        UsageError: Somebody does.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise UsageError(f"another process writes {path}", remedy="wait for it, or write another file") from exc


def refuse_own_answers(names: Iterable[str], arrays: Iterable[str], where: str) -> None:
    """Refuse a row that has a column of the name of an answer: one of the two would be lost.

    Raises:
        UsageError: It has.
    """
    if both := set(names) & set(arrays):
        raise UsageError(
            f"a row of {where} holds {', '.join(sorted(both))} already",
            expected="other names than those of the model's outputs",
            got="the same",
            remedy="rename them in --file",
        )
