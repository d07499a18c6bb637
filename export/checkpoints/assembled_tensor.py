"""A tensor whose bytes lie scattered: boxes of it in several files, or its transpose.

Sharding along the first dimension needs none of this: the shards' bytes follow one another, and a plain `StoredTensor`
says so. Along another dimension every row is spread over all shards, and listing each piece of each row would take more
memory than a large model's names. So the boxes are kept, and rows are put together as they are asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.checkpoints.dtypes import ElementType
from export.checkpoints.stored_tensor import CHUNK_BYTES, ByteRange, StoredTensor
from export.errors import CheckpointError, list_some

if TYPE_CHECKING:
    import numpy as np

# Marks a tensor whose `ranges` are not its elements in order, for all code that would take them for it.
_SCATTERED = (0,)
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

    `ranges` are the bytes of all boxes, so that files are found and checksums checked as for any other tensor; they are
    not in the order of the elements, which is why `stride` is not None.
    """

    boxes: tuple[Box, ...] = ()
    transposed: bool = False

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield the tensor's bytes, row-major, at most `chunk_bytes` at a time (one row at least).

        Raises:
            CheckpointError: A file ends early or cannot be opened.
        """
        if not self.numel:
            return
        rows = max(1, chunk_bytes // (self.nbytes // self.shape[0]))
        pages = _Pages()
        for start in range(0, self.shape[0], rows):
            stop = min(self.shape[0], start + rows)
            yield (self._read_columns(start, stop, pages) if self.transposed else self._read_rows(start, stop))

    def _read_rows(self, start: int, stop: int) -> bytes:
        import numpy as np

        out = np.empty((stop - start, *self.shape[1:]), _bits(self.dtype))
        for box in self.boxes:
            first, last = max(start, box.offsets[0]), min(stop, box.offsets[0] + box.part.shape[0])
            if first >= last:
                continue
            inner = prod(box.part.shape[1:])
            elements = _read_elements(box.part, (first - box.offsets[0]) * inner, (last - box.offsets[0]) * inner)
            target = (slice(first - start, last - start), *_slices(box.offsets[1:], box.part.shape[1:]))
            out[target] = elements.reshape(last - first, *box.part.shape[1:])
        return out.tobytes()

    def _read_columns(self, start: int, stop: int, pages: _Pages) -> bytes:
        """Return rows [start, stop) of the transpose: columns of the boxes, read from mapped pages."""
        import numpy as np

        out = np.empty((stop - start, self.shape[1]), _bits(self.dtype))
        for box in self.boxes:
            height, width = box.part.shape
            first, last = max(start, box.offsets[1]), min(stop, box.offsets[1] + width)
            if first >= last:
                continue
            for row, block in _map_rows(box.part, height, width, pages):
                # Copied together first: far columns, a power of two apart, would push each other out of the cache.
                columns = np.ascontiguousarray(block[:, first - box.offsets[1] : last - box.offsets[1]])
                top = box.offsets[0] + row
                out[first - start : last - start, top : top + len(block)] = columns.T
        return out.tobytes()


def assemble(shape: tuple[int, ...], dtype: ElementType, boxes: Sequence[Box], *, name: str) -> StoredTensor:
    """Return the tensor that `boxes` make up.

    Args:
        shape: Of the whole tensor.
        dtype: Of the whole tensor and every box.
        boxes: In any order. Boxes without elements are let pass.
        name: The tensor's name, used only in the error.

    Returns:
        A plain `StoredTensor` where the boxes' bytes follow one another, an `AssembledTensor` elsewhere.

    Raises:
        CheckpointError: The boxes leave a gap, overlap, stick out, or are of another dtype.
    """
    filled = sorted((box for box in boxes if box.part.numel), key=lambda box: box.offsets)
    check_tiling(shape, [(box.offsets, box.part.shape) for box in filled], name=name)
    others = {box.part.dtype.name for box in filled} - {dtype.name}
    if others:
        raise CheckpointError(
            f"{name} is stored in several dtypes",
            expected=dtype.name,
            got=list_some(others),
            remedy="copy the checkpoint again, or use the one before it",
        )
    ranges = tuple(part for box in filled for part in box.part.ranges)
    # Boxes that are whole in every dimension but the first, or cut only where all sides before are 1, follow in order.
    if all(box.part.stride is None for box in filled) and _follow_in_order(shape, filled):
        return StoredTensor(dtype=dtype, shape=shape, ranges=ranges)
    return AssembledTensor(dtype=dtype, shape=shape, ranges=ranges, stride=_SCATTERED, boxes=tuple(filled))


def transpose(tensor: StoredTensor) -> StoredTensor:
    """Return the matrix [a, b] as [b, a]; nothing is read.

    Raises:
        CheckpointError: The tensor is no matrix.
    """
    if len(tensor.shape) != 2:
        raise CheckpointError("only a matrix is transposed", expected="2 dimensions", got=f"{len(tensor.shape)}")
    shape = (tensor.shape[1], tensor.shape[0])
    boxes = tensor.boxes if isinstance(tensor, AssembledTensor) else (Box((0, 0), tensor),)
    assert not isinstance(tensor, AssembledTensor) or not tensor.transposed, "Bug: transposed twice"
    return AssembledTensor(
        dtype=tensor.dtype, shape=shape, ranges=tensor.ranges, stride=_SCATTERED, boxes=boxes, transposed=True
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
        remedy="a rank's file is missing or of another save; copy the whole checkpoint again",
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


def _bits(dtype: ElementType) -> str:
    """Return numpy's unsigned integer as wide as an element, which numpy copies faster than its bytes one by one."""
    return f"u{dtype.itemsize}"


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def _read_elements(part: StoredTensor, start: int, stop: int) -> np.ndarray[Any, Any]:
    """Return the elements [start, stop) of a tensor, flattened, as `_bits`."""
    import numpy as np

    if part.stride is not None:
        # Saved with other strides and sharded along another dimension: never seen, and read whole.
        content = b"".join(part.chunks())[start * part.dtype.itemsize : stop * part.dtype.itemsize]
    else:
        piece = StoredTensor(dtype=part.dtype, shape=(stop - start,), ranges=part.cut(start, stop))
        content = b"".join(piece.chunks())
    return np.frombuffer(content, _bits(part.dtype))


