"""From a checkpoint to a module of the user's own, whose names may share tensors that were trained apart."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..checkpoints import StateDict
from ..checkpoints.remedies import GATHER_PIPELINE
from ..errors import ModelError, list_some


def load_weights(module: nn.Module, weights: StateDict, unshared: frozenset[str] | None) -> None:
    """Give a module the values of a checkpoint: all that it wants, and all that there are.

    Args:
        module: The user's own.
        weights: Tensors under the names of its state dict; of one under several names, one is enough.
        unshared: Names whose values another name of the same tensor may not have; None where nothing tells.

    Raises:
        ModelError: They do not fit, or what is one tensor of the module has several values.
    """
    wanted, specs = module.state_dict(), weights.specs()
    groups = _group_shared(wanted)
    held = [[name for name in group if name in specs] for group in groups]
    missing = sorted(name for group, names in zip(groups, held, strict=True) if not names for name in group)
    unexpected = sorted(set(specs) - set(wanted))
    shapes = [
        f"{name} {list(specs[name].shape)} where {list(wanted[name].shape)} belongs"
        for name in sorted(set(wanted) & set(specs))
        if specs[name].shape != tuple(wanted[name].shape)
    ]
    if missing or unexpected or shapes:
        got = [f"none for {list_some(missing)}"] if missing else []
        got += [f"{list_some(unexpected)} beyond them"] if unexpected else []
        raise ModelError(
            "the weights do not fit the module",
            expected="every parameter and buffer of its state dict, in its shape",
            got="; ".join([*got, *shapes[:10]]),
            remedy="pass the checkpoint that this module was trained to",
        )
    guessed = sorted(
        name
        for group, names in zip(groups, held, strict=True)
        for name in {*group} - {*names}
        if unshared is None or not unshared.isdisjoint(names)
    )
    if guessed:
        expected = "a weight that DeepSpeed keeps the same at all places of a layer"
        if unshared is None:
            expected = "names of all that was trained, as DeepSpeed saves them with ZeRO"
        raise ModelError(
            f"nothing tells whether {list_some(guessed)} of the module was trained as the tensor that it shares",
            expected=f"a file of the layer, or {expected}",
            got="neither",
            remedy="where that place uses nothing of the layer but the weights that its TiedLayerSpec ties (`weight`, "
            "unless tied_weight_attr says otherwise), have the module's forward use that tensor "
            f"(x @ self[0].weight.t()) without another name for it; else {GATHER_PIPELINE}",
        )
    values: dict[str, Tensor] = {}
    for group, names in zip(groups, held, strict=True):
        values |= dict.fromkeys(group, _read_shared(weights, names))
    module.load_state_dict(values)
    _check_overlaps(module, values)


def _group_shared(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of a state dict, in groups of those that are one tensor."""
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        # A module may keep what is no tensor under a name of its own.
        is_placed = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.data_ptr()
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if is_placed else name
        groups.setdefault(place, []).append(name)
    return [*groups.values()]


def _check_overlaps(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Refuse a module of which one tensor is a part of another, or it transposed, where their values do not agree.

    Raises:
        ModelError: What was loaded last has changed what was loaded before.
    """
    held = {name: tensor for name, tensor in module.state_dict().items() if isinstance(tensor, Tensor)}
    names: dict[int, list[str]] = {}
    for name, tensor in held.items():
        if tensor.layout == torch.strided and tensor.data_ptr():
            names.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    for shared in names.values():
        if len(shared) > 1 and not all(torch.equal(held[name], values[name].to(held[name].dtype)) for name in shared):
            raise _refuse_apart(shared)


def _read_shared(weights: StateDict, names: Sequence[str]) -> Tensor:
    """Return the value of a tensor that a checkpoint holds under one name or several.

    A pipeline keeps a tied layer once, where a module may have it at each of its places. What one weight was trained as
    may lie beside copies of it in training precision.

    Raises:
        ModelError: They have several values: DeepSpeed ties the weights alone of a layer at several places of its
            pipeline, and each place trains what else it has, as a bias, for itself.
    """
    values = [weights.read(name) for name in names]
    if len(values) == 1:
        return values[0]
    for value in values:
        rounded = (value.bfloat16(), value.half()) if value.is_floating_point() else ()
        if all(any(torch.equal(other, copy.to(other.dtype)) for copy in (value, *rounded)) for other in values):
            return value
    raise _refuse_apart(names)


def _refuse_apart(names: Sequence[str]) -> ModelError:
    return ModelError(
        "the module shares tensors that were trained apart",
        expected=f"the same values under {list_some(names)}, which are one tensor of the module",
        got="several",
        remedy="have the factory build a layer of its own for each of these places; where only its weight was trained "
        "as one, share that alone",
    )
