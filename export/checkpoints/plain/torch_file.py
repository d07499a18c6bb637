"""One file by `torch.save` with a model in it, as plain loops, DDP, Lightning, Accelerate and torch.compile leave it.

The state dict may lie under keys that name it, and wrappers of the model may have put their own name before every key.
Both are the trainer's storage, so both are undone, when they are certain: a prefix only when every key has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, list_some
from ..pickles.torch_zip import GATHER_RANKS, Record, is_tensor, open_torch_zip, refuse_foreign_tensors
from ..storage.paths import check_inside, open_regular, refuse_irregular
from ..storage.stored_tensor import StoredTensor
from ..stored_checkpoint import CheckpointFacts, StoredCheckpoint, find_tied
from ..wrapper_names import strip_wrappers

# `.pkl` by Accelerate's `save`, whose documentation calls it so.
SUFFIXES = (".pth", ".pt", ".ckpt", ".pkl")
LOOKED_FOR = "one *.pth, *.pt, *.ckpt or *.pkl"
_PICKLE_SUFFIX = ".pkl"
_ZIP_MAGIC = b"PK\3\4"

_NUMBER = re.compile(r"\d+")

# What trainers save beside the weights, under names of these suffixes (transformers, Accelerate, torchtune).
OTHER_STATE = (
    "optimizer",
    "scheduler",
    "rng_state",
    "random_states",
    "scaler",
    "training_args",
    "sampler",
    "dl_state",
    # Accelerate's `register_for_checkpointing`.
    "custom_checkpoint",
)

# Keys under which trainers keep the model: Lightning and most recipes, DeiT and MAE, DDP recipes, older ones.
OUTER_KEYS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network", "weights")
# How many of them may lie within each other.
MAX_OUTER_KEYS = 3

# What a module that holds the model, such as Lightning's, usually calls it.
_INNER_MODEL = "model."
# A file of transformers or Accelerate, passed by itself: read as `huggingface.py` reads its folder.
_HUGGING_FACE_SUFFIX = ".bin"


def recognises(directory: Path, tag: str | None = None) -> bool:
    """Tell whether `directory` holds a file of one of the suffixes that may be a model."""
    return bool(_candidates(directory))


def open_folder(directory: Path, tag: str | None = None, base: Path | None = None) -> StoredCheckpoint:
    """Return a reader for the only such file in `directory`, or for the one named `tag`; `base` tells nothing more.

    Raises:
        CheckpointError: There are several, or the file holds no model.
    """
    found = [path for path in _candidates(directory) if tag is None or path.name == tag]
    if len(found) != 1:
        if len({_NUMBER.sub("", path.name) for path in found}) == 1:
            refuse_rank(found[0])
        raise CheckpointError(
            f"{directory} holds several files that may be the model" if found else f"{directory} holds no {tag}",
            expected="one of them to be chosen",
            got=list_some(path.name for path in _candidates(directory)),
            remedy="pass the file itself, or --tag with its name",
        )
    return open_file(found[0])


def refuse_rank(path: Path) -> None:
    """Refuse a file of several alike that each hold a rank's part, for which another name is the remedy.

    Raises:
        CheckpointError: It is one.
    """
    try:
        open_file(path)
    except CheckpointError as exc:
        # Another fault may not be that of the file that is wanted.
        if GATHER_RANKS in str(exc):
            raise


def open_file(path: Path) -> StoredCheckpoint:
    """Return a reader for one file by `torch.save`, reading no tensor data.

    Raises:
        CheckpointError: The file is damaged, or holds no model or more than one.
    """
    refuse_irregular(path.parent, [path.name])
    check_inside(path, path.parent)
    content = open_torch_zip(path).content
    state, where = _find_state_dict(path, content)
    names, removed = strip_wrappers(state, path)
    if path.suffix != _HUGGING_FACE_SUFFIX and all(name.startswith(_INNER_MODEL) for name in names.values()):
        # Once and last: what is left may be the model's own, as in Llama's `model.layers`. Llama itself is not
        # mistaken, since its `lm_head` has no such prefix.
        names = {old: name.removeprefix(_INNER_MODEL) for old, name in names.items()}
        removed += f"{' and' if removed else ', without'} prefix {_INNER_MODEL}"
    stripped = {names[name]: tensor for name, tensor in state.items()}
    described = f"torch file {path.name}" + (f", under {where}" if where else "")
    return StoredCheckpoint(
        directory=path.parent,
        format_name=described + removed,
        tensors=stripped,
        tied=find_tied(stripped),
        # The placeholders of ZeRO stage 3 are of shape [0].
        zero_size=frozenset(name for name, tensor in stripped.items() if 0 in tensor.shape and tensor.shape != (0,)),
        facts=_read_facts(content),
        archives=(path,),
    )


def refuse_bare_pickle(directory: Path) -> None:
    """Refuse a folder whose only file of one of the suffixes is a bare pickle, which is passed over where others are.

    Raises:
        CheckpointError: There is one; the reason is the file's own.
    """
    for path in _list_files(directory):
        if not _may_be_torchs(path):
            open_file(path)


def _candidates(directory: Path) -> list[Path]:
    return [path for path in _list_files(directory) if _may_be_torchs(path)]


def _list_files(directory: Path) -> list[Path]:
    """Return what may be a model by its name alone, a FIFO or a link to nothing too: another must not replace it."""
    return [
        path
        for path in sorted(directory.iterdir())
        if path.suffix in SUFFIXES and not path.is_dir() and not path.name.startswith(OTHER_STATE)
    ]


def _may_be_torchs(path: Path) -> bool:
    """Tell whether a file is not one of the many bare pickles that lie about under that suffix."""
    if path.suffix != _PICKLE_SUFFIX:
        return True
    if not path.is_file():
        return False
    with open_regular(path) as file:
        return file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC


def _find_state_dict(path: Path, content: Any) -> tuple[dict[str, StoredTensor], str]:
    """Return the state dict in `content` and the keys that lead to it."""
    where: list[str] = []
    while isinstance(content, dict):
        if tensors := find_tensors(path, content):
            return tensors, ".".join(where)
        inner = [key for key in OUTER_KEYS if isinstance(content.get(key), dict)]
        if len(inner) > 1:
            # Settings may be kept under such a key as well.
            inner = [key for key in inner if _holds_tensors(content[key])]
        if len(inner) != 1 or len(where) >= MAX_OUTER_KEYS:
            break
        where.append(inner[0])
        content = content[inner[0]]
    raise CheckpointError(
        f"{path} holds no state dict",
        expected="tensors by name, alone or under " + ", ".join(OUTER_KEYS),
        got=_describe(content),
        remedy="save model.state_dict()",
    )


def find_tensors(path: Path, state: Mapping[Any, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of `state` by name if it is a state dict; empty if it holds other things or none.

    What modules keep beside their tensors (`torch.nn.Module.get_extra_state`) is left out.

    Raises:
        CheckpointError: It is one with tensors that are not read, or with two of one name.
    """
    found = {name: value for name, value in state.items() if is_tensor(value)}
    if any(name not in found and not _is_extra(name) for name in state):
        return {}
    refuse_foreign_tensors(path, found)
    tensors = {str(name): value for name, value in found.items()}
    if len(tensors) != len(found):
        raise CheckpointError(
            f"{path} holds two tensors of one name",
            expected="names that differ as text",
            got=list_some({str(name) for name in found if not isinstance(name, str)}),
            remedy="name all of them by text",
        )
    return tensors


def _holds_tensors(state: Mapping[Any, Any]) -> bool:
    """Tell whether there are tensors in `state`, or where a state dict would be looked for in it."""
    # By identity, since a pickle may put one large dict under every key of every level.
    level = {id(state): state}
    for _ in range(MAX_OUTER_KEYS + 1):
        if any(is_tensor(value) for found in level.values() for value in found.values()):
            return True
        inner = [found.get(key) for found in level.values() for key in OUTER_KEYS]
        level = {id(value): value for value in inner if isinstance(value, dict)}
    return False


def _is_extra(name: Any) -> bool:
    return isinstance(name, str) and name.endswith("_extra_state")


def _describe(content: Any) -> str:
    if isinstance(content, Record):
        return f"a whole object of {content.type_name}"
    if isinstance(content, dict):
        return f"the keys {list_some(content)}"
    return type(content).__name__


def _read_facts(content: Any) -> CheckpointFacts:
    if not isinstance(content, dict):
        return CheckpointFacts()
    version, step = content.get("pytorch-lightning_version"), content.get("global_step")
    facts = CheckpointFacts(step=step if type(step) is int else None)
    return replace(facts, trainer=f"Lightning {version}") if isinstance(version, str) else facts
