"""The two kinds of files that DeepSpeed saves, with the keys that matter: model states and optimizer states.

Keys: DeepSpeed 0.19.8, checkpoint/constants.py. Everything else in the files (schedulers, the user's own state) is
parsed, because it lies in the same pickle, and dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...errors import CheckpointError, list_some
from ..pickles.torch_zip import Record, open_torch_zip, refuse_foreign_tensors
from ..storage.stored_tensor import ContiguousTensor, StoredTensor
from ..wrapper_names import plain_name, plain_names

# Beside the files of a tag: a folder for each rank with what DeepSpeed had swapped out to NVMe.
OFFLOADED = "offloaded_tensors"

_SCALARS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """One `*_model_states.pt`. Names are the model's own, without those of wrappers within it.

    Attributes:
        module: Name → tensor in training precision; placeholders of size 0 at stage 3.
        buffer_names: Names in `module` that are buffers.
        groups: Name → shape per parameter group (per sub-group at stage 3) in flat order; None without ZeRO.
        frozen_shapes: Name → shape of frozen parameters; None where DeepSpeed kept none apart.
        frozen: Name → tensor, whole at stages 1 and 2, this rank's 1-D slice at stage 3.
        shared: Name → the name whose weights it shares.
        masters: The fp32 tensors that a 16-bit optimizer without ZeRO keeps of each parameter group; empty without.
        flat_masters: Whether these are one flat tensor for each group.
        config: The `ds_config` of the run.
        lightning: The version of Lightning, where its strategy saved the file.
    """

    path: Path
    module: Mapping[str, StoredTensor]
    buffer_names: frozenset[str]
    groups: list[dict[str, tuple[int, ...]]] | None
    frozen_shapes: Mapping[str, tuple[int, ...]] | None
    frozen: Mapping[str, StoredTensor]
    shared: Mapping[str, str]
    masters: tuple[tuple[StoredTensor, ...], ...]
    flat_masters: bool
    config: Mapping[str, Any]
    version: str | None
    lightning: str | None
    step: int | None
    skipped_steps: int
    dp_world_size: int | None
    mp_world_size: int | None
    # Experts per MoE layer; empty without.
    num_experts: tuple[int, ...]
    # Whether the file has `frozen_param_shapes`, as None.
    nulls_frozen: bool

    @property
    def is_offloaded(self) -> bool:
        """Whether the run's configuration keeps the optimizer's states on NVMe."""
        zero = self.config.get("zero_optimization")
        offload = zero.get("offload_optimizer") if isinstance(zero, dict) else None
        return isinstance(offload, dict) and offload.get("device") == "nvme"

    @property
    def stage(self) -> int | None:
        """The ZeRO stage that the run's configuration asked for."""
        zero = self.config.get("zero_optimization")
        return _count(zero.get("stage", 0)) if isinstance(zero, dict) else None

    @property
    def excludes_frozen(self) -> bool:
        """Whether frozen parameters were left out by `exclude_frozen_parameters`, as far as the file tells.

        At stages 2 and 3 there is a dict of their shapes else, if an empty one; at stage 1 there never is
        (DeepSpeed 0.19.8, engine.py, `_save_checkpoint`).
        """
        return self.nulls_frozen and self.stage in (2, 3)


@dataclass(frozen=True, kw_only=True)
class OptimizerStates:
    """One `*_optim_states.pt`.

    Attributes:
        sliced: Whether the pieces are those of stage 3.
        pieces: This rank's flat piece of each group, or sub-group at stage 3.
        partition_counts: Over how many ranks each group is split; one number for all at stage 3.
        group_paddings: Elements of padding at the end of this rank's pieces, per group; None where not saved.
        alignment_paddings: Per group, the elements of alignment after each parameter.
        fragments: Per group, name → (start in the piece, elements), as saved; None where not saved.
        second_moments: Adam's `exp_avg_sq` per group; None where there is none.
        steps: Every count of optimizer steps in the file.
        counter_sharers: How many parameter groups count their steps in one and the same tensor; 1 as a rule.
        checksums: CRC-32 of every storage, in order of their keys.
    """

    path: Path
    sliced: bool
    pieces: tuple[StoredTensor, ...]
    partition_counts: tuple[int, ...]
    group_paddings: tuple[int, ...] | None
    alignment_paddings: tuple[tuple[int, ...], ...]
    fragments: tuple[dict[str, tuple[int, int]], ...] | None
    second_moments: tuple[StoredTensor | None, ...]
    steps: frozenset[int]
    counter_sharers: int
    checksums: tuple[int | None, ...]

    def alignment(self, group: int) -> tuple[int, ...]:
        """Return the elements of alignment after each parameter of `group`; none if empty."""
        return self.alignment_paddings[group] if group < len(self.alignment_paddings) else ()


