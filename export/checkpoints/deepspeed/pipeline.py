"""A model of one's own that DeepSpeed split into pipeline stages, under the names of its layers.

On disk (DeepSpeed 0.19.8, runtime/pipe/module.py, `save_state_dict`): `layer_LL-model_states.pt` holds layer LL in
training precision, whose names the model has behind `LL.`, like an `nn.Sequential` of all layers; of functions there is
no file. The optimizer names what it trained in the same way, but for a layer that stands in several places, which it
trains as `tied_modules.KEY.` in every stage that has one, and saves in each of them.

The fp32 pieces are the weights wherever there are any, and the copies in training precision must agree with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import CheckpointError, list_some
from ..pickles.torch_zip import refuse_foreign_tensors
from ..remedies import LOST_RANKS
from ..storage.stored_tensor import StoredTensor
from ..stored_checkpoint import CheckpointFacts, StoredCheckpoint
from .files import LOOKED_FOR, DeepSpeedFiles, find_files, recognises_folder
from .model_parallel import check_count, check_steps, has_megatrons_arguments, list_models, open_layer, read_rank
from .states import ModelStates
from .tied_layers import TIED, place

__all__ = ["LOOKED_FOR", "open_folder", "recognises"]

Tensors = Mapping[str, StoredTensor]


def recognises(directory: Path, tag: str | None = None) -> bool:
    """Tell whether DeepSpeed's pipeline saved whole layers of a model that is not Megatron's.

    Raises:
        CheckpointError: It is DeepSpeed's, and `tag` is not there, none is chosen, or its first file is damaged.
    """
    if not recognises_folder(directory):
        return False
    files = find_files(directory, tag)
    is_whole = bool(files.pipeline_layers) and not any(rank for _, rank in files.pipeline_layers)
    first = next((files.models[key] for key in sorted(files.models)), None)
    return is_whole and first is not None and not has_megatrons_arguments(first)


def open_folder(directory: Path, tag: str | None = None, base: Path | None = None) -> StoredCheckpoint:
    """Return a reader of the whole model, reading no tensor data; `base` tells nothing more.

    Args:
        directory: The folder with `latest`, or the tag's own folder.
        tag: Which checkpoint in it; the one that `latest` names where None.
        base: As for every reader.

    Raises:
        CheckpointError: Files are missing, or do not fit each other.
    """
    files = find_files(directory, tag)
    ranks = [read_rank(files, index, path) for index, path in enumerate(list_models(files))]
    check_count(files, ranks)
    check_steps(files, ranks)
    stages = [rank.states for rank in ranks]
    paths = {layer: path for (layer, _), path in sorted(files.pipeline_layers.items())}
    low = {f"{layer}.{name}": tensor for layer, path in paths.items() for name, tensor in _read_layer(path).items()}
    _check_whole(files, stages, low)
    trained = [rank.trained for rank in ranks]
    masters, lost = place(files.folder, trained, low, lambda stage, names: ranks[stage].list_unused(names))
    masters |= {
        name: masters[holder]
        for states in stages
        for name, holder in states.shared.items()
        if holder in masters and name in low and low[name].shape == low[holder].shape
    }
    tells_all = len(ranks) == 1 or all(trained)
    kept = {name: masters[name].reshape(tensor.shape) if name in masters else tensor for name, tensor in low.items()}
    return StoredCheckpoint(
        directory=files.directory,
        format_name=f"DeepSpeed pipeline of {len(stages)} stages, {len(paths)} layers",
        tensors=kept,
        copies=({name: low[name] for name in masters},) if masters else (),
        archives=(*(states.path for states in stages), *paths.values(), *files.optimizers.values()),
        facts=CheckpointFacts(
            trainer="DeepSpeed" + (f" {stages[0].version}" if stages[0].version else ""),
            world_size=len(stages) * (stages[0].dp_world_size or 1),
            stage=stages[0].stage,
            step=stages[0].step,
            missing=(*_list_missing(kept, stages), *(told for each in lost for told in each.describe())),
        ),
        unfiled=frozenset().union(*(each.list_all(each.used) for each in lost)),
        unshared=frozenset().union(*(each.list_all(each.untrained) for each in lost)) if tells_all else None,
    )


def _read_layer(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a layer; what else its state has, such as a number, a network of torch needs none of."""
    content = open_layer(path)
    state = content if isinstance(content, dict) else {}
    refuse_foreign_tensors(path, state)
    return {str(name): value for name, value in state.items() if isinstance(value, StoredTensor)}


def _check_whole(files: DeepSpeedFiles, stages: Sequence[ModelStates], low: Tensors) -> None:
    """Refuse a checkpoint without the file of a layer that was trained, or has buffers.

    Raises:
        CheckpointError: It is one.
    """
    trained = {name for states in stages for group in states.groups or () for name in group}
    named = trained.union(*(states.buffer_names for states in stages))
    missing = sorted(name for name in named - low.keys() if not name.startswith(TIED))
    if missing or not low:
        raise CheckpointError(
            f"{files.folder} lacks files of layers",
            expected=f"layer_{missing[0].split('.')[0].zfill(2)}-model_states.pt" if missing else "some",
            got=f"none for {list_some(missing)}" if missing else "none with weights",
            remedy=LOST_RANKS,
        )


def _list_missing(kept: Mapping[str, StoredTensor], stages: Sequence[ModelStates]) -> tuple[str, ...]:
    short = sorted({tensor.dtype.name for tensor in kept.values() if tensor.dtype.is_floating_point} - {"float32"})
    has_masters = any(states.masters for states in stages)
    kept_as = "in the optimizer's state without names, given in" if has_masters else "saved only as"
    missing = [f"fp32 weights: {kept_as} {list_some(short)}"] if short else []
    if any(states.groups is None for states in stages):
        missing.append(
            "the names of what was trained, which show that the files of all layers are there, and what a head that is "
            "a function of a tied layer has of its own"
        )
    return tuple(missing)
