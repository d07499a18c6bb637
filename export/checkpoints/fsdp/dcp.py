"""Folders by `torch.distributed.checkpoint` (DCP): `.metadata` and one or more `__RANK_FILE.distcp`.

FSDP and FSDP2 save them, alone or through Accelerate, on any mesh of ranks. Each region of a `.distcp` file is a whole
torch zip archive of one tensor, so a chunk is again a range of bytes. The chunks' offsets are trusted and checked to
tile each tensor: no rule on how shards are cut is assumed.

What no file shows: two `.distcp` files of the same sizes, swapped. Nothing in a region names its tensor or its rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, ExportError, list_some
from ..pickles.torch_zip import open_torch_zip
from ..remedies import DOUBLED, LOST_RANKS, MIXED_SAVES, RECOPY_WHOLE
from ..storage.assembled_tensor import Box, assemble
from ..storage.byte_ranges import ByteRange, read_range
from ..storage.paths import check_inside, is_taken, refuse_irregular
from ..storage.stored_tensor import StoredTensor
from ..stored_checkpoint import CheckpointFacts, StoredCheckpoint
from .dcp_metadata import (
    METADATA_FILE,
    DcpMetadata,
    DcpTensor,
    Region,
    merge_metadata,
    read_metadata,
)
from .dcp_subtree import select_model

# torch 2.13, torch/distributed/checkpoint/filesystem.py: `_StoragePrefix(f"__{rank}_")`, then a number per file.
_SHARD = re.compile(r"__(\d+)_(\d+)\.distcp")
# The same, where each rank saved alone (`use_collectives=False`).
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_STEP_NAMES = ("step", "global_step", "iteration", "global_steps")


def recognises_folder(directory: Path) -> bool:
    """Tell whether DCP saved into `directory` itself."""
    return is_taken(directory / METADATA_FILE) or bool(_list_shards(directory))


def open_folder(directory: Path, sub_tree: str | None = None) -> StoredCheckpoint:
    """Return a reader for the DCP folder `directory`, reading no tensor data.

    Args:
        directory: The folder with `.metadata`.
        sub_tree: The part of the saved state that is the model, where it cannot be determined.

    Raises:
        CheckpointError: Files are missing, too many, cut off or not of one save; chunks do not tile a tensor; the model
            cannot be told apart from the rest; or the data is compressed.
    """
    metadata = _read_metadata(directory)
    _check_files(directory, metadata)
    _refuse_objects_alone(directory, metadata)
    chosen = select_model(metadata.tensors, directory, sub_tree)
    _refuse_unread(directory, chosen)
    tensors = {name: _assemble(directory, tensor) for name, tensor in chosen.items()}
    _refuse_doubles(tensors)
    names = {region.file_name for region in metadata.regions}
    ranks = {int(match[1]) for match in map(_SHARD.fullmatch, (*names, *_list_shards(directory))) if match}
    return StoredCheckpoint(
        directory=directory,
        format_name=f"torch.distributed.checkpoint, {len(names)} file{'s' if len(names) > 1 else ''}",
        tensors=tensors,
        zero_size=frozenset(name for name, tensor in chosen.items() if 0 in tensor.shape),
        facts=CheckpointFacts(
            trainer="torch.distributed.checkpoint",
            # A rank with nothing to save leaves an empty file, or none where each tensor has its own: there may have
            # been more.
            world_size=max(ranks) + 1 if ranks else None,
            step=_read_step(directory, metadata),
        ),
    )


def _read_metadata(directory: Path) -> DcpMetadata:
    path = directory / METADATA_FILE
    alone = {int(match[1]): entry for entry in directory.iterdir() if (match := _RANK_METADATA.fullmatch(entry.name))}
    if alone and not os.path.lexists(path):
        for entry in alone.values():
            check_inside(entry, directory)
        return merge_metadata({rank: read_metadata(entry) for rank, entry in alone.items()})
    if not os.path.lexists(path):
        shards = _list_shards(directory)
        raise CheckpointError(
            f"{directory} lacks {METADATA_FILE}",
            expected=f"{METADATA_FILE} beside {len(shards)} .distcp files",
            got=list_some(shards, 4),
            remedy="the save was interrupted, or the hidden file was not copied; use a whole checkpoint",
        )
    check_inside(path, directory)
    return read_metadata(path)


def _check_files(directory: Path, metadata: DcpMetadata) -> None:
    """Check that the folder holds the files that the metadata names, each as long as its regions, and no others."""
    ends: dict[str, int] = {}
    for region in metadata.regions:
        ends[region.file_name] = max(ends.get(region.file_name, 0), region.offset + region.length)
    missing = [name for name in ends if not (directory / name).is_file()]
    if missing:
        refuse_irregular(directory, missing)
        raise CheckpointError(
            f"{directory} lacks files of {len(ends)} that {METADATA_FILE} names",
            expected=f"{len(ends)} files",
            got=f"none called {list_some(missing)}",
            remedy=LOST_RANKS,
        )
    # A rank that had nothing to save leaves an empty file (torch 2.13, filesystem.py, `_write_files_from_queue`).
    extra = [name for name in _list_shards(directory) if name not in ends and not _is_empty(directory / name)]
    if extra:
        raise CheckpointError(
            f"{directory} has files that {METADATA_FILE} does not name",
            expected=f"{len(ends)} files",
            got=list_some(extra),
            remedy="they are of an earlier save with more ranks; remove them, or use a clean checkpoint",
        )
    for name, end in ends.items():
        check_inside(directory / name, directory)
        size = (directory / name).stat().st_size
        if size != end:
            _refuse_safetensors(directory / name)
            raise CheckpointError(
                f"{directory / name} is {'cut off' if size < end else 'of another save'}",
                expected=f"{end} bytes, as {METADATA_FILE} says",
                got=str(size),
                remedy=RECOPY_WHOLE,
            )


def _is_empty(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == 0


def _refuse_safetensors(path: Path) -> None:
    """Refuse a file by `SerializationFormat.SAFETENSORS`: the metadata's places are not those in it."""
    with path.open("rb") as file:
        head = file.read(16)
    # The header's length, then the header, which is JSON.
    if head[8:10] == b'{"':
        raise CheckpointError(
            f"{path} is in safetensors, an encoding of .distcp files that is not read",
            expected="SerializationFormat.TORCH_SAVE, the default",
            got="SerializationFormat.SAFETENSORS",
            remedy="load it and save it with the default, or with HuggingFaceStorageWriter, which is read",
        )


