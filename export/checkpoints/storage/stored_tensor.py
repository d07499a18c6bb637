"""A tensor as byte ranges of files: cut, joined and read in pieces without ever being whole in memory."""

from __future__ import annotations

import itertools
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError
from .dtypes import ElementType
from .zip_archive import StoredBlock

if TYPE_CHECKING:
    import numpy as np
    import torch

# Reading, checking and writing release the interpreter's lock; beyond a few threads the disk or the page cache is the
# limit.
THREADS = min(4, os.cpu_count() or 1)

# Between reading, checking and writing it had better stay in a core's caches; but each of these steps gives up the
# interpreter's lock and asks for it again, and threads that ask too often wait for each other: with 64 KiB two of them
# took twice as long as one. With 4 MiB what is transposed took a quarter longer than with this.
CHUNK_BYTES = 1 << 20

# What a thread may hold of a matrix that it transposes: all threads together stay well below 100 MB.
BAND_BYTES = (40 << 20) // THREADS

# The most of a file that is in memory for a tensor whose first row reaches from one end of it to the other.
_MAX_WINDOW_BYTES = 64 << 20

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


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor on disk, row-major: its bytes are those of `ranges`, one after the other.

    A tensor saved with other strides (a transposed one, say) has `stride` set, in elements; its one range then covers
    everything from its first element to its last.
    """

    dtype: ElementType
    shape: tuple[int, ...]
    ranges: tuple[ByteRange, ...]
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """The number of elements; 1 for a scalar, 0 if any side is 0."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements, which are also the bytes of `ranges` where `stride` is None."""
        return self.numel * self.dtype.itemsize

    def cut(self, start: int, stop: int) -> tuple[ByteRange, ...]:
        """Return the bytes of the elements [start, stop) of the flattened tensor.

        Raises:
            CheckpointError: The tensor has fewer elements, or is not row-major.
        """
        if self.stride is not None or not 0 <= start <= stop <= self.numel:
            where = f" in {self.ranges[0].block.path}" if self.ranges else ""
            raise CheckpointError(
                f"a flat tensor{where} is too short",
                expected=f"elements {start} to {stop}, row-major",
                got=f"{self.numel} elements" + ("" if self.stride is None else f" with stride {self.stride}"),
                remedy="copy the checkpoint again, or use the one before it",
            )
        first, last = start * self.dtype.itemsize, stop * self.dtype.itemsize
        # A tensor of many ranges is cut as often as it has chunks: those before the first byte are jumped over.
        skipped = bisect_right(self._ends, first)
        before = self._ends[skipped - 1] if skipped else 0
        return cut_ranges(itertools.islice(self.ranges, skipped, None), first - before, last - before)

    @cached_property
    def _ends(self) -> list[int]:
        """Where each of `ranges` ends, in bytes from the tensor's start."""
        return list(itertools.accumulate(part.length for part in self.ranges))

    def reshape(self, shape: tuple[int, ...]) -> StoredTensor:
        """Return the same elements under another shape.

        Raises:
            CheckpointError: `shape` has another number of elements, or the tensor is not row-major.
        """
        if prod(shape) != self.numel:
            where = f" in {self.ranges[0].block.path}" if self.ranges else ""
            raise CheckpointError(
                f"a tensor{where} is of another size than recorded",
                expected=f"{prod(shape)} elements, {list(shape)}",
                got=f"{self.numel}, {list(self.shape)}",
                remedy="copy the checkpoint again, or use the one before it",
            )
        return StoredTensor(dtype=self.dtype, shape=shape, ranges=self.cut(0, self.numel))

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield the tensor's bytes, row-major, at most `chunk_bytes` at a time (one element at least).

        No checksum is looked at: see `export.checkpoints.integrity`.

        Raises:
            CheckpointError: A file ends early or cannot be opened.
        """
        if self.stride is None:
            for part in self.ranges:
                yield from read_range(part, chunk_bytes)
        else:
            yield from _strided_chunks(self, chunk_bytes)

    def is_constant(self) -> bool:
        """Tell whether all elements are the same, as zeros or ones are; reads them until one is not.

        Raises:
            CheckpointError: A file ends early or cannot be opened.
        """
        first = b""
        for chunk in self.chunks():
            first = first or chunk[: self.dtype.itemsize]
            if chunk != first * (len(chunk) // len(first)):
                return False
        return True

    def to_torch(self) -> torch.Tensor:
        """Return the whole tensor on the CPU. Takes the tensor's size of memory, and imports torch.

        Raises:
            CheckpointError: A file ends early or cannot be opened.
        """
        import torch

        content = bytearray(self.nbytes)
        position = 0
        for chunk in self.chunks():
            content[position : position + len(chunk)] = chunk
            position += len(chunk)
        if not content:
            return torch.empty(self.shape, dtype=self.dtype.to_torch())
        return torch.frombuffer(content, dtype=self.dtype.to_torch()).reshape(self.shape)


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
        # Path → descriptor, the one used last at the end.
        self._files: dict[Path, int] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            os.close(file)

    def read_into(self, block: StoredBlock, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the block's bytes from `start` on.

        Raises:
            CheckpointError: The file cannot be opened or read, or ends early.
        """
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(self._open(block.path), [buffer[filled:]], block.offset + start + filled)
            except OSError as exc:
                raise CheckpointError(f"{block.path} cannot be read", got=exc.strerror or str(exc)) from exc
            if not count:
                raise CheckpointError(
                    f"{block.path} ends early",
                    expected=f"{block.offset + block.length} bytes",
                    got=f"{block.offset + start + filled}",
                    remedy="copy the checkpoint again",
                )
            filled += count

    def _open(self, path: Path) -> int:
        file = self._files.pop(path, None)
        if file is None:
            if len(self._files) == self._MAX_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._files[path] = file
        return file


