"""FSDP's checkpoints, alone or in a folder by Accelerate's `save_state` or the Trainer.

These are read, found in the folder or, for the second, in its `pytorch_model_fsdp_0`:

    pytorch_model_fsdp.bin                         the full state dict in one file (FULL_STATE_DICT)
    .metadata, __RANK_FILE.distcp                  torch.distributed.checkpoint (SHARDED_STATE_DICT)
    shard-*-model-*-of-*.safetensors               its Hugging Face storage writer; also in `sharded`
    pytorch_model_fsdp_0_rankR.bin                 one file per rank (SHARDED_STATE_DICT with use_dcp=False)
    model_world_size_W_rank_R.pt                   the same by verl
    pytorch_model_fsdp_rankR.bin                   slices without shapes (LOCAL_STATE_DICT)

Names: Accelerate 1.15, utils/fsdp_utils.py. Optimizers (`optimizer_0`, `optimizer.bin`) are not looked at.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from ...errors import CheckpointError, list_some
from ..pickles.torch_zip import open_torch_zip
from ..plain import huggingface
from ..plain.gathered_copy import match_gathered
from ..plain.model_shapes import read_model_shapes, read_model_ties
from ..storage.paths import check_inside, refuse_broken_link, refuse_irregular
from ..stored_checkpoint import CheckpointFacts, StoredCheckpoint
from ..wrapper_names import strip_wrappers
from . import dcp, dcp_safetensors
from .dcp_metadata import METADATA_FILE
from .full import open_full_file
from .rank_files import Shapes, open_rank_files

LOOKED_FOR = "torch.distributed.checkpoint's .metadata, or FSDP's pytorch_model_fsdp*"

_MODEL_FOLDER = re.compile(r"pytorch_model_fsdp_(\d+)")
_FULL = re.compile(r"pytorch_model_fsdp(?:_(\d+))?\.bin")
_RANK_FILES = (
    re.compile(r"pytorch_model_fsdp(?:_(?P<model>\d+))?_rank(?P<rank>\d+)\.bin"),
    re.compile(r"model_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt"),
)
_SHARDED_FOLDER = "sharded"
_SAFETENSORS_SHARDS = "shard-*.safetensors"
# `random_states_R.pkl` by Accelerate, `rng_state_R.pth` by the Trainer: one per rank.
_RANDOM_STATE = re.compile(r"(?:random_states|rng_state)_(\d+)\.(?:pkl|pth)")

# Lightning's trainer beside the shards, as in its `.ckpt` (Lightning 2.6, lightning_fabric/utilities/load.py).
_LIGHTNING_STATE = "meta.pt"
_LIGHTNING_VERSION = "pytorch-lightning_version"


def recognises(directory: Path, tag: str | None = None) -> bool:
    """Tell whether FSDP or `torch.distributed.checkpoint` saved a checkpoint in `directory`."""
    return bool(_find_kinds(directory))


def open_folder(
    directory: Path, tag: str | None = None, base: Path | None = None, *, shapes: Shapes | None = None
) -> StoredCheckpoint:
    """Return a reader for the FSDP checkpoint in `directory`, reading no tensor data.

    Args:
        directory: The folder that the trainer saved into.
        tag: One of several models in it, such as `pytorch_model_fsdp_1`; or, for a `torch.distributed.checkpoint`, the
            part of the saved state that is the model, where it cannot be determined: `app.ema`.
        base: The folder with the `config.json` that tells shapes, where the checkpoint has none.
        shapes: Name → shape for LOCAL state dicts; those of the model that `config.json` describes where None.

    Raises:
        CheckpointError: Files are missing, too many, damaged or not of one save, or the model cannot be determined.
    """
    kinds = _find_kinds(directory)
    named = tag if tag in kinds else None
    if len(kinds) != 1 and named is None:
        raise CheckpointError(
            f"{directory} holds {'several models' if kinds else 'no model of FSDP'}",
            expected="one of them to be chosen",
            got=list_some(kinds) or "none of its files",
            remedy="pass --tag with one of these names" if kinds else "pass the folder that holds the weights",
        )
    kind = named or next(iter(kinds))
    sub_tree = None if named else tag
    opened = _open(directory, kind, kinds[kind], sub_tree, base, shapes)
    names, removed = strip_wrappers(opened.tensors, opened.directory)
    gathered, unmatched = match_gathered(opened.directory, names)
    return StoredCheckpoint(
        directory=opened.directory,
        format_name=opened.format_name + removed,
        tensors={names[name]: tensor for name, tensor in opened.tensors.items()},
        tied={names[name]: names[holder] for name, holder in opened.tied.items()},
        copies=(*({names[name]: tensor for name, tensor in copy.items()} for copy in opened.copies), gathered),
        zero_size=frozenset(names[name] for name in opened.zero_size),
        facts=_complete_facts(opened, unmatched),
        archives=opened.archives,
    )


def _find_kinds(directory: Path) -> dict[str, Path]:
    """Return what may be the model in `directory` itself: a name for messages → where it lies."""
    kinds: dict[str, Path] = {}
    for path in sorted(directory.iterdir()):
        # A link to nothing as well: other weights must not replace those behind it.
        if _FULL.fullmatch(path.name) or (_MODEL_FOLDER.fullmatch(path.name) and not path.is_file()):
            kinds[path.name] = path
        for pattern in _RANK_FILES:
            if match := pattern.fullmatch(path.name):
                kinds[_name_rank_files(match)] = directory
    if dcp.recognises_folder(directory):
        kinds[METADATA_FILE] = directory
    if dcp_safetensors.recognises_folder(directory):
        kinds[_SAFETENSORS_SHARDS] = directory
    sharded = directory / _SHARDED_FOLDER
    if not kinds and sharded.is_dir() and dcp_safetensors.recognises_folder(sharded):
        kinds[_SHARDED_FOLDER] = sharded
    return kinds


def _name_rank_files(match: re.Match[str]) -> str:
    """Return the name of a rank's file with `*` for the rank: one name per set of files."""
    start, end = match.span("rank")
    return f"{match.string[:start]}*{match.string[end:]}"