def _refuse_objects_alone(directory: Path, metadata: DcpMetadata) -> None:
    """Refuse a state dict that was pickled whole: rank 0's object is kept, with rank 0's part of each tensor."""
    if metadata.objects and not metadata.tensors:
        raise CheckpointError(
            f"{directory} holds no tensor of its own, only objects that one rank pickled whole",
            expected="a place for each tensor's chunks",
            got=list_some(metadata.objects),
            remedy="the other ranks' parts were never saved if it was sharded; save with flatten_state_dict=True",
        )


def _refuse_unread(directory: Path, tensors: Mapping[str, DcpTensor]) -> None:
    unread = {name: tensor.dtype_name for name, tensor in tensors.items() if tensor.dtype is None}
    if unread:
        raise CheckpointError(
            f"{directory} holds tensors that are not read: {list_some(unread)}",
            expected="dense tensors of real numbers",
            got=list_some(set(unread.values())),
            remedy="save the model without them, or in another dtype",
        )


def _list_shards(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir() if _SHARD.fullmatch(entry.name))


def _assemble(directory: Path, tensor: DcpTensor) -> StoredTensor:
    assert tensor.dtype is not None, "Bug: a dtype that is not read"
    boxes = []
    for chunk in tensor.chunks:
        if chunk.region is None or 0 in chunk.sizes:
            continue
        part = _open_region(directory, chunk.region)
        where = f"the chunk of {tensor.name} at {list(chunk.offsets)}, byte {chunk.region.offset} of"
        if not isinstance(part, StoredTensor) or part.shape != chunk.sizes or part.dtype != tensor.dtype:
            found = f"{list(part.shape)} {part.dtype.name}" if isinstance(part, StoredTensor) else "no tensor"
            raise CheckpointError(
                f"{where} {directory / chunk.region.file_name}, is another than {METADATA_FILE} says",
                expected=f"{list(chunk.sizes)} {tensor.dtype.name}",
                got=found,
                remedy=MIXED_SAVES,
            )
        boxes.append(Box(chunk.offsets, part))
    return assemble(tensor.shape, tensor.dtype, boxes, name=tensor.name)


def _refuse_doubles(tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse a file that is a copy of another under its name: every checksum is the same then.

    Files of constant values are accepted, since shards of zeros or ones may well be equal, and so are two names of one
        tensor, which lie in two files where a rank writes several: then the tensors are equal as a whole.
    """
    parts: dict[Path, list[tuple[str, ByteRange]]] = {}
    for name, tensor in tensors.items():
        for part in tensor.ranges:
            parts.setdefault(part.block.path, []).append((name, part))
    seen: dict[tuple[int | None, ...], Path] = {}
    for path, found in parts.items():
        checksums = tuple(part.block.crc32 for _, part in found)
        first = seen.setdefault(checksums, path)
        if first == path or None in checksums or all(_is_constant(part) for _, part in found):
            continue
        pairs = [(name, other) for (name, _), (other, _) in zip(found, parts[first], strict=True)]
        if any(name == other or not _are_equal(tensors[name], tensors[other]) for name, other in pairs):
            raise CheckpointError(
                f"{path} and {first} have the same contents",
                expected="each rank's own part",
                got="every checksum equal",
                remedy=DOUBLED,
            )


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Tell by their checksums whether two tensors were saved with equal elements."""
    sums = [[part.block.crc32 for part in tensor.ranges] for tensor in (one, other)]
    return one.shape == other.shape and sums[0] == sums[1]


def _is_constant(part: ByteRange) -> bool:
    """Tell whether the first bytes of `part`, taken as elements of up to 8 bytes, are all one value."""
    head = next(read_range(part), b"")
    return head[:8] * (len(head) // 8) == head[: len(head) // 8 * 8]


def _open_region(directory: Path, region: Region) -> Any:
    return open_torch_zip(directory / region.file_name, start=region.offset, length=region.length).content


def _read_step(directory: Path, metadata: DcpMetadata) -> int | None:
    """Return the application's step counter, if there is exactly one; it is only reported, never used."""
    steps = set()
    for name in _candidates(metadata.objects):
        try:
            value = _open_region(directory, metadata.objects[name])
        except ExportError:
            # Not every saved object is a torch zip archive of plain data, and none of them is a weight.
            continue
        if type(value) is int and 0 <= value < 1 << 53:
            steps.add(value)
    return steps.pop() if len(steps) == 1 else None


def _candidates(names: Iterable[str]) -> list[str]:
    found = [name for name in names if name.rpartition(".")[2] in _STEP_NAMES]
    # Optimizers count their steps per parameter.
    return found if len(found) < 8 else []
