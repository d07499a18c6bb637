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

# Never an attribute of anybody's own model: Fabric's and older Lightning's wrappers and torch.compile's
# `OptimizedModule` name the model within them so.
_LIGHTNING_PREFIX = "_forward_module."
# What a LightningModule calls the model within it as a rule; without Lightning it may be the model's own.
_INNER_MODEL = "model."
_COMPILED_PART = "_orig_mod."


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
    _check_buffers(model)
    frozen = _join_frozen(files, models)
    # From the most exact place to the least. At stage 3 the module holds placeholders, and buffers.
    whole_module = {
        name: tensor for name, tensor in model.module.items() if name in model.buffer_names or _is_whole(tensor)
    }
    found = {**whole_module, **experts, **frozen, **trained}
    tied = _tie(model, trained, found)
    # In the order of the model, which `module` has kept.
    names = dict.fromkeys([*model.module, *found, *tied])
    tensors = {name: found[tied.get(name, name)] for name in names}
    # What is not trained may share weights as well: at stage 0, or frozen.
    tied |= find_tied({name: tensor for name, tensor in tensors.items() if name not in tied})
    masters = trained.keys() | {name for name, holder in tied.items() if holder in trained}
    second = {name: tensor for name, tensor in whole_module.items() if name in masters | frozen.keys()}
    second |= {name: tensor for name, tensor in experts.items() if name in trained}
    gathered = huggingface.read_gathered(files.directory)
    untrained = [name for name in tensors if name not in masters and name not in model.buffer_names]
    plain = _unwrap_names(tensors, model)
    return StoredCheckpoint(
        directory=files.directory,
        format_name=format_name,
        tensors={plain[name]: tensor for name, tensor in tensors.items()},
        tied={plain[name]: plain[holder] for name, holder in tied.items()},
        copies=tuple(copies for copies in ({plain[name]: second[name] for name in second}, gathered) if copies),
        buffer_names=frozenset(plain[name] for name in model.buffer_names),
        zero_size=frozenset(plain[name] for name, tensor in tensors.items() if tensor.numel == 0),
        facts=_with_missing(facts, tensors, untrained),
        archives=(*files.models.values(), *files.optimizers.values(), *files.experts.values()),
    )


def _unwrap_names(tensors: Mapping[str, StoredTensor], model: ModelStates) -> dict[str, str]:
    """Return each name → the name without what Lightning's strategy and torch.compile put into it.

    Raises:
        CheckpointError: Two names become one.
    """
    plain = {name: name.replace(_COMPILED_PART, "") for name in tensors}
    for prefix in (_LIGHTNING_PREFIX, *([_INNER_MODEL] if model.lightning else [])):
        if all(name.startswith(prefix) for name in plain.values()):
            plain = {old: name[len(prefix) :] for old, name in plain.items()}
    if len(set(plain.values())) != len(plain):
        raise CheckpointError(
            f"names in {model.path} fall together without {_COMPILED_PART}",
            expected="one weight under each name",
            got=f"{len(set(plain.values()))} names for {len(plain)} tensors",
            remedy="save the model without torch.compile's wrapper",
        )
    return plain


def _check_buffers(model: ModelStates) -> None:
    lost = model.buffer_names - model.module.keys()
    if lost:
        raise CheckpointError(
            f"{model.path} lacks the buffers {list_some(lost)}",
            expected=f"{len(model.buffer_names)} recorded buffers in its module",
            got=str(len(model.buffer_names - lost)),
            remedy="copy the checkpoint again",
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


def _tie(model: ModelStates, trained: Mapping[str, StoredTensor], found: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return each shared name → the name that holds its bytes.

    Shared are the names that DeepSpeed recorded, unless the optimizer trained them apart (0.9.0 and 0.9.1 recorded too
    many: deepspeedai/DeepSpeed#3407), and those that are one tensor with a trained one in the module's own file.

    Raises:
        CheckpointError: A name of the module has neither data nor a holder.
    """
    holders = {tensor: name for name, tensor in model.module.items() if name in trained and tensor.numel}
    tied = {name: holders[tensor] for name, tensor in model.module.items() if tensor in holders and name not in trained}
    for name in model.shared:
        holder = _holder(model, name)
        if name not in trained and holder in found:
            tied[name] = holder
    lost = [name for name in model.module if name not in found and name not in tied]
    if lost:
        raise CheckpointError(
            f"{model.path.parent} lacks the weights of {list_some(lost)}",
            expected="fp32 pieces, frozen parameters or shared ones under these names",
            got="only placeholders of size 0",
            remedy="saved before DeepSpeed 0.9.1, or without the file of rank 0; save again with a newer DeepSpeed",
        )
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
