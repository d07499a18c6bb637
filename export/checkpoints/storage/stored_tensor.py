"""A tensor on disk, read a few chunks at a time: what all kinds of it offer, and the most common kind.

Most tensors are `ContiguousTensor`s, whose bytes follow one another. Of the others, `strided_tensor` has those saved as
views, and `assembled_tensor` those of which every row is spread over several files.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError
from ..remedies import RECOPY_OR_USE_OLDER
from .byte_ranges import CHUNK_BYTES, ByteRange, OpenFiles, cut_ranges, read_range
from .dtypes import ElementType

if TYPE_CHECKING:
    import numpy as np
    import torch

# Called with the index of a run, a start and a stop: returns the elements [start, stop) of the run, flattened, as
# unsigned integers of their size. They are good until the next call.
ReadRun = Callable[[int, int, int], "np.ndarray[Any, Any]"]


@dataclass(frozen=True, kw_only=True)
class StoredTensor(ABC):
    """A tensor on disk.

    Equal ones are one tensor under two names: the same bytes of the same files, in the same layout.

    Attributes:
        dtype: Type of its elements.
        shape: Sides; empty for a scalar.
        ranges: Everything that is read for it, by which its files and their checksums are found. Only in a
            `ContiguousTensor` are these its elements in order.
    """

    dtype: ElementType
    shape: tuple[int, ...]
    ranges: tuple[ByteRange, ...]

    @property
    def numel(self) -> int:
        """The number of elements; 1 for a scalar, 0 if any side is 0."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.numel * self.dtype.itemsize

    @property
    @abstractmethod
    def runs(self) -> tuple[ContiguousTensor, ...]:
        """The contiguous tensors that its elements are read from, which together are `ranges`."""

    @property
    @abstractmethod
    def layout(self) -> Hashable:
        """How `runs` make up the tensor: where two tensors have it alike, so have their runs, element by element."""

    @property
    def is_all_of_its_runs(self) -> bool:
        """Whether the elements of `runs` are those of the tensor, each once and in whatever order."""
        return True

    @abstractmethod
    def pieces(self, read: ReadRun) -> Iterator[tuple[int, memoryview]]:
        """Yield (position, bytes) until every byte of the row-major tensor was there once, in no certain order.

        Each run is read from start to end, each of its elements once, in bounded memory whatever the tensor's size. So
        whoever reads decides what the bytes are checked with.

        Args:
            read: What to read with.

        Yields:
            Bytes that are good until the next are asked for.

        Raises:
            CheckpointError: A file ends early or cannot be opened, or the layout cannot be read in bounded memory.
        """

    @abstractmethod
    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield the tensor's bytes, row-major, about `chunk_bytes` at a time at most (one row or element at least).

        No checksum is looked at: see `integrity`.

        Raises:
            CheckpointError: A file ends early or cannot be opened.
        """

    def cut(self, start: int, stop: int) -> tuple[ByteRange, ...]:
        """Return the bytes of the elements [start, stop) of the flattened tensor.

        Raises:
            CheckpointError: The tensor has fewer elements, or they do not lie in order.
        """
        raise CheckpointError(
            f"a tensor{self._where} was saved with strides, or is split, where its elements must lie in order",
            expected=f"elements {start} to {stop}, row-major",
            got=f"shape {list(self.shape)} in another order",
            remedy="call contiguous() on it and save it again",
        )

    def take(self, start: int, shape: tuple[int, ...]) -> ContiguousTensor:
        """Return the elements of the flattened tensor from `start` on, as many as `shape` has, under that shape.

        Raises:
            CheckpointError: The tensor has fewer elements, or they do not lie in order.
        """
        return ContiguousTensor(dtype=self.dtype, shape=shape, ranges=self.cut(start, start + prod(shape)))

    def reshape(self, shape: tuple[int, ...]) -> ContiguousTensor:
        """Return the same elements under another shape.

        Raises:
            CheckpointError: `shape` has another number of elements, or they do not lie in order.
        """
        if prod(shape) != self.numel:
            raise CheckpointError(
                f"a tensor{self._where} is of another size than recorded",
                expected=f"{prod(shape)} elements, {list(shape)}",
                got=f"{self.numel}, {list(self.shape)}",
                remedy=RECOPY_OR_USE_OLDER,
            )
        return self.take(0, shape)

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

        if not self.numel:
            return torch.empty(self.shape, dtype=self.dtype.to_torch())
        content = bytearray(self.nbytes)
        with OpenFiles() as files:
            for position, piece in self.pieces(read_unchecked(files, self.runs)):
                content[position : position + len(piece)] = piece
        return torch.frombuffer(content, dtype=self.dtype.to_torch()).reshape(self.shape)

    @property
    def _where(self) -> str:
        return f" in {self.ranges[0].block.path}" if self.ranges else ""


@dataclass(frozen=True, kw_only=True)
class ContiguousTensor(StoredTensor):
    """A tensor whose elements, row-major, are the bytes of `ranges`, one range after the other."""

    @property
    def runs(self) -> tuple[ContiguousTensor, ...]:
        """The tensor itself."""
        return (self,)

    @property
    def layout(self) -> Hashable:
        """The shape."""
        return self.shape

    def pieces(self, read: ReadRun) -> Iterator[tuple[int, memoryview]]:
        """Yield it from start to end."""
        step = CHUNK_BYTES // self.dtype.itemsize
        for start in range(0, self.numel, step):
            yield start * self.dtype.itemsize, as_bytes(read(0, start, min(self.numel, start + step)))

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield its bytes, no two ranges' in one chunk."""
        for part in self.ranges:
            yield from read_range(part, chunk_bytes)

    def cut(self, start: int, stop: int) -> tuple[ByteRange, ...]:
        """Return the bytes of the elements [start, stop) of the flattened tensor.

        Raises:
            CheckpointError: The tensor has fewer elements.
        """
        if not 0 <= start <= stop <= self.numel:
            raise CheckpointError(
                f"a flat tensor{self._where} is too short",
                expected=f"elements {start} to {stop}, row-major",
                got=f"{self.numel} elements",
                remedy=RECOPY_OR_USE_OLDER,
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


def join(parts: Sequence[StoredTensor], shape: tuple[int, ...]) -> ContiguousTensor:
    """Return the elements of `parts`, of one dtype, one part after the other, under a shape of as many elements.

    Raises:
        CheckpointError: The elements of a part do not lie in order.
    """
    ranges = tuple(window for part in parts for window in part.cut(0, part.numel))
    return ContiguousTensor(dtype=parts[0].dtype, shape=shape, ranges=ranges)


def read_unchecked(files: OpenFiles, runs: Sequence[ContiguousTensor]) -> ReadRun:
    """Return what reads `runs` through `files`, without a look at checksums, into memory of its own each time."""
    import numpy as np

    def read(index: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        run = runs[index]
        content = memoryview(bytearray((stop - start) * run.dtype.itemsize))
        position = 0
        for window in run.cut(start, stop):
            files.read_into(window.block, window.start, content[position : position + window.length])
            position += window.length
        return np.frombuffer(content, bits(run.dtype))

    return read


def bits(dtype: ElementType) -> str:
    """Return numpy's unsigned integer as wide as an element, which numpy copies faster than its bytes one by one."""
    return f"u{dtype.itemsize}"


def as_bytes(elements: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of contiguous elements; nothing is copied."""
    import numpy as np

    return elements.reshape(-1).view(np.uint8).data
