"""Parquet files to be answered, and to answer in.

A Parquet file ends with the table of its contents, so that nothing can be appended to it. Answers are therefore written
as parts, whole files in a folder beside the one that is asked for, and joined when the last row is answered.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..display import decode
from ..errors import UsageError
from ..outputs import Arrays
from .rows import Chunk, Columns, lock, refuse_own_answers

# Of column chunks, which are as large as a row group, this much is read at a time.
_BUFFER_BYTES = 1 << 20
# Readers are made for row groups larger than what is asked together.
_PARTS_OF_ROW_GROUP = 16


@dataclass(frozen=True, kw_only=True)
class ParquetChunk:
    """Some rows of a file, as a `Chunk`."""

    table: pa.Table
    columns: Columns
    first: int
    path: Path

    @property
    def where(self) -> str:
        """The file, and the first of them, in words."""
        return f"{self.path}, from row {self.first + 1} on"

    @property
    def texts(self) -> list[str]:
        """The first text of each."""
        return self._read(self.columns.text)

    @property
    def pairs(self) -> list[str]:
        """The second text of each, where there is such a column."""
        if self.columns.pair in self.table.column_names:
            return self._read(self.columns.pair)
        return [] if self.columns.second is None else [self.columns.second] * len(self.table)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return everything that each holds."""
        rows: list[dict[str, Any]] = self.table.to_pylist()
        return rows

    def _read(self, name: str) -> list[str]:
        texts: list[str] = self.table[name].cast(pa.string()).to_pylist()
        if None in texts:
            raise UsageError(
                f"row {self.first + texts.index(None) + 1} of {self.path} holds no text",  # type: ignore[arg-type]
                expected=f"a string in {name}",
                got="null",
            )
        return texts


class ParquetSource:
    """A Parquet file, of which one column holds texts."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self._path, self._columns = path, columns
        self._file = _open(path)
        self._passed = 0
        schema = self._file.schema_arrow
        wanted = [columns.text, *([columns.pair] if columns.has_pairs else [])]
        for name in wanted:
            if name not in schema.names:
                raise UsageError(
                    f"{path} has no column {name}",
                    expected="one that holds texts",
                    got=", ".join(schema.names),
                    remedy="name it with --column",
                )
        for name in {*wanted, columns.pair} & set(schema.names):
            if not _holds_texts(schema.field(name).type):
                raise UsageError(
                    f"column {name} of {path} holds no texts",
                    expected="strings",
                    got=str(schema.field(name).type),
                    remedy="name another with --column",
                )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def pass_over(self, count: int) -> tuple[int, str]:
        """Go to the row behind those that have an answer; return how many there are, and the text of the last one."""
        self._passed = min(count, self._file.metadata.num_rows)
        if not self._passed:
            return 0, ""
        last = next(self._read_tables(self._passed - 1, 1, [self._columns.text]))
        return self._passed, ParquetChunk(
            table=last, columns=self._columns, first=self._passed - 1, path=self._path
        ).texts[0]

    def read(self, most: int) -> Iterator[Chunk]:
        """Yield what follows, at most `most` rows at a time; of a file without rows, none once."""
        schema = self._file.schema_arrow
        tables = self._read_tables(self._passed, most) if self._file.metadata.num_rows else [schema.empty_table()]
        for table in tables:
            yield ParquetChunk(
                table=table.replace_schema_metadata(None), columns=self._columns, first=self._passed, path=self._path
            )
            self._passed += len(table)

    def _read_tables(self, first: int, most: int, names: list[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows from `first` on; row groups before it are not read."""
        sizes = [self._file.metadata.row_group(index).num_rows for index in range(self._file.num_row_groups)]
        group = 0
        while group < len(sizes) and first >= sizes[group]:
            first -= sizes[group]
            group += 1
        groups = list(range(group, len(sizes)))
        try:
            for batch in self._file.iter_batches(batch_size=most, row_groups=groups, columns=names):
                skipped = min(first, len(batch))
                first -= skipped
                if skipped < len(batch):
                    yield pa.Table.from_batches([batch.slice(skipped)])
        except pa.ArrowInvalid as exc:
            raise _explain(self._path, exc) from exc