def _open(
    directory: Path, kind: str, path: Path, sub_tree: str | None, base: Path | None, shapes: Shapes | None
) -> StoredCheckpoint:
    is_full = bool(_FULL.fullmatch(kind))
    if is_full:
        refuse_irregular(directory, [kind])
    refuse_broken_link(path)
    check_inside(path, directory)
    if path != directory and not is_full:
        inner = _find_kinds(path)
        if len(inner) != 1:
            raise CheckpointError(
                f"{path} does not hold the shards of one model",
                expected=".metadata and .distcp files",
                got=list_some((entry.name for entry in path.iterdir()), 4) or "an empty folder",
                remedy="the save was interrupted, or the folder was not copied whole",
            )
        # The model's own files lie beside the folder of its shards.
        return replace(_open(path, *inner.popitem(), sub_tree, base, shapes), directory=directory)
    if kind == METADATA_FILE:
        return replace(dcp.open_folder(directory, sub_tree), directory=_find_home(directory))
    if sub_tree is not None:
        raise CheckpointError(
            f"{directory} holds no {sub_tree}", expected="no --tag", got=repr(sub_tree), remedy="leave --tag out"
        )
    if is_full:
        return open_full_file(path)
    home = _find_home(directory)
    described = _find_described(home, base)
    if kind == _SAFETENSORS_SHARDS:
        return dcp_safetensors.open_folder(directory, home, described)
    ranks, world_size = _find_rank_files(directory, kind)

    def read_shapes() -> Shapes | None:
        return shapes if shapes is not None else read_model_shapes(described)

    opened = open_rank_files(directory, ranks, read_shapes, lambda: read_model_ties(described), world_size)
    return replace(opened, directory=home)


def _find_home(directory: Path) -> Path:
    """Return the folder with the model's `config.json`.

    For shards in a folder of their own it is the one above; verl keeps it in `huggingface` beside the rank files.
    """
    homes = [directory, directory / "huggingface"]
    if _MODEL_FOLDER.fullmatch(directory.name) or directory.name == _SHARDED_FOLDER:
        homes.append(directory.parent)
    return next(
        (home for home in homes if os.path.lexists(home / "config.json")), homes[-1] if len(homes) > 2 else directory
    )


def _find_described(home: Path, base: Path | None) -> Path:
    """Return the folder whose `config.json` tells shapes: the one that the ranks trained with, where it is there."""
    return home if base is None or os.path.lexists(home / "config.json") else base


def _find_rank_files(directory: Path, kind: str) -> tuple[dict[int, Path], int | None]:
    """Return rank → its file of the set named `kind`, and the number of ranks where the names say it."""
    ranks: dict[int, Path] = {}
    world_size = None
    for path in sorted(directory.iterdir()):
        for pattern in _RANK_FILES:
            if (match := pattern.fullmatch(path.name)) and _name_rank_files(match) == kind:
                ranks[int(match["rank"])] = path
                world_size = int(match.groupdict().get("world") or 0) or None
    return ranks, world_size


def _complete_facts(opened: StoredCheckpoint, unmatched: tuple[str, ...]) -> CheckpointFacts:
    """Return the facts with what the files beside the weights say: the number of ranks, the trainer and its step."""
    facts, directory = replace(opened.facts, missing=(*opened.facts.missing, *unmatched)), opened.directory
    ranks = [int(match[1]) for entry in directory.iterdir() if (match := _RANDOM_STATE.fullmatch(entry.name))]
    if ranks:
        facts = replace(facts, world_size=max([*ranks, (facts.world_size or 1) - 1]) + 1)
    if (directory / _LIGHTNING_STATE).is_file():
        told = _read_lightning(directory)
        facts = replace(
            facts, trainer=told.trainer or facts.trainer, step=told.step if facts.step is None else facts.step
        )
    if facts.step is None:
        facts = replace(facts, step=huggingface.read_facts(directory).step)
    return facts


def _read_lightning(directory: Path) -> CheckpointFacts:
    """Return what Lightning saved of its trainer beside the shards; it is only reported, never used."""
    path = directory / _LIGHTNING_STATE
    check_inside(path, directory)
    try:
        content = open_torch_zip(path).content
    except CheckpointError:
        # Callbacks may keep what no weight needs.
        return CheckpointFacts()
    state = content if isinstance(content, dict) else {}
    version, step = state.get(_LIGHTNING_VERSION), state.get("global_step")
    return CheckpointFacts(
        trainer=f"Lightning {version}" if isinstance(version, str) else None,
        step=step if type(step) is int else None,
    )
