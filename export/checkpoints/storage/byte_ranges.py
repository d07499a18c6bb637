"""Ranges of bytes in files: cut, joined and read, by threads that each hold a few chunks of them at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ..remedies import RECOPY, find_remedy
from .file_state import FileState, refuse_changed
from .zip_archive import StoredBlock

# Reading, checking and writing release the interpreter's lock; beyond a few threads the disk or the page cache is the
# limit.
THREADS = min(4, os.cpu_count() or 1)

# Between reading, checking and writing it had better stay in a core's caches; but each of these steps gives up the
# interpreter's lock and asks for it again, and threads that ask too often wait for each other: with 64 KiB two of them
# took twice as long as one. With 4 MiB what is transposed took a quarter longer than with this.
CHUNK_BYTES = 1 << 20

# What a thread may hold of a matrix that it transposes: all threads together stay well below 100 MB.
BAND_BYTES = (40 << 20) // THREADS

_reused = threading.local()


def reuse_memory(purpose: str, size: int) -> memoryview:
    """Return `size` bytes that this thread keeps for `purpose`: fresh memory costs more than a copy does."""
    buffer: bytearray = getattr(_reused, purpose, None) or bytearray()
    if len(buffer) < size:
        # The old one goes first: there is never room for both.
        buffer = bytearray()
        setattr(_reused, purpose, None)
        buffer = bytearray(size)
        setattr(_reused, purpose, buffer)
    return memoryview(buffer)[:size]


@dataclass(frozen=True)
class ByteRange:
    """A part of a stored block, in bytes from the block's start."""

    block: StoredBlock
    start: int
    length: int


def cut_ranges(ranges: Iterable[ByteRange], start: int, stop: int) -> tuple[ByteRange, ...]:
    """Return the bytes [start, stop) of `ranges` laid end to end."""
    parts = []
    position = 0
    for part in ranges:
        if position >= stop:
            break
        first, last = max(start, position), min(stop, position + part.length)
        if first < last:
            parts.append(ByteRange(part.block, part.start + first - position, last - first))
        position += part.length
    return tuple(parts)


def read_range(part: ByteRange, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the bytes of `part`, at most `chunk_bytes` at a time.

    Raises:
        CheckpointError: The file ends early or cannot be opened.
    """
    position, end = part.start, part.start + part.length
    with OpenFiles() as files:
        while position < end:
            chunk = bytearray(min(chunk_bytes, end - position))
            files.read_into(part.block, position, memoryview(chunk))
            position += len(chunk)
            yield bytes(chunk)


class OpenFiles:
    """Files kept open for reading between reads, the latest few of them. For a `with`, and for one thread."""

    # A tensor's bytes and those of its copy alternate between the files of some ranks; a process may open 1,024.
    _MAX_FILES = 16

    def __init__(self) -> None:
        # Path → descriptor and what the file is to be, the one used last at the end.
        self._files: dict[Path, tuple[int, FileState]] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for path, (file, state) in self._files.items():
                    refuse_changed(path, state, file)
        finally:
            for file, _state in self._files.values():
                os.close(file)

    def read_into(self, block: StoredBlock, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the block's bytes from `start` on.

        Raises:
            CheckpointError: The file cannot be opened or read, ends early, or is not what it was. That it changes
                while it is read is told at the end of the `with`.
        """
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(self._open(block), [buffer[filled:]], block.offset + start + filled)
            except OSError as exc:
                raise CheckpointError(
                    f"{block.path} cannot be read", got=exc.strerror or str(exc), remedy=find_remedy(exc)
                ) from exc
            if not count:
                raise CheckpointError(
                    f"{block.path} ends early",
                    expected=f"{block.offset + block.length} bytes",
                    got=f"{block.offset + start + filled}",
                    remedy=RECOPY,
                )
            filled += count

    def _open(self, block: StoredBlock) -> int:
        file, state = self._files.pop(block.path, (None, None))
        if file is None:
            if len(self._files) == self._MAX_FILES:
                self._close(next(iter(self._files)))
            file = os.open(block.path, os.O_RDONLY | os.O_CLOEXEC)
        self._files[block.path] = file, block.file_state
        if state != block.file_state:
            refuse_changed(block.path, block.file_state, file)
        return file

    def _close(self, path: Path) -> None:
        file, state = self._files.pop(path)
        try:
            refuse_changed(path, state, file)
        finally:
            os.close(file)
