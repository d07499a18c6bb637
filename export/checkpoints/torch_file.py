"""One file by `torch.save` with a model in it: `.pth`, `.pt`, `.ckpt` of plain loops, DDP, Lightning, torch.compile.

The state dict may lie under keys that name it, and wrappers of the model may have put their own name before every key.
Both are the trainer's storage, so both are undone, when they are certain: a prefix only when every key has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from export.checkpoints.paths import check_inside
from export.checkpoints.stored_checkpoint import CheckpointFacts, StoredCheckpoint, find_tied
from export.checkpoints.stored_tensor import StoredTensor
from export.checkpoints.torch_zip import Record, open_torch_zip, refuse_foreign_tensors
from export.errors import CheckpointError, list_some

SUFFIXES = (".pth", ".pt", ".ckpt")
LOOKED_FOR = "one *.pth, *.pt or *.ckpt"

# What trainers save beside the weights, under names of these suffixes (transformers, Accelerate, torchtune).
_OTHER_STATE = (
    "optimizer",
    "scheduler",
    "rng_state",
    "random_states",
    "scaler",
    "training_args",
    "sampler",
    "dl_state",
)

# Keys under which trainers keep the model: Lightning and most recipes, DeiT and MAE, DDP recipes, older ones.
_OUTER_KEYS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights")

# What wrappers put before every name: DDP and DataParallel, Lightning Fabric, torch.compile, Lightning modules.
PREFIXES = ("module.", "_forward_module.", "_orig_mod.")
_INNER_MODEL = "model."


def recognises(directory: Path) -> bool:
    """Tell whether `directory` holds a file of one of the suffixes that may be a model."""
    return bool(_candidates(directory))


def open_folder(directory: Path, tag: str | None = None) -> StoredCheckpoint:
    """Return a reader for the only such file in `directory`, or for the one named `tag`.

    Raises:
        CheckpointError: There are several, or the file holds no model.
    """
    found = [path for path in _candidates(directory) if tag is None or path.name == tag]
    if len(found) != 1:
        raise CheckpointError(
            f"{directory} holds several files that may be the model" if found else f"{directory} holds no {tag}",
            expected="one of them to be chosen",
            got=list_some(path.name for path in _candidates(directory)),
            remedy="pass the file itself, or --tag with its name",
        )
    return open_file(found[0])


def open_file(path: Path) -> StoredCheckpoint:
    """Return a reader for one file by `torch.save`, reading no tensor data.

    Raises:
        CheckpointError: The file is damaged, or holds no model or more than one.
    """
    check_inside(path, path.parent)
    content = open_torch_zip(path).content
    state, where = _find_state_dict(path, content)
    stripped, prefix = strip_prefixes(path, state)
    described = f"torch file {path.name}" + (f", under {where}" if where else "")
    return StoredCheckpoint(
        directory=path.parent,
        format_name=described + (f", without prefix {prefix}" if prefix else ""),
        tensors=stripped,
        tied=find_tied(stripped),
        # The placeholders of ZeRO stage 3 are of shape [0].
        zero_size=frozenset(name for name, tensor in stripped.items() if 0 in tensor.shape and tensor.shape != (0,)),
        facts=_read_facts(content),
        archives=(path,),
    )


def strip_prefixes(path: Path, state: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], str]:
    """Return `state` without what wrappers put before its names, and what that was.

    `model.`, from a module that holds the model, is taken off once and last: what is left may be the model's own, as
    in Llama's `model.layers`. Llama itself is not mistaken, since its `lm_head` has no such prefix.
    """
    names = {name: name for name in state}
    removed = ""
    while not removed.endswith(_INNER_MODEL):
        prefix = next((prefix for prefix in (*PREFIXES, _INNER_MODEL) if all(n.startswith(prefix) for n in names)), "")
        if not prefix:
            break
        names = {name[len(prefix) :]: old for name, old in names.items()}
        removed += prefix
    # torch.compile of a part puts its name in the middle: `encoder._orig_mod.weight`.
    inner = {name.replace("_orig_mod.", ""): old for name, old in names.items()}
    if len(inner) != len(state):
        raise CheckpointError(
            f"names in {path} fall together without _orig_mod.",
            expected="one weight under each name",
            got=f"{len(inner)} names for {len(state)} tensors",
            remedy="save the model without torch.compile's wrapper",
        )
    return {name: state[old] for name, old in inner.items()}, removed


def _candidates(directory: Path) -> list[Path]:
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file() and path.suffix in SUFFIXES and not path.name.startswith(_OTHER_STATE)
    ]


def _find_state_dict(path: Path, content: Any) -> tuple[dict[str, StoredTensor], str]:
    """Return the state dict in `content` and the keys that lead to it."""
    where: list[str] = []
    while isinstance(content, dict):
        refuse_foreign_tensors(path, content)
        tensors = {str(name): value for name, value in content.items() if isinstance(value, StoredTensor)}
        if tensors and all(isinstance(value, StoredTensor) or _is_extra(name) for name, value in content.items()):
            return tensors, ".".join(where)
        inner = [key for key in _OUTER_KEYS if isinstance(content.get(key), dict)]
        if len(inner) != 1 or len(where) >= 3:
            break
        where.append(inner[0])
        content = content[inner[0]]
    raise CheckpointError(
        f"{path} holds no state dict",
        expected="tensors by name, alone or under " + ", ".join(_OUTER_KEYS),
        got=_describe(content),
        remedy="save model.state_dict()",
    )


def _is_extra(name: Any) -> bool:
    # What a module keeps beside its tensors (torch.nn.Module.get_extra_state).
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
