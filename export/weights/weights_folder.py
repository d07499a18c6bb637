"""A state dict as a folder of safetensors files, as `save_pretrained` and `consolidate` lay them out."""

from pathlib import Path

import torch

from ..checkpoints import StateDict, open_checkpoint
from ..checkpoints.storage.dtypes import BY_NAME, ElementType
from ..checkpoints.storage.stored_tensor import ContiguousTensor
from ..consolidation.safetensors_output import SafetensorsOutput

# A file is not begun beyond it, as in `consolidate`.
_MAX_SHARD_BYTES = 5 * 10**9


def write_weights(weights: StateDict, folder: Path, dtype: str) -> None:
    """Write every tensor into files in `folder`, one tensor in memory at a time.

    Args:
        weights: What is written.
        folder: An existing folder without weights.
        dtype: What floating-point tensors are cast to, such as `bfloat16`.

    Raises:
        CheckpointError: The disk is full, or a number does not fit the type.
    """
    tensors = {
        name: ContiguousTensor(dtype=_find_type(spec.dtype), shape=spec.shape, ranges=())
        for name, spec in weights.specs().items()
    }
    output = SafetensorsOutput(
        folder,
        tensors,
        dtype=BY_NAME[dtype],
        max_shard_bytes=_MAX_SHARD_BYTES,
        metadata={"format": "pt"},
        allow_non_finite=False,
    )
    with output:
        for name in tensors:
            output.write(name, 0, _to_bytes(weights.read(name)).numpy().data)
    output.write_index()


def find_differing(weights: StateDict, folder: Path, dtype: str) -> str | None:
    """Return the name of a tensor in `folder` that is not, bit for bit, that of `weights`; None where all are.

    Args:
        weights: What was written.
        folder: Where to.
        dtype: What it was cast to.

    Raises:
        CheckpointError: A file cannot be read.
    """
    stored, specs = open_checkpoint(folder), weights.specs()
    if unknown := stored.specs().keys() ^ specs.keys():
        return min(unknown)
    for name, spec in specs.items():
        wanted = weights.read(name)
        if spec.dtype.is_floating_point:
            wanted = wanted.to(BY_NAME[dtype].to_torch())
        found = stored.read(name)
        if found.dtype != wanted.dtype or found.shape != wanted.shape:
            return name
        if not torch.equal(_to_bytes(found), _to_bytes(wanted)):
            return name
    return None


def _find_type(dtype: torch.dtype) -> ElementType:
    return BY_NAME[str(dtype).removeprefix("torch.")]


def _to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
