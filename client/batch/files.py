"""Files of any length: each row asked once, answered in order, and taken up again where it was broken off."""

import contextlib
import errno
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from ..errors import ClientError, RefusedError, UsageError
from ..outputs import Arrays
from ..synchronous import Client
from .lines import LinesSource, LinesTarget
from .rows import Chunk, Columns, Source, Target

CHUNK_LINES = 1024

_PARQUET = ".parquet"


def answer_file(
    client: Client,
    source: Path,
    target: Path,
    *,
    model: str | None = None,
    pair: str | None = None,
    columns: tuple[str, ...] = (),
    chunk_lines: int = CHUNK_LINES,
    on_progress: Callable[[int], None] = lambda lines: None,
) -> int:
    """Write the answer to each row of a file into another one; return how many rows were asked now.

    A chunk is asked, written and on the disk before the next one is read. So memory is that of one chunk, and what a
    crash costs is one chunk: what was written of it in part is cut off, and rows that have an answer are passed over.

    Args:
        client: The server; each chunk is sent in as many requests as it takes.
        source: One text a line; of a file called `.jsonl` each line is a text in JSON, or an object; one called
            `.parquet` has columns. Whatever else a row holds comes back beside the answers.
        target: Appended to, one object a line: the row, and what the model makes of it. Or, of Parquet alone, a file
            called `.parquet`, which has a folder of parts beside it until it is whole.
        model: Whom to ask.
        pair: Second text of every row that has none of its own.
        columns: Names of the text, and of the second text if every row has one; without them `text`, and `pair`
            where there is one.
        chunk_lines: Rows asked together.
        on_progress: Told how many rows of `source` are answered, after each chunk.

    Raises:
        ClientError: A file cannot be read or written, `target` belongs to other rows, another process writes it, or
            the server refuses a row or does not answer; what was answered until then stays.
    """
    named = dict(zip(("text", "pair"), columns, strict=False))
    where = Columns(**named, has_pairs=len(columns) > 1, second=pair)
    _check(source, target, columns)
    with (
        _explain_files(),
        contextlib.closing(_open_source(source, where)) as rows,
        contextlib.closing(_open_target(target, where)) as answers,
    ):
        start = answers.done
        if start:
            _compare(rows, answers, source, target)
        on_progress(start)
        for chunk in rows.read(chunk_lines):
            answers.add(chunk, _ask(client, chunk, model))
            on_progress(answers.done)
        answers.finish()
        return answers.done - start


def _check(source: Path, target: Path, columns: tuple[str, ...]) -> None:
    """Refuse what does not go together, before a file is made."""
    if len(columns) > 2 or len(set(columns)) < len(columns):
        raise UsageError("--column takes the name of the text, and one of the second text", got=", ".join(columns))
    if columns and source.suffix not in (".jsonl", _PARQUET):
        raise UsageError(
            "--column has no effect",
            expected="--file called .jsonl or .parquet",
            got=str(source),
            remedy="leave it out",
        )
    if target.suffix == _PARQUET and source.suffix != _PARQUET:
        raise UsageError(
            f"{target} cannot be written",
            expected="--file called .parquet, whose columns have types",
            got=str(source),
            remedy="write into a .jsonl file",
        )
    if source.exists() and target.exists() and source.samefile(target):
        raise UsageError(f"{target} is what is read", remedy="write another file")


def _open_source(path: Path, columns: Columns) -> Source:
    source: type[Source] = _load_parquet().ParquetSource if path.suffix == _PARQUET else LinesSource
    return source(path, columns)


def _open_target(path: Path, columns: Columns) -> Target:
    target: type[Target] = _load_parquet().ParquetTarget if path.suffix == _PARQUET else LinesTarget
    return target(path, columns)


def _load_parquet() -> ModuleType:
    try:
        # Only whoever has such files needs its library.
        return importlib.import_module(".parquet", __package__)
    except ImportError as exc:
        raise UsageError(
            "files called .parquet cannot be read here",
            expected="what modelyard[parquet] brings",
            got=f"an environment without {exc.name}",
            remedy="pip install pyarrow",
        ) from exc


def _compare(rows: Source, answers: Target, source: Path, target: Path) -> None:
    """Pass over the rows that have an answer, and see that the last answer belongs to the last of them."""
    done = answers.done
    expected, remedy = f"answers to the first {done} lines of {source}", "write another file, or remove it"
    passed, text = rows.pass_over(done)
    answered = answers.read_last()
    if passed < done:
        raise UsageError(
            f"{target} belongs to another file", expected=expected, got=f"{done} lines for {passed}", remedy=remedy
        )
    if answered is None:
        raise UsageError(
            f"{target} holds something else", expected=expected, got="a last line of another form", remedy=remedy
        )
    if answered != text:
        raise UsageError(
            f"{target} belongs to another file", expected=expected, got="another text in its last line", remedy=remedy
        )


def _ask(client: Client, chunk: Chunk, model: str | None) -> Arrays:
    try:
        return client.ask(chunk.texts, chunk.pairs, model=model)
    except RefusedError as exc:
        # Rows count from the first line of the chunk.
        raise type(exc)(f"{exc.what} ({chunk.where})", expected=exc.expected, got=exc.got, remedy=exc.remedy) from exc


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
