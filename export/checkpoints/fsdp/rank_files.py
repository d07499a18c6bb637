"""One `.bin` per rank, as FSDP leaves them without `torch.distributed.checkpoint`.

Sharded: each value is a DTensor or a ShardedTensor that knows its place (Accelerate with `use_dcp=False`, verl).
Local: FSDP1's LOCAL_STATE_DICT with `use_orig_params`, each value a 1-D slice of the flattened parameter, without its
shape; the slices of all ranks, in their order, are the parameter. Shapes must come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, list_some
from ..pickles.torch_zip import is_tensor, open_torch_zip
from ..plain.torch_file import MAX_OUTER_KEYS, OUTER_KEYS
from ..remedies import LOST_RANKS, MIXED_RUNS, RECOPY_WHOLE, SWAPPED
from ..storage.assembled_tensor import Box, assemble
from ..storage.paths import check_inside
from ..storage.stored_tensor import StoredTensor, join
from ..storage.zip_archive import StoredBlock
from ..stored_checkpoint import CheckpointFacts, StoredCheckpoint, find_tied
from .full import EXTRA_STATE
from .placements import RankTensor, find_boxes, is_sharded, read_rank_tensor

Shapes = Mapping[str, tuple[int, ...]]

# torch 2.13, torch/distributed/fsdp/_flat_param.py: the one parameter that FSDP1 makes of many.
_FLAT_PARAM = "_flat_param"
# torch 2.13, torch/nn/modules/batchnorm.py.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """One rank's file: plain tensors, and those that know their place."""

    path: Path
    rank: int
    plain: Mapping[str, StoredTensor]
    sharded: Mapping[str, RankTensor]


def open_rank_files(
    directory: Path,
    paths: Mapping[int, Path],
    read_shapes: Callable[[], Shapes | None],
    read_ties: Callable[[], Mapping[str, str]],
    world_size: int | None = None,
) -> StoredCheckpoint:
    """Return a reader over the files of all ranks, reading no tensor data.

    Args:
        directory: The folder with `config.json`.
        paths: Rank → its file.
        read_shapes: Returns name → shape of the model's tensors, None if not known; asked for LOCAL files only.
        read_ties: Returns each second name of a tied tensor → its first; asked where LOCAL files lack a name.
        world_size: How many ranks there were, where the files' names say so.

    Raises:
        CheckpointError: Ranks are missing, too many, swapped or of different runs, or shapes are needed and not known.
    """
    for path in paths.values():
        check_inside(path, directory)
    files = [_read_rank_file(path, rank) for rank, path in sorted(paths.items())]
    world_size = _check_ranks(directory, files, world_size)
    _check_names(directory, files)
    _refuse_flat(directory, files)
    if any(not _is_flat(name) for name in files[0].sharded):
        _check_plain(directory, files)
        tensors = _join_sharded(files)
        kind = "FSDP sharded"
    else:
        tensors = _join_slices(directory, files, read_shapes(), read_ties)
        kind = "FSDP local"
    return StoredCheckpoint(
        directory=directory,
        format_name=f"{kind} state dict, {len(files)} rank file{'s' if len(files) > 1 else ''}",
        tensors=tensors,
        tied=find_tied(tensors),
        copies=_list_copies(files, tensors),
        zero_size=frozenset(name for name, tensor in tensors.items() if 0 in tensor.shape),
        facts=CheckpointFacts(trainer="FSDP", world_size=world_size),
        archives=tuple(file.path for file in files),
    )


def _read_rank_file(path: Path, rank: int) -> RankFile:
    content = _find_state_dict(open_torch_zip(path).content)
    if not isinstance(content, dict) or not content:
        raise CheckpointError(
            f"{path} holds no state dict", expected="names and tensors", got=type(content).__name__, remedy=RECOPY_WHOLE
        )
    plain: dict[str, StoredTensor] = {}
    sharded: dict[str, RankTensor] = {}
    unknown: list[Any] = []
    for name, value in content.items():
        if isinstance(name, str) and isinstance(value, StoredTensor):
            plain[name] = value
        elif isinstance(name, str) and is_sharded(value):
            sharded[name] = read_rank_tensor(value, name, path)
        elif not isinstance(name, str) or not name.endswith(EXTRA_STATE):
            unknown.append(name)
    if unknown:
        raise CheckpointError(
            f"{path} holds what is not a tensor",
            expected="a state dict of tensors, DTensors or ShardedTensors",
            got=list_some(unknown),
            remedy="save the model's state dict alone",
        )
    return RankFile(path=path, rank=rank, plain=plain, sharded=sharded)


