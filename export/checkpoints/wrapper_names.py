"""What wrappers of a model put into its names, and the names without it, alike in every kind of checkpoint.

Only what a wrapper itself is called is taken off. `model.` is not: it is a name of the user's own where a trainer saves
the module that it was given (FSDP, Accelerate), and transformers leaves a tied `lm_head` out of what it saves, so that
every name of a Llama has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ..errors import CheckpointError, list_some

# DDP and DataParallel, Lightning Fabric, and `_INNER`: taken off where every name begins so.
_OUTER = ("module", "_forward_module")
# torch.compile, FSDP1 and checkpoint_wrapper, each of which may wrap any block, so taken off wherever they stand: no
# module of a user's has such a name (torch 2.13, torch/distributed/fsdp/_common_utils.py, `clean_tensor_name`).
_INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """Return a parameter's name without those of wrappers within the model."""
    *parts, last = name.split(".")
    return ".".join([*(part for part in parts if part not in _INNER), last])


def plain_names(names: Iterable[str], source: Path) -> dict[str, str]:
    """Return each name → `plain_name` of it.

    Raises:
        CheckpointError: Two names would become one.
    """
    plain = {name: plain_name(name) for name in names}
    _refuse_equal(plain, source)
    return plain


def strip_wrappers(names: Collection[str], source: Path) -> tuple[dict[str, str], str]:
    """Return each name → the name without wrappers, and what was taken off, in words.

    Args:
        names: Every name of the state dict.
        source: The checkpoint, for messages.

    Returns:
        The words begin with ", without "; they are empty where nothing was taken off.

    Raises:
        CheckpointError: Two names would become one.
    """
    keys = {name: name.split(".") for name in names}
    prefix: list[str] = []
    while (key := _find_common(keys.values(), len(prefix))) in (*_OUTER, *_INNER):
        prefix.append(f"{key}.")
    keys = {name: parts[len(prefix) :] for name, parts in keys.items()}
    inside = sorted({part for parts in keys.values() for part in parts[:-1] if part in _INNER})
    stripped = {name: plain_name(".".join(parts)) for name, parts in keys.items()}
    _refuse_equal(stripped, source)
    removed = [f"prefix {''.join(prefix)}"] if prefix else []
    removed += [f"{part}. inside names" for part in inside]
    return stripped, ", without " + " and ".join(removed) if removed else ""


def find_holder(wanted: Collection[str], names: Collection[str], *, may_lack: int = 0) -> str:
    """Return what stands in front of the names that are wanted, as a LightningModule's `net.`; empty for nothing.

    Args:
        wanted: The names, of which the first in their order must be there.
        names: Those that are there.
        may_lack: How many of the wanted ones need not be there.
    """
    if not wanted:
        return ""
    first, there = min(wanted), set(names)
    fronts = sorted({name.removesuffix(first) for name in there if name.endswith(f".{first}")})
    lacking = {front: sum(f"{front}{name}" not in there for name in wanted) for front in fronts}
    return next((front for front, count in lacking.items() if count <= may_lack), "")


def name_holder(front: str) -> str:
    """Return what to do about a model whose names all begin so."""
    return f"save the model that the trained module holds, as by torch.save(module.{front}state_dict(), 'model.pt')"


def _find_common(keys: Iterable[list[str]], index: int) -> str | None:
    """Return the key that every name has at `index`, if it is the last of none."""
    found = {parts[index] if len(parts) > index + 1 else None for parts in keys}
    return found.pop() if len(found) == 1 else None


def _refuse_equal(stripped: Mapping[str, str], source: Path) -> None:
    seen: dict[str, str] = {}
    double = [name for name, new in stripped.items() if seen.setdefault(new, name) != name]
    if double:
        raise CheckpointError(
            f"names in {source} become one without their wrappers' names",
            expected="one tensor under each name",
            got=list_some([*double, *(seen[stripped[name]] for name in double)]),
            remedy="save the model without torch.compile's wrapper",
        )
