"""Lines of text or JSON to be answered, and lines of JSON to answer in."""

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..display import to_plain
from ..errors import UsageError
from ..outputs import Arrays
from .rows import Chunk, Columns, lock, refuse_own_answers

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LinesChunk:
    """Some lines of a file, as a `Chunk`."""

    rows: list[dict[str, Any]]
    columns: Columns
    where: str

    @property
    def texts(self) -> list[str]:
        """The first text of each."""
        return [row[self.columns.text] for row in self.rows]

    @property
    def pairs(self) -> list[str]:
        """The second text of each that has one."""
        return [row[self.columns.pair] for row in self.rows if self.columns.pair in row]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return what each line holds."""
        return self.rows


class LinesSource:
    """A file of one text a line, or called `.jsonl`, of JSON."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self._path, self._columns = path, columns
        self._file = path.open("rb")
        self._is_json = path.suffix == ".jsonl"
        self._read_line = self._read_json if self._is_json else self._read_plain
        self._lines = self._number_lines()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def pass_over(self, count: int) -> tuple[int, str]:
        """Read lines that have an answer; return how many there are, at most `count`, and the text of the last one."""
        passed, number, line = 0, 0, b""
        for number, line in itertools.islice(self._lines, count):  # noqa: B007 -- the last ones are used
            passed += 1
        return passed, self._read_line(line, number)[self._columns.text] if passed else ""

    def read(self, most: int) -> Iterator[Chunk]:
        """Yield what follows, `most` lines at a time."""
        while lines := list(itertools.islice(self._lines, most)):
            yield LinesChunk(
                rows=[self._read_line(line, number) for number, line in lines],
                columns=self._columns,
                where=f"{self._path}, from line {lines[0][0]} on",
            )

    def _number_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield lines with their numbers; between lines of JSON, a blank one is nothing."""
        for number, line in enumerate(self._file, start=1):
            if line.strip() or not self._is_json:
                yield number, line

    def _read_plain(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            # Editors that mark a file as UTF-8 mean no text by it.
            marked = "utf-8-sig" if number == 1 else "utf-8"
            text = line.removesuffix(b"\n").rstrip(b"\r").decode(marked)
        except UnicodeDecodeError as exc:
            raise UsageError(
                f"line {number} of {self._path} cannot be read", expected="UTF-8", got=f"'{exc.reason}'"
            ) from exc
        return self._add_pair({self._columns.text: text})

    def _read_json(self, line: bytes, number: int) -> dict[str, Any]:
        where, (text, pair) = f"line {number} of {self._path}", (self._columns.text, self._columns.pair)
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise UsageError(f"{where} cannot be read", expected="JSON", got=f"'{exc}'") from exc
        row = {text: value} if isinstance(value, str) else value
        if not isinstance(row, dict) or not isinstance(row.get(text), str) or not isinstance(row.get(pair, ""), str):
            raise UsageError(
                f"{where} holds no text",
                expected=f"a string, or an object whose {text}, and {pair} if it has one, are strings",
                got=type(value).__name__,
            )
        row = self._add_pair(row)
        if self._columns.has_pairs and pair not in row:
            raise UsageError(f"{where} holds no second text", expected=f"{pair} in it", got=", ".join(row))
        return row

    def _add_pair(self, row: dict[str, Any]) -> dict[str, Any]:
        pair = self._columns.second
        return row if pair is None or self._columns.pair in row else row | {self._columns.pair: pair}


class LinesTarget:
    """A file that one line of JSON is appended to for each answer."""

    def __init__(self, path: Path, columns: Columns) -> None:
        if path.exists() and not path.is_file():
            raise UsageError(
                f"{path} cannot be appended to",
                expected="a regular file, or none yet",
                got="something else",
                remedy="correct --output",
            )
        self._path, self._columns = path, columns
        self._is_kept = path.exists()
        self._file = path.open("a+b")
        try:
            lock(self._file.fileno(), path)
            self.done, self._last = _repair(self._file)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file, and leave the lock to others. One that was made here and holds nothing is removed."""
        if not self._is_kept and not os.fstat(self._file.fileno()).st_size:
            self._path.unlink(missing_ok=True)
        self._file.close()

    def read_last(self) -> str | None:
        """Return the text of the last answer; None where the line is of another form."""
        try:
            text = json.loads(self._last)[self._columns.text]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return text if isinstance(text, str) else None

    def add(self, chunk: Chunk, arrays: Arrays) -> None:
        """Write the answers to a chunk; when this returns they are on the disk."""
        self._file.write(b"".join(_to_lines(chunk, arrays)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done += len(chunk.texts)

    def finish(self) -> None:
        """Keep the file, and be it empty: there were no rows."""
        self._is_kept = True


def _to_lines(chunk: Chunk, arrays: Arrays) -> Iterator[bytes]:
    try:
        rows = chunk.to_rows()
    # Parquet has times that Python has not.
    except (ValueError, OverflowError) as exc:
        raise _refuse_row(chunk, exc) from exc
    for row in rows:
        refuse_own_answers(row, arrays, chunk.where)
    for index, row in enumerate(rows):
        content = row | {name: to_plain(values[index]) for name, values in arrays.items()}
        try:
            yield _to_json(content) + b"\n"
        except TypeError as exc:
            raise _refuse_row(chunk, exc) from exc


def _to_json(content: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(content, ensure_ascii=False).encode()
    # Half a character, which a file in JSON can hold as an escape alone.
    except UnicodeEncodeError:
        return json.dumps(content).encode()


def _refuse_row(chunk: Chunk, exc: Exception) -> UsageError:
    return UsageError(
        f"a row of {chunk.where} cannot be written as JSON",
        expected="texts, numbers, lists and objects",
        got=f"'{exc}'",
        remedy="write into a .parquet file",
    )


def _repair(answers: BinaryIO) -> tuple[int, bytes]:
    """Cut off what follows the last whole line; return how many lines there are, and the last one."""
    count = end = 0
    answers.seek(0)
    for start in itertools.count(0, _BLOCK_BYTES):
        block = answers.read(_BLOCK_BYTES)
        if not block:
            break
        count += block.count(b"\n")
        if b"\n" in block:
            end = start + block.rindex(b"\n") + 1
    answers.truncate(end)
    return count, _read_last(answers, end)


def _read_last(answers: BinaryIO, end: int) -> bytes:
    size, line = _BLOCK_BYTES, b""
    while end and line.count(b"\n", 0, -1) == 0 and len(line) < end:
        answers.seek(max(end - size, 0))
        line = answers.read(end - answers.tell())
        size *= 2
    return line[line.rfind(b"\n", 0, -1) + 1 :]
