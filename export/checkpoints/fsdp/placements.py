"""Which box of a tensor a rank holds: the two classes that FSDP pickles, DTensor and ShardedTensor, as data.

DTensor: `_local_tensor` and `_spec` (mesh, placements, shape), torch 2.13, torch/distributed/tensor/_dtensor_spec.py.
A side of n elements is cut as `torch.chunk` cuts it: ceil(n / ranks) for each rank while there are any, so the last
ranks may hold fewer or none. ShardedTensor (FSDP1 without a mesh): each local shard names its own offsets, torch 2.13,
torch/distributed/_shard/sharded_tensor/api.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..pickles.inert_pickle import Record
from ..pickles.torch_zip import DTENSORS, SHARDED_TENSOR
from ..remedies import RECOPY_OR_USE_OLDER
from ..storage.assembled_tensor import Box
from ..storage.dtypes import ElementType
from ..storage.stored_tensor import StoredTensor

# Under torch.distributed.tensor.placement_types, or torch.distributed._tensor.placement_types before torch 2.5.
_SHARD, _REPLICATE = "Shard", "Replicate"


@dataclass(frozen=True, kw_only=True)
class MeshPlace:
    """Where a rank stands in its mesh.

    Attributes:
        coordinate: The rank's index in each dimension of the mesh.
        world_size: How many ranks the job had, as far as the mesh knows.
        rank: The rank's own number; None where the file does not tell.
    """

    coordinate: tuple[int, ...]
    world_size: int | None
    rank: int | None


@dataclass(frozen=True, kw_only=True)
class RankTensor:
    """What one rank saved of a tensor, before the other ranks are known.

    Attributes:
        shape: Shape of the whole tensor.
        local: This rank's part; None where `boxes` say it all.
        placements: Per mesh dimension, the dimension that is sharded over it, or None where it is replicated.
        place: Where the rank stands.
        boxes: For a ShardedTensor, its parts with their offsets.
    """

    shape: tuple[int, ...]
    dtype: ElementType
    place: MeshPlace
    local: StoredTensor | None = None
    placements: tuple[int | None, ...] = ()
    boxes: tuple[Box, ...] = ()


def is_sharded(value: Any) -> bool:
    """Tell whether `value` is a DTensor or a ShardedTensor."""
    return isinstance(value, Record) and value.type_name in (*DTENSORS, SHARDED_TENSOR)


def read_rank_tensor(value: Record, name: str, path: Path) -> RankTensor:
    """Return what the pickled DTensor or ShardedTensor `value` says.

    Raises:
        CheckpointError: It is damaged, or placed in a way that is not read.
    """
    if value.type_name == SHARDED_TENSOR:
        return _read_sharded_tensor(value, name, path)
    spec, local = value.field("_spec"), value.field("_local_tensor")
    meta, mesh = (spec.field("tensor_meta"), spec.field("mesh")) if isinstance(spec, Record) else (None, None)
    placements = spec.field("placements") if isinstance(spec, Record) else None
    # TensorMeta is a NamedTuple: (shape, stride, dtype).
    shape = meta.args[0] if isinstance(meta, Record) and len(meta.args) == 3 else None
    if not isinstance(shape, tuple) or not isinstance(mesh, Record) or not isinstance(placements, tuple):
        raise _unlike(path, name, "a DTensor with its shape, mesh and placements")
    if not isinstance(local, StoredTensor):
        raise _unlike(path, name, "a DTensor with a plain tensor inside")
    coordinate = mesh.field("_coordinate_on_dim")
    if not isinstance(coordinate, (tuple, list)) or len(coordinate) != len(placements):
        raise _unlike(path, name, "a DTensor of a rank in its mesh")
    ranks = mesh.field("_rank_map", mesh.field("mesh"))
    return RankTensor(
        shape=shape,
        dtype=local.dtype,
        local=local,
        placements=tuple(_read_placement(item, name, path) for item in placements),
        place=MeshPlace(
            coordinate=tuple(coordinate),
            world_size=ranks.numel if isinstance(ranks, StoredTensor) else None,
            rank=_number(mesh.field("_rank")),
        ),
    )


def find_boxes(tensor: RankTensor, mesh_shape: Sequence[int], name: str, path: Path) -> tuple[Box, ...]:
    """Return the boxes of the whole tensor that this rank holds.

    Args:
        tensor: What the rank saved.
        mesh_shape: Ranks in each dimension of the mesh.
        name: The tensor's name, for messages.
        path: The rank's file, for messages.

    Raises:
        CheckpointError: The rank's part has another shape than the rule gives.
    """
    if tensor.local is None:
        return tensor.boxes
    offsets, sizes = [0] * len(tensor.shape), list(tensor.shape)
    for dim, ranks, index in zip(tensor.placements, mesh_shape, tensor.place.coordinate, strict=True):
        if dim is None:
            continue
        if dim >= len(sizes):
            raise _unlike(path, name, f"a placement on one of {len(sizes)} dimensions")
        step = -(-sizes[dim] // ranks)
        start = min(index * step, sizes[dim])
        offsets[dim], sizes[dim] = offsets[dim] + start, min(step, sizes[dim] - start)
    if tensor.local.shape != tuple(sizes):
        raise CheckpointError(
            f"{name} in {path} is not the part that its rank holds",
            expected=f"{sizes} of {list(tensor.shape)}, at place {list(tensor.place.coordinate)} of torch.chunk",
            got=str(list(tensor.local.shape)),
            remedy="rank files are swapped or of another run, or the tensor was cut by a rule that is not read",
        )
    return (Box(tuple(offsets), tensor.local),)


def _read_placement(placement: Any, name: str, path: Path) -> int | None:
    """Return the sharded dimension, None for a replica."""
    kind = placement.type_name if isinstance(placement, Record) else ""
    if kind.startswith("torch.distributed.") and kind.rpartition(".")[2] == _REPLICATE:
        return None
    # torch 2.13 keeps the fields in the state; Shard was a dataclass with the same one before.
    dim = (
        placement.field("dim", placement.args[0] if placement.args else None) if isinstance(placement, Record) else None
    )
    if not kind.startswith("torch.distributed.") or kind.rpartition(".")[2] != _SHARD or _number(dim) is None:
        raise CheckpointError(
            f"{name} in {path} is placed in a way that is not read",
            expected="Shard or Replicate in every dimension of the mesh",
            got=kind.rpartition(".")[2] or "something else",
            remedy="save it with torch.distributed.checkpoint, which keeps every chunk's offsets",
        )
    return _number(dim)


def _read_sharded_tensor(value: Record, name: str, path: Path) -> RankTensor:
    state = value.state if isinstance(value.state, tuple) else ()
    shards, metadata, group = state[:3] if len(state) >= 3 else (None, None, None)
    shape = metadata.field("size") if isinstance(metadata, Record) else None
    properties = metadata.field("tensor_properties") if isinstance(metadata, Record) else None
    dtype = properties.state[0] if isinstance(properties, Record) and isinstance(properties.state, tuple) else None
    if not isinstance(shape, tuple) or not isinstance(shards, list) or not isinstance(dtype, ElementType):
        raise _unlike(path, name, "a ShardedTensor with its size, dtype and shards")
    boxes = []
    for shard in shards:
        part, where = (shard.field("tensor"), shard.field("metadata")) if isinstance(shard, Record) else (None, None)
        offsets = where.field("shard_offsets") if isinstance(where, Record) else None
        if not isinstance(part, StoredTensor) or not isinstance(offsets, (list, tuple)):
            raise _unlike(path, name, "shards with their offsets")
        boxes.append(Box(tuple(offsets), part))
    rank, world_size = _read_group(group)
    return RankTensor(
        shape=shape,
        dtype=dtype,
        boxes=tuple(boxes),
        place=MeshPlace(coordinate=() if rank is None else (rank,), world_size=world_size, rank=rank),
    )


def _read_group(group: Any) -> tuple[int | None, int | None]:
    """Return (rank, world size) of a pickled `ShardedTensor.ProcessGroupState`."""
    if not isinstance(group, Record):
        return None, None
    return _number(group.field("global_rank")), _number(group.field("global_world_size"))


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def _unlike(path: Path, name: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{name} in {path} cannot be read",
        expected=expected,
        got="something else",
        remedy=RECOPY_OR_USE_OLDER,
    )
