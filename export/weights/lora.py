"""Low-rank adapters, merged into the weights they were trained beside."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..checkpoints import StateDict, TensorSpec
from ..checkpoints.adapter_names import ADAPTER_FILE, CHAT_SIDES, PEFT_FACTOR, PEFT_PREFIX
from ..checkpoints.pickles.torch_zip import open_torch_zip
from ..checkpoints.storage.paths import has_file, refuse_lfs_pointer
from ..checkpoints.storage.stored_tensor import StoredTensor
from ..errors import AdapterError, list_some
from .lora_settings import DEFAULT_ALPHA, DEFAULT_RANK, match_pattern, read_adapter_settings

_TABLE = ".base_layer.weight"


@dataclass(frozen=True, kw_only=True)
class LowRankUpdate:
    """What is added to one weight: `scaling * left @ right`, as the weight is stored.

    Attributes:
        left: [rows, rank], fp32.
        right: [rank, columns], fp32.
        scaling: Factor.
        is_transposed: Whether the product is of the transposed weight, such as that of a Conv1D.
    """

    left: Tensor
    right: Tensor
    scaling: float
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight."""
        rows, columns = self.left.shape[0], self.right.shape[1]
        return (columns, rows) if self.is_transposed else (rows, columns)

    def apply(self, weight: Tensor) -> Tensor:
        """Return `weight` with the update, computed in peft's order, so that it is equal to the bit."""
        product = self.left @ self.right
        return weight + (product.T if self.is_transposed else product) * self.scaling


@dataclass(frozen=True, kw_only=True)
class MergeUpdates:
    """Weights with updates added, and other tensors replaced or added; every other tensor as it is.

    Attributes:
        source: The state dict to change, in fp32.
        updates: Tensor name → what is added, in this order.
        replaced: Tensor name → the tensor that stands there instead, or is added.
    """

    source: StateDict
    updates: Mapping[str, tuple[LowRankUpdate, ...]]
    replaced: Mapping[str, Tensor]

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `StateDict`."""
        return {**self.source.specs(), **_describe(self.replaced)}

    def read(self, name: str) -> Tensor:
        """See `StateDict`."""
        weight = self.replaced[name] if name in self.replaced else self.source.read(name)
        for update in self.updates.get(name, ()):
            weight = update.apply(weight)
        return weight


def _describe(tensors: Mapping[str, Tensor]) -> Mapping[str, TensorSpec]:
    return {name: TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in tensors.items()}


@dataclass(frozen=True, kw_only=True)
class Rename:
    """The same tensors under other names; what has none is left out.

    Attributes:
        source: The state dict to change.
        names: New name → name in `source`.
    """

    source: StateDict
    names: Mapping[str, str]

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `StateDict`."""
        specs = self.source.specs()
        return {new: specs[old] for new, old in self.names.items()}

    def read(self, name: str) -> Tensor:
        """See `StateDict`."""
        return self.source.read(self.names[name])


