"""The parameter groups of BF16_Optimizer without ZeRO, from the fragments that each rank recorded of its piece.

PipelineEngine uses it for bf16 at stage 0, and lists no shapes then: `param_slice_mappings` (DeepSpeed 0.19.8,
runtime/bf16_optimizer.py and utils/tensor_fragment.py) names what lies where in each rank's piece. At stages 1 and 2
the fragments may be in another order than the pieces; this optimizer has no such option.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import CheckpointError
from ..remedies import RECOPY_WHOLE
from .partitions import map_fragments
from .states import OptimizerStates


def derive_groups(states: Sequence[OptimizerStates]) -> list[dict[str, tuple[int, ...]]]:
    """Return name → shape per parameter group in flat order, each shape 1-D: fragments are flat.

    Args:
        states: Optimizer states of every rank, by rank.

    Raises:
        CheckpointError: None are recorded, or those of the ranks do not follow one another as their pieces do.
    """
    for state in states:
        if state.sliced or state.fragments is None or len(state.fragments) != len(state.pieces):
            raise CheckpointError(
                f"nothing names the parameters in {state.path}",
                expected="param_shapes in the model states, or param_slice_mappings for each group here",
                got="neither",
                remedy="the model states are of another run, or the checkpoint was saved before DeepSpeed 0.6",
            )
    return [_derive_group(states, index) for index in range(len(states[0].pieces))]


def _derive_group(states: Sequence[OptimizerStates], index: int) -> dict[str, tuple[int, ...]]:
    recorded = [state.fragments[index] if state.fragments else {} for state in states]
    numels: dict[str, int] = {}
    for fragments in recorded:
        for name, (_, numel) in sorted(fragments.items(), key=lambda fragment: fragment[1]):
            numels[name] = numels.get(name, 0) + numel
    shapes: dict[str, tuple[int, ...]] = {name: (numel,) for name, numel in numels.items()}
    piece_numel = max(state.pieces[index].numel for state in states)
    for rank, state in enumerate(states):
        expected = map_fragments(shapes, states[0].alignment(index), rank, piece_numel)
        if recorded[rank] != expected:
            raise CheckpointError(
                f"{state.path} records fragments of parameters that do not follow those of the ranks before it",
                expected=f"{len(expected)} fragments, end to end over {len(states)} ranks",
                got=f"{len(recorded[rank])} at other places",
                remedy=f"rank files are missing, swapped or of another run; {RECOPY_WHOLE}",
            )
    return shapes
