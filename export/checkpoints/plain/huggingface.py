"""Hugging Face folders: safetensors and `.bin`, in one file or sharded with an index; one safetensors file alone.

Accelerate's own index for models too big for one file (`load_checkpoint_in_model`, Accelerate 1.15, utils/modeling.py)
may be the map of names to files alone, without `weight_map` around it, and is called `index.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from ...errors import CheckpointError, list_some
from ..pickles.torch_zip import open_torch_zip
from ..remedies import RECOPY, RECOPY_WHOLE
from ..storage.paths import (
    MAX_JSON_BYTES,
    check_inside,
    find_json_remedy,
    is_taken,
    parse_json,
    read_json_beside,
    read_small,
    refuse_irregular,
)
from ..storage.safetensors_file import read_safetensors
from ..storage.stored_tensor import StoredTensor
from ..stored_checkpoint import CheckpointFacts, StoredCheckpoint, find_tied
from ..wrapper_names import strip_wrappers
from . import torch_file
from .accelerate_models import refuse_several_models
from .torch_file import OTHER_STATE, find_tensors

# In this order: safetensors is preferred where a folder holds both, as transformers does.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
LOOKED_FOR = ", ".join((*WEIGHT_FILES, "index.json"))
_PLAIN_INDEX = "index.json"
_INDEX_ENDING = ".index.json"
SAFETENSORS_SUFFIX = ".safetensors"
_SHARD_SUFFIXES = (SAFETENSORS_SUFFIX, ".bin")
# A file that is not one of several.
_ALONE = re.compile(r"(?!.*-\d+-of-\d+\.).+\.safetensors")
# One that is, as transformers names them.
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)(?P<suffix>\.safetensors|\.bin)")
# More are in no model, and a number in a name may be anything.
_MAX_SHARDS = 10_000
# What peft calls the weights of an adapter, which is not a model, and what else lies beside one.
_NO_MODEL = ("adapter_", *OTHER_STATE)

# Keys of a safetensors file's metadata. The first names the framework; the other, our own, has a JSON list of the
# parameters that have no elements on purpose. Any further key may be a tied name (`_read_tied`).
FORMAT_KEY = "format"
ZERO_SIZE_KEY = "zero_size_parameters"


def recognises(directory: Path, tag: str | None = None) -> bool:
    """Tell whether `directory` holds the weights of a Hugging Face folder."""
    return _find_main_file(directory) is not None


def open_folder(directory: Path, tag: str | None = None, base: Path | None = None) -> StoredCheckpoint:
    """Return a reader for the Hugging Face folder `directory`, reading no tensor data.

    Args:
        directory: The folder with the weights.
        tag: Must be None: such a folder holds one model.
        base: Tells nothing that the files do not.

    Raises:
        CheckpointError: A weight file is missing, truncated, not what its name says, or disagrees with the index; or
            there are several models.
    """
    if tag is not None:
        raise CheckpointError(
            f"{directory} has no tags",
            expected="a DeepSpeed checkpoint with --tag",
            got="a Hugging Face folder",
            remedy="leave --tag out",
        )
    refuse_several_models(directory)
    main_file = _find_main_file(directory) or WEIGHT_FILES[0]
    return _open(directory, main_file, _list_shards(directory, main_file))


def open_file(path: Path) -> StoredCheckpoint:
    """Return a reader for one safetensors file, passed by itself; reads no tensor data.

    Raises:
        CheckpointError: It is truncated, or not what its name says.
    """
    return _open(path.parent, path.name)


def _find_main_file(directory: Path) -> str | None:
    """Return the name of the weights or of their index; one that trainers write comes before any other."""
    if usual := _find_usual_file(directory):
        return usual
    files = sorted(entry.name for entry in directory.iterdir() if not entry.is_dir())
    indices = [name for name in files if name.endswith(_INDEX_ENDING)]
    if _PLAIN_INDEX in files and _is_plain_index(directory / _PLAIN_INDEX):
        indices.append(_PLAIN_INDEX)
    if len(indices) == 1:
        return indices[0]
    if numbered := _find_numbered(files):
        return numbered
    alone = [name for name in files if _ALONE.fullmatch(name) and not name.startswith(_NO_MODEL)]
    if torch_file.recognises(directory):
        return None
    return alone[0] if len(alone) == 1 else _find_damaged_index(directory, files)


def _find_usual_file(directory: Path) -> str | None:
    """Return the first of the usual names that is there, be it a link to nothing: other weights must not replace it.

    A folder may bear such a name, as `zero_to_fp32.py` makes one where it once wrote a file.
    """
    paths = (directory / name for name in WEIGHT_FILES)
    return next((path.name for path in paths if is_taken(path)), None)


def _find_numbered(files: Iterable[str]) -> str | None:
    """Return the first file of the shards of one model, whose index was not copied; safetensors before `.bin`."""
    matches = [match for name in files if (match := _SHARD.fullmatch(name))]
    for suffix in _SHARD_SUFFIXES:
        of_kind = [match for match in matches if match["suffix"] == suffix and not match[0].startswith(_NO_MODEL)]
        if len({(match["stem"], int(match["count"])) for match in of_kind}) == 1:
            return of_kind[0][0]
    return None


def _list_shards(directory: Path, main_file: str) -> list[str] | None:
    """Return all shards of which `main_file` is one; None where it is an index, or a model alone.

    Raises:
        CheckpointError: One of them is not there.
    """
    match = _SHARD.fullmatch(main_file)
    if match is None:
        return None
    count, width = int(match["count"]), len(match["number"])
    wanted = [
        f"{match['stem']}-{number:0{width}d}-of-{match['count']}{match['suffix']}"
        for number in range(1, min(count, _MAX_SHARDS) + 1)
    ]
    if missing := [name for name in wanted if not (directory / name).is_file()]:
        refuse_irregular(directory, missing)
        if match["suffix"] == ".bin":
            torch_file.refuse_rank(directory / main_file)
        raise CheckpointError(
            f"{directory} lacks shards of its model",
            expected=list_some(missing),
            got=f"{len(wanted) - len(missing)} of {count}, and no index",
            remedy=RECOPY_WHOLE,
        )
    return wanted


def _is_plain_index(path: Path) -> bool:
    content = read_json_beside(path)
    named = content.get("weight_map", content)
    return (
        isinstance(named, dict) and bool(named) and all(str(file).endswith(_SHARD_SUFFIXES) for file in named.values())
    )


def _find_damaged_index(directory: Path, files: Iterable[str]) -> str | None:
    """Return the plain index beside what may be its shards if it is no JSON, which another file of that name is."""
    shards = [name for name in files if name.endswith(_SHARD_SUFFIXES) and not name.startswith(_NO_MODEL)]
    if _PLAIN_INDEX not in files or not shards:
        return None
    try:
        parse_json(read_small(directory / _PLAIN_INDEX, max_bytes=MAX_JSON_BYTES))
    except ValueError:
        return _PLAIN_INDEX
    return None


def _open(directory: Path, main_file: str, shards: Sequence[str] | None = None) -> StoredCheckpoint:
    saved, zero_size, shard_names = _read_folder(directory, main_file, shards)
    names, removed = strip_wrappers(saved, directory)
    tensors = {names[name]: tensor for name, tensor in saved.items()}
    kind = "safetensors" if shard_names[0].endswith(".safetensors") else "torch .bin"
    count, facts = len(shard_names), read_facts(directory)
    if shards and count > 1:
        facts = replace(facts, missing=(*facts.missing, "the index, which shows that all shards are of one save"))
    return StoredCheckpoint(
        directory=directory,
        format_name=f"Hugging Face {kind}, {count} file{'s' if count > 1 else ''}{removed}",
        tensors=tensors,
        tied=find_tied(tensors),
        zero_size=frozenset(names[name] for name in zero_size if name in names),
        facts=facts,
        archives=tuple(directory / name for name in shard_names if name.endswith(".bin")),
    )


def read_gathered(directory: Path) -> dict[str, StoredTensor]:
    """Return the weights that a trainer gathered beside its own checkpoint; empty if there are none.

    The placeholders of size 0, which are left where nobody asked ZeRO stage 3 to gather, are not weights.

    Raises:
        CheckpointError: The files are damaged.
    """
    name = _find_usual_file(directory)
    if name is None:
        return {}
    tensors, _, _ = _read_folder(directory, name)
    return {name: tensor for name, tensor in tensors.items() if tensor.numel}


def read_facts(directory: Path) -> CheckpointFacts:
    """Return what `config.json` and `trainer_state.json` say, where they are there and are JSON.

    Raises:
        CheckpointError: One of them is not a regular file, or is too large.
    """
    config, state = read_json_beside(directory / "config.json"), read_json_beside(directory / "trainer_state.json")
    version, step = config.get("transformers_version"), state.get("global_step")
    return CheckpointFacts(
        trainer=f"transformers {version}" if isinstance(version, str) else None,
        step=step if type(step) is int else None,
    )


def _read_folder(
    directory: Path, name: str, shards: Sequence[str] | None = None
) -> tuple[dict[str, StoredTensor], frozenset[str], list[str]]:
    """Return the tensors, the names that have no elements on purpose, and the files' names.

    Args:
        directory: The folder.
        name: The weights in it, or their index.
        shards: All files of the weights, where there is no index.
    """
    refuse_irregular(directory, [name])
    check_inside(directory / name, directory)
    index = _read_index(directory / name) if name.endswith(_PLAIN_INDEX) else None
    shard_names = sorted(set(index.values())) if index else list(shards or [name])
    tensors: dict[str, StoredTensor] = {}
    tied: dict[str, StoredTensor] = {}
    zero_size: set[str] = set()
    for shard_name in shard_names:
        _check_shard_path(directory, shard_name)
        path = directory / shard_name
        if shard_name.endswith(".safetensors"):
            found, metadata = read_safetensors(path)
            zero_size |= _read_zero_size(path, metadata)
            tied |= _read_tied(found, metadata)
        else:
            found = read_state_dict(path)
        if index is not None:
            _check_against_index(path, shard_name, found, index)
        elif twice := tensors.keys() & found.keys():
            raise CheckpointError(
                f"{path} holds tensors that a shard before it has as well",
                expected=f"each in one of {len(shard_names)} shards",
                got=list_some(twice),
                remedy="copy the index beside them, or the whole checkpoint again",
            )
        tensors.update(found)
    return (
        tensors | {name: tied[name] for name in sorted(tied.keys() - tensors.keys())},
        frozenset(zero_size),
        shard_names,
    )


def _read_zero_size(path: Path, metadata: Mapping[str, str]) -> set[str]:
    try:
        names: Any = json.loads(metadata.get(ZERO_SIZE_KEY, "[]"))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("no list of names")
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(
            f"{path} cannot be read",
            expected=f"a JSON list of names under {ZERO_SIZE_KEY} in its metadata",
            got=str(exc).rstrip("."),
            remedy=RECOPY,
        ) from exc
    return set(names)


def _read_tied(found: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Return the names that the writer left out because another tensor of the same file has their bytes.

    safetensors' own `save_model` records them in the metadata: the name left out → the name that holds its bytes
    (safetensors 0.8, bindings/python/py_src/safetensors/torch.py).
    """
    return {
        name: found[holder]
        for name, holder in metadata.items()
        if name not in (FORMAT_KEY, ZERO_SIZE_KEY) and holder in found
    }


