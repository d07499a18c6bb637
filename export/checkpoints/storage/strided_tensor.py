"""A tensor that was saved as a view: every second column of a matrix, a stack of transposes, a channels-last filter."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError
from .byte_ranges import CHUNK_BYTES, OpenFiles
from .stored_tensor import ContiguousTensor, ReadRun, StoredTensor, read_unchecked

if TYPE_CHECKING:
    import numpy as np

# The most of a file that is in memory for a tensor whose first row reaches from one end of it to the other.
_MAX_WINDOW_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class StridedTensor(StoredTensor):
    """A tensor with strides that are not those of its shape.

    Attributes:
        ranges: One range, from its first element to its last; others' elements may lie between.
        stride: Elements from one index to the next, for each side.
    """

    stride: tuple[int, ...]

    @property
    def runs(self) -> tuple[ContiguousTensor, ...]:
        """Everything from its first element to its last, as one row."""
        length = self.ranges[0].length // self.dtype.itemsize
        return (ContiguousTensor(dtype=self.dtype, shape=(length,), ranges=self.ranges),)

    @property
    def layout(self) -> Hashable:
        """The shape and the strides."""
        return self.shape, self.stride

    @property
    def is_all_of_its_runs(self) -> bool:
        """Never counted upon: others' elements may lie between, and its own be there twice."""
        return False

    def pieces(self, read: ReadRun) -> Iterator[tuple[int, memoryview]]:
        """Yield it from start to end."""
        position = 0
        for piece in self._rows(read, CHUNK_BYTES):
            yield position, memoryview(piece)
            position += len(piece)

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield its bytes, row-major, at most `chunk_bytes` at a time, or one element."""
        with OpenFiles() as files:
            yield from self._rows(read_unchecked(files, self.runs), chunk_bytes)

    def _rows(self, read: ReadRun, piece_bytes: int) -> Iterator[bytes]:
        """Yield the bytes in the order of the rows.

        A file of others is never mapped: one that is cut off meanwhile would end the process.

        Raises:
            CheckpointError: More of it than memory is set aside for would have to be read before its first rows are
                known.
        """
        import numpy as np

        itemsize, length = self.dtype.itemsize, self.runs[0].numel
        # The stride of a side of 1 has no meaning.
        sides = [(side, step) for side, step in zip(self.shape, self.stride, strict=True) if side != 1]
        (rows, row_step), inner = sides[0], sides[1:]
        if row_step > sum((side - 1) * step for side, step in inner):
            # Rows lie one after the other: some of them are read at a time.
            block_rows = max(1, min(rows, CHUNK_BYTES // (row_step * itemsize)))
            block = block_rows * row_step
        else:
            block_rows, block = rows, length
        if min(block, length) * itemsize > _MAX_WINDOW_BYTES:
            raise CheckpointError(
                f"a tensor{self._where} was saved with strides that are not read at its size",
                expected=f"row-major, a transposed matrix, or at most {_MAX_WINDOW_BYTES >> 20} MiB",
                got=f"shape {list(self.shape)}, stride {list(self.stride)}",
                remedy="call contiguous() on it and save it again",
            )
        for first in range(0, rows, block_rows):
            start = first * row_step if block_rows < rows else 0
            count = min(block_rows, rows - first)
            elements = read(0, start, min(length, start + block))
            view = np.lib.stride_tricks.as_strided(
                elements,
                (count, *(side for side, _ in inner)),
                tuple(step * itemsize for step in (row_step, *(step for _, step in inner))),
                writeable=False,
            )
            yield from cut_view(view, piece_bytes)
            # Or the next block would be read beside this one.
            del elements, view


def cut_view(view: np.ndarray[Any, Any], piece_bytes: int) -> Iterator[bytes]:
    """Yield a view's bytes, row-major, `piece_bytes` at most, or one element."""
    import numpy as np

    row_bytes = view[0].nbytes
    if row_bytes > piece_bytes and view.ndim > 1:
        for row in view:
            yield from cut_view(row, piece_bytes)
        return
    count = max(1, piece_bytes // row_bytes)
    for start in range(0, len(view), count):
        yield np.ascontiguousarray(view[start : start + count]).tobytes()
