"""The fp32 weights that DeepSpeed's fp16 optimizers keep at stage 0: by parameter group, and without names.

Formats: DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py (`fp32_groups`, a list of tensors for each group) and
fused_optimizer.py (`fp32_groups_flat`, one flat tensor for each). Within a group the parameters stand as in the model.

Which group a parameter is in is not recorded, so names are given only where the shapes leave one possibility. The fp16
weights in `module` are the masters' second copy: names that were given wrongly would be refused there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from export.checkpoints.deepspeed_states import ModelStates
from export.checkpoints.dtypes import FLOAT16, FLOAT32
from export.checkpoints.stored_checkpoint import find_tied
from export.checkpoints.stored_tensor import StoredTensor

_Parameters = Mapping[str, StoredTensor]


def name_masters(model: ModelStates) -> dict[str, StoredTensor]:
    """Return name → fp32 tensor of every fp16 parameter; empty where the file does not tell which is which."""
    if any(tensor.dtype != FLOAT32 for group in model.masters for tensor in group):
        return {}
    # A tied parameter is in the optimizer once.
    tied = find_tied(model.module)
    parameters = {
        name: tensor for name, tensor in model.module.items() if name not in tied and name not in model.buffer_names
    }
    if any(tensor.dtype != FLOAT16 for tensor in parameters.values()):
        return {}
    return _name_flat(parameters, model.masters) if model.flat_masters else _name_shaped(parameters, model.masters)


def _name_shaped(parameters: _Parameters, groups: Sequence[Sequence[StoredTensor]]) -> dict[str, StoredTensor]:
    waiting = [deque(group) for group in groups]
    named = {}
    for name, parameter in parameters.items():
        fitting = [group for group in waiting if group and group[0].shape == parameter.shape]
        if len(fitting) != 1:
            return {}
        named[name] = fitting[0].popleft()
    return {} if any(waiting) else named


def _name_flat(parameters: _Parameters, groups: Sequence[Sequence[StoredTensor]]) -> dict[str, StoredTensor]:
    # All parameters in one group; or matrices, which decay, in one, and biases and norms in the other.
    members = [list(parameters)]
    if len(groups) == 2:
        members = [[name for name in parameters if (len(parameters[name].shape) > 1) == wide] for wide in (True, False)]
    if [sum(parameters[name].numel for name in names) for names in members] != [flat.numel for (flat,) in groups]:
        return {}
    named = {}
    for names, (flat,) in zip(members, groups, strict=True):
        position = 0
        for name in names:
            shape, stop = parameters[name].shape, position + parameters[name].numel
            named[name] = StoredTensor(dtype=FLOAT32, shape=shape, ranges=flat.cut(position, stop))
            position = stop
    return named