def read_state_dict(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by `torch.save` that holds a state dict and nothing else.

    Raises:
        CheckpointError: The file is damaged, or holds something else.
    """
    content = open_torch_zip(path).content
    tensors = find_tensors(path, content) if isinstance(content, dict) else {}
    if not tensors:
        torch_file.refuse_rank(path)
        raise CheckpointError(
            f"{path} is not a state dict",
            expected="a dict of tensors",
            got=type(content).__name__ if not isinstance(content, dict) else "a dict with other values",
            remedy="save it with model.save_pretrained()",
        )
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    """Return tensor name → shard file name, as the index says."""
    data = read_small(path, max_bytes=MAX_JSON_BYTES)
    try:
        index = parse_json(data)
        weight_map = index.get("weight_map", index)
        if not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError("weight_map is empty or names no files")
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(
            f"{path} cannot be read",
            expected="an index that names the file of each tensor",
            got=f"{len(data)} bytes ({str(exc).rstrip('.')})",
            remedy=find_json_remedy(data),
        ) from exc
    return dict(weight_map)


def _check_shard_path(directory: Path, shard_name: str) -> None:
    parts = PurePosixPath(shard_name)
    # Whether links in between lead outside is told once it is there.
    if parts.is_absolute() or ".." in parts.parts or not parts.parts or "\0" in shard_name:
        raise CheckpointError(
            f"the index in {directory} leads outside the folder",
            expected="names of files in it",
            got=repr(shard_name),
            remedy="do not use this checkpoint unless you know why",
        )
    refuse_irregular(directory, [shard_name])
    if not (directory / shard_name).is_file():
        raise CheckpointError(
            f"{directory} lacks a shard that its index names",
            expected=shard_name,
            got="no such file",
            remedy=RECOPY_WHOLE,
        )
    check_inside(directory / shard_name, directory)


def _check_against_index(path: Path, shard_name: str, found: Iterable[str], index: Mapping[str, str]) -> None:
    promised, names = {name for name, shard in index.items() if shard == shard_name}, set(found)
    missing, extra = promised - names, names - promised
    if missing or extra:
        wrong = [f"without {list_some(missing)}"] if missing else []
        wrong += [f"with {list_some(extra)}"] if extra else []
        raise CheckpointError(
            f"{path} is not the shard that the index describes",
            expected=f"its {len(promised)} tensors",
            got="the file " + " and ".join(wrong),
            remedy="copy index and shards from the same save",
        )
