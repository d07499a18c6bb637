"""Triton Python-based backend `python_preprocess`: TEXT, or TEXT and TEXT_PAIR, to the tensors that its config names.

A model of this backend has no code of its own: its version folder holds `tokenizer.json`, its config the outputs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from texts import RequestTexts
from tokenization import TextError, TextTokenizer


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
        # Token ids of shape [windows, seq_len] a row: a text too long for one window is read in several.
        has_windows = any(len(tensor["dims"]) == 2 for tensor in config["output"] if tensor["name"] == "input_ids")
        self._tokenizer = TextTokenizer(version_folder / "tokenizer.json", names, has_windows=has_windows)
        self._texts = RequestTexts(config, has_windows=has_windows)

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
                rows = self._texts.read_rows(request)
            except TextError as exc:
                taken.append(exc)
                continue
            taken.append(slice(len(texts), len(texts) + len(rows)))
            texts.extend(rows)
        encodings = self._tokenizer.encode(texts)
        return [self._respond(encodings[rows]) if isinstance(rows, slice) else _refuse(rows) for rows in taken]

    def _respond(self, encodings: list[Any]) -> Any:
        error = next((encoding for encoding in encodings if isinstance(encoding, TextError)), None)
        if error:
            return _refuse(error)
        tensors = self._tokenizer.stack(encodings)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])


def _refuse(error: TextError) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
