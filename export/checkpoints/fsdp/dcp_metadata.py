"""The `.metadata` of `torch.distributed.checkpoint` (DCP): which chunk of which tensor lies where.

A bare pickle of `Metadata` (torch 2.13, torch/distributed/checkpoint/metadata.py and filesystem.py): per name the
shape, dtype and chunks, per chunk a file, an offset and a length in bytes, and per name its path in the nested dict
that was saved. It is read as data, like any other pickle here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, list_some
from ..pickles.torch_zip import GlobalName, Record, read_bare_pickle
from ..remedies import RECOPY_OR_USE_OLDER
from ..storage.dtypes import ElementType

METADATA_FILE = ".metadata"

_MODULE = "torch.distributed.checkpoint.metadata"
_MAX_DIMS = 64


@dataclass(frozen=True)
class Region:
    """A part of a `.distcp` file, in bytes: one saved object, complete in itself."""

    file_name: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and where it lies; `region` is None only for a box without elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    region: Region | None


@dataclass(frozen=True, kw_only=True)
class DcpTensor:
    """One tensor of the state dict.

    Attributes:
        name: Its flat name: the keys of `path` joined by dots.
        path: The keys that lead to it in the nested dict that was saved.
        shape: Shape of the whole tensor.
        dtype: Its element type; None for one that is not read, such as a complex one.
        dtype_name: torch's name for it.
        chunks: What each rank saved of it.
    """

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: ElementType | None
    dtype_name: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True)
class DcpMetadata:
    """What a `.metadata` file says.

    Attributes:
        tensors: Flat name → tensor.
        objects: Flat name → the region of what is not a tensor, such as a step counter.
        regions: Every region of every file, the objects' included.
    """

    path: Path
    tensors: Mapping[str, DcpTensor]
    objects: Mapping[str, Region]
    regions: tuple[Region, ...]


def read_metadata(path: Path) -> DcpMetadata:
    """Parse a `.metadata` file; no other file is looked at.

    Raises:
        CheckpointError: It is damaged, contradicts itself, or describes compressed data.
    """
    content = read_bare_pickle(path)
    if not isinstance(content, Record) or content.type_name != f"{_MODULE}.Metadata":
        found = content.type_name if isinstance(content, Record) else type(content).__name__
        raise _unlike(path, "torch.distributed.checkpoint's Metadata", found)
    entries, stored = content.field("state_dict_metadata"), content.field("storage_data")
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        raise _unlike(path, "names and where they are stored", "neither")
    paths = content.field("planner_data", default="absent")
    if paths is not None and not isinstance(paths, dict):
        raise _unlike(path, "the keys that lead to each name", "none")
    regions = _read_regions(path, stored)
    tensors: dict[str, DcpTensor] = {}
    objects: dict[str, Region] = {}
    for name, entry in entries.items():
        kind = entry.type_name if isinstance(entry, Record) and isinstance(name, str) else ""
        if kind == f"{_MODULE}.TensorStorageMetadata":
            tensors[name] = _read_tensor(path, name, entry, regions.pop(name, {}), _read_path(path, paths, name))
        elif kind == f"{_MODULE}.BytesStorageMetadata":
            objects.update((name, region) for region in regions.pop(name, {}).values())
        else:
            raise _unlike(path, "tensors and bytes", f"{kind or type(entry).__name__} as {name}")
    if regions:
        raise _unlike(path, "a place for what it names and nothing else", f"places for {list_some(regions)}")
    chunks = [chunk.region for tensor in tensors.values() for chunk in tensor.chunks if chunk.region is not None]
    return DcpMetadata(path=path, tensors=tensors, objects=objects, regions=(*chunks, *objects.values()))


def merge_metadata(parts: Mapping[int, DcpMetadata]) -> DcpMetadata:
    """Return the metadata of all ranks as one, where each rank saved its own (`__RANK.metadata`).

    Without `use_collectives` no rank knows of the others, so what is replicated is there once for each rank; the first
    one's is taken.

    Args:
        parts: Rank → its metadata.

    Raises:
        CheckpointError: The ranks contradict each other.
    """
    tensors: dict[str, DcpTensor] = {}
    objects: dict[str, Region] = {}
    for rank, part in sorted(parts.items()):
        foreign = [region.file_name for region in part.regions if not region.file_name.startswith(f"__{rank}_")]
        if foreign:
            raise _unlike(part.path, f"places in files __{rank}_*", list_some(foreign))
        for name, tensor in part.tensors.items():
            known = tensors.setdefault(name, tensor)
            if (known.shape, known.dtype_name, known.path) != (tensor.shape, tensor.dtype_name, tensor.path):
                raise _unlike(part.path, f"{name} as on the ranks before", f"{list(tensor.shape)} {tensor.dtype_name}")
            chunks = {(chunk.offsets, chunk.sizes): chunk for chunk in (*tensor.chunks, *known.chunks)}
            tensors[name] = replace(known, chunks=tuple(chunks.values()))
        objects = {**part.objects, **objects}
    regions = tuple(region for part in parts.values() for region in part.regions)
    return DcpMetadata(path=parts[min(parts)].path, tensors=tensors, objects=objects, regions=regions)


def _read_regions(path: Path, stored: Mapping[Any, Any]) -> dict[str, dict[tuple[int, ...], Region]]:
    """Return name → the chunk's offsets → its region."""
    regions: dict[str, dict[tuple[int, ...], Region]] = {}
    for index, info in stored.items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise _unlike(path, "places of chunks", type(info).__name__)
        name, offsets = index.field("fqn"), index.field("offset")
        file_name, offset, length = info.field("relative_path"), info.field("offset"), info.field("length")
        if info.field("transform_descriptors"):
            raise CheckpointError(
                f"{path.parent} was saved through a transformation of its bytes",
                expected="tensors stored as they are",
                got=list_some(info.field("transform_descriptors")),
                remedy="save without extensions such as ZStandard, or load and save it again",
            )
        if not isinstance(name, str) or not isinstance(file_name, str) or not _are_sizes((offset, length)):
            raise _unlike(path, "a file, an offset and a length per chunk", f"something else for {name}")
        if file_name in ("", ".", "..") or "/" in file_name or "\\" in file_name or "\0" in file_name:
            raise CheckpointError(
                f"{path} leads outside its folder",
                expected="names of files in it",
                got=repr(file_name[:100]),
                remedy="do not use this checkpoint unless you know why",
            )
        place = tuple(offsets) if isinstance(offsets, tuple) else ()
        if regions.setdefault(name, {}).setdefault(place, Region(file_name, offset, length)) != Region(
            file_name, offset, length
        ):
            raise _unlike(path, f"one place for {name} at {list(place)}", "two")
    return regions