def merge_adapters(
    weights: StateDict, directory: Path, adapters: Iterable[Path], chat_scaling: float | None
) -> StateDict:
    """Return `weights` with every adapter merged: those inside the checkpoint, then those in folders of their own.

    Args:
        weights: The checkpoint's tensors, in fp32.
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
        weights = _merge_inside(weights, directory)
    for folder in adapters:
        weights = _merge_peft(weights, folder, _read_tensors(folder))
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
        _check_not_empty("the checkpoint", {path + right_end: right, path + left_end: left})
        updates[f"{path}.weight"] = (LowRankUpdate(left=left.T, right=right.T, scaling=scaling / right.shape[1]),)
    kept = {name: name for name in specs if not name.endswith(CHAT_SIDES)}
    _check_shapes("the checkpoint", updates, specs)
    return MergeUpdates(source=Rename(source=weights, names=kept), updates=updates, replaced={})


def _merge_inside(weights: StateDict, directory: Path) -> StateDict:
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
    return _merge_peft(Rename(source=weights, names=base), directory, tensors)


def _merge_peft(weights: StateDict, folder: Path, tensors: Mapping[str, Tensor]) -> StateDict:
    settings = read_adapter_settings(folder)
    factors: dict[str, dict[str, Tensor]] = {}
    # Tables that peft saves beside their factors, for they may have more rows than those of the checkpoint.
    tables: dict[str, Tensor] = {}
    replaced: dict[str, Tensor] = {}
    names: set[str] = set()
    for name, tensor in tensors.items():
        local = name.removeprefix(PEFT_PREFIX)
        match = PEFT_FACTOR.fullmatch(local)
        if local.endswith(_TABLE):
            tables[local.removesuffix(_TABLE)] = tensor
            continue
        if match is None:
            replaced[local.replace(".base_layer.", ".")] = tensor
            continue
        names.add(match["name"] or "")
        side = ("embedding " if match["kind"] else "") + match["side"]
        factors.setdefault(match["path"], {})[side] = tensor
    if len(names) > 1:
        raise AdapterError(
            f"{folder} holds several adapters at once", expected="one in each folder", got=list_some(names)
        )
    _check_not_empty(str(folder), tensors)
    if not factors and not replaced:
        raise AdapterError(f"{folder} is an empty adapter", expected="pairs of factors", got="no tensor")
    weights = _align_names(weights, factors)
    named = {_find(f"{path}.weight", weights.specs(), folder): tensor.float() for path, tensor in tables.items()}
    specs = {**weights.specs(), **_describe(named)}
    updates: dict[str, tuple[LowRankUpdate, ...]] = {}
    for path, sides in factors.items():
        updates[_find(f"{path}.weight", specs, folder)] = (_build_update(path, sides, settings, folder),)
    if updates and all(not update.left.any() for (update,) in updates.values()):
        raise AdapterError(
            f"{folder} is an empty adapter",
            expected="factors that change the weights",
            got="nothing but zeros in every lora_B",
            remedy="check that it was saved after training",
        )
    _check_shapes(str(folder), updates, specs)
    allowed = set(settings.get("modules_to_save") or ())
    for local, tensor in replaced.items():
        is_saved = _is_saved_module(local, allowed)
        is_bias = settings.get("bias", "none") != "none" and local.endswith(".bias")
        if not is_saved and not is_bias:
            raise AdapterError(
                f"{local} in {folder} is of a kind that is not merged",
                expected="factors lora_A and lora_B, or one of modules_to_save",
                got=f"modules_to_save {list_some(allowed) or 'of none'}",
                remedy="merge it with peft and export the result",
            )
        named[local] = tensor.float()
    return MergeUpdates(source=weights, updates=updates, replaced=named)


def _is_saved_module(name: str, saved: Collection[str]) -> bool:
    """Tell whether a tensor is of a module that `modules_to_save` names.

    peft compares the ends of modules' paths, so `classifier` means `pre_classifier` as well
    (`peft.utils.other._set_trainable`).
    """
    parts = name.split(".")
    modules = (".".join(parts[:length]) for length in range(1, len(parts)))
    return any(module.endswith(tuple(saved)) for module in modules)


def _read_pickled(path: Path) -> dict[str, Tensor]:
    content = open_torch_zip(path).content
    if not isinstance(content, dict) or not all(isinstance(value, StoredTensor) for value in content.values()):
        raise AdapterError(
            f"{path} is not a state dict", expected="a dict of tensors", got="other values", remedy="save it with peft"
        )
    return {name: tensor.to_torch() for name, tensor in content.items()}


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    safe, pickled = folder / "adapter_model.safetensors", folder / "adapter_model.bin"
    try:
        if has_file(safe):
            refuse_lfs_pointer(safe)
            return dict(load_file(safe))
        if has_file(pickled):
            return _read_pickled(pickled)
    except (SafetensorError, OSError) as exc:
        reason = str(exc).split("\n", 1)[0].rstrip(".")
        raise AdapterError(f"the weights in {folder} cannot be read", got=reason, remedy="copy them again") from exc
    if (folder / ADAPTER_FILE).is_file():
        raise AdapterError(
            f"{folder} holds no weights", expected=f"{safe.name} or {pickled.name}", got="neither", remedy="copy them"
        )
    return {}


def _check_not_empty(where: str, tensors: Mapping[str, Tensor]) -> None:
    empty = [name for name, tensor in tensors.items() if not tensor.numel()]
    if empty:
        raise AdapterError(
            f"{where} holds an empty adapter",
            expected="factors with values",
            got=f"size 0 for {list_some(empty)}",
            remedy="it was saved under ZeRO-3 without gathering: export the ZeRO checkpoint itself",
        )


def _align_names(weights: StateDict, factors: Iterable[str]) -> StateDict:
    """Return `weights` named as in the model that the adapter was trained in, which may have a head around them."""
    specs = weights.specs()
    for path in factors:
        target = f"{path}.weight"
        if target in specs:
            return weights
        shorter = [name for name in specs if target.endswith(f".{name}")]
        if len(shorter) == 1:
            prefix = target.removesuffix(shorter[0])
            return Rename(source=weights, names={prefix + name: name for name in specs})
    return weights


def _find(target: str, specs: Mapping[str, TensorSpec], folder: Path) -> str:
    found = [name for name in specs if name == target or name.endswith(f".{target}")]
    if len(found) != 1:
        raise AdapterError(
            f"the adapter in {folder} changes a weight that the checkpoint does not have",
            expected=f"one tensor named {target}",
            got=list_some(found) or f"none among {list_some(specs, 5)}",
            remedy="pass the checkpoint that it was trained on, or merge it with peft and export the result",
        )
    return found[0]


def _build_update(path: str, sides: Mapping[str, Tensor], settings: Mapping[str, Any], folder: Path) -> LowRankUpdate:
    is_embedding = "embedding A" in sides or "embedding B" in sides
    wanted = ("embedding A", "embedding B") if is_embedding else ("A", "B")
    if set(sides) != set(wanted):
        raise AdapterError(
            f"the update of {path} in {folder} is not whole", expected="lora_A and lora_B", got=list_some(sides)
        )
    right, left = (sides[side].to(torch.float32) for side in wanted)
    if right.dim() != 2 or left.dim() != 2 or left.shape[1] != right.shape[0]:
        raise AdapterError(
            f"the update of {path} in {folder} is not of a linear layer or an embedding",
            expected="matrices [rank, in] and [out, rank]",
            got=f"{list(right.shape)} and {list(left.shape)}",
            remedy="merge it with peft and export the result",
        )
    rank = right.shape[0]
    told = match_pattern(settings.get("rank_pattern"), path, settings.get("r", DEFAULT_RANK))
    if rank != told:
        raise AdapterError(
            f"the update of {path} in {folder} has another rank than {ADAPTER_FILE} says",
            expected=str(told),
            got=str(rank),
            remedy="copy the file that was saved with the adapter",
        )
    alpha = float(match_pattern(settings.get("alpha_pattern"), path, settings.get("lora_alpha", DEFAULT_ALPHA)))
    scaling = alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank
    is_transposed = is_embedding or bool(settings.get("fan_in_fan_out"))
    return LowRankUpdate(left=left, right=right, scaling=scaling, is_transposed=is_transposed)


def _check_shapes(
    where: str, updates: Mapping[str, tuple[LowRankUpdate, ...]], specs: Mapping[str, TensorSpec]
) -> None:
    wrong = [
        f"{name} {list(update.shape)} where {list(specs[name].shape)} belongs"
        for name, several in updates.items()
        for update in several
        if specs[name].shape != update.shape
    ]
    if wrong:
        raise AdapterError(
            f"the adapter in {where} does not fit the checkpoint",
            expected="updates of the weights' shapes",
            got=list_some(wrong, 3),
            remedy="pass the checkpoint that it was trained on, or merge it with peft and export the result",
        )
