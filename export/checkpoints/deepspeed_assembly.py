"""The whole model out of its trained, frozen, shared and buffered parts, each name from the most exact place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from export.checkpoints import huggingface
from export.checkpoints.deepspeed_files import DeepSpeedFiles
from export.checkpoints.deepspeed_partitions import join_sliced_group
from export.checkpoints.deepspeed_states import ModelStates
from export.checkpoints.stored_checkpoint import CheckpointFacts, StoredCheckpoint, find_tied
from export.checkpoints.stored_tensor import StoredTensor
from export.errors import CheckpointError, list_some


def assemble(
    files: DeepSpeedFiles,
    models: Sequence[ModelStates],
    trained: Mapping[str, StoredTensor],
    *,
    experts: Mapping[str, StoredTensor],
    format_name: str,
    facts: CheckpointFacts,
) -> StoredCheckpoint:
    """Return the checkpoint with every name that the module has.

    Args:
        files: Where it lies.
        models: The model states, by rank.
        trained: Name → fp32 tensor of what the optimizer trained.
        experts: Name → tensor of the experts in training precision.
        format_name: The on-disk format in words.
        facts: What the files say about themselves; what is missing is added.

    Raises:
        CheckpointError: A name has no data anywhere.
    """
    model = models[0]
    frozen = _join_frozen(files, models)
    tensors: dict[str, StoredTensor] = {}
    open_names: list[str] = []
    for name in dict.fromkeys([*model.module, *frozen, *trained, *experts]):
        own = model.module.get(name)
        if name in trained:
            tensors[name] = trained[name]
        elif name in frozen:
            tensors[name] = frozen[name]
        elif name in experts:
            tensors[name] = experts[name]
        elif own is not None and (name in model.buffer_names or _is_whole(own)):
            tensors[name] = own
        else:
            open_names.append(name)
    tied = _tie(model, trained, tensors, open_names)
    # In the order of the model, which `module` has kept.
    names = dict.fromkeys([*model.module, *frozen, *trained, *experts, *tied])
    whole = {name: tensors[name] for name in names if name in tensors}
    # What is not trained may share weights as well: at stage 0, or frozen.
    tied |= find_tied({name: tensor for name, tensor in whole.items() if name not in tied})
    masters = set(trained) | {name for name, holder in tied.items() if holder in trained}
    copies = {name: tensor for name, tensor in model.module.items() if name in masters and _is_whole(tensor)}
    copies |= {name: tensor for name, tensor in experts.items() if name in trained}
    gathered = huggingface.read_gathered(files.directory)
    untrained = [name for name in whole if name not in masters and name not in model.buffer_names]
    return StoredCheckpoint(
        directory=files.directory,
        format_name=format_name,
        tensors=whole,
        tied=tied,
        copies=tuple(copy for copy in (copies, gathered) if copy),
        buffer_names=model.buffer_names & whole.keys(),
        zero_size=frozenset(name for name, tensor in whole.items() if tensor.numel == 0),
        facts=_with_missing(facts, whole, untrained),
    )


def _is_whole(tensor: StoredTensor) -> bool:
    """Tell a tensor from the placeholder that stage 3 leaves, which is 1-D and empty."""
    return tensor.shape != (0,)


def _join_frozen(files: DeepSpeedFiles, models: Sequence[ModelStates]) -> dict[str, StoredTensor]:
    """Return the frozen parameters that DeepSpeed keeps apart from the module, in training precision."""
    source = f"the frozen parameters of {files.folder}"
    frozen: dict[str, StoredTensor] = {}
    for name, shape in (models[0].frozen_shapes or {}).items():
        found = [model.frozen[name] for model in models if name in model.frozen]
        if len(found) != len(models):
            raise CheckpointError(
                f"{name} is not whole among {source}",
                expected=f"a part in each of {len(models)} files",
                got=str(len(found)),
                remedy="copy the checkpoint again",
            )
        if files.partitioned:
            frozen |= join_sliced_group({name: shape}, found, source=source)
        else:
            frozen[name] = found[0].reshape(shape)
    return frozen


def _tie(
    model: ModelStates, trained: Mapping[str, StoredTensor], tensors: dict[str, StoredTensor], open_names: list[str]
) -> dict[str, str]:
    """Add every shared name to `tensors`, with the bytes of its holder, and return name → holder.

    Shared are the names that DeepSpeed recorded, unless the optimizer trained them apart (0.9.0 and 0.9.1 recorded too
    many: deepspeedai/DeepSpeed#3407), and those that are one tensor in the module's own file.

    Raises:
        CheckpointError: A name has no holder, so no data anywhere.
    """
    tied = {
        name: holder
        for name, holder in model.shared.items()
        if name not in trained and _holder(model, holder) in tensors
    }
    tied = {name: _holder(model, holder) for name, holder in tied.items()}
    holders = {tensor: name for name, tensor in model.module.items() if name in trained and tensor.numel}
    for name, tensor in model.module.items():
        holder = holders.get(tensor)
        if holder is not None and name not in trained and name not in tied:
            tied[name] = holder
    lost = [name for name in open_names if name not in tied]
    if lost:
        raise CheckpointError(
            f"{model.path.parent} lacks the weights of {list_some(lost)}",
            expected="fp32 pieces, frozen parameters or shared ones under these names",
            got="only placeholders of size 0",
            remedy="saved before DeepSpeed 0.9.1, or without the file of rank 0; save again with a newer DeepSpeed",
        )
    tensors.update({name: tensors[holder] for name, holder in tied.items()})
    return tied


def _holder(model: ModelStates, name: str) -> str:
    """Follow shared names to the one that is not shared."""
    for _ in model.shared:
        name = model.shared.get(name, name)
    return name


def _with_missing(
    facts: CheckpointFacts, whole: Mapping[str, StoredTensor], untrained: Sequence[str]
) -> CheckpointFacts:
    low = [name for name in untrained if whole[name].dtype.is_floating_point and whole[name].dtype.itemsize < 4]
    if not low:
        return facts
    dtypes = list_some({whole[name].dtype.name for name in low})
    return replace(facts, missing=(*facts.missing, f"fp32 weights of {list_some(low)}: saved as {dtypes} only"))
