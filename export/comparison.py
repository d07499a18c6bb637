"""How far two sets of outputs are apart, and how far they may be."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

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


def is_within(errors: Mapping[str, float], tolerances: Mapping[str, float]) -> bool:
    """Tell whether every error keeps its bound: `min_` from above, the others from below. NaN keeps none."""
    return all(
        errors[key] >= bound if key.startswith("min_") else errors[key] <= bound for key, bound in tolerances.items()
    )


def describe_errors(errors: Mapping[str, float], *, bounds: bool = False) -> str:
    """Return errors in words, or with `bounds` what they may be, such as `max abs error <= 1e-05`."""
    parts = []
    for key, value in errors.items():
        figure = f"{value:.7g}" if key.startswith("min_") else f"{value:.2g}"
        sign = (" >= " if key.startswith("min_") else " <= ") if bounds else " "
        parts.append(f"{key.replace('_', ' ')}{sign}{figure}")
    return ", ".join(parts)


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


def compare_logits(expected: Sequence[FloatArray], got: Sequence[FloatArray]) -> dict[str, float]:
    """Return the worst error between two sets of logits, and in how many choices both prefer the same one.

    Args:
        expected: One array a row, [choices, ..., labels]; the label of a choice is its largest logit.
        got: The same shapes.

    Returns:
        `max_abs_error`, in parts of the largest logit where that is above 1, and `min_label_agreement`, the share of
        choices, in which two labels that are nearer to each other than the tolerance count as one.
    """
    if [array.shape for array in expected] != [array.shape for array in got]:
        return {"max_abs_error": math.inf, "min_label_agreement": 0.0}
    worst, agreeing, choices = [], 0, 0
    for want, have in zip(expected, got, strict=True):
        want, have = want.reshape(-1, want.shape[-1]), have.reshape(-1, have.shape[-1])
        worst.append(np.abs(want - have).max() / max(1.0, np.abs(want).max()))
        preferred = np.take_along_axis(want, have.argmax(axis=1)[:, None], axis=1)[:, 0]
        agreeing += int((want.max(axis=1) - preferred <= 2 * MAX_LOGIT_ERROR * max(1.0, np.abs(want).max())).sum())
        choices += len(want)
    # np.max keeps a NaN, which Python's max may lose.
    return {"max_abs_error": float(np.max(worst)), "min_label_agreement": agreeing / choices}


def compare_rankings(
    expected: Sequence[tuple[FloatArray, npt.NDArray[np.int64]]],
    got: Sequence[tuple[FloatArray, npt.NDArray[np.int64]]],
) -> dict[str, float]:
    """Return the worst error between two sets of ranked log-probabilities, and the share of ranks of the same id.

    Args:
        expected: A row's log-probabilities and ids, both [choices, k], best first.
        got: The same shapes.

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
        tied[:, 1:] |= gaps <= MAX_LOGIT_ERROR
        tied[:, :-1] |= gaps <= MAX_LOGIT_ERROR
        # Whether the last one is tied with the one that was cut off cannot be seen.
        tied[:, -1] = True
        agreeing += int(((want_ids == have_ids) | tied).sum())
        ranks += want.size
    return {"max_abs_error": float(np.max(worst)), "min_label_agreement": agreeing / ranks if ranks else 1.0}
