"""How ZeRO cuts parameters into the ranks' flat pieces, and their way back. Pure arithmetic on byte ranges.

Layouts: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py and runtime/bf16_optimizer.py; each
was checked against the live ranks, bit for bit. The order of the names is the order in the flat group and comes from
`param_shapes` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ...errors import CheckpointError
from ..remedies import RECOPY_WHOLE
from ..storage.byte_ranges import cut_ranges
from ..storage.stored_tensor import ContiguousTensor, StoredTensor, join

Shapes = Mapping[str, tuple[int, ...]]


def join_contiguous_group(
    shapes: Shapes, pieces: Sequence[StoredTensor], paddings: Sequence[int], *, source: str
) -> dict[str, StoredTensor]:
    """Undo stages 1 and 2, where the ranks hold consecutive pieces of one flat group and cut anywhere.

    The group was padded to a multiple of twice the ranks; the padding may have been stripped from the last pieces.

    Args:
        shapes: Name → shape, in the order of the flat group.
        pieces: Each rank's piece, 1-D, by rank.
        paddings: Elements of alignment after each parameter, in the order of `shapes`; none if empty.
        source: What to call the group in messages.

    Returns:
        Name → tensor, of the pieces' dtype.

    Raises:
        CheckpointError: The pieces do not add up to the shapes.
    """
    flat = _flat(pieces, source)
    after = list(paddings) or [0] * len(shapes)
    if len(after) != len(shapes):
        raise _misfit(source, f"{len(shapes)} paddings of parameters", str(len(after)))
    tensors: dict[str, StoredTensor] = {}
    position = 0
    needed = sum(prod(shape) for shape in shapes.values()) + sum(after)
    # DeepSpeed aligns a group to two elements per rank (`nccl_start_alignment_factor`).
    if not 0 <= flat.numel - needed < 2 * len(pieces):
        raise _misfit(source, f"{needed} elements and less than {2 * len(pieces)} of padding", f"{flat.numel}")
    for (name, shape), padding in zip(shapes.items(), after, strict=True):
        stop = position + prod(shape)
        tensors[name] = flat.take(position, shape)
        position = stop + padding
    return tensors


def join_sliced_group(shapes: Shapes, pieces: Sequence[StoredTensor], *, source: str) -> dict[str, StoredTensor]:
    """Undo stage 3, where each parameter is cut into one slice per rank, the last ones padded.

    Args:
        shapes: Name → shape, in the order of the sub-group.
        pieces: Each rank's slices end to end, 1-D, by rank.
        source: What to call the sub-group in messages.

    Returns:
        Name → tensor, of the pieces' dtype.

    Raises:
        CheckpointError: The pieces do not add up to the shapes.
    """
    dtype = _flat(pieces, source).dtype
    world_size = len(pieces)
    needed = sum(slice_numel(shape, world_size) for shape in shapes.values())
    for rank, piece in enumerate(pieces):
        if piece.numel != needed:
            raise _misfit(f"{source}, rank {rank}", f"{needed} elements for {world_size} ranks", str(piece.numel))
    tensors: dict[str, StoredTensor] = {}
    position = 0
    for name, shape in shapes.items():
        step = slice_numel(shape, world_size)
        slices = tuple(part for piece in pieces for part in piece.cut(position, position + step))
        ranges = cut_ranges(slices, 0, prod(shape) * dtype.itemsize)
        tensors[name] = ContiguousTensor(dtype=dtype, shape=shape, ranges=ranges)
        position += step
    return tensors


def slice_numel(shape: tuple[int, ...], world_size: int) -> int:
    """Return the elements of each rank's slice of a parameter at stage 3, padding included."""
    return -(-prod(shape) // world_size)


def find_slice_padding(shapes: Shapes, rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return the [start, stop) in rank's piece at stage 3 that no parameter uses."""
    unused = []
    position = 0
    for shape in shapes.values():
        step = slice_numel(shape, world_size)
        used = max(0, min(step, prod(shape) - rank * step))
        if used < step:
            unused.append((position + used, position + step))
        position += step
    return unused


def map_fragments(shapes: Shapes, paddings: Sequence[int], rank: int, piece_numel: int) -> dict[str, tuple[int, int]]:
    """Return which part of which parameter lies in rank's piece at stages 1 and 2: name → (start in it, elements)."""
    first, last = rank * piece_numel, (rank + 1) * piece_numel
    fragments = {}
    position = 0
    for (name, shape), padding in zip(shapes.items(), paddings or [0] * len(shapes), strict=True):
        start, stop = max(first, position), min(last, position + prod(shape))
        if start < stop:
            fragments[name] = (start - first, stop - start)
        position += prod(shape) + padding
    return fragments


def _flat(pieces: Sequence[StoredTensor], source: str) -> StoredTensor:
    """Return the pieces laid end to end as one 1-D tensor."""
    dtypes = {piece.dtype for piece in pieces}
    if len(dtypes) != 1 or any(len(piece.shape) != 1 for piece in pieces):
        found = ", ".join(sorted(f"{piece.dtype.name} {list(piece.shape)}" for piece in pieces))
        raise _misfit(source, "1-D pieces of one dtype", found or "no pieces")
    return join(pieces, (sum(piece.numel for piece in pieces),))


def _misfit(source: str, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"the ranks' pieces do not fit together in {source}",
        expected=expected,
        got=got,
        remedy=f"a rank file is missing, from another run or from an older save; {RECOPY_WHOLE}",
    )
