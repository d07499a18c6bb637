"""An adapter as peft saves it: factors, tables beside them, and modules that were trained whole."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..checkpoints.adapter_names import ADAPTER_FILE, PEFT_FACTOR, PEFT_PREFIX
from ..checkpoints.pickles.torch_zip import open_torch_zip
from ..checkpoints.storage.paths import has_file, refuse_lfs_pointer
from ..checkpoints.storage.stored_tensor import StoredTensor
from ..errors import AdapterError, list_some
from .lora_settings import DEFAULT_ALPHA, DEFAULT_RANK, match_pattern
from .trained_model import TrainedModel
from .transforms import LowRankUpdate

_TABLE = ".base_layer.weight"
# What save_embedding_layers=True saves of a table that was trained whole: as it was, and as it is.
_WRAPPED = re.compile(r"(?P<path>.+)\.(?P<kind>modules_to_save|original_module)(?:\.[^.]+)?\.weight")


@dataclass(frozen=True, kw_only=True)
class PeftAdapter:
    """What an adapter changes, by the names that the model had in training.

    Attributes:
        folder: Where it was saved.
        updates: Weight → what is added to it.
        tables: Weight → what it is before that, where it may have more rows than that of the checkpoint.
        replaced: Tensor → what stands there instead.
        ties: Whether peft was told to train tables as one that the model shares.
    """

    folder: Path
    updates: Mapping[str, LowRankUpdate]
    tables: Mapping[str, Tensor]
    replaced: Mapping[str, Tensor]
    ties: bool


def read_adapter(
    folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], model: TrainedModel
) -> PeftAdapter:
    """Return what the tensors of an adapter say.

    Args:
        folder: Where it was saved, for errors.
        settings: Its `adapter_config.json`.
        tensors: By the names that peft saves them under.
        model: What it was trained in.

    Raises:
        AdapterError: It is empty, or of a kind that is not merged.
    """
    saved, ties = set(settings.get("modules_to_save") or ()), bool(settings.get("ensure_weight_tying"))

    def is_saved(name: str) -> bool:
        # With a table that is named, peft saves those that it ties to it.
        names = (name, *model.find_shared(name)) if ties else (name,)
        return any(_is_saved_module(each, saved) for each in names)

    factors: dict[str, dict[str, Tensor]] = {}
    tables: dict[str, Tensor] = {}
    replaced: dict[str, Tensor] = {}
    names: set[str] = set()
    for name, tensor in tensors.items():
        local = name.removeprefix(PEFT_PREFIX)
        if match := PEFT_FACTOR.fullmatch(local):
            names.add(match["name"] or "")
            side = ("embedding " if match["kind"] else "") + match["side"]
            factors.setdefault(match["path"], {})[side] = tensor
        elif (wrapped := _WRAPPED.fullmatch(local)) and model.is_table(f"{wrapped['path']}.weight"):
            kept = replaced if wrapped["kind"] == "modules_to_save" else tables
            kept[f"{wrapped['path']}.weight"] = tensor.float()
        elif local.endswith(_TABLE) or (model.is_table(local) and not is_saved(local)):
            tables[f"{local.removesuffix(_TABLE).removesuffix('.weight')}.weight"] = tensor.float()
        else:
            replaced[local.replace(".base_layer.", ".")] = tensor.float()
    if len(names) > 1:
        raise AdapterError(
            f"{folder} holds several adapters at once", expected="one in each folder", got=list_some(names)
        )
    check_not_empty(str(folder), tensors)
    if not factors and not replaced:
        raise AdapterError(f"{folder} is an empty adapter", expected="pairs of factors", got="no tensor")
    updates = {f"{path}.weight": _build_update(path, sides, settings, folder, model) for path, sides in factors.items()}
    if updates and all(not update.left.any() for update in updates.values()):
        raise AdapterError(
            f"{folder} is an empty adapter",
            expected="factors that change the weights",
            got="nothing but zeros in every lora_B",
            remedy="check that it was saved after training",
        )
    has_biases = settings.get("bias", "none") != "none"
    others = [name for name in replaced if not is_saved(name) and not (has_biases and name.endswith(".bias"))]
    if others:
        raise AdapterError(
            f"{list_some(others)} in {folder} is of a kind that is not merged",
            expected="factors lora_A and lora_B, or one of modules_to_save",
            got=f"modules_to_save {list_some(saved) or 'of none'}",
            remedy="merge it with peft and export the result",
        )
    return PeftAdapter(folder=folder, updates=updates, tables=tables, replaced=replaced, ties=ties)


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


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter's folder as peft names them, none where it is no folder of an adapter.

    Raises:
        AdapterError: They are missing or damaged.
    """
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


def check_not_empty(where: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse factors without values.

    Raises:
        AdapterError: There are some.
    """
    empty = [name for name, tensor in tensors.items() if not tensor.numel()]
    if empty:
        raise AdapterError(
            f"{where} holds an empty adapter",
            expected="factors with values",
            got=f"size 0 for {list_some(empty)}",
            remedy="it was saved under ZeRO-3 without gathering: export the ZeRO checkpoint itself",
        )


def _build_update(
    path: str, sides: Mapping[str, Tensor], settings: Mapping[str, Any], folder: Path, model: TrainedModel
) -> LowRankUpdate:
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
    # Not by fan_in_fan_out: peft sets it for each layer by its kind, and saves what it set last.
    is_transposed = is_embedding or model.is_transposed(path)
    return LowRankUpdate(left=left, right=right, scaling=scaling, is_transposed=is_transposed)
