"""Which part of a saved application state is the model: its sub-tree in the nested dict.

Applications save `{"app": {"model": ..., "optim": ...}, "step": ...}`, Accelerate `{"model": ...}`, others the bare
state dict of the model. The path of each tensor tells which; where two parts could be the model, neither is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ...errors import CheckpointError, list_some
from .dcp_metadata import DcpTensor

# The keys under which applications keep the model, and its optimizer.
_MODEL_KEYS = frozenset(
    {"model", "module", "model_state_dict", "model_state", "models", "net", "network", "state_dict"}
)
_OPTIMIZER_KEYS = frozenset(
    {"optim", "optimizer", "optimizers", "optims", "opt", "optim_state", "optimizer_state", "optimizer_state_dict"}
)
# What torch's optimizers call their tensors; no module calls a parameter so.
_MOMENT_NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "exp_inf", "acc_delta")

SubTree = tuple[str, ...]


def select_model(tensors: Mapping[str, DcpTensor], source: Path, sub_tree: str | None = None) -> dict[str, DcpTensor]:
    """Return the model's tensors under their names in the model.

    Args:
        tensors: Everything that was saved, optimizers included.
        source: The checkpoint, for messages.
        sub_tree: The keys that lead to the model, joined by dots, where the user has said so; "" for the root.

    Raises:
        CheckpointError: Nothing can be the model, or more than one part can.
    """
    groups: dict[SubTree, dict[str, DcpTensor]] = {}
    for tensor in tensors.values():
        if sub_tree is None and _is_optimizer(tensor.path):
            continue
        prefix = _find_prefix(tensor.path) if sub_tree is None else _match(tensor.path, sub_tree)
        if prefix is not None:
            groups.setdefault(prefix, {})[".".join(tensor.path[len(prefix) :])] = tensor
    if not groups:
        raise CheckpointError(
            f"{source} holds no model",
            expected="parameters of a model" if sub_tree is None else f"tensors under {sub_tree}",
            got=f"an optimizer's state, such as {min(tensors)}" if tensors and sub_tree is None else _list(tensors),
            remedy="pass the folder that the model was saved in",
        )
    weighty = {prefix: group for prefix, group in groups.items() if any(map(_is_weight, group.values()))}
    return groups[_choose(weighty or groups, source)]


def _list(tensors: Mapping[str, DcpTensor]) -> str:
    return list_some(tensors, 5) if tensors else "no tensors"


def _match(path: SubTree, sub_tree: str) -> SubTree | None:
    keys = tuple(sub_tree.split(".")) if sub_tree else ()
    return keys if len(path) > len(keys) and path[: len(keys)] == keys else None


def _find_prefix(path: SubTree) -> SubTree:
    """Return the keys up to one that names a model; else all but the last, which is the tensor's own name."""
    for index, key in enumerate(path[:-1]):
        if key in _MODEL_KEYS:
            return path[: index + 1]
    return path[:-1]


def _is_optimizer(path: SubTree) -> bool:
    return any(key in _OPTIMIZER_KEYS for key in path[:-1]) or path[-1].rpartition(".")[2] in _MOMENT_NAMES


def _is_weight(tensor: DcpTensor) -> bool:
    """Tell a weight from counters and states of random generators, which have no float or only one."""
    return tensor.dtype is not None and tensor.dtype.is_floating_point and tensor.shape not in ((), (1,))


def _choose(groups: Mapping[SubTree, Mapping[str, DcpTensor]], source: Path) -> SubTree:
    named = [prefix for prefix in groups if prefix and prefix[-1] in _MODEL_KEYS]
    # A second set of the same names is an average of the weights (EMA) or a teacher: only the user knows which one.
    twins = [prefix for prefix in groups if named and prefix not in named and _alike(groups[prefix], groups[named[0]])]
    candidates: Iterable[SubTree] = [*named, *twins] or list(groups)
    if len(list(candidates)) == 1:
        return next(iter(candidates))
    raise CheckpointError(
        f"{source} holds several parts that may be the model",
        expected="one of them to be chosen",
        got=list_some(".".join(prefix) or "the root" for prefix in candidates),
        remedy="pass --tag with the part to read",
    )


def _alike(one: Mapping[str, DcpTensor], other: Mapping[str, DcpTensor]) -> bool:
    return len(one.keys() & other.keys()) * 2 > len(other)
