"""The fp32 weights that DeepSpeed's 16-bit optimizers keep at stage 0: by parameter group, and without names.

Formats: DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py (`fp32_groups`, a list of tensors for each group) and
fused_optimizer.py (`fp32_groups_flat`, one flat tensor for each), for fp16 and bf16 alike.

Which parameters a group holds, and in which order, is up to the code that made the optimizer, and not recorded. But a
16-bit weight is its master rounded, so the first elements of both show which belong together. Where 16-bit weights
begin alike, as norms do that have hardly moved from 1, the order of the model counts, if what else the group holds is
in that order.
Every name is proven when the weights are read: all of a master is then compared with its 16-bit weight.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import prod

from ...errors import CheckpointError, list_some
from ..storage.cast import cast_bytes, count_non_finite
from ..storage.dtypes import BFLOAT16, FLOAT16, FLOAT32, ElementType
from ..storage.stored_tensor import StoredTensor
from ..stored_checkpoint import find_tied
from .states import ModelStates

# Elements that are read of each tensor: those that chance initialised differ within the first few.
_HEAD = 64
# Masters of a group that must be known by their contents before its order is taken for the model's.
_WITNESSES = 2
_UNNAMED = "names of the optimizer's fp32 weights: its parameter groups leave several possibilities"
_UNREAD_EXPERTS = "fp32 weights of the experts: without ZeRO they are not read from expp_rank_*_optim_states.pt"

# A tensor's shape, and its first elements in 16 bit.
_Key = tuple[tuple[int, ...], bytes]
_Groups = Sequence[Sequence[tuple[_Key, StoredTensor]]]


def name_masters(model: ModelStates) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Name the fp32 weights that lie beside the 16-bit ones; reads the first elements of each.

    Returns:
        Name → fp32 tensor of every trained parameter, none of them where the file does not tell which is which; and
        what is missing, in words.

    Raises:
        CheckpointError: An fp32 tensor is of no parameter at all.
    """
    masters = [master for group in model.masters for master in group if master.numel]
    if not masters:
        return {}, ()
    # A tied parameter is in the optimizer once, and one without elements is not.
    parameters = {name: tensor for name, tensor in model.module.items() if name not in model.buffer_names}
    tied = find_tied(parameters)
    parameters = {name: tensor for name, tensor in parameters.items() if tensor.numel and name not in tied}
    # fp32 as well: buffers under a second name, which are in no list.
    parameters = {name: tensor for name, tensor in parameters.items() if tensor.dtype in (FLOAT32, FLOAT16, BFLOAT16)}
    dtypes = {tensor.dtype for tensor in parameters.values()} - {FLOAT32}
    if len(dtypes) != 1 or any(master.dtype != FLOAT32 for master in masters):
        return {}, (_UNNAMED,)
    (dtype,) = dtypes
    keys = {name: _read_key(tensor, dtype) for name, tensor in parameters.items()}
    named = _name_flat(keys, masters, dtype) if model.flat_masters else _name_shaped(model, keys, dtype)
    experts = (_UNREAD_EXPERTS,) if model.num_experts else ()
    return named, experts if named else (_UNNAMED, *experts)


def _name_shaped(model: ModelStates, keys: Mapping[str, _Key], dtype: ElementType) -> dict[str, StoredTensor]:
    known = set(keys.values())
    groups = [[(_read_key(master, dtype), master) for master in group if master.numel] for group in model.masters]
    strange = [master for group in groups for key, master in group if key not in known]
    # The experts of one rank are among the masters, and are not among the parameters.
    if strange and not model.num_experts:
        raise CheckpointError(
            f"the optimizer in {model.path} holds fp32 weights of none of its parameters",
            expected=f"each of them in {dtype.name} as well",
            got=f"others of the shapes {list_some(list(master.shape) for master in strange)}",
            remedy="the weights were changed after the last step, or are of another model; save again",
        )
    groups = [[(key, master) for key, master in group if key in known] for group in groups]
    return _match_contents(keys, groups) or _match_order(keys, groups)


def _match_contents(keys: Mapping[str, _Key], groups: _Groups) -> dict[str, StoredTensor]:
    """Name every master by its contents, whatever the order; nothing where two of them or two parameters are alike."""
    masters = {key: master for group in groups for key, master in group}
    named = {name: masters[key] for name, key in keys.items() if key in masters}
    return named if len(named) == len(masters) == sum(map(len, groups)) else {}


def _match_order(keys: Mapping[str, _Key], groups: _Groups) -> dict[str, StoredTensor]:
    """Name the masters in the order of the model; nothing where they are in another, or too many are alike."""
    waiting = [deque(group) for group in groups]
    named: dict[str, StoredTensor] = {}
    members: list[list[str]] = [[] for _ in groups]
    for name, key in keys.items():
        fitting = [index for index, group in enumerate(waiting) if group and group[0][0] == key]
        if len(fitting) > 1:
            return {}
        # Without any: a frozen parameter.
        for index in fitting:
            named[name] = waiting[index].popleft()[1]
            members[index].append(name)
    return {} if any(waiting) or not _is_certain(keys, members) else named


def _name_flat(
    keys: Mapping[str, _Key], masters: Sequence[StoredTensor], dtype: ElementType
) -> dict[str, StoredTensor]:
    # All parameters in one group; or matrices, which decay, in one, and biases and norms in the other.
    members = [list(keys)]
    if len(masters) == 2:
        members = [[name for name, (shape, _) in keys.items() if (len(shape) > 1) == wide] for wide in (True, False)]
    numels = [sum(prod(keys[name][0]) for name in names) for names in members]
    if numels != [flat.numel for flat in masters] or not _is_certain(keys, members):
        return {}
    named: dict[str, StoredTensor] = {}
    for names, flat in zip(members, masters, strict=True):
        position = 0
        for name in names:
            shape = keys[name][0]
            stop = position + prod(shape)
            named[name] = flat.take(position, shape)
            position = stop
    return named if all(_read_key(master, dtype) == keys[name] for name, master in named.items()) else {}


def _is_certain(keys: Mapping[str, _Key], members: Sequence[Sequence[str]]) -> bool:
    """Tell whether parameters that begin alike are told apart by their order, which the others show to be the model's.

    Args:
        keys: Those of all parameters.
        members: The names of each group, in its order.
    """
    counts = Counter(keys.values())
    named = Counter(keys[name] for names in members for name in names)
    alike = {key for key in named if counts[key] > 1}
    # A frozen parameter may be one of them.
    if any(named[key] != counts[key] for key in alike):
        return False
    witnesses = [sum(keys[name] not in alike for name in names) for names in members]
    doubtful = [any(keys[name] in alike for name in names) for names in members]
    return all(number >= _WITNESSES for number, doubt in zip(witnesses, doubtful, strict=True) if doubt)


def _read_key(tensor: StoredTensor, dtype: ElementType) -> _Key:
    count = min(_HEAD, tensor.numel)
    head = b""
    for chunk in tensor.chunks(count * tensor.dtype.itemsize):
        head += chunk
        if len(head) >= count * tensor.dtype.itemsize:
            break
    rounded = cast_bytes(head[: count * tensor.dtype.itemsize], tensor.dtype, dtype)
    # There are many NaN.
    return tensor.shape, b"" if count_non_finite(rounded, dtype) else rounded
