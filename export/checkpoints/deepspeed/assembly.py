"""The whole model out of its trained, frozen, shared and buffered parts, each name from the most exact place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...errors import CheckpointError, list_some
from ..plain.gathered_copy import match_gathered
from ..remedies import RECOPY
from ..storage.stored_tensor import StoredTensor
from ..stored_checkpoint import CheckpointFacts, StoredCheckpoint, find_tied
from .files import DeepSpeedFiles
from .partitions import join_sliced_group
from .states import ModelStates

# Never an attribute of anybody's own model: Fabric's and older Lightning's wrappers name the model within them so.
_LIGHTNING_PREFIX = "_forward_module."
# What a LightningModule calls the model within it as a rule; without Lightning it may be the model's own.
_INNER_MODEL = "model."


def assemble(
    files: DeepSpeedFiles,
    models: Sequence[ModelStates],
    trained: Mapping[str, StoredTensor],
    *,
    experts: Mapping[str, StoredTensor],
    format_name: str,
    facts: CheckpointFacts,
    unproven: tuple[str, ...] = (),
) -> StoredCheckpoint:
    """Return the checkpoint with every name that the module has.

    Args:
        files: Where it lies.
        models: The model states, by rank.
        trained: Name → fp32 tensor of what the optimizer trained.
        experts: Name → tensor of the experts in training precision.
        format_name: The on-disk format in words.
        facts: What the files say about themselves; what is missing is added.
        unproven: What is missing as well, unless a gathered copy lies beside the files.

    Raises:
        CheckpointError: A name has no data anywhere.
    """
    model = models[0]
    _check_buffers(model)
    frozen = _join_frozen(files, models)
    whole_module = {name: tensor for name, tensor in model.module.items() if not _is_placeholder(name, model, files)}
    # From the least exact place to the most.
    found = {**whole_module, **experts, **frozen, **trained}
    tied = _tie(model, trained, found)
    lost = _find_lost(model, found, tied)
    # In the order of the model, which `module` has kept.
    names = dict.fromkeys(name for name in (*model.module, *found, *tied) if name not in lost)
    tensors = {name: found[tied.get(name, name)] for name in names}
    # What is not trained may share weights as well: at stage 0, or frozen.
    tied |= find_tied({name: tensor for name, tensor in tensors.items() if name not in tied})
    masters = trained.keys() | {name for name, holder in tied.items() if holder in trained}
    second = {name: tensor for name, tensor in whole_module.items() if name in masters | frozen.keys()}
    second |= {name: tensor for name, tensor in experts.items() if name in trained}
    plain = _strip_prefixes(tensors, model)
    gathered, unmatched = match_gathered(files.directory, plain)
    # A file of placeholders, or of other names, proves nothing.
    unproven = () if gathered.keys() & set(plain.values()) else unproven
    facts = replace(facts, missing=(*facts.missing, *unproven, *unmatched))
    untrained = {
        plain[name]: tensor
        for name, tensor in tensors.items()
        if name not in masters and tied.get(name, name) not in model.buffer_names
    }
    return StoredCheckpoint(
        directory=files.directory,
        format_name=format_name,
        tensors={plain[name]: tensor for name, tensor in tensors.items()},
        tied={plain[name]: plain[holder] for name, holder in tied.items()},
        copies=tuple(copies for copies in ({plain[name]: second[name] for name in second}, gathered) if copies),
        buffer_names=frozenset(plain[name] for name in model.buffer_names),
        zero_size=frozenset(plain[name] for name, tensor in tensors.items() if tensor.numel == 0),
        facts=_with_missing(facts, untrained, excludes_frozen=model.excludes_frozen),
        archives=(*files.models.values(), *files.optimizers.values(), *files.experts.values()),
    )


def _strip_prefixes(tensors: Mapping[str, StoredTensor], model: ModelStates) -> dict[str, str]:
    """Return each name → the name without what Lightning's strategy puts in front of all."""
    plain = {name: name for name in tensors}
    for prefix in (_LIGHTNING_PREFIX, *([_INNER_MODEL] if model.lightning else [])):
        if all(name.startswith(prefix) for name in plain.values()):
            plain = {old: name[len(prefix) :] for old, name in plain.items()}
    return plain


