"""MoE experts: their files in training precision, and their fp32 pieces in the optimizer states.

Layout (DeepSpeed 0.19.8, moe/layer.py and utils/groups.py): with `ep` expert-parallel ranks, data-parallel rank R
trains the experts of expert rank R mod ep, and splits its optimizer's pieces with the other ranks of that remainder.
`param_shapes` names only the experts of rank 0, by local numbers; the expert files count over all ranks.

Layers may have different numbers of experts (PR-MoE), and one layer's may lie in several groups (`max_group_size` in
moe/utils.py): no group tells how many of them each rank holds, but the layer's expert files do.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, list_some
from ..pickles.torch_zip import open_torch_zip
from ..remedies import ALL_NODES, MIXED_RUNS, RECOPY_WHOLE
from ..storage.stored_tensor import StoredTensor
from .files import DeepSpeedFiles
from .partitions import Shapes, join_contiguous_group
from .states import OptimizerStates

_LOCAL_EXPERT = re.compile(r"(?P<before>.*deepspeed_experts\.)(?P<number>\d+)(?P<after>\..*)")


def read_experts(files: DeepSpeedFiles, num_experts: Sequence[int]) -> dict[str, StoredTensor]:
    """Return name → tensor of every expert, in training precision.

    Args:
        files: The files of the checkpoint.
        num_experts: Experts of each MoE layer, as the model states say.

    Raises:
        CheckpointError: The file of an expert is missing, is one too many, or is not of its expert.
    """
    expected = ((layer, expert) for layer, count in enumerate(num_experts) for expert in range(count))
    # A damaged file may claim any number of experts: no more of them are listed than a message shows.
    missing = list(itertools.islice((key for key in expected if key not in files.experts), 11))
    if missing:
        raise CheckpointError(
            f"{files.folder} lacks experts",
            expected=f"{sum(num_experts)} files layer_*_expert_*_mp_rank_00_model_states.pt",
            got=f"none of {list_some(f'layer {layer} expert {expert}' for layer, expert in missing)}",
            remedy=f"each node may have kept only its own experts: {ALL_NODES}",
        )
    extra = [path.name for (layer, expert), path in files.experts.items() if expert >= _count(num_experts, layer)]
    if extra:
        raise CheckpointError(
            f"{files.folder} holds files of more experts than the model has",
            expected=f"{sum(num_experts)} files layer_*_expert_*_mp_rank_00_model_states.pt",
            got=f"{len(files.experts)}, with {list_some(extra)}",
            remedy="they are of another run; remove them",
        )
    experts: dict[str, StoredTensor] = {}
    homes: dict[str, Path] = {}
    for (_, number), path in files.experts.items():
        content = open_torch_zip(path).content
        for name, tensor in content.items() if isinstance(content, dict) else ():
            match = _LOCAL_EXPERT.fullmatch(str(name))
            if not isinstance(tensor, StoredTensor) or not match or int(match["number"]) != number or name in experts:
                raise CheckpointError(
                    f"{path} is not the file of expert {number}",
                    expected=f"weights of deepspeed_experts.{number}",
                    got=f"{name}" + (f", which {homes[name].name} has too" if name in homes else ""),
                    remedy=RECOPY_WHOLE,
                )
            experts[name], homes[name] = tensor, path
    return experts


def is_expert_group(shapes: Shapes) -> bool:
    """Tell whether a parameter group holds experts, which are split over fewer ranks than the rest."""
    return any(_LOCAL_EXPERT.fullmatch(name) for name in shapes)


def join_expert_group(
    shapes: Shapes,
    states: Sequence[OptimizerStates],
    index: int,
    config: Mapping[str, Any],
    experts: Mapping[str, StoredTensor],
    *,
    source: str,
) -> dict[str, StoredTensor]:
    """Undo stages 1 and 2 for one group of experts; nothing where the ranks' order is not known to be the usual one.

    Args:
        shapes: Local name → shape of the experts of rank 0, in the order of the flat group.
        states: The optimizer states of every rank, by rank.
        index: Position of the group among theirs.
        config: The `ds_config` of the run.
        experts: Name → tensor of every expert of every layer, as `read_experts` returns them.
        source: What to call the group in messages.

    Returns:
        Name, with the expert's number over all ranks → tensor. Empty means: take the expert files.

    Raises:
        CheckpointError: The pieces do not add up to the shapes, or are of other experts than the expert files.
    """
    counts = states[0].partition_counts
    count = counts[index] if index < len(counts) else 0
    if not count or len(states) % count:
        raise CheckpointError(
            f"the experts are split in a way that is not read in {source}",
            expected=f"a divisor of {len(states)} ranks",
            got=f"{count}",
        )
    # Then ranks that share experts are neighbours, and which they are depends on the whole topology.
    if config.get("use_data_before_expert_parallelism"):
        return {}
    expert_ranks = len(states) // count
    local_counts = _count_local_experts(experts, expert_ranks)
    joined: dict[str, StoredTensor] = {}
    for expert_rank in range(expert_ranks):
        group = states[expert_rank::expert_ranks]
        renamed = {_rename(name, expert_rank, local_counts): shape for name, shape in shapes.items()}
        _refuse_unknown(renamed, experts, source=source)
        joined |= join_contiguous_group(
            renamed,
            [state.pieces[index] for state in group],
            group[0].alignment(index),
            source=f"{source}, expert rank {expert_rank}",
        )
    return joined


def _count(num_experts: Sequence[int], layer: int) -> int:
    return num_experts[layer] if layer < len(num_experts) else 0


def _count_local_experts(experts: Mapping[str, StoredTensor], expert_ranks: int) -> dict[str, int]:
    """Return the experts that each rank holds of each layer, by what stands before an expert's number in its names."""
    numbers: dict[str, set[int]] = {}
    for name in experts:
        if match := _LOCAL_EXPERT.fullmatch(name):
            numbers.setdefault(match["before"], set()).add(int(match["number"]))
    return {before: len(found) // expert_ranks for before, found in numbers.items()}


def _rename(name: str, expert_rank: int, local_counts: Mapping[str, int]) -> str:
    match = _LOCAL_EXPERT.fullmatch(name)
    if match is None:
        raise CheckpointError(
            f"{name} is in a parameter group with experts",
            expected="groups of experts apart from the rest, as DeepSpeed requires",
            got="a mixed group",
        )
    before, number, after = match.groups()
    return f"{before}{expert_rank * local_counts.get(before, 0) + int(number)}{after}"


def _refuse_unknown(renamed: Shapes, experts: Mapping[str, StoredTensor], *, source: str) -> None:
    """Refuse experts that no file holds: numbers that are one off would end there, with the last of the ranks."""
    unlike = [name for name, shape in renamed.items() if name not in experts or experts[name].shape != shape]
    if unlike:
        raise CheckpointError(
            f"the pieces of experts in {source} are not of the experts that have files",
            expected="each of them with its shape in a file layer_*_expert_*_mp_rank_00_model_states.pt",
            got=f"{list_some(unlike)} in none",
            remedy=MIXED_RUNS,
        )
