"""The texts of a request."""

import json
from collections.abc import Mapping
from typing import Any

from request_values import read_values
from tokenization import decode_text
from truncation import TextError

# Bytes of text in one request, unless its config says otherwise in this parameter. A text that is truncated costs
# little, however long it is; one that is read in windows costs in proportion to its length, in every step.
LIMIT_PARAMETER = "modelyard_max_text_bytes"
MAX_TEXT_BYTES = 1 << 20
MAX_WINDOWED_BYTES = 1 << 17


class RequestTexts:
    """The inputs that requests for one model have.

    Args:
        config: Configuration of the model, whose inputs are columns of text.
        has_windows: Whether a long text is read in windows.

    Attributes:
        names: Names of the inputs, in the order in which a row has them.

    Raises:
        ValueError: The parameter that limits them is not a number.
    """

    def __init__(self, config: Mapping[str, Any], *, has_windows: bool) -> None:
        self.names = [tensor["name"] for tensor in config["input"]]
        self._max_bytes = read_limit(config, MAX_WINDOWED_BYTES if has_windows else MAX_TEXT_BYTES)

    def read_rows(self, request: Any) -> list[tuple[str, ...]]:
        """Return the texts of each row: one, or a pair.

        Raises:
            TextError: One cannot be read, a row lacks its partner, or there is more text than one request may hold.
        """
        values = {name: read_values(request, name, TextError) for name in self.names}
        sizes = [len(value) for column in values.values() for value in column]
        if sizes == [0]:
            check_body(request.parameters())
        size = sum(sizes)
        if size > self._max_bytes:
            raise TextError(
                f"there is too much text in the request: expected at most {self._max_bytes} bytes in all its rows, got "
                f"{size}; cut the texts or send fewer at once"
            )
        columns = [
            [decode_text(value, row, name) for row, value in enumerate(column)] for name, column in values.items()
        ]
        if len({len(column) for column in columns}) > 1:
            counts = ", ".join(f"{len(column)} in {name}" for name, column in zip(self.names, columns, strict=True))
            raise TextError(f"the inputs have different batches: expected a row of each for every pair, got {counts}")
        return list(zip(*columns, strict=True))


def check_body(parameters: str) -> None:
    """Refuse an empty text that may be what tritonserver made of a body that it did not get.

    tritonserver 2.51 takes a body without a JSON header for the value of the model's one input. It goes on with none
    where there is none, and where what is said to be packed cannot be unpacked.

    Args:
        parameters: Those of the request as JSON, with the HTTP headers that the launcher has tritonserver hand on.

    Raises:
        TextError: There was no body, or it was packed or in chunks, and whether anything was in it is unknown.
    """
    headers = {name.lower(): str(value).strip() for name, value in json.loads(parameters or "{}").items()}
    packings = {name: headers.get(name, "").lower() for name in ("content-encoding", "transfer-encoding")}
    packed = {name: value for name, value in packings.items() if value not in ("", "identity")}
    # None came over gRPC, which has no such bodies.
    if headers and "transfer-encoding" not in packed and not headers.get("content-length", "").strip("0"):
        raise TextError("the request has no body: expected JSON with `inputs`, got 0 bytes; send the body as well")
    for name, value in packed.items():
        raise TextError(
            f"there is no text in what was unpacked: expected a body that is packed as its {name.title()} says, "
            f"got nothing out of {value!r}; pack it so, or send it as it is, as an empty text has to be"
        )


def read_limit(config: Mapping[str, Any], usual: int) -> int:
    """Return how many bytes of text one request may hold.

    Args:
        config: Configuration of the model.
        usual: What holds where the configuration does not say.

    Raises:
        ValueError: It says something else than a number of at least 1.
    """
    text = config.get("parameters", {}).get(LIMIT_PARAMETER, {}).get("string_value", str(usual))
    if not text.isdecimal() or not int(text):
        raise ValueError(f"the parameter {LIMIT_PARAMETER} is wrong: expected a number of bytes, got {text!r}")
    return int(text)
