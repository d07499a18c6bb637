"""FSDP's checkpoints, alone or in a folder by Accelerate's `save_state` or the Trainer.

Read are, as found in the folder or, for the second, in its `pytorch_model_fsdp_0`:

    pytorch_model_fsdp.bin                         the full state dict in one file (FULL_STATE_DICT)
    .metadata, __RANK_FILE.distcp                  torch.distributed.checkpoint (SHARDED_STATE_DICT)
    shard-*-model-*-of-*.safetensors               its Hugging Face storage writer; also in `sharded`
    pytorch_model_fsdp_0_rankR.bin                 one file per rank (SHARDED_STATE_DICT with use_dcp=False)
    model_world_size_W_rank_R.pt                   the same by verl
    pytorch_model_fsdp_rankR.bin                   slices without shapes (LOCAL_STATE_DICT)

Names: Accelerate 1.15, utils/fsdp_utils.py. Optimizers (`optimizer_0`, `optimizer.bin`) are not looked at.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from export.checkpoints import dcp, dcp_safetensors
from export.checkpoints.dcp_metadata import METADATA_FILE
from export.checkpoints.fsdp_ranks import Shapes, open_rank_files
from export.checkpoints.model_shapes import read_model_shapes
from export.checkpoints.paths import check_inside
from export.checkpoints.stored_checkpoint import StoredCheckpoint
from export.checkpoints.torch_file import open_file
from export.errors import CheckpointError, list_some

LOOKED_FOR = "torch.distributed.checkpoint's .metadata, or FSDP's pytorch_model_fsdp*"

_MODEL_FOLDER = re.compile(r"pytorch_model_fsdp_(\d+)")
_FULL = re.compile(r"pytorch_model_fsdp(?:_(\d+))?\.bin")
_RANK_FILES = (
    re.compile(r"pytorch_model_fsdp(?:_(?P<model>\d+))?_rank(?P<rank>\d+)\.bin"),
    re.compile(r"model_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt"),
)
_SHARDED_FOLDER = "sharded"
# `random_states_R.pkl` by Accelerate, `rng_state_R.pth` by the Trainer: one per rank.
_RANDOM_STATE = re.compile(r"(?:random_states|rng_state)_(\d+)\.(?:pkl|pth)")


def recognises(directory: Path) -> bool:
    """Tell whether FSDP or `torch.distributed.checkpoint` saved into `directory`, or into folders right in it."""
    return bool(_find_kinds(directory)) or bool(_list_inner(directory))


def open_checkpoint(
    directory: Path, tag: str | None = None, *, sub_tree: str | None = None, shapes: Shapes | None = None
) -> StoredCheckpoint:
    """Return a reader for the FSDP checkpoint in `directory`, reading no tensor data.

    Args:
        directory: The folder that the trainer saved into.
        tag: A folder in `directory` to read instead, such as `checkpoint-100`.
        sub_tree: Which part of a `torch.distributed.checkpoint` is the model, where it cannot be told ("app.ema").
        shapes: Name → shape for LOCAL state dicts; those of the model that `config.json` describes where None.

    Raises:
        CheckpointError: Files are missing, too many, damaged or not of one save, or the model cannot be told.
    """
    if tag is not None:
        directory = _resolve_tag(directory, tag)
    kinds = _find_kinds(directory)
    if not kinds:
        raise _wrong_level(directory)
    if len(kinds) > 1:
        raise CheckpointError(
            f"{directory} holds several models",
            expected="one of them to be chosen",
            got=list_some(kinds),
            remedy="pass --tag with one of the folders, or move the others away",
        )
    (path,) = kinds.values()
    check_inside(path, directory)
    opened = _open(directory, path, sub_tree, shapes)
    return _with_facts(opened, opened.directory)


def _find_kinds(directory: Path) -> dict[str, Path]:
    """Return what may be the model in `directory` itself: a name for messages → where it lies."""
    kinds: dict[str, Path] = {}
    for path in sorted(directory.iterdir()):
        if _FULL.fullmatch(path.name) or (_MODEL_FOLDER.fullmatch(path.name) and path.is_dir()):
            kinds[path.name] = path
        for pattern in _RANK_FILES:
            if match := pattern.fullmatch(path.name):
                kinds[_name_rank_files(match)] = directory
    if dcp.recognises_folder(directory):
        kinds[METADATA_FILE] = directory
    if dcp_safetensors.recognises_folder(directory):
        kinds["shard-*.safetensors"] = directory
    sharded = directory / _SHARDED_FOLDER
    if not kinds and sharded.is_dir() and dcp_safetensors.recognises_folder(sharded):
        kinds[_SHARDED_FOLDER] = sharded
    return kinds


def _name_rank_files(match: re.Match[str]) -> str:
    """Return the name of a rank's file with `*` for the rank: one name per set of files."""
    start, end = match.span("rank")
    return f"{match.string[:start]}*{match.string[end:]}"


