"""What a server is asked for when it starts: recorded answers that the verified file itself was seen to give."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import EngineError, ModelError, RuntimeFailure, VerificationError
from ..tasks.base import RunGraph, Task
from ..tasks.comparison import Bound, choose_worse, is_bounded_below
from ..tasks.golden import is_float, list_others, measure_sample
from .tolerances import Tolerances

# How much further off than in any case a server may be, whose batches are others.
_MARGIN = 1.5

# Of answers that are more than scores, in parts of the largest value: in a small picture another box is near as well.
_WIDEST_PART = 0.05

# What the summary says where the file answers nothing as the checkpoint does.
_OWN_ANSWERS = (
    "recorded for the check of a server are the file's own answers, which another CPU may miss: it gives none of the "
    "checkpoint's"
)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """How far a file was off in the cases that were judged.

    Attributes:
        answers: Error → the worst, in the unit of the answers; empty where it cannot be told from the graph's outputs.
        room: How many times further off than that its outputs may be.
    """

    answers: Mapping[str, float] = field(default_factory=dict)
    room: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a `golden.json` is to hold.

    Attributes:
        golden: Its content.
        note: What it leaves out, or holds in place of the checkpoint's answers, and why; empty where it does not.
    """

    golden: Mapping[str, Any]
    note: str = ""

    def asked_alone(self) -> "Recording":
        """Return the same of a file that answers otherwise in a batch."""
        return replace(self, golden={**self.golden, "alone": True})


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """The checkpoint's answer to one request, and how far the file's own is from it.

    Attributes:
        sample: As it is recorded.
        error: In the unit of the answers.
        is_same: Whether labels, ids and counts are the same.
        left_out: Outputs that it does without.
    """

    sample: Mapping[str, Any]
    error: float
    is_same: bool
    left_out: tuple[str, ...] = ()


def record_answers(task: Task, judged: Tolerances, seen: Seen, run: RunGraph) -> Recording:
    """Return answers with tolerances that a server which runs these very files keeps: the file is asked here as well.

    They are the checkpoint's own. In fp32 the file must give them. Another precision, or a bound that was accepted,
    moves scores, and with them what hangs on which of two is the larger: answers of which that is seen are left out,
    and the others may be missed by as much as they are here, and somewhat more. What a GPU computes in another
    precision than the proof may be off by all that is allowed: all-MiniLM-L6-v2 in fp16 by 9e-5 on a CPU, by 3.8e-4 on
    an H200. Where the file gives none of them, its own are recorded.

    Args:
        task: The source of truth.
        judged: What the file was held to.
        seen: How far it was off.
        run: Runs the file.

    Raises:
        VerificationError: It fails on what is recorded, or in fp32 answers otherwise.
    """
    golden = task.build_golden()
    # What an engine writes is compared elsewhere, text by text.
    if golden.get("decoupled"):
        return Recording(golden=golden)
    own = _ask_file(task, run)
    answers = {json.dumps(sample["inputs"]): sample["outputs"] for sample in own}
    pairs = [
        _compare(sample, answers[key], golden["tolerances"])
        for sample in golden["samples"]
        if (key := json.dumps(sample["inputs"])) in answers
    ]
    is_exact = _is_exact(task, judged)
    if not is_exact:
        pairs = [pair for pair in pairs if math.isfinite(pair.error) and pair.error <= _limit(task, pair)]
        pairs = [pair for pair in pairs if pair.is_same] or pairs
    moved = 0.0 if is_exact else max((pair.error for pair in pairs), default=0.0)
    bounds = _widen(task, judged, seen, golden["tolerances"], moved)
    kept = [pair for pair in pairs if pair.error <= _find_bound(bounds)]
    if kept:
        samples = [pair.sample for pair in kept]
        why = "which the file misses" if is_exact else "which this precision moves"
        note = _describe_left_out(kept, len(golden["samples"]), why)
        return Recording(golden={**golden, "tolerances": bounds, "samples": samples}, note=note)
    if is_exact or not own:
        raise VerificationError(
            "the graph gives none of the answers that a server is asked for when it starts",
            expected=f"one of the checkpoint's within {_find_bound(bounds):g}",
            got=f"{min((pair.error for pair in pairs), default=math.inf):.1e} at best",
            remedy="export trained weights, whose answers do not hang on the last digits"
            + ("" if is_exact else ", or pass --precision fp32"),
        )
    return Recording(golden={**golden, "tolerances": bounds, "samples": own}, note=_OWN_ANSWERS)


