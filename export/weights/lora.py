"""Low-rank adapters, merged into the weights they were trained beside."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from transformers import PretrainedConfig

from ..checkpoints import StateDict, TensorSpec
from ..checkpoints.adapter_names import CHAT_SIDES, PEFT_FACTOR, PEFT_PREFIX
from ..errors import AdapterError, list_some
from .lora_settings import read_adapter_settings
from .peft_adapter import PeftAdapter, check_not_empty, read_adapter, read_tensors
from .tied_tables import check_rows, find_parted, read_apart, read_untied
from .trained_model import TrainedModel, describe_model, find_ends
from .transforms import LowRankUpdate, MergeUpdates, Rename, describe_tensors


def merge_adapters(
    weights: StateDict,
    config: PretrainedConfig,
    directory: Path,
    adapters: Iterable[Path],
    chat_scaling: float | None,
) -> StateDict:
    """Return `weights` with every adapter merged: those inside the checkpoint, then those in folders of their own.

    Args:
        weights: The checkpoint's tensors, in fp32.
        config: The checkpoint's configuration, which no longer ties the embeddings if an adapter changes one alone.
        directory: The checkpoint's folder, where the settings of an adapter inside it lie.
        adapters: Folders as peft saves them, merged one after another as its `merge_and_unload` does.
        chat_scaling: DeepSpeed-Chat's `lora_scaling`, which it does not save.

    Raises:
        AdapterError: An adapter is empty, of a kind that is not merged, or does not fit the weights.
    """
    specs = weights.specs()
    if any(name.endswith(CHAT_SIDES) for name in specs):
        weights = _merge_chat_lora(weights, chat_scaling)
    elif chat_scaling is not None:
        raise AdapterError(
            "--lora-scaling has nothing to scale",
            expected="tensors that end in lora_right_weight",
            got="none",
            remedy="leave it out",
        )
    if any(name.startswith(PEFT_PREFIX) for name in specs):
        weights = _merge_inside(weights, config, directory)
    for folder in adapters:
        weights = _merge_peft(weights, config, folder, read_tensors(folder))
    return weights


def _merge_chat_lora(weights: StateDict, scaling: float | None) -> StateDict:
    """Merge DeepSpeed-Chat's factors: `W + lora_scaling / rank * left.T @ right.T`."""
    specs = weights.specs()
    right_end, left_end = CHAT_SIDES
    paths = sorted({name.removesuffix(end) for name in specs for end in CHAT_SIDES if name.endswith(end)})
    if scaling is None:
        raise AdapterError(
            f"the checkpoint holds {len(paths)} low-rank updates of DeepSpeed-Chat, whose scaling it does not record",
            expected="the lora_scaling that it was trained with",
            got="none",
            remedy="pass --lora-scaling; DeepSpeed-Chat's own default is 1",
        )
    updates = {}
    for path in paths:
        needed = [path + end for end in (*CHAT_SIDES, ".weight")]
        missing = [name for name in needed if name not in specs]
        if missing:
            raise AdapterError(
                f"a low-rank update of {path} is not whole", expected=list_some(needed), got=f"no {list_some(missing)}"
            )
        right, left = weights.read(path + right_end), weights.read(path + left_end)
        check_not_empty("the checkpoint", {path + right_end: right, path + left_end: left})
        updates[f"{path}.weight"] = LowRankUpdate(left=left.T, right=right.T, scaling=scaling / right.shape[1])
    kept = {name: name for name in specs if not name.endswith(CHAT_SIDES)}
    _check_shapes("the checkpoint", updates, specs)
    return MergeUpdates(source=Rename(source=weights, names=kept), updates=updates, replaced={})


def _merge_inside(weights: StateDict, config: PretrainedConfig, directory: Path) -> StateDict:
    """Merge the adapter of a checkpoint that was saved with peft's wrappers around the model, such as ZeRO's files."""
    base, adapter = {}, {}
    for name in weights.specs():
        local = name.removeprefix(PEFT_PREFIX)
        if PEFT_FACTOR.fullmatch(local):
            adapter[PEFT_PREFIX + local] = name
        elif ".modules_to_save." in local:
            path, rest = local.split(".modules_to_save.", 1)
            adapter[f"{PEFT_PREFIX}{path}.{rest.split('.', 1)[1]}"] = name
        else:
            base[local.replace(".base_layer.", ".").replace(".original_module.", ".")] = name
    if not adapter:
        return Rename(source=weights, names=base)
    tensors = {local: weights.read(name) for local, name in adapter.items()}
    return _merge_peft(Rename(source=weights, names=base), config, directory, tensors)


