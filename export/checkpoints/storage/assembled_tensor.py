"""A tensor whose bytes lie scattered: boxes of it in several files, or its transpose.

Sharding along the first dimension needs none of this: the shards' bytes follow one another, and a `ContiguousTensor`
says so. Along another dimension every row is spread over all shards, and listing each piece of each row would take more
memory than a large model's names. So the boxes are kept, and rows are put together as they are asked for.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, list_some
from ..remedies import RECOPY_OR_USE_OLDER, RECOPY_WHOLE
from .byte_ranges import BAND_BYTES, CHUNK_BYTES, OpenFiles, reuse_memory
from .dtypes import ElementType
from .stored_tensor import ContiguousTensor, ReadRun, StoredTensor, as_bytes, bits, join, read_unchecked
from .strided_tensor import cut_view

if TYPE_CHECKING:
    import numpy as np

# Rows transposed at a time: their part of a column is a few lines of the first-level cache.
_TILE_ROWS = 128
# Pairs of boxes compared for one tensor, about 3 s of them. A grid of 128 by 128 ranks has 1 million.
_MAX_PAIRS = 3_000_000


@dataclass(frozen=True)
class Box:
    """A part of a tensor: `part` holds the elements from `offsets` on, in every dimension as many as its shape says."""

    offsets: tuple[int, ...]
    part: StoredTensor


@dataclass(frozen=True, kw_only=True)
class AssembledTensor(StoredTensor):
    """A tensor put together from boxes; where `transposed`, the boxes tile its transpose, a matrix.

    Attributes:
        ranges: The bytes of all boxes, which are not in the order of the elements.
        boxes: Contiguous parts, sorted by their offsets.
        transposed: Whether the tensor is the transpose of what the boxes tile.
    """

    boxes: tuple[Box, ...]
    transposed: bool = False

    @property
    def runs(self) -> tuple[ContiguousTensor, ...]:
        """The part of each box."""
        return tuple(run for box in self.boxes for run in box.part.runs)

    @property
    def layout(self) -> Hashable:
        """The shape, and where which box lies."""
        return self.shape, self.transposed, tuple((box.offsets, box.part.shape) for box in self.boxes)

    def pieces(self, read: ReadRun) -> Iterator[tuple[int, memoryview]]:
        """Yield rows where they are short, what is contiguous in box and tensor where they are long."""
        if self.transposed:
            for index, box in enumerate(self.boxes):
                yield from self._transposed_pieces(index, box, read)
        elif self._row_bytes <= CHUNK_BYTES:
            for start, rows in self._rows(read, CHUNK_BYTES):
                yield start * self._row_bytes, as_bytes(rows)
        else:
            for index, box in enumerate(self.boxes):
                yield from self._long_pieces(index, box, read)

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield its bytes, row-major; a tensor with rows longer than a chunk is whole in memory meanwhile."""
        with OpenFiles() as files:
            read = read_unchecked(files, self.runs)
            if self.transposed:
                for band in self._bands(read):
                    yield from cut_view(band.T, chunk_bytes)
            elif self._row_bytes <= CHUNK_BYTES:
                for _, rows in self._rows(read, chunk_bytes):
                    yield bytes(as_bytes(rows))
            else:
                content = bytearray(self.nbytes)
                for position, piece in self.pieces(read):
                    content[position : position + len(piece)] = piece
                for position in range(0, len(content), chunk_bytes):
                    yield bytes(content[position : position + chunk_bytes])

    @property
    def _row_bytes(self) -> int:
        return self.nbytes // self.shape[0]

    def _rows(self, read: ReadRun, chunk_bytes: int) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """Yield (first row, rows) from start to end."""
        import numpy as np

        step = max(1, chunk_bytes // self._row_bytes)
        for start in range(0, self.shape[0], step):
            stop = min(self.shape[0], start + step)
            out = np.empty((stop - start, *self.shape[1:]), bits(self.dtype))
            for index, box in enumerate(self.boxes):
                first, last = max(start, box.offsets[0]), min(stop, box.offsets[0] + box.part.shape[0])
                if first >= last:
                    continue
                inner = prod(box.part.shape[1:])
                elements = read(index, (first - box.offsets[0]) * inner, (last - box.offsets[0]) * inner)
                target = (slice(first - start, last - start), *_slices(box.offsets[1:], box.part.shape[1:]))
                out[target] = elements.reshape(last - first, *box.part.shape[1:])
            yield start, out

    def _long_pieces(self, index: int, box: Box, read: ReadRun) -> Iterator[tuple[int, memoryview]]:
        """Yield what is contiguous in both the box and the tensor."""
        sides, itemsize = box.part.shape, self.dtype.itemsize
        whole = len(sides)
        while whole > 1 and sides[whole - 1] == self.shape[whole - 1]:
            whole -= 1
        outer, run = sides[: whole - 1], prod(sides[whole - 1 :])
        for number, place in enumerate(itertools.product(*map(range, outer))):
            target = 0
            at = [*map(operator.add, place, box.offsets), *box.offsets[whole - 1 :]]
            for offset, side in zip(at, self.shape, strict=True):
                target = target * side + offset
            for start in range(0, run, CHUNK_BYTES // itemsize):
                stop = min(run, start + CHUNK_BYTES // itemsize)
                elements = read(index, number * run + start, number * run + stop)
                yield (target + start) * itemsize, as_bytes(elements)

    def _transposed_pieces(self, index: int, box: Box, read: ReadRun) -> Iterator[tuple[int, memoryview]]:
        """Yield rows of the transpose, of as many columns as the box's rows that fit into a band of memory."""
        height, width = box.part.shape
        total, itemsize = self.shape[1], self.dtype.itemsize
        rows = max(1, min(height, BAND_BYTES // (width * itemsize)))
        for top in range(0, height, rows):
            count = min(rows, height - top)
            band = _transpose_rows(width, top, count, read, index, bits(self.dtype))
            start = box.offsets[1] * total + box.offsets[0] + top
            if count == total:
                for position in range(0, len(band), CHUNK_BYTES):
                    yield start * itemsize + position, band[position : position + CHUNK_BYTES]
                continue
            for row in range(width):
                piece = band[row * count * itemsize : (row + 1) * count * itemsize]
                yield (start + row * total) * itemsize, piece

    def _bands(self, read: ReadRun) -> Iterator[np.ndarray[Any, Any]]:
        """Yield some rows of the transpose at a time, in order, each as [columns, rows].

        Of every stored row what the band has of it is read: for those who want rows in order, and not for a scan.
        """
        import numpy as np

        rows, columns = self.shape
        step = max(1, BAND_BYTES // 2 // (columns * self.dtype.itemsize))
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            band = np.empty((columns, stop - start), bits(self.dtype))
            for index, box in enumerate(self.boxes):
                (top, left), (height, width) = box.offsets, box.part.shape
                first, last = max(start, left), min(stop, left + width)
                for row in range(height) if first < last else ():
                    elements = read(index, row * width + first - left, row * width + last - left)
                    band[top + row, first - start : last - start] = elements
            yield band


def _transpose_rows(width: int, top: int, count: int, read: ReadRun, index: int, kind: str) -> memoryview:
    """Return rows [top, top + count) of a box, `width` wide, as [width, count]."""
    import numpy as np

    itemsize = np.dtype(kind).itemsize
    band = reuse_memory("band", width * count * itemsize)
    out = np.frombuffer(band, kind).reshape(width, count)
    # Rows are a power of two apart as a rule, and columns of such rows push each other out of the cache: a line between
    # them makes it two to three times as fast.
    pitch = width + 64 // itemsize
    tile = max(1, min(_TILE_ROWS, CHUNK_BYTES // (pitch * itemsize)))
    spaced = np.frombuffer(reuse_memory("spaced", tile * pitch * itemsize), kind).reshape(tile, pitch)
    step = max(1, CHUNK_BYTES // (width * itemsize))
    for start in range(0, count, step):
        stop = min(count, start + step)
        elements = read(index, (top + start) * width, (top + stop) * width).reshape(stop - start, width)
        for row in range(start, stop, tile):
            rows = min(tile, stop - row)
            spaced[:rows, :width] = elements[row - start : row - start + rows]
            out[:, row : row + rows] = spaced[:rows, :width].T
    return band


def assemble(shape: tuple[int, ...], dtype: ElementType, boxes: Sequence[Box], *, name: str) -> StoredTensor:
    """Return the tensor that `boxes` make up.

    Args:
        shape: Shape of the whole tensor.
        dtype: Type of the whole tensor's elements and of every box's.
        boxes: Parts in any order. Boxes without elements are ignored.
        name: The tensor's name, used only in the error.

    Returns:
        A `ContiguousTensor` where the boxes' bytes follow one another, the part itself where there is but one, an
        `AssembledTensor` elsewhere.

    Raises:
        CheckpointError: The boxes leave a gap, overlap, stick out, are of another dtype, or were saved as views of
            several kinds.
    """
    filled = sorted((box for box in boxes if box.part.numel), key=lambda box: box.offsets)
    check_tiling(shape, [(box.offsets, box.part.shape) for box in filled], name=name)
    others = {box.part.dtype.name for box in filled} - {dtype.name}
    if others:
        raise CheckpointError(
            f"{name} is stored in several dtypes",
            expected=dtype.name,
            got=list_some(others),
            remedy=RECOPY_OR_USE_OLDER,
        )
    if len(filled) == 1:
        return filled[0].part
    if any(_is_turned(box.part) for box in filled):
        turned = [Box(box.offsets[::-1], transpose(box.part)) for box in filled]
        return transpose(assemble(shape[::-1], dtype, turned, name=name))
    _refuse_views(filled, name)
    # Boxes that are whole in every dimension but the first, or cut only where all sides before are 1, follow in order.
    if _follow_in_order(shape, filled):
        return (
            join([box.part for box in filled], shape)
            if filled
            else ContiguousTensor(dtype=dtype, shape=shape, ranges=())
        )
    return _put_together(shape, dtype, filled)


def transpose(tensor: StoredTensor) -> StoredTensor:
    """Return the matrix [a, b] as [b, a]; nothing is read.

    Raises:
        CheckpointError: The tensor is not a matrix, or was saved as a view that is neither a matrix nor its transpose.
    """
    if len(tensor.shape) != 2:
        raise CheckpointError("only a matrix is transposed", expected="2 dimensions", got=f"{len(tensor.shape)}")
    if not tensor.numel:
        return ContiguousTensor(dtype=tensor.dtype, shape=tensor.shape[::-1], ranges=tensor.ranges)
    boxes = tensor.boxes if isinstance(tensor, AssembledTensor) else (Box((0, 0), tensor),)
    _refuse_views(boxes, "a matrix to transpose")
    if not isinstance(tensor, AssembledTensor) or not tensor.transposed:
        return _put_together(tensor.shape[::-1], tensor.dtype, boxes, transposed=True)
    # Twice is not at all.
    return boxes[0].part if len(boxes) == 1 else _put_together(tensor.shape[::-1], tensor.dtype, boxes)


def _put_together(
    shape: tuple[int, ...], dtype: ElementType, boxes: Sequence[Box], *, transposed: bool = False
) -> AssembledTensor:
    ranges = tuple(part for box in boxes for part in box.part.ranges)
    return AssembledTensor(dtype=dtype, shape=shape, ranges=ranges, boxes=tuple(boxes), transposed=transposed)


def _is_turned(part: StoredTensor) -> bool:
    return isinstance(part, AssembledTensor) and part.transposed


def _refuse_views(boxes: Sequence[Box], name: str) -> None:
    """Refuse boxes whose parts are not contiguous: to read them piece by piece would be to read them many times."""
    views = [box.part for box in boxes if not isinstance(box.part, ContiguousTensor)]
    if views:
        raise CheckpointError(
            f"{name} has shards in {views[0].ranges[0].block.path} that were saved as views",
            expected="contiguous shards, or all of them transposed",
            got=f"one of shape {list(views[0].shape)} with strides of its own",
            remedy="call contiguous() on it before it is sharded, and save it again",
        )


def check_tiling(
    shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], *, name: str
) -> None:
    """Check that boxes (offsets, sizes), none of them empty, cover every element of `shape` exactly once.

    Raises:
        CheckpointError: They do not; the message says where.
    """
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise _untiled(name, shape, f"a chunk of {len(sizes)} dimensions at {list(offsets)}")
        if any(start < 0 or start + size > side for start, size, side in zip(offsets, sizes, shape, strict=True)):
            raise _untiled(name, shape, f"a chunk {list(sizes)} at {list(offsets)}, which sticks out")
    overlapping = _find_overlap(boxes)
    if overlapping is not None:
        raise _untiled(name, shape, f"chunks at {list(overlapping[0])} and {list(overlapping[1])} that overlap")
    # Boxes inside the tensor that do not overlap tile it exactly when they have as many elements.
    covered = sum(prod(sizes) for _, sizes in boxes)
    if covered != prod(shape):
        raise _untiled(name, shape, f"chunks of {covered} elements, at {list_some(list(box[0]) for box in boxes)}")


def _find_overlap(
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the offsets of two boxes that overlap, None if no two do."""
    if len(boxes) < 2:
        return None
    # Swept along the dimension in which the fewest boxes stand beside each other.
    pairs, dim = min((_count_beside(boxes, dim), dim) for dim in range(len(boxes[0][0]))) if boxes[0][0] else (1, 0)
    if not boxes[0][0] or pairs > _MAX_PAIRS:
        return boxes[0][0], boxes[1][0]
    ordered = sorted(boxes, key=lambda box: box[0][dim])
    for index, (offsets, sizes) in enumerate(ordered):
        for other_offsets, other_sizes in ordered[index + 1 :]:
            if other_offsets[dim] >= offsets[dim] + sizes[dim]:
                break
            if _overlap(offsets, sizes, other_offsets, other_sizes):
                return offsets, other_offsets
    return None


def _count_beside(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], dim: int) -> int:
    starts = sorted(offsets[dim] for offsets, _ in boxes)
    ends = ((offsets[dim], offsets[dim] + sizes[dim]) for offsets, sizes in boxes)
    return sum(bisect_left(starts, end) - bisect_left(starts, start) for start, end in ends)


def _overlap(a: Sequence[int], a_sizes: Sequence[int], b: Sequence[int], b_sizes: Sequence[int]) -> bool:
    return all(x < y + y_size and y < x + x_size for x, x_size, y, y_size in zip(a, a_sizes, b, b_sizes, strict=True))


def _untiled(name: str, shape: tuple[int, ...], got: str) -> CheckpointError:
    return CheckpointError(
        f"the chunks of {name} do not make up the tensor",
        expected=f"each of the {prod(shape)} elements of {list(shape)} once",
        got=got,
        remedy=f"a rank's file is missing or of another save; {RECOPY_WHOLE}",
    )


def _follow_in_order(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Tell whether boxes that tile `shape`, sorted by offsets, are consecutive runs of its row-major elements."""
    position = 0
    for box in boxes:
        start = 0
        for offset, side in zip(box.offsets, shape, strict=True):
            start = start * side + offset
        # A run: whole sides at the end, at most one cut side before them, and nothing but 1 before that.
        cut = next((i for i in range(len(shape)) if box.part.shape[i] != 1), len(shape))
        if box.part.shape[cut + 1 :] != shape[cut + 1 :] or start != position:
            return False
        position += box.part.numel
    return True


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
