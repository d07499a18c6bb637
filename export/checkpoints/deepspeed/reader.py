"""DeepSpeed checkpoints: ZeRO stages 0 to 3 on any number of ranks, with frozen, shared and expert parameters.

The weights come from the fp32 pieces of the optimizer wherever there are any. What the optimizer does not train is
taken from the model states: buffers, frozen parameters, and what stage 0 trained without fp32 pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import CheckpointError, list_some
from ..remedies import ALL_NODES, LOST_RANKS, REMOVE_OLDER
from ..storage.stored_tensor import StoredTensor
from ..stored_checkpoint import CheckpointFacts, StoredCheckpoint
from .assembly import assemble
from .checks import (
    check_contiguous_owners,
    check_model_states,
    check_optimizer_states,
    check_ranks,
    check_sliced_owners,
    describe_unproven,
)
from .experts import is_expert_group, join_expert_group, read_experts
from .files import LOOKED_FOR, DeepSpeedFiles, find_files, recognises_folder
from .fragments import derive_groups
from .masters import name_masters
from .partitions import Shapes, join_contiguous_group, join_sliced_group
from .states import (
    OFFLOADED,
    ModelStates,
    OptimizerStates,
    describe_offloaded,
    read_model_states,
    read_optimizer_states,
)
from .universal import read_universal

__all__ = ["LOOKED_FOR", "open_folder", "read_trained", "recognises"]


def recognises(directory: Path, tag: str | None = None) -> bool:
    """Tell whether DeepSpeed saved a checkpoint in `directory`."""
    return recognises_folder(directory)


def open_folder(directory: Path, tag: str | None = None, base: Path | None = None) -> StoredCheckpoint:
    """Return a reader for the DeepSpeed checkpoint in `directory`, reading no more tensor data than the checks need.

    Args:
        directory: The folder with `latest`, or the tag's own folder.
        tag: Name of the checkpoint in it; the one that `latest` names where None.
        base: Tells nothing that the files do not.

    Raises:
        CheckpointError: Files are missing, too many, damaged, or not of one save.
    """
    files = find_files(directory, tag)
    _refuse_without_models(files)
    models = [read_model_states(path) for path in files.models.values()]
    check_model_states(files, models)
    experts = read_experts(files, models[0].num_experts)
    unproven: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()
    if files.universal:
        trained, stage, world_size = read_universal(files, models), models[0].stage, models[0].dp_world_size
        format_name = "DeepSpeed universal checkpoint"
    elif files.optimizers:
        states = _read_states(files, models)
        trained = _join_groups(files, models[0], states, experts)
        stage, world_size = _find_stage(models[0], states), len(states)
        if stage == 3:
            unproven = describe_unproven(models[0], states)
        format_name = f"DeepSpeed ZeRO stage {stage}, {world_size} ranks"
    else:
        _refuse_lost_optimizer(files, models[0])
        (trained, unnamed), stage, world_size = name_masters(models[0]), 0, models[0].dp_world_size
        format_name = "DeepSpeed without ZeRO"
    facts = CheckpointFacts(
        trainer=_name_trainer(models[0]),
        world_size=world_size,
        stage=stage,
        step=models[0].step,
        missing=unnamed,
    )
    return assemble(files, models, trained, experts=experts, format_name=format_name, facts=facts, unproven=unproven)


def read_trained(files: DeepSpeedFiles, models: Sequence[ModelStates]) -> dict[str, StoredTensor]:
    """Return name → fp32 tensor of all that the optimizer trained, joined from the pieces of every data-parallel rank.

    Args:
        files: Those of one model-parallel rank, with optimizer states and without experts.
        models: Its model states, by rank.

    Raises:
        CheckpointError: Ranks are missing, or the pieces do not fit the parameters or each other.
    """
    return _join_groups(files, models[0], _read_states(files, models), {})


def read_second_moments(files: DeepSpeedFiles, models: Sequence[ModelStates]) -> dict[str, StoredTensor]:
    """Return name → Adam's `exp_avg_sq` of all that the optimizer trained; empty where another optimizer has none.

    Args:
        files: As for `read_trained`.
        models: As for `read_trained`.

    Raises:
        CheckpointError: They do not fit the parameters.
    """
    states = _read_states(files, models)
    moments = [[moment for moment in state.second_moments if moment is not None] for state in states]
    if any(len(found) < len(state.pieces) for found, state in zip(moments, states, strict=True)):
        return {}
    both = zip(states, moments, strict=True)
    return _join_groups(files, models[0], [replace(state, pieces=tuple(found)) for state, found in both], {})


def _name_trainer(model: ModelStates) -> str:
    name = "DeepSpeed" + (f" {model.version}" if model.version else "")
    return f"Lightning {model.lightning}, {name}" if model.lightning else name


def _refuse_without_models(files: DeepSpeedFiles) -> None:
    if not files.models:
        raise CheckpointError(
            f"{files.folder} lacks its model states",
            expected="mp_rank_00_model_states.pt or zero_pp_rank_*_model_states.pt",
            got=list_some(path.name for path in files.optimizers.values()) or "none",
            remedy=LOST_RANKS,
        )


def _refuse_lost_optimizer(files: DeepSpeedFiles, model: ModelStates) -> None:
    if files.partitioned or model.stage:
        raise CheckpointError(
            f"{files.folder} lacks the optimizer states that hold its fp32 weights",
            expected=f"{model.dp_world_size or 'one'} files zero_pp_rank_*_optim_states.pt, one per rank",
            got="none",
            remedy=ALL_NODES,
        )


def _find_stage(model: ModelStates, states: Sequence[OptimizerStates]) -> int:
    # The pieces tell; BF16_Optimizer does not record the stage, which is 1.
    return 3 if states[0].sliced else model.stage or 1


def _read_states(files: DeepSpeedFiles, models: Sequence[ModelStates]) -> list[OptimizerStates]:
    """Return the optimizer states of every rank, checked against each other."""
    paths = {rank: path for (rank, _), path in files.optimizers.items()}
    first = read_optimizer_states(next(iter(paths.values())))
    counts = [count for count in (*first.partition_counts, models[0].dp_world_size) if count]
    world_size = max(counts, default=len(paths))
    check_ranks(paths, world_size, kind="optimizer", folder=files.folder)
    if files.partitioned:
        model_paths = {rank: path for (rank, _), path in files.models.items()}
        check_ranks(model_paths, world_size, kind="model", folder=files.folder)
    if files.partitioned != first.sliced:
        raise CheckpointError(
            f"{files.folder} holds model states and optimizer states of different stages",
            expected=f"stage {'3' if files.partitioned else '1 or 2'}, as the model states say",
            got=f"fp32 pieces of stage {'3' if first.sliced else '1 or 2'}",
            remedy=REMOVE_OLDER,
        )
    states = [read_optimizer_states(path) for path in paths.values()]
    _refuse_offloaded(files, states, models[0])
    check_optimizer_states(files, states, models[0])
    return states


def _refuse_offloaded(files: DeepSpeedFiles, states: Sequence[OptimizerStates], model: ModelStates) -> None:
    """Refuse states whose larger pieces were swapped out: DeepSpeed 0.19.8 leaves tensors of size 0 of them."""
    emptied = [state.path for state in states if any(piece.numel == 0 for piece in state.pieces)]
    if emptied and (model.is_offloaded or (files.folder / OFFLOADED).exists()):
        raise describe_offloaded(emptied[0])


def _join_groups(
    files: DeepSpeedFiles,
    model: ModelStates,
    states: Sequence[OptimizerStates],
    experts: Mapping[str, StoredTensor],
) -> dict[str, StoredTensor]:
    # BF16_Optimizer without ZeRO: PipelineEngine lists no shapes (DeepSpeed 0.19.8, engine.py, `_save_checkpoint`).
    groups = derive_groups(states) if model.groups is None else model.groups
    if len(groups) != len(states[0].pieces):
        raise CheckpointError(
            f"{model.path} describes other parameter groups than the optimizer states",
            expected=f"{len(states[0].pieces)} groups",
            got=str(len(groups)),
            remedy="the files of two runs are mixed, or were saved before DeepSpeed 0.6",
        )
    if states[0].sliced:
        check_sliced_owners(groups, states)
    trained: dict[str, StoredTensor] = {}
    for index, shapes in enumerate(groups):
        source = f"parameter group {index} of {files.folder}"
        joined = _join_group(shapes, index, model, states, experts, source=source)
        doubled = joined.keys() & trained.keys()
        if doubled:
            raise CheckpointError(
                f"{model.path} names parameters twice: {list_some(doubled)}", expected="each in one group", got="two"
            )
        trained |= joined
    return trained


def _join_group(
    shapes: Shapes,
    index: int,
    model: ModelStates,
    states: Sequence[OptimizerStates],
    experts: Mapping[str, StoredTensor],
    *,
    source: str,
) -> dict[str, StoredTensor]:
    pieces = [state.pieces[index] for state in states]
    if states[0].sliced:
        return join_sliced_group(shapes, pieces, source=source)
    if is_expert_group(shapes):
        return join_expert_group(shapes, states, index, model.config, experts, source=source)
    joined = join_contiguous_group(shapes, pieces, states[0].alignment(index), source=source)
    check_contiguous_owners(index, shapes, states)
    return joined
