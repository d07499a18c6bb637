"""Recorded answers: what a `golden.json` asks for."""

import base64
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import GoldenError
from ..locations import name_command

# Above the largest number of fp32.
_BEYOND_FP32 = 1e39

# KServe's datatypes that a recorded tensor may have, and whether a value of its `data` is of one.
_DATATYPES: Mapping[str, Callable[[object], bool]] = {
    "BYTES": lambda value: isinstance(value, str),
    "BOOL": lambda value: isinstance(value, int),
    **{f"FP{bits}": lambda value: _is_number(value) for bits in (16, 32, 64)},
    **{
        f"{sign}INT{bits}": lambda value: isinstance(value, int) and not isinstance(value, bool)
        for sign in ("", "U")
        for bits in (8, 16, 32, 64)
    },
}

_EXPECTED_GOLDEN = "expected samples of whole tensors and tolerances, got something else"


class DamagedGoldenError(ValueError):
    """A `golden.json` says nothing that could be asked."""


def read_golden(path: Path) -> dict[str, Any]:
    """Return what a `golden.json` holds, which docs/contracts.md describes.

    Raises:
        GoldenError: An older modelyard wrote it.
        DamagedGoldenError: It holds no such thing.
    """
    if not path.is_file():
        raise DamagedGoldenError(f"{path} is damaged: it is no regular file")
    if not os.access(path, os.R_OK):
        raise DamagedGoldenError(f"{path} cannot be read: Permission denied")
    try:
        golden: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        samples, bounds = golden["samples"], golden["tolerances"]
        is_old = not all({"inputs", "outputs"} <= sample.keys() for sample in samples)
        is_whole = is_old or (bool(samples) and all(map(_is_whole_sample, samples)) and _are_bounds(bounds))
    except ValueError as exc:
        raise DamagedGoldenError(f"{path} is damaged: expected JSON, got {exc}") from exc
    # A file that was written over may hold anything.
    except (TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise DamagedGoldenError(f"{path} is damaged: {_EXPECTED_GOLDEN}") from exc
    if is_old:
        raise GoldenError(
            f"{path} was written by an older modelyard",
            expected="samples of inputs and outputs",
            got=", ".join(golden["samples"][0]),
            remedy=f"export the model again with `{name_command('run')}`",
        )
    if not is_whole:
        raise DamagedGoldenError(f"{path} is damaged: {_EXPECTED_GOLDEN}")
    return golden


def _is_whole_sample(sample: Mapping[str, Any]) -> bool:
    """Tell whether a recorded request and its answer can be asked and compared."""
    return bool(sample["outputs"]) and all(map(_is_whole_tensor, [*sample["inputs"], *sample["outputs"]]))


def _is_whole_tensor(tensor: Mapping[str, Any]) -> bool:
    """Tell whether a recorded tensor has as many values as its shape says, each of its datatype.

    tritonserver makes room for a shape before it looks at the values, and ends where it cannot.
    """
    shape, data, is_one = tensor["shape"], tensor["data"], _DATATYPES[tensor["datatype"]]
    return (
        isinstance(tensor["name"], str)
        and isinstance(shape, list)
        and all(type(size) is int and size >= 0 for size in shape)
        and isinstance(data, list)
        and math.prod(shape) == len(data)
        and all(map(is_one, data))
        and (tensor.get("parameters", {}) == {} or _is_base64(tensor))
    )


def _is_base64(tensor: Mapping[str, Any]) -> bool:
    """Tell whether a tensor says that its values are in base64, and they are."""
    if tensor["parameters"] != {"encoding": "base64"}:
        return False
    for text in tensor["data"]:
        base64.b64decode(text, validate=True)
    return True


def _are_bounds(tolerances: Mapping[str, Any]) -> bool:
    given = [tolerances[key] for key in ("max_abs_error", "max_relative_error") if key in tolerances]
    return bool(given) and all(_is_number(value) and value >= 0 for value in given)


def _is_number(value: object) -> bool:
    """Tell whether `value` is a number that fp32 has; NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _BEYOND_FP32
