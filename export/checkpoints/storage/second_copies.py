"""Second copies of a model's tensors, which must be those tensors in the same or a lower precision.

Stages 1 and 2 of ZeRO keep the weights of the forward pass beside the fp32 pieces, and these are cast from those after
every step; trainers gather 16-bit weights beside their own shards; Megatron's ranks each have their replica of a norm.
A rank file that is swapped, doubled or from another step does not agree with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...errors import CheckpointError, list_some
from ..remedies import RECOPY
from .byte_ranges import OpenFiles, reuse_memory
from .cast import cast_bytes, equals_cast
from .dtypes import ElementType
from .stored_tensor import ContiguousTensor, StoredTensor

_WINDOW_ELEMENTS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class SecondCopy:
    """A second copy of a tensor, of the same or lower precision.

    Attributes:
        name: What to call it in messages.
        holder: The name of the tensor that it is a copy of.
        tensor: Where it lies.
        group: Copies of one group are complained about together.
    """

    name: str
    holder: str
    tensor: StoredTensor
    group: int


class SecondCopies:
    """Compares copies with the parts of tensors that pass by, in any thread.

    Args:
        tensors: Name → tensor.
        copies: What must agree with them.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], copies: Sequence[SecondCopy]) -> None:
        self._tensors = tensors
        self._copies = copies
        # (group, name) of copies that are not their tensors.
        self._differing: set[tuple[int, str]] = set()
        # Copies that cannot be looked at while their tensors pass, because they are cut otherwise.
        self.unpaired: list[SecondCopy] = []
        # Name → copies and, for each, its runs, which lie as those of the tensor do.
        self._pairs: dict[str, list[tuple[SecondCopy, tuple[ContiguousTensor, ...]]]] = {}
        for copy in copies:
            tensor = tensors[copy.holder]
            if tensor.is_all_of_its_runs and tensor.layout == copy.tensor.layout:
                self._pairs.setdefault(copy.holder, []).append((copy, copy.tensor.runs))
            else:
                self.unpaired.append(copy)

    def compare_part(
        self, files: OpenFiles, name: str, index: int, position: int, part: memoryview, dtype: ElementType
    ) -> None:
        """Compare bytes of `name`, from `position` on of its run `index`, with its copies there."""
        for copy, runs in self._pairs.get(name, ()):
            if (copy.group, copy.name) not in self._differing:
                twin = runs[index]
                start, stop = position // dtype.itemsize, (position + len(part)) // dtype.itemsize
                content = reuse_memory("copy", (stop - start) * twin.dtype.itemsize)
                filled = 0
                for window in twin.cut(start, stop):
                    files.read_into(window.block, window.start, content[filled : filled + window.length])
                    filled += window.length
                if not equals_cast(part, dtype, content, twin.dtype):
                    self._differing.add((copy.group, copy.name))

    def compare_whole(self, copy: SecondCopy) -> None:
        """Read an unpaired copy and its tensor, and compare them."""
        if not agrees(self._tensors[copy.holder], copy.tensor):
            self._differing.add((copy.group, copy.name))

    def refuse_different(self) -> None:
        """Raise for the first group of copies in which one was not its tensor, cast to the copy's dtype.

        Raises:
            CheckpointError: There is one.
        """
        if not self._differing:
            return
        group = min(number for number, _ in self._differing)
        alike = [copy for copy in self._copies if copy.group == group]
        wrong = [copy for copy in alike if (group, copy.name) in self._differing]
        ours = {part.block.path for copy in wrong for part in self._tensors[copy.holder].ranges}
        theirs = {part.block.path for copy in wrong for part in copy.tensor.ranges}
        # A trainer's 16-bit save lies beside the folders of all tags, and is of one of them.
        apart = {path.parent for path in ours}.isdisjoint(path.parent for path in theirs)
        beside = ", or, if only the copy is from another step, pass the folder of the tag itself" if apart else ""
        raise CheckpointError(
            f"the pieces in {list_some(ours, 4)} disagree with the {wrong[0].tensor.dtype.name} copy in"
            f" {list_some(theirs, 4)} on {list_some(copy.name for copy in wrong)}",
            expected=f"the same {len(alike)} weights in both",
            got=f"{len(wrong)} that differ",
            remedy=f"a rank file is swapped, doubled, damaged or from another step; {RECOPY}{beside}",
        )


def agrees(tensor: StoredTensor, other: StoredTensor) -> bool:
    """Tell whether another tensor is this one, cast to its dtype; reads both until they differ, and no checksum.

    Raises:
        CheckpointError: A file ends early or cannot be opened.
    """
    return tensor.shape == other.shape and all(
        cast_bytes(ours, tensor.dtype, other.dtype) == theirs
        for ours, theirs in zip(_read_windows(tensor), _read_windows(other), strict=True)
    )


def _read_windows(tensor: StoredTensor) -> Iterator[bytes]:
    """Yield the tensor's bytes, row-major, `_WINDOW_ELEMENTS` elements at a time."""
    size = _WINDOW_ELEMENTS * tensor.dtype.itemsize
    waiting = bytearray()
    for chunk in tensor.chunks():
        waiting += chunk
        while len(waiting) >= size:
            yield bytes(waiting[:size])
            del waiting[:size]
    if waiting:
        yield bytes(waiting)