def _read_tensor(
    path: Path, name: str, entry: Record, regions: dict[tuple[int, ...], Region], keys: tuple[str, ...]
) -> DcpTensor:
    shape, chunks, properties = entry.field("size"), entry.field("chunks"), entry.field("properties")
    # TensorProperties has its own __getstate__: (dtype, layout, requires_grad, memory format, pinned).
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    # A dtype that is not read is only its name.
    dtype_name = dtype.name if isinstance(dtype, (ElementType, GlobalName)) else ""
    if not _is_shape(shape) or not isinstance(chunks, list) or not dtype_name:
        raise _unlike(path, f"shape, dtype and chunks of {name}", "something else")
    found = []
    for chunk in chunks:
        offsets: Any = chunk.field("offsets") if isinstance(chunk, Record) else None
        sizes: Any = chunk.field("sizes") if isinstance(chunk, Record) else None
        if not _is_shape(offsets) or not _is_shape(sizes):
            raise _unlike(path, f"offsets and sizes of each chunk of {name}", "something else")
        region = regions.pop(offsets, None)
        if region is None and 0 not in sizes:
            raise _unlike(path, f"a place for the chunk of {name} at {list(offsets)}", "none")
        found.append(Chunk(offsets, sizes, region))
    if regions:
        raise _unlike(path, f"chunks of {name} at each place", f"none at {list_some(map(list, regions))}")
    return DcpTensor(
        name=name,
        path=keys,
        shape=shape,
        dtype=dtype if isinstance(dtype, ElementType) else None,
        dtype_name=dtype_name.removeprefix("torch."),
        chunks=tuple(found),
    )


def _read_path(path: Path, paths: Any, name: str) -> tuple[str, ...]:
    """Return the keys that lead to `name`; the name itself where the planner kept no nesting."""
    if not paths:
        return (name,)
    keys = paths.get(name)
    # The planner flattens so; a key that was damaged would move the tensor to another part of what was saved.
    if not isinstance(keys, tuple) or ".".join(map(str, keys)) != name:
        raise _unlike(path, f"the keys that lead to {name}", ".".join(map(str, keys or ())) or "none")
    return tuple(map(str, keys))


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= _MAX_DIMS and _are_sizes(value)


def _are_sizes(values: tuple[Any, ...]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _unlike(path: Path, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not the metadata of a sharded checkpoint",
        expected=expected,
        got=got,
        remedy=RECOPY_OR_USE_OLDER,
    )
