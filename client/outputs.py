"""What a model answers to one request, held against what it says that it makes."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.utils import np_to_triton_dtype

from .errors import GarbledError
from .model import Model

Arrays = dict[str, npt.NDArray[Any]]


def read_outputs(model: Model, result: Any, names: Iterable[str], *, rows: int) -> Arrays:
    """Return output name → values, strings as bytes however they came.

    Args:
        model: Whose answer it is.
        result: The answer, as tritonclient has it.
        names: Of the outputs that were asked for.
        rows: As many as were asked, where the model has a batch.

    Raises:
        GarbledError: An output is missing, has other rows, or is of another type or shape than the model makes.
        TypeError: A string is none.
    """
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


def _read(result: Any, name: str) -> npt.NDArray[Any] | None:
    """Return the values of an output; None where there is none."""
    values: npt.NDArray[Any] | None = result.as_numpy(name)
    if values is None or values.dtype != np.object_:
        return values
    texts = [value.encode() if isinstance(value, str) else value for value in values.flat]
    for value in texts:
        if not isinstance(value, bytes):
            raise TypeError(f"{name} holds {value!r}, which is no string")
    read = np.empty(len(texts), dtype=np.object_)
    read[:] = texts
    return read.reshape(values.shape)