def _check_buffers(model: ModelStates) -> None:
    lost = model.buffer_names - model.module.keys()
    if lost:
        raise CheckpointError(
            f"{model.path} lacks the buffers {list_some(lost)}",
            expected=f"{len(model.buffer_names)} recorded buffers in its module",
            got=str(len(model.buffer_names - lost)),
            remedy=RECOPY,
        )


def _is_placeholder(name: str, model: ModelStates, files: DeepSpeedFiles) -> bool:
    """Tell what stage 3 leaves in place of a parameter, 1-D and empty, from a tensor of the module."""
    return files.partitioned and name not in model.buffer_names and model.module[name].shape == (0,)


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
                remedy=RECOPY,
            )
        if files.partitioned:
            frozen |= join_sliced_group({name: shape}, found, source=source)
        else:
            frozen[name] = found[0].reshape(shape)
    return frozen


def _tie(model: ModelStates, trained: Mapping[str, StoredTensor], found: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return each shared name → the name that holds its bytes.

    Shared are the names that DeepSpeed recorded, unless the optimizer trained them apart (0.9.0 and 0.9.1 recorded too
    many: deepspeedai/DeepSpeed#3407) or they begin in the same place with other elements; and those that are one tensor
    with a trained one in the module's own file. Of a module under two names of one parent DeepSpeed records nothing:
    there the placeholders are one.
    """
    holders = {tensor: name for name, tensor in model.module.items() if name in trained and tensor.numel}
    tied = {name: holders[tensor] for name, tensor in model.module.items() if tensor in holders and name not in trained}
    for name in model.shared:
        holder = _holder(model, name)
        if name not in trained and holder in found and not _are_apart(found.get(name), model.module.get(holder)):
            tied[name] = holder
    return tied | _tie_placeholders(
        model, [name for name in model.module if name not in found and name not in tied], found
    )


def _tie_placeholders(model: ModelStates, names: Sequence[str], found: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return each of `names` whose placeholder is also that of one name with data → that name."""
    holders: dict[StoredTensor, list[str]] = {}
    for name in found.keys() & model.module.keys():
        holders.setdefault(model.module[name], []).append(name)
    alike = {name: holders.get(model.module[name], []) for name in names if model.module[name].ranges}
    # If ever one placeholder stood for all, it would tell nothing.
    return {name: found_there[0] for name, found_there in alike.items() if len(found_there) == 1}


def _are_apart(tensor: StoredTensor | None, holder: StoredTensor | None) -> bool:
    """Tell whether two whole tensors of a module differ in their elements: views of one storage, or empty ones."""
    if tensor is None or holder is None:
        return False
    return tensor.numel == 0 or tensor.layout != holder.layout


def _find_lost(model: ModelStates, found: Mapping[str, StoredTensor], tied: Mapping[str, str]) -> set[str]:
    """Return the names of the module that share a frozen parameter which was left out on purpose.

    Raises:
        CheckpointError: Another name of the module has neither data nor a holder.
    """
    nowhere = {name for name in model.module if name not in found and name not in tied}
    excluded = {name for name in nowhere if model.excludes_frozen and _holder(model, name) not in model.module}
    if nowhere - excluded:
        raise CheckpointError(
            f"{model.path.parent} lacks the weights of {list_some(nowhere - excluded)}",
            expected="fp32 pieces, frozen parameters or shared ones under these names",
            got="only placeholders of size 0",
            remedy="at stage 3 DeepSpeed saves what the optimizer trains, what was frozen from the start and, from"
            " 0.9.1 on in the file of rank 0, which names are shared; save again with these names among them",
        )
    return excluded


def _holder(model: ModelStates, name: str) -> str:
    """Follow shared names to the one that is not shared."""
    for _ in model.shared:
        name = model.shared.get(name, name)
    return name


def _with_missing(
    facts: CheckpointFacts, untrained: Mapping[str, StoredTensor], *, excludes_frozen: bool
) -> CheckpointFacts:
    missing = list(facts.missing)
    weights = {name: tensor.dtype for name, tensor in untrained.items() if tensor.numel}
    low = {name: dtype.name for name, dtype in weights.items() if dtype.is_floating_point and dtype.itemsize < 4}
    if low:
        missing.append(f"fp32 weights of {list_some(low)}: saved as {list_some(set(low.values()))} only")
    if excludes_frozen:
        missing.append("the frozen parameters: left out when it was saved, by exclude_frozen_parameters")
    return replace(facts, missing=tuple(missing))