def read_model_states(path: Path, *, nested: bool = False) -> ModelStates:
    """Parse a model states file; reads no tensor data.

    Args:
        path: The file.
        nested: Leave `module` out, since Megatron keeps state dicts within each other there.

    Raises:
        CheckpointError: The file is damaged, or lacks what every such file has.
    """
    content = open_torch_zip(path).content
    if not isinstance(content, dict) or "module" not in content:
        raise _unlike(path, "the key module")
    module = content["module"]
    if module is not None and not isinstance(module, dict):
        raise _unlike(path, "a state dict under module")
    if nested:
        module = None
    other = [name for name, value in (module or {}).items() if not isinstance(value, StoredTensor)]
    refuse_foreign_tensors(path, module or {})
    # What a module keeps beside its tensors (torch.nn.Module.get_extra_state) is not a weight.
    if any(not str(name).endswith("_extra_state") for name in other):
        raise _unlike(path, f"tensors under module, not {list_some(other)}")
    groups = content.get("param_shapes")
    if isinstance(groups, dict):
        # One dict for all before DeepSpeed 0.5.4.
        groups = [groups]
    if groups is not None and not isinstance(groups, list):
        raise _unlike(path, "lists of shapes under param_shapes")
    frozen_shapes, config = content.get("frozen_param_shapes"), content.get("ds_config")
    masters, flat_masters = _read_masters(content.get("optimizer"))
    return ModelStates(
        path=path,
        module=_tensors(path, module or {}),
        buffer_names=frozenset(
            plain_name(name) for name in _items(content.get("buffer_names")) if isinstance(name, str)
        ),
        groups=None if groups is None else [_shapes(path, group) for group in groups],
        frozen_shapes=None if frozen_shapes is None else _shapes(path, frozen_shapes),
        nulls_frozen=frozen_shapes is None and "frozen_param_shapes" in content,
        frozen=_tensors(path, content.get("frozen_param_fragments") or {}),
        shared=_names(path, content.get("shared_params") or {}),
        masters=masters,
        flat_masters=flat_masters,
        config=config if isinstance(config, dict) else {},
        version=_text(content.get("ds_version")),
        lightning=_text(content.get("pytorch-lightning_version")),
        step=_count(content.get("global_steps")),
        skipped_steps=_count(content.get("skipped_steps")) or 0,
        dp_world_size=_count(content.get("dp_world_size")),
        mp_world_size=_count(content.get("mp_world_size")),
        num_experts=_numbers(content.get("num_experts")) or (),
    )


def _read_masters(optimizer: Any) -> tuple[tuple[tuple[StoredTensor, ...], ...], bool]:
    """Return the fp32 tensors of each group in a 16-bit optimizer's state, and whether each is one flat tensor."""
    state = optimizer if isinstance(optimizer, dict) else {}
    flat = "fp32_groups_flat" in state
    groups = state.get("fp32_groups_flat" if flat else "fp32_groups")
    if not isinstance(groups, list):
        return (), False
    found = tuple((group,) if flat else tuple(group) if isinstance(group, list) else () for group in groups)
    is_whole = all(isinstance(tensor, ContiguousTensor) for group in found for tensor in group)
    return (found, flat) if is_whole else ((), False)


def read_optimizer_states(path: Path) -> OptimizerStates:
    """Parse an optimizer states file; reads no tensor data but the step counters.

    Raises:
        CheckpointError: The file is damaged, lacks what every such file has, or keeps its pieces elsewhere.
    """
    opened = open_torch_zip(path)
    state = opened.content.get("optimizer_state_dict") if isinstance(opened.content, dict) else None
    if not isinstance(state, dict):
        raise _unlike(path, "the key optimizer_state_dict")
    if state.get("ds_zero_partition_groups"):
        raise CheckpointError(
            f"{path} was saved with AutoEP",
            expected="one partitioning for all parameters",
            got="ds_zero_partition_groups",
            remedy="convert it with deepspeed.checkpoint.ds_to_universal",
        )
    sliced = "fp32_flat_groups" in state
    pieces = state.get("fp32_flat_groups" if sliced else "single_partition_of_fp32_groups")
    if not isinstance(pieces, list) or not all(isinstance(piece, StoredTensor) for piece in pieces):
        if (path.parent / OFFLOADED).exists():
            raise describe_offloaded(path)
        raise CheckpointError(
            f"{path} holds no fp32 pieces",
            expected="fp32_flat_groups or single_partition_of_fp32_groups",
            got="neither",
            remedy="pass a checkpoint with its optimizer states",
        )
    inner = state.get("optimizer_state_dict" if sliced else "base_optimizer_state")
    counters = _find_counters(inner)
    counts = state.get("partition_count")
    return OptimizerStates(
        path=path,
        sliced=sliced,
        pieces=tuple(pieces),
        partition_counts=_numbers(counts if isinstance(counts, (list, tuple)) else [counts]) or (),
        group_paddings=_numbers(state.get("group_paddings")),
        alignment_paddings=tuple(_numbers(group) or () for group in _items(state.get("param_alignment_paddings"))),
        fragments=_fragments(state.get("param_slice_mappings")),
        second_moments=_second_moments(inner, len(pieces)),
        steps=frozenset(_count_steps(counters)),
        counter_sharers=_count_sharers(counters),
        checksums=tuple(block.crc32 for _, block in sorted(opened.storages.items())),
    )