def is_transposed(tensor: StoredTensor) -> bool:
    """Tell whether a tensor is the transpose of a row-major matrix, as `weight.T` is saved."""
    return len(tensor.shape) == 2 and tensor.stride == (1, tensor.shape[0])


def strided_pieces(
    tensor: StoredTensor, read: Callable[[int, memoryview], None], piece_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """Yield the bytes of a tensor that is not row-major, in the order of its rows.

    Whoever reads decides what each byte is checked with: `read` gets the range's bytes from start to end, each once.
    A file of others is never mapped: one that is cut off meanwhile would end the process.

    Args:
        tensor: With `stride`, and the one range that goes with it.
        read: Called with where in the range to begin, and what to fill.
        piece_bytes: The most to yield at a time, but for one element.

    Raises:
        CheckpointError: More of it than memory is set aside for would have to be read before its first rows are known.
    """
    import numpy as np

    assert tensor.stride is not None, "Bug: a row-major tensor is read by its ranges"
    (window,) = tensor.ranges
    itemsize = tensor.dtype.itemsize
    # A side of 1 has a stride that means nothing.
    sides = [(side, step) for side, step in zip(tensor.shape, tensor.stride, strict=True) if side != 1]
    (rows, row_step), inner = sides[0], sides[1:]
    if row_step > sum((side - 1) * step for side, step in inner):
        # Rows lie one after the other: some of them are read at a time.
        block_rows = max(1, min(rows, CHUNK_BYTES // (row_step * itemsize)))
        block_bytes = block_rows * row_step * itemsize
    else:
        block_rows, block_bytes = rows, window.length
    if min(block_bytes, window.length) > _MAX_WINDOW_BYTES:
        raise CheckpointError(
            f"a tensor in {window.block.path} was saved with strides that are not read at its size",
            expected=f"row-major, a transposed matrix, or at most {_MAX_WINDOW_BYTES >> 20} MiB",
            got=f"shape {list(tensor.shape)}, stride {list(tensor.stride)}",
            remedy="call contiguous() on it and save it again",
        )
    for first in range(0, rows, block_rows):
        start = first * row_step * itemsize if block_rows < rows else 0
        count = min(block_rows, rows - first)
        raw = bytearray(min(block_bytes, window.length - start))
        read(start, memoryview(raw))
        view = np.lib.stride_tricks.as_strided(
            np.frombuffer(raw, np.uint8),
            (count, *(side for side, _ in inner), itemsize),
            (row_step * itemsize, *(step * itemsize for _, step in inner), 1),
            writeable=False,
        )
        yield from _cut_view(view, piece_bytes)
        # Or the next block would be read beside this one.
        del raw, view


def _cut_view(view: np.ndarray[Any, Any], piece_bytes: int) -> Iterator[bytes]:
    """Yield a view's bytes, row-major, `piece_bytes` at most, or one element."""
    import numpy as np

    row_bytes = view[0].nbytes
    if row_bytes > piece_bytes and view.ndim > 2:
        for row in view:
            yield from _cut_view(row, piece_bytes)
        return
    count = max(1, piece_bytes // row_bytes)
    for start in range(0, len(view), count):
        yield np.ascontiguousarray(view[start : start + count]).tobytes()


def _strided_chunks(tensor: StoredTensor, chunk_bytes: int) -> Iterator[bytes]:
    """Yield a tensor that is not row-major, in the order of its rows."""
    if not tensor.numel:
        return
    (window,) = tensor.ranges
    with OpenFiles() as files:
        if is_transposed(tensor):
            yield from _transposed_chunks(tensor, files, chunk_bytes)
            return

        def read(start: int, buffer: memoryview) -> None:
            files.read_into(window.block, window.start + start, buffer)

        yield from strided_pieces(tensor, read, chunk_bytes)


def _transposed_chunks(tensor: StoredTensor, files: OpenFiles, chunk_bytes: int) -> Iterator[bytes]:
    """Yield a transposed matrix in the order of its rows: of each stored row what a band of columns has of it."""
    import numpy as np

    (window,) = tensor.ranges
    (rows, columns), itemsize = tensor.shape, tensor.dtype.itemsize
    band_rows = max(1, BAND_BYTES // 2 // (columns * itemsize))
    for first in range(0, rows, band_rows):
        count = min(band_rows, rows - first)
        band = np.empty((columns, count), f"u{itemsize}")
        for column in range(columns):
            start = window.start + (column * rows + first) * itemsize
            files.read_into(window.block, start, band[column].view(np.uint8).data)
        yield from _cut_view(band.T[..., None].view(np.uint8), chunk_bytes)