def _ask_file(task: Task, run: RunGraph) -> Sequence[Mapping[str, Any]]:
    """Return what would be recorded if the file were the checkpoint; nothing where all of it hangs on last digits.

    Raises:
        VerificationError: The file fails.
    """
    try:
        with task.answered_by(run):
            samples: Sequence[Mapping[str, Any]] = task.build_golden()["samples"]
    except ModelError:
        return []
    except (RuntimeFailure, EngineError) as exc:
        raise VerificationError(
            "the graph fails on what a server is asked for when it starts",
            expected="an answer",
            got=str(exc).rstrip("."),
            remedy="where a shape is named, the model's own code probably fixed a dimension",
        ) from exc
    return samples


def _is_exact(task: Task, judged: Tolerances) -> bool:
    """Tell whether a file was held to what fp32 is held to, or to less."""
    exact = task.tolerances
    return exact.keys() == judged.bounds.keys() and all(
        Bound(name, value).holds(judged.bounds[name]) for name, value in exact.items()
    )


def _compare(sample: Mapping[str, Any], own: Sequence[Mapping[str, Any]], usual: Mapping[str, float]) -> _Pair:
    wanted, had = list_others(sample["outputs"]), list_others(own)
    differing = [name for name, values in wanted.items() if values != had[name]]
    if not differing or "max_relative_error" not in usual:
        return _Pair(sample=sample, error=measure_sample(sample["outputs"], own, usual), is_same=not differing)
    # Of tensors of any meaning each is compared. Integers that follow from scores, such as the place of the largest,
    # have no distance, and nothing is between all of it and none.
    outputs = [tensor for tensor in sample["outputs"] if tensor["name"] not in differing]
    error = measure_sample(outputs, own, usual) if outputs else math.inf
    return _Pair(sample={**sample, "outputs": outputs}, error=error, is_same=False, left_out=tuple(differing))


def _limit(task: Task, pair: _Pair) -> float:
    """Return how far an answer may be moved and still be the same one."""
    if math.isinf(task.widest_answer):
        return math.inf
    values = [abs(value) for tensor in pair.sample["outputs"] if is_float(tensor) for value in tensor["data"]]
    return min(task.widest_answer, _WIDEST_PART * max(values, default=0.0))


def _find_bound(bounds: Mapping[str, float]) -> float:
    return bounds["max_relative_error" if "max_relative_error" in bounds else "max_abs_error"]


def _widen(task: Task, judged: Tolerances, seen: Seen, usual: Mapping[str, float], moved: float) -> Mapping[str, float]:
    """Return how far recorded answers may be missed.

    Args:
        task: The source of truth.
        judged: What the file was held to.
        seen: How far it was off in the cases.
        usual: What holds in fp32.
        moved: How far the recorded answers were off.
    """

    def widen(key: str, least: float) -> float:
        bound = judged.bounds.get(key, least)
        if is_bounded_below(key):
            return choose_worse(key, least, bound)
        # These are counted as the graph's outputs are; other answers have a unit of their own, such as a pixel.
        has_unit = key in seen.answers
        wide = max(least, _MARGIN * max(seen.answers.get(key, 0.0), moved))
        if judged.is_for_gpus:
            wide = max(wide, bound if has_unit else seen.room * moved)
        return wide if has_unit else min(wide, max(least, task.widest_answer))

    return {key: widen(key, least) for key, least in usual.items()}


def _describe_left_out(kept: Sequence[_Pair], whole: int, why: str) -> str:
    names = sorted({name for pair in kept for name in pair.left_out})
    parts = [f"{whole - len(kept)} of {whole} answers"] if len(kept) < whole else []
    parts += [f"the values of {', '.join(names)}"] if names else []
    if not parts:
        return ""
    return f"recorded for the check of a server are not {' and '.join(parts)}, {why}"
