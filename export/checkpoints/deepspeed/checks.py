"""What DeepSpeed's rank files give away about each other: none of them says whose it is.

A rank number is only in the file's name. What the contents can show: how many ranks there were, which parameters a
piece holds (stages 1 and 2), where the padding lies (stage 3), the optimizer's step, and equal checksums. Two files
swapped at stage 3, neither of them of a rank with padding, look like any other checkpoint: nothing in them can show it,
unless a gathered 16-bit copy lies beside them. So do two files with the ranks' parts of frozen parameters.

Equal checksums show a file copied under another's name, but not where every parameter in it is constant: the parts of a
norm that is still 1, or of a matrix that was set to 0, are the same on every rank.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

from ...errors import CheckpointError, list_some
from ..remedies import DOUBLED, LOST_RANKS, RECOPY_WHOLE, SWAPPED
from ..storage.stored_tensor import StoredTensor
from .files import DeepSpeedFiles
from .partitions import Shapes, find_slice_padding, map_fragments, slice_numel
from .states import ModelStates, OptimizerStates

_DEFAULT_TAG = re.compile(r"global_step(\d+)")
_COUNTS_TOGETHER = "since a universal checkpoint was loaded, all sub-groups count in one number"


def check_ranks(found: Mapping[int, Path], world_size: int, *, kind: str, folder: Path) -> None:
    """Check that each of `world_size` ranks has its file, and no other rank has.

    Raises:
        CheckpointError: Ranks are missing or too many.
    """
    # A damaged file may claim any number of ranks: no more of them are listed than a message shows.
    missing = list(itertools.islice((rank for rank in range(world_size) if rank not in found), 11))
    extra = [path.name for rank, path in found.items() if rank >= world_size]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {kind} states of {world_size} ranks",
            expected=f"{world_size} files",
            got=f"{len(found)}, without rank {list_some(f'{rank:03d}' for rank in missing)}",
            remedy=LOST_RANKS,
        )
    if extra:
        raise CheckpointError(
            f"{folder} has {kind} states of more ranks than trained",
            expected=f"{world_size} files",
            got=f"{len(found)}, with {list_some(extra)}",
            remedy="they are of another run with more ranks; remove them",
        )


def check_model_states(files: DeepSpeedFiles, models: Sequence[ModelStates]) -> None:
    """Check that the model states are of one save.

    Raises:
        CheckpointError: They are of different steps, two ranks' files are the same, or cut for fewer ranks.
    """
    steps = {model.path.name: model.step for model in models}
    if len(set(steps.values())) > 1:
        raise _different_steps(files, steps)
    if len({repr(model.groups) for model in models}) > 1:
        raise CheckpointError(
            f"the model states in {files.folder} are of different models",
            expected="the same parameters in each",
            got=f"{len(models)} files that disagree",
            remedy=RECOPY_WHOLE,
        )
    # Only the first rank records the shared parameters (DeepSpeed 0.19.8, engine.py, `_get_shared_params`).
    if any(model.shared for model in models[1:]) and not models[0].shared:
        holder = next(model for model in models[1:] if model.shared)
        raise _swapped(holder.path, "a later rank", "the file of rank 0")
    shapes = models[0].frozen_shapes or {}
    if all(model.frozen.keys() == shapes.keys() for model in models):
        alone = [{name: shape} for name, shape in shapes.items()]
        _refuse_replicas(files, alone, [[model.frozen[name].numel for name in shapes] for model in models])
    _refuse_doubles(
        [
            (model.path, _checksums(model.frozen), _cut_frozen(model, rank, len(models)))
            for rank, model in enumerate(models)
        ]
    )


def check_optimizer_states(files: DeepSpeedFiles, states: Sequence[OptimizerStates], model: ModelStates) -> None:
    """Check that the optimizer states are of one save, each of another rank.

    Raises:
        CheckpointError: They are of different steps or stages, two are the same file, or they are cut for fewer ranks.
    """
    kinds = {(state.sliced, len(state.pieces), state.partition_counts, state.alignment_paddings) for state in states}
    if len(kinds) > 1:
        raise CheckpointError(
            f"the optimizer states in {files.folder} are of different runs",
            expected="one stage and one number of ranks",
            got=f"{len(states)} files that disagree",
            remedy=RECOPY_WHOLE,
        )
    steps = {state.path.name: max(state.steps, default=None) for state in states}
    if len({state.steps for state in states if any(piece.numel for piece in state.pieces)}) > 1:
        raise _different_steps(files, steps)
    last = max((step for step in steps.values() if step is not None), default=None)
    if last is not None and model.step is not None and not _is_count_of_sharers(states, last, model):
        # A step that overflowed is counted, but not by the optimizer. Trainers may count from elsewhere in the tag, and
        # an optimizer may have been restarted; but where tag and optimizer agree, the model states are wrong.
        match = _DEFAULT_TAG.fullmatch(files.folder.name)
        tagged = int(match[1]) if match else model.step
        if last > model.step or (tagged != model.step and tagged == last + model.skipped_steps):
            raise _different_steps(files, {model.path.name: model.step, **steps})
    groups = model.groups or []
    if states[0].sliced:
        _refuse_replicas(files, groups, [[piece.numel for piece in state.pieces] for state in states])
    _refuse_doubles(
        [
            (state.path, state.checksums, _cut_states(groups, state, rank, len(states)))
            for rank, state in enumerate(states)
        ]
    )


def _is_count_of_sharers(states: Sequence[OptimizerStates], last: int, model: ModelStates) -> bool:
    """Tell whether the optimizer is ahead as it is after a universal checkpoint was loaded at stage 3.

    DeepSpeed then gives all sub-groups one tensor for their counts (0.19.8, runtime/zero/stage3.py,
    `load_hp_checkpoint_state_from_checkpoint_dir_stage3`), so that each step since has counted once for each of them.
    """
    sharers, taken = states[0].counter_sharers, (model.step or 0) - model.skipped_steps
    if not states[0].sliced or sharers == 1 or any(state.counter_sharers != sharers for state in states):
        return False
    return taken <= last <= taken * sharers and (last - taken) % (sharers - 1) == 0


def check_contiguous_owners(index: int, shapes: Shapes, states: Sequence[OptimizerStates]) -> None:
    """Check by the recorded fragments and paddings that each file's piece of group `index` is its rank's.

    Raises:
        CheckpointError: A file at stage 1 or 2 holds the piece of another rank.
    """
    for rank, state in enumerate(states):
        padding = state.group_paddings[index : index + 1] if state.group_paddings else ()
        if padding and padding[0] and sum(other.pieces[index].numel for other in states[rank + 1 :]):
            raise _swapped(state.path, f"rank {rank}", "the padding of the last rank")
    piece_numel = max(state.pieces[index].numel for state in states)
    paddings = states[0].alignment(index)
    for rank, state in enumerate(states):
        saved = state.fragments[index] if state.fragments and index < len(state.fragments) else None
        # With round-robin gradients the record follows another order than the pieces (DeepSpeed, stage_1_and_2.py);
        # then it matches no rank, and the copy in training precision has to tell.
        if not saved or saved == map_fragments(shapes, paddings, rank, piece_numel):
            continue
        for owner in range(len(states)):
            if saved == map_fragments(shapes, paddings, owner, piece_numel):
                raise _swapped(state.path, f"rank {rank}", f"the piece of rank {owner}")


def check_sliced_owners(groups: Sequence[Shapes], states: Sequence[OptimizerStates]) -> None:
    """Check by the padding that each file at stage 3 is of its rank.

    No gradient ever reaches the padding, so Adam's second moment is exactly 0 there. A file with other values in its
    rank's padding, while another rank's file has zeros there, has been swapped with it.

    Raises:
        CheckpointError: A file holds the slices of another rank.
    """
    world_size = len(states)
    for rank, state in enumerate(states):
        if _is_clean(groups, state, rank, world_size):
            continue
        for other, candidate in enumerate(states):
            if other != rank and _is_clean(groups, candidate, rank, world_size):
                raise _swapped(
                    state.path, f"rank {rank}", f"values in its padding, where {candidate.path.name} has none"
                )


def describe_unproven(model: ModelStates, states: Sequence[OptimizerStates]) -> tuple[str, ...]:
    """Return what nothing in the files of stage 3 can show: which of the ranks padded alike is which, and more.

    The parts of frozen parameters lie in the model states, where the padding is whatever was in memory.
    """
    world_size = len(states)
    groups = model.groups or []
    alike: dict[str, list[int]] = {}
    for rank, state in enumerate(states):
        known = all(moments is not None for moments in state.second_moments)
        padding = [find_slice_padding(shapes, rank, world_size) for shapes in groups] if known else []
        alike.setdefault(repr(padding), []).append(rank)
    reason = "no gathered copy lies beside them"
    unproven = [
        f"proof of the order of ranks {list_some(f'{rank:03d}' for rank in ranks)}: {reason}"
        for ranks in alike.values()
        if len(ranks) > 1
    ]
    if world_size > 1:
        unproven.append(f"proof that the files of all ranks are of one run: {reason}")
    if any(state.counter_sharers > 1 for state in states):
        unproven.append(f"proof that optimizer and model states are of one step: {_COUNTS_TOGETHER}, and {reason}")
    frozen = [name for name, shape in (model.frozen_shapes or {}).items() if prod(shape) > 1]
    # The first rank's file is known where it records shared parameters.
    if frozen and world_size - bool(model.shared) > 1:
        unproven.append(f"proof of the order of the ranks' parts of {list_some(frozen)}: {reason}")
    return tuple(unproven)


def _is_clean(groups: Sequence[Shapes], state: OptimizerStates, rank: int, world_size: int) -> bool:
    for shapes, moments in zip(groups, state.second_moments, strict=False):
        if moments is None:
            continue
        for start, stop in find_slice_padding(shapes, rank, world_size):
            if stop <= moments.numel and not _is_zero(moments, start, stop):
                return False
    return True


def _is_zero(tensor: StoredTensor, start: int, stop: int) -> bool:
    return not any(any(chunk) for chunk in tensor.take(start, (stop - start,)).chunks())


def _refuse_replicas(files: DeepSpeedFiles, groups: Sequence[Shapes], numels: Sequence[Sequence[int]]) -> None:
    """Refuse parts at stage 3 that were cut for some of the ranks, so that each was on several.

    Args:
        files: Where they lie.
        groups: Name → shape of each group.
        numels: Elements of each group, by rank.
    """
    world_size, found = len(numels), {tuple(numel) for numel in numels}
    if found == {_split(groups, world_size)}:
        return
    for ranks in (number for number in range(1, world_size) if world_size % number == 0):
        if found == {_split(groups, ranks)}:
            raise CheckpointError(
                f"{files.folder} holds parts of the weights that were cut for fewer ranks than saved them",
                expected=f"parts for {world_size} ranks",
                got=f"parts for {ranks}, as a user's own mpu for sequence parallelism may have asked for",
                remedy="such parts are not read, and those on several ranks may differ; train with DeepSpeed's "
                "parallel_state_sp as the mpu",
            )


def _split(groups: Sequence[Shapes], world_size: int) -> tuple[int, ...]:
    return tuple(sum(slice_numel(shape, world_size) for shape in shapes.values()) for shapes in groups)


def _checksums(tensors: Mapping[str, StoredTensor]) -> tuple[int | None, ...]:
    return tuple(part.block.crc32 for tensor in tensors.values() for part in tensor.ranges)


def _cut_frozen(model: ModelStates, rank: int, world_size: int) -> Iterator[StoredTensor]:
    """Yield the rank's part of each frozen parameter, without padding."""
    for name, part in model.frozen.items():
        yield from _cut_slices({name: (model.frozen_shapes or {}).get(name, part.shape)}, part, rank, world_size)