def describe_offloaded(path: Path) -> CheckpointError:
    """Return what is to be said of optimizer states whose fp32 weights are on NVMe."""
    folder = path.parent / OFFLOADED
    copied = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return CheckpointError(
        f"{path} holds no fp32 weights, because the optimizer was offloaded to NVMe",
        expected="them in the file itself",
        got=f"swap files in {OFFLOADED} for {list_some(copied)}, which say nothing of what they hold"
        if copied
        else "offload_optimizer.device nvme in the run's configuration",
        remedy="load it with DeepSpeed and save it again with offload_optimizer.device cpu, or save the weights with "
        "save_16bit_model",
    )


def read_scalar(tensor: StoredTensor) -> int | None:
    """Return a one-element tensor as a whole number; None if it is of a type that counts nothing."""
    code = _SCALARS.get(tensor.dtype.name)
    if code is None or tensor.numel != 1:
        return None
    value = struct.unpack(code, b"".join(tensor.chunks()))[0]
    return int(value) if value == value and abs(value) < 1 << 53 else None


def _find_counters(inner: Any) -> list[Any]:
    """Return each counter of the optimizer: per group, and where fused optimizers keep it."""
    if isinstance(inner, list):
        # An "elastic" save before DeepSpeed 0.8 keeps one state per group.
        inner = {"state": dict(enumerate(inner))}
    if not isinstance(inner, dict):
        return []
    states = inner.get("state")
    groups = inner.get("param_groups")
    holders = [*states.values()] if isinstance(states, dict) else []
    holders += groups if isinstance(groups, list) else []
    return [holder["step"] for holder in holders if isinstance(holder, dict) and "step" in holder]


def _count_steps(counters: Sequence[Any]) -> list[int]:
    counts = [read_scalar(step) if isinstance(step, StoredTensor) else _count(step) for step in counters]
    return [count for count in counts if count is not None]


def _count_sharers(counters: Sequence[Any]) -> int:
    tensors = [step for step in counters if isinstance(step, StoredTensor)]
    return len(tensors) if len(set(tensors)) == 1 else 1


def _second_moments(inner: Any, groups: int) -> tuple[StoredTensor | None, ...]:
    states = inner.get("state") if isinstance(inner, dict) else None
    found: list[StoredTensor | None] = []
    for index in range(groups):
        state = states.get(index) if isinstance(states, dict) else None
        moment = state.get("exp_avg_sq") if isinstance(state, dict) else None
        found.append(moment if isinstance(moment, StoredTensor) else None)
    return tuple(found)


def _fragments(mappings: Any) -> tuple[dict[str, tuple[int, int]], ...] | None:
    if not isinstance(mappings, list) or not all(isinstance(mapping, dict) for mapping in mappings):
        return None
    groups = []
    for mapping in mappings:
        group = {}
        for name, address in mapping.items():
            if not isinstance(address, Record):
                return None
            start, numel = _count(address.field("start")), _count(address.field("numel"))
            if start is None or numel is None:
                return None
            if numel:
                group[plain_name(str(name))] = (start, numel)
        groups.append(group)
    return tuple(groups)


def _tensors(path: Path, state: Any) -> dict[str, StoredTensor]:
    """Return the tensors of a state dict; a module may keep other state (`_extra_state`) beside them."""
    if not isinstance(state, dict):
        raise _unlike(path, "state dicts")
    refuse_foreign_tensors(path, state)
    tensors = {name: tensor for name, tensor in state.items() if isinstance(name, str)}
    return _unwrap(path, {name: tensor for name, tensor in tensors.items() if isinstance(tensor, StoredTensor)})


def _unwrap(path: Path, named: Mapping[str, _T]) -> dict[str, _T]:
    # Activation checkpointing takes its name out of state dicts, but not out of the names that DeepSpeed lists.
    plain = plain_names(named, path)
    return {plain[name]: value for name, value in named.items()}


def _shapes(path: Path, group: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(group, dict):
        raise _unlike(path, "shapes of parameters")
    shapes = {}
    for name, shape in group.items():
        if not isinstance(name, str) or not isinstance(shape, tuple) or _numbers(shape) is None:
            raise _unlike(path, f"the shape of {name}")
        shapes[name] = shape
    return _unwrap(path, shapes)


def _names(path: Path, names: Any) -> dict[str, str]:
    if isinstance(names, list):
        # DeepSpeed 0.9.0 and 0.9.1 save pairs (deepspeedai/DeepSpeed#3407).
        names = {pair[0]: pair[1] for pair in names if isinstance(pair, (list, tuple)) and len(pair) == 2}
    if not isinstance(names, dict) or not all(isinstance(part, str) for pair in names.items() for part in pair):
        raise _unlike(path, "names under shared_params")
    plain = {plain_name(name): plain_name(holder) for name, holder in names.items()}
    return {name: holder for name, holder in plain.items() if name != holder}


def _numbers(values: Any) -> tuple[int, ...] | None:
    if not isinstance(values, (list, tuple)) or any(_count(value) is None for value in values):
        return None
    return tuple(values)


def _items(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else []


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _unlike(path: Path, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not what its name says",
        expected=expected,
        got="something else",
        remedy="pass a checkpoint that DeepSpeed saved",
    )
