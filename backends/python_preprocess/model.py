"""Triton Python-based backend `python_preprocess`: TEXT, or TEXT and TEXT_PAIR, to the tensors that its config names.

A model of this backend has no code of its own: its version folder holds `tokenizer.json`, its config the outputs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from tokenization import TextError, TextTokenizer, decode_text

# Bytes of text in one request, unless its config says otherwise in this parameter. A text that is truncated costs
# little, however long it is; one that is read in windows costs in proportion to its length, in every step.
LIMIT_PARAMETER = "modelyard_max_text_bytes"
MAX_TEXT_BYTES = 1 << 20
MAX_WINDOWED_BYTES = 1 << 17


class TritonPythonModel:
    """One instance of one model; Triton calls `initialize` once, then `execute` with every batch."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer of this version.

        Args:
            args: Triton's arguments, with the path of the model and its configuration as JSON.

        Raises:
            ValueError: The tokenizer or a parameter is not what it must be.
        """
        config = json.loads(args["model_config"])
        version_folder = Path(args["model_repository"], args["model_version"])
        names = [output["name"] for output in config["output"]]
        self._inputs = [tensor["name"] for tensor in config["input"]]
        # Token ids of shape [windows, seq_len] a row: a text too long for one window is read in several.
        has_windows = any(len(tensor["dims"]) == 2 for tensor in config["output"] if tensor["name"] == "input_ids")
        self._tokenizer = TextTokenizer(version_folder / "tokenizer.json", names, has_windows=has_windows)
        self._max_bytes = read_limit(config, MAX_WINDOWED_BYTES if has_windows else MAX_TEXT_BYTES)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request on its own, having tokenised the texts of all of them at once.

        Args:
            requests: The requests that the dynamic batcher joined.

        Returns:
            A response for each, in their order: the tensors, or the error of that request alone.
        """
        texts: list[tuple[str, ...]] = []
        taken: list[slice | TextError] = []
        for request in requests:
            try:
                rows = self._read_rows(request)
            except TextError as exc:
                taken.append(exc)
                continue
            taken.append(slice(len(texts), len(texts) + len(rows)))
            texts.extend(rows)
        encodings = self._tokenizer.encode(texts)
        return [self._respond(encodings[rows]) if isinstance(rows, slice) else _refuse(rows) for rows in taken]

    def _read_rows(self, request: Any) -> list[tuple[str, ...]]:
        """Return the texts of each row: one, or a pair.

        Raises:
            TextError: One cannot be read, a row lacks its partner, or there is more text than one request may hold.
        """
        values = {name: read_values(request, name) for name in self._inputs}
        size = sum(len(value) for column in values.values() for value in column)
        if size > self._max_bytes:
            raise TextError(
                f"there is too much text in the request: expected at most {self._max_bytes} bytes in all its rows, got "
                f"{size}; cut the texts or send fewer at once"
            )
        columns = [
            [decode_text(value, row, name) for row, value in enumerate(column)] for name, column in values.items()
        ]
        if len({len(column) for column in columns}) > 1:
            counts = ", ".join(f"{len(column)} in {name}" for name, column in zip(self._inputs, columns, strict=True))
            raise TextError(f"the inputs have different batches: expected a row of each for every pair, got {counts}")
        return list(zip(*columns, strict=True))

    def _respond(self, encodings: list[Any]) -> Any:
        error = next((encoding for encoding in encodings if isinstance(encoding, TextError)), None)
        if error:
            return _refuse(error)
        tensors = self._tokenizer.stack(encodings)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])


def read_values(request: Any, name: str) -> Any:
    """Return the bytes of one input of a request, one a row.

    Raises:
        TextError: There is none.
    """
    values = pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)
    if not len(values):
        raise TextError(f"{name} has no rows: expected shape [batch, 1] with a batch of at least 1")
    return values


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


def _refuse(error: TextError) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
