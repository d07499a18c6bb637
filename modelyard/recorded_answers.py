"""How far an answer is from a recorded one: what an export holds its file to, and a server that starts itself."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def measure_answer(
    expected: Sequence[Mapping[str, Any]], got: Sequence[Mapping[str, Any]], tolerances: Mapping[str, float]
) -> float:
    """Return the largest difference between recorded outputs and those of a server, as the tolerances count it.

    Args:
        expected: KServe v2 tensors.
        got: The same, in any order.
        tolerances: Of the `golden.json`.

    Raises:
        ValueError: One is missing, has another shape, or is too far off.
    """
    given = {tensor["name"]: tensor for tensor in got}
    # Tensors of any meaning are compared in parts of their largest value.
    is_relative = "max_relative_error" in tolerances
    bound = tolerances["max_relative_error" if is_relative else "max_abs_error"]
    has_scores = any(tensor["datatype"].startswith("FP") for tensor in expected)
    worst = 0.0
    for tensor in expected:
        name = tensor["name"]
        answer = given.get(name, {"shape": "none", "data": []})
        if answer["shape"] != tensor["shape"]:
            raise ValueError(f"expected {name} of shape {tensor['shape']}, got {answer['shape']}")
        want, have = tensor["data"], answer["data"]
        if not is_relative and not tensor["datatype"].startswith("FP"):
            # Labels and places go with the scores, and change theirs where two scores are as good as equal.
            if not has_scores and have != want:
                raise ValueError(f"expected the verified {name}, got another")
            continue
        if is_relative:
            largest = max(map(abs, want), default=0.0) or 1.0
            want, have = [value / largest for value in want], [value / largest for value in have]
        # Vectors have a direction; scores are compared as they are.
        elif "min_cosine" in tolerances:
            want, have = _normalize(want), _normalize(have)
        errors = [abs(a - b) for a, b in zip(have, want, strict=True)]
        # Written so that NaN fails as well, which `max` alone may lose.
        wrong = [error for error in errors if not error <= bound]
        if wrong:
            raise ValueError(f"expected the verified {name} within {bound}, got {max(wrong):.1e}")
        worst = max(worst, *errors, 0.0)
    return worst


def _normalize(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in vector)) or math.nan
    return [value / length for value in vector]