def _find_state_dict(content: Any) -> Any:
    """Return the state dict that lies under keys which name it, or else what there is."""
    for _ in range(MAX_OUTER_KEYS):
        if not isinstance(content, dict) or any(is_tensor(value) for value in content.values()):
            break
        inner = [content[key] for key in OUTER_KEYS if isinstance(content.get(key), dict)]
        if len(inner) != 1:
            break
        content = inner[0]
    return content


def _check_ranks(directory: Path, files: list[RankFile], named: int | None) -> int:
    """Check that each rank has its file and no file is another rank's; return how many ranks there are."""
    places = [(file, tensor.place) for file in files for tensor in file.sharded.values()]
    known = {size for size in (named, *(place.world_size for _, place in places)) if size is not None}
    world_size = max(known, default=len(files))
    found = {file.rank for file in files}
    missing = [rank for rank in range(world_size) if rank not in found]
    if missing:
        raise CheckpointError(
            f"{directory} lacks files of {world_size} ranks",
            expected=f"{world_size} files",
            got=f"{len(files)}, without rank {list_some(f'{rank:03d}' for rank in missing)}",
            remedy=LOST_RANKS,
        )
    if len(known) > 1 or len(files) > world_size:
        raise CheckpointError(
            f"{directory} has rank files of different runs",
            expected=f"{min(known, default=world_size)} files",
            got=list_some((file.path.name for file in files), 4),
            remedy="remove those of the run with more ranks, or use a clean checkpoint",
        )
    for file, place in places:
        if place.rank is not None and place.rank != file.rank:
            raise CheckpointError(
                f"{file.path} is the file of another rank",
                expected=f"rank {file.rank}",
                got=f"rank {place.rank}",
                remedy=SWAPPED,
            )
    return world_size


def _check_names(directory: Path, files: list[RankFile]) -> None:
    first = {*files[0].plain, *files[0].sharded}
    for file in files[1:]:
        different = first ^ {*file.plain, *file.sharded}
        different |= {name for name in file.sharded if file.sharded[name].shape != _shape(files[0], name)}
        if different:
            raise CheckpointError(
                f"the rank files in {directory} are of different models",
                expected=f"the {len(first)} tensors of {files[0].path.name}",
                got=f"others in {file.path.name}: {list_some(different)}",
                remedy=MIXED_RUNS,
            )


def _shape(file: RankFile, name: str) -> tuple[int, ...] | None:
    return file.sharded[name].shape if name in file.sharded else None


def _check_plain(directory: Path, files: list[RankFile]) -> None:
    """Check that what every rank has whole is of one shape and dtype; the bytes are compared as they are read."""
    for file in files[1:]:
        pairs = ((name, file.plain[name], tensor) for name, tensor in files[0].plain.items())
        different = [name for name, one, other in pairs if (one.shape, one.dtype) != (other.shape, other.dtype)]
        if different:
            raise CheckpointError(
                f"tensors in {directory} are not the same on every rank",
                expected=f"the shapes and dtypes of {files[0].path.name}",
                got=f"others in {file.path.name}: {list_some(different)}",
                remedy=MIXED_RUNS,
            )


def _list_copies(files: list[RankFile], tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], ...]:
    """Return what the other ranks have of each tensor that is taken from rank 0 alone: copies that must agree.

    Statistics of BatchNorm need not: without SyncBatchNorm each rank keeps its own, and trainers save rank 0's.
    """
    whole = [
        name
        for name, tensor in files[0].plain.items()
        if tensors.get(name) is tensor and name.rpartition(".")[2] not in _STATISTICS
    ]
    return tuple({name: file.plain[name] for name in whole} for file in files[1:])


def _join_sharded(files: list[RankFile]) -> dict[str, StoredTensor]:
    """Return every tensor, put together from the boxes of all ranks; plain ones are rank 0's (`_list_copies`)."""
    tensors: dict[str, StoredTensor] = {}
    for name in (name for name in (*files[0].sharded, *files[0].plain) if not _is_flat(name)):
        if name in files[0].plain:
            tensors[name] = files[0].plain[name]
            continue
        mesh_shape = [1 + max(index) for index in zip(*(f.sharded[name].place.coordinate for f in files), strict=True)]
        held: dict[tuple[int, ...], tuple[Box, Path]] = {}
        for file in files:
            for box in find_boxes(file.sharded[name], mesh_shape, name, file.path):
                first, path = held.setdefault(box.offsets, (box, file.path))
                if box.part.numel and not first.part.numel:
                    held[box.offsets] = (box, file.path)
                elif box.part.numel and not _same_bytes(first.part, box.part):
                    raise CheckpointError(
                        f"{path} and {file.path} hold different copies of {name}",
                        expected="equal replicas",
                        got=f"other bytes for {list(box.part.shape)} at {list(box.offsets)}",
                        remedy="the ranks are not replicas of each other, or their files are of different steps",
                    )
        head = files[0].sharded[name]
        tensors[name] = assemble(head.shape, head.dtype, [box for box, _ in held.values()], name=name)
    return tensors


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Tell whether two copies agree: by checksum where both parts are whole blocks, else byte by byte."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one == other:
        return True
    checksums = [[(part.start, part.length, part.block.crc32) for part in copy.ranges] for copy in (one, other)]
    if checksums[0] == checksums[1] and all(checksum is not None for _, _, checksum in checksums[0]):
        return True
    return b"".join(one.chunks()) == b"".join(other.chunks())


