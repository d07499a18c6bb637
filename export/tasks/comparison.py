"""How far two sets of outputs are apart, and how far they may be."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import format_apart

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]

# fp32 sums in another order differ in the 7th digit; through a dozen layers that stays below 1e-6 on a vector of
# length 1. A wrong weight, mask or pooling is far above 1e-5. Vectors that are not normalised are compared at length
# 1, and their lengths are held together as well.
EMBEDDING_TOLERANCES = {"max_abs_error": 1e-5, "min_cosine": 0.999999, "max_relative_length_error": 1e-5}

# Logits reach 10 and more, where the same sums differ by some 1e-5. An error of 1e-4 in a logit changes no probability
# by more than 1e-4, and above 1 it is counted in parts of the largest logit.
MAX_LOGIT_ERROR = 1e-4
ANSWER_TOLERANCES = {"max_abs_error": MAX_LOGIT_ERROR}
LOGIT_TOLERANCES = {"max_abs_error": MAX_LOGIT_ERROR, "min_label_agreement": 1.0}

# Tensors of any meaning: counted in parts of the largest value of a row, where whole models of 49 architectures were
# seen to be off by 1e-5 at most.
TENSOR_TOLERANCES = {"max_relative_error": 1e-4, "min_cosine": 0.99999}

# How much larger the perplexity of real texts is, in parts of what it was; `graph/precisions.py` names it as well.
PERPLEXITY_RISE = "max_perplexity_rise"

# The edges between which differences are counted, as powers of ten.
_HISTOGRAM_EDGES = np.arange(-12.0, 3.5, 0.5)


def is_bounded_below(name: str) -> bool:
    """Tell whether an error of that name is 1 where nothing is wrong, as a cosine or a share is; others are 0."""
    return name.startswith("min_")


@dataclass(frozen=True)
class Bound:
    """How far an error may go: in which direction, its name tells, wherever it is recorded.

    Attributes:
        name: Name of the error, such as `max_abs_error` or `min_cosine`.
        value: The worst that is allowed.
    """

    name: str
    value: float

    @property
    def is_below(self) -> bool:
        """Whether errors lie above it."""
        return is_bounded_below(self.name)

    def holds(self, error: float) -> bool:
        """Tell whether an error keeps the bound; NaN does not."""
        return error >= self.value if self.is_below else error <= self.value

    def __str__(self) -> str:
        sign = ">=" if self.is_below else "<="
        return f"{self.name.replace('_', ' ')} {sign} {format_error(self.name, self.value, self.value)}"


def choose_worse(name: str, first: float, second: float) -> float:
    """Return the worse of two errors, or the wider of two bounds; NaN is worse than anything."""
    if math.isnan(first) or math.isnan(second):
        return math.nan
    return min(first, second) if is_bounded_below(name) else max(first, second)


def is_within(errors: Mapping[str, float], tolerances: Mapping[str, float]) -> bool:
    """Tell whether every error keeps its bound."""
    return all(Bound(name, value).holds(errors[name]) for name, value in tolerances.items())


def is_judged(case: Mapping[str, Any], tolerances: Mapping[str, Any]) -> bool:
    """Tell of a case, as reports record it, whether it was judged.

    One that passed beyond a bound was not held to it: no client sends the like, and in a lossy precision it may be far
    off.
    """
    bounds = {
        name: bound
        for name, bound in tolerances.items()
        if isinstance(bound, int | float) and isinstance(case.get(name), int | float)
    }
    return not case.get("passed", True) or is_within(case, bounds)


def format_error(name: str, value: float, bound: float | None = None) -> str:
    """Return an error as people read it: what is nearly 1 with seven digits, what is nearly 0 with two.

    Args:
        name: Name of the error.
        value: The error, or a bound, which then is its own.
        bound: What it is held to; as many digits more are shown as tell the two apart.
    """
    digits = 7 if is_bounded_below(name) else 2
    return f"{value:.{digits}g}" if bound is None else format_apart(value, bound, digits)


def describe_errors(errors: Mapping[str, float], bounds: Mapping[str, float] | None = None) -> str:
    """Return errors in words, such as `max abs error 3e-07`; those that have a bound cannot be taken for it."""
    named = [(name, format_error(name, value, (bounds or {}).get(name))) for name, value in errors.items()]
    return ", ".join(f"{name.replace('_', ' ')} {text}" for name, text in named)


def describe_bounds(tolerances: Mapping[str, float]) -> str:
    """Return in words what errors may be, such as `max abs error <= 1e-05`."""
    return ", ".join(str(Bound(name, value)) for name, value in tolerances.items())


def compare_embeddings(expected: FloatArray, got: FloatArray) -> dict[str, float]:
    """Return the worst errors between two sets of vectors, each scaled to length 1 for the first two.

    Args:
        expected: [rows, hidden], fp32.
        got: The same shape.

    Returns:
        `max_abs_error`, `min_cosine` and `max_relative_length_error`; NaN where `got` holds one.
    """
    if expected.shape != got.shape:
        return {"max_abs_error": math.inf, "min_cosine": -1.0, "max_relative_length_error": math.inf}
    want, have = expected.astype(np.float64), got.astype(np.float64)
    want_length, have_length = np.linalg.norm(want, axis=1), np.linalg.norm(have, axis=1)
    # A vector of length 0 or with a NaN makes every error NaN, which no tolerance admits.
    with np.errstate(all="ignore"):
        want_unit, have_unit = want / want_length[:, None], have / have_length[:, None]
        length_error = np.abs(have_length / want_length - 1.0)
    return {
        "max_abs_error": float(np.abs(want_unit - have_unit).max()),
        "min_cosine": float((want_unit * have_unit).sum(axis=1).min()),
        "max_relative_length_error": float(length_error.max()),
    }


def compare_logits(
    expected: Sequence[FloatArray], got: Sequence[FloatArray], max_error: float = MAX_LOGIT_ERROR
) -> dict[str, float]:
    """Return the worst error between two sets of logits, and in how many choices both prefer the same one.

    Args:
        expected: One array a row, [choices, ..., labels]; the label of a choice is its largest logit.
        got: The same shapes.
        max_error: How far a logit may be off; two labels that are nearer to each other count as one.

    Returns:
        `max_abs_error`, in parts of the largest logit where that is above 1, and `min_label_agreement`, the share of
        choices in which both prefer the same label.
    """
    if [array.shape for array in expected] != [array.shape for array in got]:
        return {"max_abs_error": math.inf, "min_label_agreement": 0.0}
    worst, agreeing, choices = [], 0, 0
    for want, have in zip(expected, got, strict=True):
        want, have = want.reshape(-1, want.shape[-1]), have.reshape(-1, have.shape[-1])
        worst.append(np.abs(want - have).max() / max(1.0, np.abs(want).max()))
        preferred = np.take_along_axis(want, have.argmax(axis=1)[:, None], axis=1)[:, 0]
        agreeing += int((want.max(axis=1) - preferred <= 2 * max_error * max(1.0, np.abs(want).max())).sum())
        choices += len(want)
    # np.max keeps a NaN, which Python's max may lose.
    return {"max_abs_error": float(np.max(worst)), "min_label_agreement": agreeing / choices}


def measure_apart(expected: Sequence[FloatArray], got: Sequence[FloatArray]) -> float:
    """Return the largest difference of two values at the same place; infinite where shapes differ."""
    if [array.shape for array in expected] != [array.shape for array in got]:
        return math.inf
    apart = [float(np.abs(want - have).max()) for want, have in zip(expected, got, strict=True) if want.size]
    return float(np.max([0.0, *apart]))


def compare_rankings(
    expected: Sequence[tuple[FloatArray, npt.NDArray[np.int64]]],
    got: Sequence[tuple[FloatArray, npt.NDArray[np.int64]]],
    max_error: float = MAX_LOGIT_ERROR,
) -> dict[str, float]:
    """Return the worst error between two sets of ranked log-probabilities, and the share of ranks of the same id.

    Args:
        expected: A row's log-probabilities and ids, both [choices, k], best first.
        got: The same shapes.
        max_error: How far a log-probability may be off; ids that are nearer to each other are tied.

    Returns:
        `max_abs_error`, in parts of the largest where that is beyond -1, so that no probability is off by more; and
        `min_label_agreement`, in which ids of equal score may stand in either order.
    """
    worst, agreeing, ranks = [0.0], 0, 0
    for (want, want_ids), (have, have_ids) in zip(expected, got, strict=True):
        if want.shape != have.shape or want_ids.shape != have_ids.shape:
            return {"max_abs_error": math.inf, "min_label_agreement": 0.0}
        if not want.size:
            continue
        worst.append(np.abs(want - have).max() / max(1.0, np.abs(want).max()))
        gaps = np.abs(np.diff(want, axis=1))
        tied = np.zeros(want.shape, dtype=bool)
        tied[:, 1:] |= gaps <= max_error
        tied[:, :-1] |= gaps <= max_error
        # Whether the last one is tied with the one that was cut off cannot be seen.
        tied[:, -1] = True
        agreeing += int(((want_ids == have_ids) | tied).sum())
        ranks += want.size
    return {"max_abs_error": float(np.max(worst)), "min_label_agreement": agreeing / ranks if ranks else 1.0}


def compare_tensors(expected: Sequence[Sequence[Array]], got: Sequence[Sequence[Array]]) -> dict[str, float]:
    """Return the worst errors over all rows and outputs, whatever they mean.

    Args:
        expected: The outputs of each row.
        got: The same shapes and dtypes.

    Returns:
        `max_relative_error`, in parts of the largest value of the same row and output, and `min_cosine`. Integers and
        booleans must be equal: where they are not, the error is infinite.
    """
    columns = [
        ([row[index] for row in expected], [row[index] for row in got])
        for index in range(len(expected[0]) if expected else 0)
    ]
    measured = [measure_outputs(want, have) for want, have in columns]
    # np.max keeps a NaN, which Python's max may lose.
    return {
        "max_relative_error": float(np.max([0.0, *(item["max_relative_error"] for item in measured)])),
        "min_cosine": float(np.min([1.0, *(item["min_cosine"] for item in measured)])),
    }


def measure_outputs(expected: Sequence[Array], got: Sequence[Array]) -> dict[str, float]:
    """Return how far one output is off over all rows.

    Args:
        expected: One array a row.
        got: The same shapes.

    Returns:
        `max_abs_error`; `max_relative_error`, in parts of the row's largest value; `min_cosine` of a row taken as one
        vector, 1 where both are zero.
    """
    if [array.shape for array in expected] != [array.shape for array in got]:
        return {"max_abs_error": math.inf, "max_relative_error": math.inf, "min_cosine": -1.0}
    absolute, relative, cosines = [0.0], [0.0], [1.0]
    for want, have in zip(expected, got, strict=True):
        if not want.size:
            continue
        if want.dtype.kind != "f":
            is_equal = bool(np.array_equal(want, have))
            absolute.append(0.0 if is_equal else float(np.abs(want.astype(np.float64) - have).max()))
            relative.append(0.0 if is_equal else math.inf)
            continue
        error, largest = float(np.abs(want - have).max()), float(np.abs(want).max())
        absolute.append(error)
        relative.append(error / largest if largest else error)
        cosines.append(_cosine(want, have))
    return {
        "max_abs_error": float(np.max(absolute)),
        "max_relative_error": float(np.max(relative)),
        "min_cosine": float(np.min(cosines)),
    }


def _cosine(want: Array, have: Array) -> float:
    first, second = want.reshape(-1).astype(np.float64), have.reshape(-1).astype(np.float64)
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    if lengths == 0:
        return float(np.array_equal(first, second))
    return float(first @ second / lengths)


class Distribution:
    """How the differences of one output are distributed: counted by powers of ten, over any number of rows."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(_HISTOGRAM_EDGES) - 1, dtype=np.int64)
        self._exact = 0

    def add(self, expected: Sequence[Array], got: Sequence[Array]) -> None:
        """Count every finite difference between arrays of the same shapes; others are none that could be counted."""
        for want, have in zip(expected, got, strict=True):
            if want.shape != have.shape or want.dtype.kind != "f":
                continue
            difference = np.abs(want - have)
            positive = difference[(difference > 0) & np.isfinite(difference)]
            self._exact += int((difference == 0).sum())
            edges = _HISTOGRAM_EDGES
            powers = np.clip(np.log10(positive), edges[0], np.nextafter(edges[-1], 0))
            self._counts += np.histogram(powers, edges)[0]

    def to_json(self) -> dict[str, Any]:
        """Return the edges, as powers of ten, the counts between them, and how many values were equal to the bit."""
        return {
            "log10_bins": _HISTOGRAM_EDGES.tolist(),
            "counts": self._counts.tolist(),
            "exact_zeros": self._exact,
        }
