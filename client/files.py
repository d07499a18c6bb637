"""Files of any length: each line asked once, answered in order, and taken up again where it was broken off."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .display import to_plain
from .errors import ClientError, RefusedError, UsageError
from .session import Arrays
from .synchronous import Client

CHUNK_LINES = 1024

_BLOCK_BYTES = 1 << 20


def answer_file(
    client: Client,
    source: Path,
    target: Path,
    *,
    model: str | None = None,
    pair: str | None = None,
    chunk_lines: int = CHUNK_LINES,
    on_progress: Callable[[int], None] = lambda lines: None,
) -> int:
    """Write the answer to each line of a file as one line of JSON; return how many lines were asked now.

    A chunk is asked, written and on the disk before the next one is read. So memory is that of one chunk, and what a
    crash costs is one chunk: a last line of which only a part was written is cut off, and lines that have an answer are
    passed over.

    Args:
        client: The server; each chunk is sent in as many requests as it takes.
        source: One text a line; of a file called `.jsonl` each line is a text in JSON, or an object with `text`, and
            with `pair` where the model takes pairs. Whatever else an object holds comes back beside the answers.
        target: Appended to. One object a line: the text, and what the model makes of it.
        model: Whom to ask.
        pair: Second text of every line that has none of its own.
        chunk_lines: Lines asked together.
        on_progress: Told how many lines of `source` are answered, after each chunk.

    Raises:
        ClientError: A file cannot be read or written, `target` belongs to other lines, another process writes it, or
            the server refuses a line or does not answer; what was answered until then stays.
    """
    if target.exists() and not target.is_file():
        raise UsageError(
            f"{target} cannot be appended to",
            expected="a regular file, or none yet",
            got="something else",
            remedy="correct --output",
        )
    with _explain_files(), source.open("rb") as lines, target.open("a+b") as answers:
        _lock(answers, target)
        done, last = _repair(answers)
        _pass_over(lines, source, target, done, last)
        read = _read_json if source.suffix == ".jsonl" else _read_plain
        start = done
        on_progress(done)
        while chunk := list(itertools.islice(lines, chunk_lines)):
            rows = [read(line, f"line {done + index + 1} of {source}", pair) for index, line in enumerate(chunk)]
            answers.write(b"".join(_to_lines(rows, _ask(client, rows, model, f"{source}, from line {done + 1} on"))))
            answers.flush()
            os.fsync(answers.fileno())
            done += len(chunk)
            on_progress(done)
        return done - start


def _ask(client: Client, rows: list[dict[str, Any]], model: str | None, where: str) -> Arrays:
    texts = [row["text"] for row in rows]
    pairs = [row["pair"] for row in rows if "pair" in row]
    try:
        return client.ask(texts, pairs, model=model)
    except RefusedError as exc:
        # Rows count from the first line of the chunk.
        raise type(exc)(f"{exc.what} ({where})", expected=exc.expected, got=exc.got, remedy=exc.remedy) from exc


def _to_lines(rows: list[dict[str, Any]], arrays: Arrays) -> Iterator[bytes]:
    for index, row in enumerate(rows):
        content = row | {name: to_plain(values[index]) for name, values in arrays.items()}
        yield json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _read_plain(line: bytes, where: str, pair: str | None) -> dict[str, Any]:
    try:
        text = line.removesuffix(b"\n").rstrip(b"\r").decode()
    except UnicodeDecodeError as exc:
        raise UsageError(f"{where} cannot be read", expected="UTF-8", got=f"'{exc.reason}'") from exc
    return {"text": text} | ({} if pair is None else {"pair": pair})


def _read_json(line: bytes, where: str, pair: str | None) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as exc:
        raise UsageError(f"{where} cannot be read", expected="JSON", got=f"'{exc}'") from exc
    row = {"text": value} if isinstance(value, str) else value
    if not isinstance(row, dict) or not isinstance(row.get("text"), str) or not isinstance(row.get("pair", ""), str):
        raise UsageError(
            f"{where} holds no text",
            expected="a string, or an object whose text, and pair if it has one, are strings",
            got=type(value).__name__,
        )
    return row if pair is None or "pair" in row else row | {"pair": pair}


def _lock(answers: BinaryIO, target: Path) -> None:
    try:
        # Goes with the process, however it ends.
        fcntl.flock(answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise UsageError(f"another process writes {target}", remedy="wait for it, or write another file") from exc


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


def _pass_over(lines: BinaryIO, source: Path, target: Path, done: int, last: bytes) -> None:
    """Read the lines that have an answer, and see that the last answer belongs to the last of them."""
    line = b""
    passed = 0
    for passed, line in enumerate(itertools.islice(lines, done), start=1):  # noqa: B007
        pass
    if not done:
        return
    expected = f"answers to the first {done} lines of {source}"
    remedy = "write another file, or remove it"
    if passed < done:
        raise UsageError(
            f"{target} belongs to another file", expected=expected, got=f"{done} lines for {passed}", remedy=remedy
        )
    read = _read_json if source.suffix == ".jsonl" else _read_plain
    text = read(line, f"line {done} of {source}", None)["text"]
    try:
        answered = json.loads(last)["text"]
    except (ValueError, KeyError, TypeError) as exc:
        raise UsageError(
            f"{target} holds something else", expected=expected, got="a last line of another form", remedy=remedy
        ) from exc
    if answered != text:
        raise UsageError(
            f"{target} belongs to another file", expected=expected, got="another text in its last line", remedy=remedy
        )


@contextlib.contextmanager
def _explain_files() -> Iterator[None]:
    """Put what the system says about a file into one sentence."""
    try:
        yield
    except ClientError:
        raise
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ClientError(
                "the answers cannot be written",
                expected="room on the disk of --output",
                got=f"'{exc.strerror}'",
                remedy="make room, and repeat the command: it goes on where it stopped",
            ) from exc
        raise UsageError(
            f"{exc.filename or 'a file'} cannot be used",
            expected="lines to read, and a file to append to",
            got=f"'{exc.strerror}'",
            remedy="correct --file and --output",
        ) from exc