def _refuse_flat(directory: Path, files: list[RankFile]) -> None:
    """Refuse flat parameters that are not there as slices as well (use_orig_params=False).

    With use_orig_params each weight is a view of the flat one, so some rank's slice lies in the same storage. Without,
    no file says where in the flat parameter each weight lies.
    """
    flat = {name for name in (*files[0].sharded, *files[0].plain) if _is_flat(name)}
    for file in files:
        sliced = {part.block for name in file.plain if not _is_flat(name) for part in file.plain[name].ranges}
        flat -= {name for name in flat if _blocks(file, name) & sliced}
    if flat:
        raise CheckpointError(
            f"{directory} holds flat parameters, each of many weights in one",
            expected="a slice per parameter, as FSDP1 saves with use_orig_params=True",
            got=list_some(flat),
            remedy="no file says where each parameter lies; save with FULL_STATE_DICT or SHARDED_STATE_DICT",
        )


def _blocks(file: RankFile, name: str) -> set[StoredBlock]:
    """Return the storages of the rank's own part of a tensor."""
    if name in file.plain:
        return {part.block for part in file.plain[name].ranges}
    held = file.sharded[name]
    parts = [box.part for box in held.boxes] if held.local is None else [held.local]
    return {window.block for part in parts for window in part.ranges}


def _is_flat(name: str) -> bool:
    return name.rpartition(".")[2] == _FLAT_PARAM


def _join_slices(
    directory: Path, files: list[RankFile], shapes: Shapes | None, read_ties: Callable[[], Mapping[str, str]]
) -> dict[str, StoredTensor]:
    """Return every tensor of LOCAL files: the ranks' 1-D slices end to end, under the shape that is known for it."""
    names = [name for name in files[0].plain if not _is_flat(name)]
    if shapes is None:
        raise CheckpointError(
            f"{directory} holds FSDP's LOCAL state dict, which keeps no shapes",
            expected="config.json of the model beside it, to know the shapes",
            got="none, or of an architecture that transformers does not have",
            remedy="put the model's config.json there, or pass its folder with --base, or save with FULL_STATE_DICT or "
            "SHARDED_STATE_DICT",
        )
    unknown = [name for name in names if name not in shapes]
    if unknown:
        raise CheckpointError(
            f"{directory} holds parameters that the model of config.json lacks",
            expected="the names of that model",
            got=list_some(unknown),
            remedy="use the config.json that the checkpoint was trained with",
        )
    if shapes.keys() - set(names):
        _refuse_missing(directory, set(names), shapes, read_ties())
    return {name: _join_slice(name, shapes[name], files) for name in names}


def _refuse_missing(directory: Path, found: set[str], shapes: Shapes, ties: Mapping[str, str]) -> None:
    """Refuse a model of which a tensor is under none of its names."""
    held = {ties.get(name, name) for name in found}
    missing = [name for name in shapes if ties.get(name, name) not in held]
    if missing:
        raise CheckpointError(
            f"{directory} lacks tensors of the model that config.json describes",
            expected=f"its {len(shapes)} names",
            got=f"none called {list_some(missing)}",
            remedy="use the config.json that the checkpoint was trained with, or save with SHARDED_STATE_DICT",
        )


def _join_slice(name: str, shape: tuple[int, ...], files: list[RankFile]) -> StoredTensor:
    parts = [file.plain[name] for file in files]
    is_sliced = all(len(part.shape) == 1 for part in parts) and len({part.dtype for part in parts}) == 1
    if is_sliced and sum(part.numel for part in parts) == prod(shape):
        return join(parts, shape)
    # Buffers, and parameters that FSDP was told to ignore, are whole on every rank.
    if all(part.shape == shape for part in parts):
        return parts[0]
    raise CheckpointError(
        f"the slices of {name} do not make up the parameter",
        expected=f"{prod(shape)} elements for {list(shape)}",
        got=" + ".join(str(part.numel) for part in parts[:8]),
        remedy="a rank's file is of another run, or config.json is of another model",
    )