def _map_rows(part: StoredTensor, height: int, width: int, pages: _Pages) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Yield (first row, block [rows, width]) over a matrix: mapped, but for rows that cross two ranges."""
    itemsize = part.dtype.itemsize
    if part.stride is not None:
        yield 0, _read_elements(part, 0, part.numel).reshape(height, width)
        return
    row_bytes = width * itemsize
    position, done = 0, 0
    for window in part.ranges:
        end = position + window.length
        # Rows that lie whole in this range; those before them crossed its border.
        first, last = -(-position // row_bytes), end // row_bytes
        if done < min(first, last):
            yield done, _read_elements(part, done * width, first * width).reshape(first - done, width)
            done = first
        if first < last:
            yield first, pages.view(window, first * row_bytes - position, (last - first, width), part.dtype)
            done = last
        position = end
    if done < height:
        yield done, _read_elements(part, done * width, height * width).reshape(height - done, width)


class _Pages:
    """Files mapped once each: their pages take no anonymous memory."""

    def __init__(self) -> None:
        self._files: dict[Path, np.ndarray[Any, Any]] = {}

    def view(self, window: ByteRange, start: int, shape: tuple[int, int], dtype: ElementType) -> np.ndarray[Any, Any]:
        """Return a range from byte `start` on as an array of `shape`; nothing is copied.

        Raises:
            CheckpointError: The file ends early or cannot be opened.
        """
        import numpy as np

        path = window.block.path
        try:
            if path not in self._files:
                self._files[path] = np.memmap(path, np.uint8, mode="r")
            offset = window.block.offset + window.start + start
            content = self._files[path][offset : offset + prod(shape) * dtype.itemsize]
            return content.view(_bits(dtype)).reshape(shape)
        except (OSError, ValueError) as exc:
            raise CheckpointError(
                f"{path} ends early",
                expected=f"{prod(shape)} bytes more",
                got="fewer",
                remedy="copy the checkpoint again",
            ) from exc