class ParquetTarget:
    """A Parquet file that is made of parts when the last one is there."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self._path, self._columns = path, columns
        self._folder = path.with_name(f"{path.name}.parts")
        self._lock: int | None = None
        self._is_locked = False
        self.is_finished = path.is_file()
        if not self.is_finished or self._folder.is_dir():
            self._folder.mkdir(exist_ok=True)
            self._lock = os.open(self._folder, os.O_RDONLY)
        try:
            if self._lock is not None:
                lock(self._lock, path)
                self._is_locked = True
            if self._lock is not None and path.is_file():
                # Whoever joined them was killed before they were removed.
                shutil.rmtree(self._folder)
                self.is_finished = True
            self._parts = [path] if self.is_finished else self._find_parts()
            self.done = sum(_open(part).metadata.num_rows for part in self._parts)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the lock to others, and no folder without a part."""
        if self._is_locked:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
        if self._lock is not None:
            os.close(self._lock)
            self._lock, self._is_locked = None, False

    def read_last(self) -> str | None:
        """Return the text of the last answer; None where the rows are of another form."""
        source = _open(self._parts[-1])
        name = self._columns.text
        if name not in source.schema_arrow.names or not _holds_texts(source.schema_arrow.field(name).type):
            return None
        column = source.read_row_group(source.num_row_groups - 1, columns=[name])[name]
        text = column[-1].as_py()
        return text if isinstance(text, str) else None

    def add(self, chunk: Chunk, arrays: Arrays) -> None:
        """Write the answers to a chunk; when this returns they are on the disk."""
        assert isinstance(chunk, ParquetChunk), "Bug: only rows of Parquet are written as such"
        refuse_own_answers(chunk.table.column_names, arrays, chunk.where)
        if self.is_finished and len(chunk.table):
            raise UsageError(
                f"{self._path} is whole",
                expected=f"a file of {self.done} rows to be asked about",
                got="more",
                remedy="write another file, or remove it",
            )
        if self.is_finished:
            return
        table = chunk.table
        for name, values in arrays.items():
            table = table.append_column(name, to_arrow(values))
        part = self._folder / f"{self.done:012d}.parquet"
        if self._parts and not table.schema.equals(_open(self._parts[0]).schema_arrow):
            raise UsageError(
                f"{self._folder} holds other columns",
                expected=", ".join(_describe(_open(self._parts[0]).schema_arrow)),
                got=", ".join(_describe(table.schema)),
                remedy="go on with the model that it was begun with, or write another file",
            )
        with _whole(part) as unfinished:
            pq.write_table(table, unfinished)
        self._parts.append(part)
        self.done += len(table)

    def finish(self) -> None:
        """Join the parts."""
        if self.is_finished:
            return
        with (
            _whole(self._path, beside=self._folder / "joined.tmp") as unfinished,
            pq.ParquetWriter(unfinished, _open(self._parts[0]).schema_arrow) as writer,
        ):
            for start in range(0, len(self._parts), _PARTS_OF_ROW_GROUP):
                parts = self._parts[start : start + _PARTS_OF_ROW_GROUP]
                writer.write_table(pa.concat_tables([pq.read_table(part) for part in parts]).combine_chunks())
        shutil.rmtree(self._folder)

    def _find_parts(self) -> list[Path]:
        """Return the parts that are whole, in order.

        Raises:
            UsageError: One between them is missing.
        """
        for unfinished in self._folder.glob("*.tmp"):
            unfinished.unlink()
        parts, rows = sorted(self._folder.glob("*.parquet")), 0
        for part in parts:
            if part.stem != f"{rows:012d}":
                raise UsageError(
                    f"{self._folder} is not whole",
                    expected=f"{rows:012d}.parquet",
                    got=part.name,
                    remedy="remove the folder, and begin anew",
                )
            rows += _open(part).metadata.num_rows
        return parts


def to_arrow(values: npt.NDArray[Any]) -> pa.Array:
    """Return the values of one output, a row each: lists where a row is one, strings where they are bytes."""
    if values.ndim > 1:
        rows, length = values.shape[:2]
        offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * np.int32(length))
        return pa.ListArray.from_arrays(offsets, to_arrow(values.reshape(rows * length, *values.shape[2:])))
    if values.dtype == np.object_:
        return pa.array([decode(value) for value in values], pa.string())
    return pa.array(values)


def _holds_texts(kind: pa.DataType) -> bool:
    held = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(held) or pa.types.is_large_string(held))


def _describe(schema: pa.Schema) -> list[str]:
    return [f"{field.name} {field.type}" for field in schema]


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except pa.ArrowInvalid as exc:
        raise _explain(path, exc) from exc


def _explain(path: Path, exc: Exception) -> UsageError:
    reason = " ".join(str(exc).split())[:120]
    return UsageError(f"{path} cannot be read", expected="a whole Parquet file", got=f"'{reason}'")


@contextlib.contextmanager
def _whole(path: Path, *, beside: Path | None = None) -> Iterator[Path]:
    """Yield where a file is written that is at `path` when it is whole and on the disk, and not before."""
    unfinished = beside or path.with_suffix(".tmp")
    yield unfinished
    with unfinished.open("rb") as written:
        os.fsync(written.fileno())
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
