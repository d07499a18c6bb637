"""The ranks of a DeepSpeed checkpoint whose model was split over pipeline stages or tensor parallel ranks.

On disk (DeepSpeed 0.19.8, runtime/pipe/topology.py): `mp_rank_NN_model_states.pt` is of model-parallel rank NN, which
counts pipeline stages times tensor parallel ranks, and `zero_pp_rank_D_mp_rank_NN_optim_states.pt` has its fp32 pieces,
each NN by ZeRO's own rule.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, list_some
from ..pickles.torch_zip import open_torch_zip
from ..remedies import ALL_NODES, LOST_RANKS, RECOPY_WHOLE
from ..storage.stored_tensor import StoredTensor
from .checks import check_model_states
from .files import DeepSpeedFiles
from .reader import read_second_moments, read_trained
from .states import ModelStates, read_model_states

_LAYER = "layer_"


@dataclass(frozen=True, kw_only=True)
class ModelParallelRank:
    """One model-parallel rank: a pipeline stage of one tensor parallel rank.

    Attributes:
        states: Its `mp_rank_NN_model_states.pt`.
        trained: Pipeline or module name → fp32 tensor; empty where the optimizer keeps none, or none that can be named.
        files: Its own.
    """

    states: ModelStates
    trained: Mapping[str, StoredTensor]
    files: DeepSpeedFiles

    def list_unused(self, names: Collection[str]) -> set[str]:
        """Return which of what was trained surely never changed an answer, for it had no gradient; reads that.

        Raises:
            CheckpointError: What Adam keeps of them does not fit the parameters, or cannot be read.
        """
        moments = read_second_moments(self.files, [self.states]) if names else {}
        return {name for name in names if name in moments and _is_zero(moments[name])}


def _is_zero(tensor: StoredTensor) -> bool:
    return tensor.is_constant() and not any(next(iter(tensor.chunks()), b"")[: tensor.dtype.itemsize])


def has_megatrons_arguments(path: Path) -> bool:
    """Tell whether a file of model states is Megatron-DeepSpeed's, by what it saves beside every model.

    Raises:
        CheckpointError: The file cannot be read, or is damaged.
    """
    content = open_torch_zip(path).content
    return isinstance(content, dict) and "checkpoint_version" in content and "args" in content


def open_layer(path: Path) -> Any:
    """Return what the file of a pipeline's layer holds.

    Raises:
        CheckpointError: It is damaged, or was saved as another layer's: nothing else tells layers of one shape apart.
    """
    opened = open_torch_zip(path)
    if opened.root.startswith(_LAYER) and opened.root != path.stem:
        raise CheckpointError(
            f"{path} is the file of another layer",
            expected=f"what was saved as {path.name}",
            got=f"what was saved as {opened.root}{path.suffix}",
            remedy=f"files of layers were swapped; {RECOPY_WHOLE}",
        )
    return opened.content


def list_models(files: DeepSpeedFiles) -> list[Path]:
    """Return the model states of every model-parallel rank, in order.

    Raises:
        CheckpointError: There are experts, ZeRO stage 3 or universal states beside them, or a rank is missing.
    """
    if files.partitioned or files.experts or files.universal:
        kind = "ZeRO stage 3" if files.partitioned else "experts" if files.experts else "a universal checkpoint"
        raise CheckpointError(
            f"{files.folder} is of a layout over model-parallel ranks that is not proven",
            expected="ZeRO stage 0 to 2 without experts",
            got=kind,
            remedy="pass the checkpoint that it was converted from, or one that training saved after going on from it"
            if files.universal
            else "convert it with the trainer's own tools to a Hugging Face folder",
        )
    ranks = sorted(rank for _, rank in files.models)
    count = 1 + max([*ranks, *(rank for _, rank in files.optimizers)], default=-1)
    missing = [rank for rank in range(count) if rank not in ranks]
    if missing or not ranks:
        raise _lack(files, count, missing)
    return [files.models[0, rank] for rank in ranks]


def check_count(files: DeepSpeedFiles, ranks: Sequence[ModelParallelRank]) -> None:
    """Refuse a checkpoint without its last model-parallel ranks, of which each other one knows.

    Raises:
        CheckpointError: It is one.
    """
    count = max(rank.states.mp_world_size or 0 for rank in ranks)
    if count > len(ranks):
        raise _lack(files, count, range(len(ranks), count))


def _lack(files: DeepSpeedFiles, count: int, missing: Sequence[int]) -> CheckpointError:
    return CheckpointError(
        f"{files.folder} lacks model states of model-parallel ranks",
        expected=f"mp_rank_00 to mp_rank_{max(0, count - 1):02d}",
        got=f"none for {list_some(f'mp_rank_{rank:02d}' for rank in missing)}" if missing else "no such file",
        remedy=LOST_RANKS,
    )


def read_rank(files: DeepSpeedFiles, index: int, path: Path) -> ModelParallelRank:
    """Return what the rank `index`, whose model states `path` holds, has saved.

    Raises:
        CheckpointError: Its optimizer states are missing, or do not fit.
    """
    own = replace(
        files,
        models={(0, index): path},
        optimizers={key: file for key, file in files.optimizers.items() if key[1] == index},
    )
    states = read_model_states(path, nested=True)
    check_model_states(own, [states])
    if own.optimizers:
        return ModelParallelRank(states=states, trained=read_trained(own, [states]), files=own)
    if states.stage or files.optimizers:
        raise CheckpointError(
            f"{files.folder} lacks the optimizer states that hold the fp32 weights of mp_rank_{index:02d}",
            expected=f"{states.dp_world_size or 'one'} files zero_pp_rank_*_mp_rank_{index:02d}_optim_states.pt",
            got="none",
            remedy=ALL_NODES,
        )
    return ModelParallelRank(states=states, trained={}, files=own)


def check_steps(files: DeepSpeedFiles, ranks: Sequence[ModelParallelRank]) -> None:
    """Refuse ranks that were not saved together.

    Raises:
        CheckpointError: They are of several steps.
    """
    steps = {rank.states.path.name: rank.states.step for rank in ranks}
    if len(set(steps.values())) > 1:
        raise CheckpointError(
            f"the files in {files.folder} are from different steps",
            expected="one step",
            got=list_some(f"step {step} in {name}" for name, step in steps.items()),
            remedy=RECOPY_WHOLE,
        )
