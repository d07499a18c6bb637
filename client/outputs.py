"""What a model answers to one request, held against what it says that it makes."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from .errors import GarbledError
from .faults import UnreadableError
from .model import Model

# Types whose values JSON has as numbers.
_NUMBERS = ("FP16", "FP32", "FP64", *(f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)))

Arrays = dict[str, npt.NDArray[Any]]


class Answered(NamedTuple):
    """What a model answers to one request.

    Attributes:
        version: Of the model, an ensemble's own; empty where a server does not say it.
        arrays: Output name → values.
    """

    version: str
    arrays: Arrays


def read_outputs(model: Model, result: Any, names: Iterable[str], *, rows: int) -> Arrays:
    """Return output name → values, strings as bytes however they came.

    Args:
        model: Whose answer it is.
        result: The answer, as tritonclient has it.
        names: Of the outputs that were asked for.
        rows: As many as were asked, where the model has a batch.

    Raises:
        GarbledError: An output is missing, has other rows, or is of another type or shape than the model makes.
        UnreadableError: It is the answer of another model, or an error, or a value is none of its type.
    """
    _check_said(model, result.get_response())
    arrays = {name: _read(result, name) for name in names}
    is_whole = not model.has_batch or all(
        values is not None and values.shape[:1] == (rows,) for values in arrays.values()
    )
    whole = {name: values for name, values in arrays.items() if values is not None}
    if not is_whole or len(whole) < len(arrays):
        shape = f" [{rows}, ...]" if model.has_batch else ""
        raise GarbledError(
            f"the answer of {model.name} is not whole",
            expected=", ".join(f"{name}{shape}" for name in arrays),
            got=", ".join(
                f"{name} {'missing' if values is None else list(values.shape)}" for name, values in arrays.items()
            ),
            remedy="mend the model, or ask for the outputs that it has",
        )
    for tensor in model.makes:
        values = whole.get(tensor.name)
        if values is not None and not tensor.is_of(values):
            raise GarbledError(
                f"{tensor.name} of {model.name} is not what the model says that it makes",
                expected=f"{tensor.datatype} {list(tensor.shape)}",
                got=f"{np_to_triton_dtype(values.dtype)} {list(values.shape)}",
                remedy="mend the model, or its config.pbtxt",
            )
    return whole


def read_version(result: Any) -> str:
    """Return the version of the model that answered; empty where the answer does not say it."""
    answer = result.get_response()
    # Over gRPC a field that is not said is empty.
    return str(answer.get("model_version") or "") if isinstance(answer, dict) else str(answer.model_version)


def _check_said(model: Model, answer: Any) -> None:
    """Refuse what tritonclient takes, and turns into numbers that the model has not said.

    Raises:
        UnreadableError: It is the answer of another model, or an error, or a value inside of JSON is no such number.
    """
    if not isinstance(answer, dict):
        # Over gRPC there are types, and errors are none of answers.
        said, outputs = answer.model_name, []
        shapes = {output.name: list(output.shape) for output in answer.outputs}
    else:
        said, outputs = answer.get("model_name", model.name), answer.get("outputs", [])
        shapes = {output["name"]: output["shape"] for output in outputs}
        if "error" in answer:
            raise UnreadableError(f"an error, {answer['error']!r}, beside the outputs")
    if said != model.name:
        raise UnreadableError(f"the answer of {said!r}")
    for name, shape in shapes.items():
        # NumPy finds a size for -1, and takes any other for it.
        if any(size < 0 for size in shape):
            raise UnreadableError(f"{name} of the shape {shape}")
    for output in outputs:
        if output["datatype"] in _NUMBERS and "data" in output:
            _check_numbers(output)


def _check_numbers(output: Mapping[str, Any]) -> None:
    dtype = np.dtype(triton_to_np_dtype(output["datatype"]))
    largest = np.finfo(dtype).max if dtype.kind == "f" else np.iinfo(dtype).max
    kinds = (int, float) if dtype.kind == "f" else (int,)
    for value in _flatten(output["data"]):
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_number or largest < abs(value) < math.inf:
            raise UnreadableError(f"{output['name']} holds {value!r}, which is no {output['datatype']}")


def _flatten(values: Any) -> Iterable[Any]:
    """Yield what lists of lists hold, as KServe lets a tensor be written."""
    for value in values:
        if isinstance(value, list):
            yield from _flatten(value)
        else:
            yield value


def _read(result: Any, name: str) -> npt.NDArray[Any] | None:
    """Return the values of an output; None where there is none."""
    values: npt.NDArray[Any] | None = result.as_numpy(name)
    if values is None or values.dtype != np.object_:
        return values
    texts = [value.encode() if isinstance(value, str) else value for value in values.flat]
    for value in texts:
        if not isinstance(value, bytes):
            raise UnreadableError(f"{name} holds {value!r}, which is no string")
    read = np.empty(len(texts), dtype=np.object_)
    read[:] = texts
    return read.reshape(values.shape)