def _open(directory: Path, path: Path, sub_tree: str | None, shapes: Shapes | None) -> StoredCheckpoint:
    if path.is_file():
        return replace(open_file(path), format_name="FSDP full state dict, 1 file")
    if dcp_safetensors.recognises_folder(path):
        return dcp_safetensors.open_folder(path, directory)
    ranks, world_size = _find_rank_files(path)
    if ranks:
        known = shapes if shapes is not None else read_model_shapes(directory)
        return open_rank_files(directory, ranks, known, world_size)
    if not dcp.recognises_folder(path):
        raise CheckpointError(
            f"{path} holds no shards",
            expected=".metadata and .distcp files",
            got=list_some((entry.name for entry in path.iterdir()), 4) or "an empty folder",
            remedy="the save was interrupted, or the folder was not copied whole",
        )
    # The model's own files lie beside the folder of its shards.
    outer = path.parent if directory == path and _MODEL_FOLDER.fullmatch(path.name) else directory
    home = directory if (directory / "config.json").is_file() else outer
    return replace(dcp.open_folder(path, sub_tree), directory=home)


def _find_rank_files(directory: Path) -> tuple[dict[int, Path], int | None]:
    """Return rank → its file, and the number of ranks where the names say it."""
    ranks: dict[int, Path] = {}
    worlds = set()
    for path in sorted(directory.iterdir()):
        for pattern in _RANK_FILES:
            if match := pattern.fullmatch(path.name):
                ranks[int(match["rank"])] = path
                worlds.add(int(match.groupdict().get("world") or 0))
    return ranks, (max(worlds) or None) if worlds else None


def _list_inner(directory: Path) -> list[str]:
    """Return the folders in `directory` that hold such a checkpoint themselves."""
    folders = [path for path in sorted(directory.iterdir()) if path.is_dir() and not path.name.startswith("optimizer")]
    return [path.name for path in folders if _find_kinds(path)]


def _wrong_level(directory: Path) -> CheckpointError:
    inner = _list_inner(directory)
    return CheckpointError(
        f"{directory} is not the checkpoint itself",
        expected="the folder that one step was saved into",
        got=f"a folder with {list_some(inner)}" if inner else "none of FSDP's files",
        remedy=f"pass {directory / inner[-1]}" if inner else "pass the folder that holds the weights",
    )


def _resolve_tag(directory: Path, tag: str) -> Path:
    folder = directory / tag
    if tag in ("", ".", "..") or "/" in tag or "\\" in tag or "\0" in tag or not folder.is_dir():
        inner = _list_inner(directory)
        raise CheckpointError(
            f"--tag names no folder in {directory}",
            expected=f"one of {list_some(inner)}" if inner else "the name of a folder in it",
            got=repr(tag[:100]),
            remedy="pass --tag with one that is there",
        )
    check_inside(folder, directory)
    return folder


def _with_facts(opened: StoredCheckpoint, directory: Path) -> StoredCheckpoint:
    """Return `opened` with what the files beside the weights say: the number of ranks, and the Trainer's step."""
    facts = opened.facts
    ranks = [int(match[1]) for entry in directory.iterdir() if (match := _RANDOM_STATE.fullmatch(entry.name))]
    if ranks:
        facts = replace(facts, world_size=max([*ranks, (facts.world_size or 1) - 1]) + 1)
    if facts.step is None:
        facts = replace(facts, step=_read_trainer_step(directory / "trainer_state.json"))
    return replace(opened, facts=facts)


def _read_trainer_step(path: Path) -> int | None:
    try:
        step = json.loads(path.read_text(encoding="utf-8")).get("global_step")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return step if type(step) is int else None
