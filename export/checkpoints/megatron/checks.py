"""What the files of Megatron's ranks give away about each other: a rank or layer number is in the file's name alone.

The contents can show: that two files hold one part of the model, where its weights are equal to the last bit, and with
the optimizer's fp32 weights, which name their parameters, which layer and which pipeline stage a file is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...errors import CheckpointError, list_some
from ..remedies import DOUBLED
from .parts import Tensors, find_split_dim

# Per tensor: its name within the layer, and per range the block's CRC-32 and the place in it.
_Contents = tuple[tuple[str, tuple[tuple[int | None, int, int], ...]], ...]


def refuse_doubles(held: Mapping[Path, Tensors]) -> None:
    """Refuse two files whose parts of split weights are the same: one is a copy under the other's name.

    What every tensor parallel rank holds alike proves nothing, and nor do weights that are all zeros or ones.

    Args:
        held: File → our name → tensor.

    Raises:
        CheckpointError: Two files hold the same.
    """
    seen: dict[_Contents, Path] = {}
    for path, tensors in held.items():
        split = {name: tensor for name, tensor in tensors.items() if find_split_dim(name) is not None}
        contents = _describe_contents(split)
        if not contents or any(crc32 is None for _, ranges in contents for crc32, _, _ in ranges):
            continue
        first = seen.setdefault(contents, path)
        if first is not path and not all(tensor.is_constant() for tensor in split.values()):
            raise CheckpointError(
                f"{path} and {first} have the same contents",
                expected="each rank's and layer's own part",
                got=f"every checksum equal of {list_some(split)}",
                remedy=DOUBLED,
            )


def describe_unproven(*, tensor_ranks: int, layer_files: int, numbered: bool) -> tuple[str, ...]:
    """Return what nothing in the files can show.

    Heads may stand in any order, but the ranks' parts of the vocabulary are exchanged with them.

    Args:
        tensor_ranks: Over how many ranks each matrix is split.
        layer_files: How many transformer layers have files of their own; 0 where the names within a file tell them.
        numbered: Whether the optimizer's fp32 weights are there, under the numbers of their layers.
    """
    reason = "their numbers are in the files' names alone"
    unproven = []
    if tensor_ranks > 1:
        ranks = list_some(f"{rank:02d}" for rank in range(tensor_ranks))
        unproven.append(f"proof of the order of tensor parallel ranks {ranks}: {reason}")
    if layer_files > 1 and not numbered:
        unproven.append(f"proof of the order of the {layer_files} layers: {reason}")
    return tuple(unproven)


def _describe_contents(tensors: Tensors) -> _Contents:
    # Layers keep their own names apart from the number: `layers.3.mlp.dense_4h_to_h.weight` in every layer file.
    numbers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    prefix = f"layers.{numbers.pop()}." if len(numbers) == 1 else ""
    return tuple(
        sorted(
            (
                name.removeprefix(prefix),
                tuple((part.block.crc32, part.start, part.length) for part in tensor.ranges),
            )
            for name, tensor in tensors.items()
        )
    )
