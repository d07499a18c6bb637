"""The inputs of a request, as values."""

from typing import Any

import triton_python_backend_utils as pb_utils
from generation_parameters import MAX_TEXT_BYTES, RequestError


def read_input(request: Any, name: str) -> Any:
    """Return the one value of an input; None where it was not sent.

    Raises:
        RequestError: It has none, or several.
    """
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    values = tensor.as_numpy().reshape(-1)
    if len(values) != 1:
        raise RequestError(f"{name} is not one value: expected shape [1], got {len(values)} values")
    return values[0]


def decode(name: str, value: Any) -> str:
    """Return a text.

    Raises:
        RequestError: It is not UTF-8, or too long to be read.
    """
    if len(value) > MAX_TEXT_BYTES:
        raise RequestError(
            f"{name} is too long: expected at most {MAX_TEXT_BYTES} bytes, got {len(value)}; cut the text"
        )
    try:
        text: str = value.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise RequestError(f"{name} is not text: expected UTF-8, got {exc.reason} at byte {exc.start}") from None
    return text