def _cut_states(groups: Sequence[Shapes], state: OptimizerStates, rank: int, world_size: int) -> Iterator[StoredTensor]:
    """Yield what a rank has of each parameter at stage 3, without padding, or of each group at stages 1 and 2."""
    for index, pieces in enumerate(zip(state.pieces, state.second_moments, strict=True)):
        for piece in pieces:
            if piece is not None and state.sliced and index < len(groups):
                yield from _cut_slices(groups[index], piece, rank, world_size)
            elif piece is not None:
                yield piece


def _cut_slices(shapes: Shapes, piece: StoredTensor, rank: int, world_size: int) -> Iterator[StoredTensor]:
    position = 0
    for shape in shapes.values():
        step = slice_numel(shape, world_size)
        start, stop = position, min(piece.numel, position + max(0, min(step, prod(shape) - rank * step)))
        if start < stop:
            yield piece.take(start, (stop - start,))
        position += step


def _refuse_doubles(files: Sequence[tuple[Path, tuple[int | None, ...], Iterable[StoredTensor]]]) -> None:
    """Refuse two files of equal checksums, each given with its parts, which are read only then."""
    seen: dict[tuple[int | None, ...], tuple[Path, Iterable[StoredTensor]]] = {}
    for path, checksums, parts in files:
        if not checksums or None in checksums:
            continue
        first, first_parts = seen.setdefault(checksums, (path, parts))
        # Another rank has its padding elsewhere: what is constant by the one may not be by the other.
        if first != path and not all(part.is_constant() for part in itertools.chain(first_parts, parts)):
            raise CheckpointError(
                f"{path} and {first} have the same contents",
                expected="each rank's own part",
                got="every checksum equal",
                remedy=DOUBLED,
            )


def _different_steps(files: DeepSpeedFiles, steps: Mapping[str, int | None]) -> CheckpointError:
    return CheckpointError(
        f"the files in {files.folder} are from different steps",
        expected="one step",
        got=list_some(f"step {step} in {name}" for name, step in steps.items()),
        remedy=RECOPY_WHOLE,
    )


def _swapped(path: Path, expected: str, got: str) -> CheckpointError:
    return CheckpointError(f"{path} is the file of another rank", expected=expected, got=got, remedy=SWAPPED)
