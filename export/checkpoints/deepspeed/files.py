"""Which files of a DeepSpeed folder belong to the checkpoint, by `latest` and by their names.

Names: DeepSpeed 0.19.8, runtime/engine.py (`_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_expert_ckpt_name`). Ranks are
numbers: rank 10 comes after rank 9.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError, list_some
from ..remedies import REMOVE_OLDER
from ..storage.paths import check_inside, is_taken, read_small

LOOKED_FOR = "DeepSpeed's latest and *_model_states.pt"

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_PARTITIONED_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
# The tensor parallel rank is left out where the topology has no such dimension (runtime/pipe/topology.py).
_PIPELINE_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_LATEST_FILES = ("latest", "latest_universal")
_MAX_LATEST_BYTES = 4096
# What ext4 makes at the root of a disk, for root alone.
_NO_TAG = "lost+found"


@dataclass(frozen=True, kw_only=True)
class DeepSpeedFiles:
    """The files of one tag, sorted by rank.

    Attributes:
        directory: The folder that the user named.
        folder: The tag's own folder.
        models: (data-parallel rank, model-parallel rank) → model states; rank 0 alone at stages 0 to 2.
        partitioned: Whether the model states are those of stage 3, one per rank.
        optimizers: (data-parallel rank, model-parallel rank) → optimizer states.
        experts: (MoE layer, expert) → its model states.
        pipeline_layers: (layer, tensor-parallel rank) → its model states.
        universal: Whether the tag is a universal checkpoint: a `zero` folder with one folder per parameter.
    """

    directory: Path
    folder: Path
    models: Mapping[tuple[int, int], Path]
    partitioned: bool
    optimizers: Mapping[tuple[int, int], Path]
    experts: Mapping[tuple[int, int], Path]
    pipeline_layers: Mapping[tuple[int, int], Path]
    universal: bool


def recognises_folder(directory: Path) -> bool:
    """Tell whether DeepSpeed saved a checkpoint in `directory`."""
    if any((directory / name).is_file() for name in _LATEST_FILES) or _is_tag_folder(directory):
        return True
    return any(_may_be_listed(entry) and _is_tag_folder(entry) for entry in directory.iterdir() if entry.is_dir())


def find_files(directory: Path, tag: str | None = None) -> DeepSpeedFiles:
    """Return the files of `tag`, of the tag that `latest` names, or of the only one there is.

    Raises:
        CheckpointError: There is no such tag, several and no `latest`, or something leads outside `directory`.
    """
    folder = _find_tag_folder(directory, tag)
    check_inside(folder, directory)
    tables: dict[re.Pattern[str], dict[tuple[int, int], Path]] = {
        pattern: {} for pattern in (_MODEL, _PARTITIONED_MODEL, _OPTIMIZER, _EXPERT, _PIPELINE_LAYER)
    }
    for path in sorted(folder.iterdir()):
        for pattern, table in tables.items():
            if match := pattern.fullmatch(path.name):
                check_inside(path, directory)
                numbers = [int(number or 0) for number in match.groups()]
                _add(table, (0, numbers[0]) if pattern is _MODEL else (numbers[0], numbers[1]), path)
    if tables[_MODEL] and tables[_PARTITIONED_MODEL]:
        raise CheckpointError(
            f"{folder} holds the model states of stage 3 and of another stage",
            expected="one of the two",
            got=list_some(path.name for path in (*tables[_MODEL].values(), *tables[_PARTITIONED_MODEL].values())),
            remedy=REMOVE_OLDER,
        )
    return DeepSpeedFiles(
        directory=directory,
        folder=folder,
        models=dict(sorted((tables[_MODEL] or tables[_PARTITIONED_MODEL]).items())),
        partitioned=bool(tables[_PARTITIONED_MODEL]),
        optimizers=dict(sorted(tables[_OPTIMIZER].items())),
        experts=dict(sorted(tables[_EXPERT].items())),
        pipeline_layers=dict(sorted(tables[_PIPELINE_LAYER].items())),
        universal=(folder / "zero").is_dir(),
    )


def _add(table: dict[tuple[int, int], Path], key: tuple[int, int], path: Path) -> None:
    other = table.setdefault(key, path)
    if other is not path:
        raise CheckpointError(
            f"{path.parent} has two files for rank {key[0]}",
            expected="one per rank",
            got=f"{other.name} and {path.name}",
            remedy=REMOVE_OLDER,
        )


def _find_tag_folder(directory: Path, tag: str | None) -> Path:
    if tag is not None:
        return _resolve_tag(directory, tag, "--tag")
    if _is_tag_folder(directory):
        return directory
    for name in _LATEST_FILES:
        # A link of one's own to the latest folder may bear the name as well.
        if is_taken(directory / name):
            check_inside(directory / name, directory)
            named = read_small(directory / name, max_bytes=_MAX_LATEST_BYTES).decode("utf-8", "replace").strip()
            return _resolve_tag(directory, named, str(directory / name))
    # No name is left out for want of rights here: it might be that of the latest checkpoint.
    folders = [entry for entry in sorted(directory.iterdir()) if entry.is_dir() and entry.name != _NO_TAG]
    tags = [entry for entry in folders if _is_tag_folder(entry)]
    if len(tags) != 1:
        raise CheckpointError(
            f"{directory} holds several DeepSpeed checkpoints and no file latest",
            expected="one of them to be chosen",
            got=list_some(entry.name for entry in tags),
            remedy="pass --tag with one of them",
        )
    return tags[0]


def _resolve_tag(directory: Path, tag: str, source: str) -> Path:
    """Return the folder `tag` in `directory`; a tag is one name, never a path."""
    if not tag or tag in (".", "..") or "/" in tag or "\\" in tag or "\0" in tag:
        raise CheckpointError(
            f"{source} leads outside {directory}",
            expected="the name of a folder in it",
            got=repr(tag[:100]),
            remedy="do not use this checkpoint unless you know why",
        )
    folder = directory / tag
    if not folder.is_dir():
        tags = [entry.name for entry in directory.iterdir() if entry.is_dir()]
        raise CheckpointError(
            f"{source} names a checkpoint that is not there",
            expected=str(folder),
            got=f"the folders {list_some(tags)}" if tags else "no folder at all",
            remedy="copy the whole checkpoint, or pass --tag with one that is there",
        )
    return folder


def _may_be_listed(folder: Path) -> bool:
    return os.access(folder, os.R_OK | os.X_OK)


def _is_tag_folder(folder: Path) -> bool:
    patterns = (_MODEL, _PARTITIONED_MODEL, _OPTIMIZER, _PIPELINE_LAYER)
    names = [entry.name for entry in folder.iterdir()]
    if "zero" in names and (folder / "zero" / "optimizer_state.pt").is_file():
        return True
    return any(pattern.fullmatch(name) for name in names for pattern in patterns)
