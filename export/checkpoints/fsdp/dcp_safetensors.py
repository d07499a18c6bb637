"""Shards by DCP's Hugging Face storage writer: safetensors whose metadata says which box of each tensor they hold.

Names: `shard-RANK-model-FILE-of-FILES.safetensors`, RANK and FILE counted from 1. The header's metadata has
`DCP_SHARDING_INFO`: JSON, name → `saved_offsets` (torch 2.13, torch/distributed/checkpoint/_hf_utils.py).

The whole shape of a tensor is stored nowhere, nor is the number of ranks. Without the last rank's file every tensor
sharded along its first dimension is only shorter. The vocabulary's size in `config.json` shows that; without it,
nothing does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, list_some
from ..plain.model_shapes import INPUT_EMBEDDINGS, read_vocab_size
from ..remedies import ALL_NODES, LOST_RANKS, MIXED_SAVES, RECOPY_WHOLE
from ..storage.assembled_tensor import Box, assemble
from ..storage.paths import check_inside
from ..storage.safetensors_file import read_safetensors
from ..storage.stored_tensor import StoredTensor
from ..stored_checkpoint import CheckpointFacts, StoredCheckpoint

_SHARD = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
_INFO_KEY = "DCP_SHARDING_INFO"
_OFFSETS_KEY = "saved_offsets"


def recognises_folder(directory: Path) -> bool:
    """Tell whether the storage writer saved shards into `directory` itself."""
    return any(_SHARD.fullmatch(entry.name) for entry in directory.iterdir())


def open_folder(directory: Path, home: Path, config_directory: Path) -> StoredCheckpoint:
    """Return a reader for the shards in `directory`, reading no tensor data.

    Args:
        directory: The folder with the shards.
        home: The folder with the model's files, which may be the same.
        config_directory: The folder with the `config.json` that tells the vocabulary's size.

    Raises:
        CheckpointError: Shards are missing as far as anything shows it, damaged, or do not tile a tensor.
    """
    paths = _find_shards(directory)
    boxes: dict[str, list[Box]] = {}
    for path in paths.values():
        check_inside(path, directory)
        for name, box in _read_shard(path).items():
            boxes.setdefault(name, []).append(box)
    tensors = {name: _join(name, parts) for name, parts in boxes.items()}
    unseen = "whether the last ranks' files are there: the shards say nothing of it, config.json would"
    seen = _check_vocabulary(tensors, directory, config_directory)
    return StoredCheckpoint(
        directory=home,
        format_name=f"torch.distributed.checkpoint in safetensors, {len(paths)} shard{'s' if len(paths) > 1 else ''}",
        tensors=tensors,
        zero_size=frozenset(name for name, tensor in tensors.items() if 0 in tensor.shape),
        facts=CheckpointFacts(
            trainer="torch.distributed.checkpoint",
            world_size=max(rank for rank, _ in paths),
            missing=() if seen else (unseen,),
        ),
    )


def _check_vocabulary(tensors: Mapping[str, StoredTensor], directory: Path, config_directory: Path) -> bool:
    """Check the rows of the input embedding against `config.json`; tell whether there were both.

    Every rank holds rows of it, so it is too short where the last ranks' files are missing. More rows are padding.

    Raises:
        CheckpointError: It has fewer rows than the vocabulary.
    """
    vocab_size = read_vocab_size(config_directory)
    tables = [name for name in tensors if name.endswith(INPUT_EMBEDDINGS) and len(tensors[name].shape) == 2]
    if vocab_size is None or not tables:
        return False
    short = [name for name in tables if tensors[name].shape[0] < vocab_size]
    if short:
        raise CheckpointError(
            f"{list_some(short)} in {directory} is shorter than config.json says",
            expected=f"{vocab_size} rows",
            got=str(tensors[short[0]].shape[0]),
            remedy=f"the last ranks' files are missing, or config.json is of another model; {ALL_NODES}",
        )
    return True


def _find_shards(directory: Path) -> dict[tuple[int, int], Path]:
    """Return (rank, file) → path, counted from 1, after checking what the names can show."""
    paths: dict[tuple[int, int], Path] = {}
    counts = set()
    for path in sorted(directory.iterdir()):
        if match := _SHARD.fullmatch(path.name):
            paths[int(match[1]), int(match[2])] = path
            counts.add(int(match[3]))
    if len(counts) != 1:
        raise CheckpointError(
            f"{directory} has shards of different saves",
            expected="one number of files in all names",
            got=list_some(f"of {count}" for count in counts),
            remedy="remove those of the older save",
        )
    (count,) = counts
    ranks = {rank for rank, _ in paths}
    files = {file for _, file in paths}
    missing = [f"rank {rank}" for rank in range(1, max(ranks) + 1) if rank not in ranks]
    missing += [f"file {file} of {count}" for file in range(1, count + 1) if file not in files]
    if missing:
        raise CheckpointError(
            f"{directory} lacks shards",
            expected=f"every rank up to {max(ranks)} and every file up to {count}",
            got=f"none of {list_some(missing)}",
            remedy=LOST_RANKS,
        )
    return paths


def _read_shard(path: Path) -> dict[str, Box]:
    tensors, metadata = read_safetensors(path)
    offsets = _read_offsets(path, metadata)
    if offsets.keys() != tensors.keys():
        raise CheckpointError(
            f"{path} describes other tensors than it holds",
            expected=f"{len(tensors)} tensors under {_INFO_KEY}",
            got=f"differences in {list_some(offsets.keys() ^ tensors.keys())}",
            remedy=RECOPY_WHOLE,
        )
    return {name: Box(offsets[name], tensor) for name, tensor in tensors.items()}


def _read_offsets(path: Path, metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    try:
        info: Any = json.loads(metadata[_INFO_KEY])
        offsets = {name: tuple(entry[_OFFSETS_KEY]) for name, entry in info.items()}
        if not all(type(number) is int and 0 <= number < 1 << 62 for place in offsets.values() for number in place):
            raise ValueError("offsets that are not numbers")
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as exc:
        raise CheckpointError(
            f"{path} does not say which part of each tensor it holds",
            expected=f"{_INFO_KEY} with {_OFFSETS_KEY} in its metadata",
            got=f"{type(exc).__name__}: {str(exc)[:100]}",
            remedy="pass the consolidated folder if the trainer made one, or save again",
        ) from exc
    return offsets


def _join(name: str, boxes: list[Box]) -> StoredTensor:
    """Return the tensor whose farthest corner is that of its boxes."""
    first = boxes[0]
    if any(len(box.offsets) != len(box.part.shape) or len(box.offsets) != len(first.offsets) for box in boxes):
        raise CheckpointError(
            f"the shards of {name} are of different dimensions",
            expected=f"{len(first.part.shape)} in each",
            got=list_some(len(box.offsets) for box in boxes),
            remedy=MIXED_SAVES,
        )
    corners = ([at + side for at, side in zip(box.offsets, box.part.shape, strict=True)] for box in boxes)
    shape = tuple(max(sides) for sides in zip(*corners, strict=True))
    return assemble(shape, first.part.dtype, boxes, name=name)