def _merge_peft(weights: StateDict, config: PretrainedConfig, folder: Path, tensors: Mapping[str, Tensor]) -> StateDict:
    settings = read_adapter_settings(folder)
    trained_for = settings.get("task_type")
    model = describe_model(config, trained_for)
    adapter = read_adapter(folder, settings, tensors, model)
    weights = _add_prefix(weights, adapter.updates)
    if _is_named_otherwise(weights, adapter, model):
        weights, adapter = _name_as_built(weights, adapter, model)
    pairs = find_parted(adapter, model)
    apart = read_apart(weights, adapter, pairs)
    if pairs:
        config.tie_word_embeddings = False
        apart |= read_untied(weights, adapter, model, describe_model(config, trained_for))
    specs = {**weights.specs(), **describe_tensors(apart)}
    tables = {
        _find(name, specs, folder): table
        for name, table in adapter.tables.items()
        # The same table under another name of the model's is that of the checkpoint.
        if find_ends(name, specs) or not any(find_ends(each, specs) for each in model.find_shared(name))
    }
    whole = {
        _find(name, specs, folder) if find_ends(name, specs) else name: tensor
        for name, tensor in adapter.replaced.items()
    }
    _check_new(folder, model, weights.specs(), whole.keys() - specs.keys())
    replaced = {**apart, **tables, **whole}
    specs = {**specs, **describe_tensors(replaced)}
    updates = {_find(name, specs, folder): update for name, update in adapter.updates.items()}
    _check_shapes(str(folder), updates, specs)
    check_rows(folder, model, weights.specs(), specs)
    return MergeUpdates(source=weights, updates=updates, replaced=replaced)


def _add_prefix(weights: StateDict, changed: Iterable[str]) -> StateDict:
    """Return `weights` named as in the model that the adapter was trained in, which may have a head around them."""
    specs = weights.specs()
    for target in changed:
        if target in specs:
            return weights
        shorter = [name for name in specs if target.endswith(f".{name}")]
        if len(shorter) == 1:
            prefix = target.removesuffix(shorter[0])
            return Rename(source=weights, names={prefix + name: name for name in specs})
    return weights


def _is_named_otherwise(weights: StateDict, adapter: PeftAdapter, model: TrainedModel) -> bool:
    """Tell whether the adapter changes what the checkpoint has, as far as it is seen, under other names alone."""
    specs = weights.specs()
    if not all(find_ends(name, specs) for name in adapter.updates):
        return True
    unknown = [name for name in (*adapter.tables, *adapter.replaced) if not find_ends(name, specs)]
    return bool(unknown) and not set(model.rename(specs).values()).isdisjoint(model.rename(unknown).values())


def _check_new(folder: Path, model: TrainedModel, specs: Mapping[str, TensorSpec], new: Collection[str]) -> None:
    """Refuse a tensor of the adapter's that would be left out for what the checkpoint has in its place.

    Raises:
        AdapterError: There is one.
    """
    held = set(model.find_places(specs).values()) if new else set()
    lost = [name for name, place in model.find_places(new).items() if place in held]
    if lost:
        raise AdapterError(
            f"{list_some(lost)} in {folder} cannot be put in its place",
            expected="a tensor that the checkpoint has as one, by that name",
            got="one that transformers makes of others as it loads them",
            remedy="merge it with peft and export the result",
        )


def _name_as_built(weights: StateDict, adapter: PeftAdapter, model: TrainedModel) -> tuple[StateDict, PeftAdapter]:
    """Return both with the names of the model that is built here: either may be of another release of transformers."""
    stored = model.rename(weights.specs())
    if len(set(stored.values())) == len(stored):
        weights = Rename(source=weights, names={new: name for name, new in stored.items()})
    own = model.rename([*adapter.updates, *adapter.tables, *adapter.replaced])
    return weights, replace(
        adapter,
        updates={own[name]: update for name, update in adapter.updates.items()},
        tables={own[name]: table for name, table in adapter.tables.items()},
        replaced={own[name]: tensor for name, tensor in adapter.replaced.items()},
    )


def _find(target: str, specs: Mapping[str, TensorSpec], folder: Path) -> str:
    found = find_ends(target, specs)
    if len(found) != 1:
        raise AdapterError(
            f"the adapter in {folder} changes a weight that the checkpoint does not have",
            expected=f"one tensor named {target}",
            got=list_some(found) or f"none among {list_some(specs, 5)}",
            remedy="pass the checkpoint that it was trained on, or merge it with peft and export the result",
        )
    return found[0]


def _check_shapes(where: str, updates: Mapping[str, LowRankUpdate], specs: Mapping[str, TensorSpec]) -> None:
    wrong = [
        f"{name} {list(update.shape)} where {list(specs[name].shape)} belongs"
        for name, update in updates.items()
        if specs[name].shape != update.shape
    ]
    if wrong:
        raise AdapterError(
            f"the adapter in {where} does not fit the checkpoint",
            expected="updates of the weights' shapes",
            got=list_some(wrong, 3),
            remedy="pass the checkpoint that it was trained on, or merge it with peft and export the result",
        )
