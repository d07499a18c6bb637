"""From logits to scores, and what stands where there is no answer."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# One answer of one text: label, score, first character, the one behind the last.
Place = tuple[str, float, int, int]
ABSENT: Place = ("", 0.0, -1, -1)


def softmax(logits: Array) -> Array:
    """Return the probabilities along the last axis."""
    powers: Array = np.exp(logits - logits.max(axis=-1, keepdims=True))
    scale: Array = powers.sum(axis=-1, keepdims=True)
    return powers / scale


def sigmoid(logits: Array) -> Array:
    """Return the probability of each logit on its own."""
    # Below, what is added to 1 overflows: a detector is as sure as that of most places.
    probabilities: Array = 1.0 / (1.0 + np.exp(-np.maximum(logits, -80)))
    return probabilities


FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "none": lambda logits: logits,
}
