"""Triton Python-based backend `python_preprocess`: what clients send to the tensors that its config names.

A model of this backend has no code of its own. What lies in its version folder says what it takes: `tokenizer.json`
texts, `picture.json` encoded pictures, `sound.json` encoded sounds.
"""

# tritonserver's stub looks into it at the first answer, which would wait 20 ms for it there.
import asyncio  # noqa: F401
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from steps import count_threads, open_step


class TritonPythonModel:
    """One instance of one model; Triton calls `initialize` once, then `execute` with every batch."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load what lies in the folder of this version.

        Args:
            args: Triton's arguments, with the path of the model and its configuration as JSON.

        Raises:
            ValueError: The tokenizer, the recipe or a parameter is not what it must be.
        """
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"], args["model_version"])
        # Read once, by the first batch of texts that is encoded.
        os.environ.setdefault("RAYON_NUM_THREADS", str(count_threads(config)))
        # Token ids of shape [windows, seq_len] a row: a text too long for one window is read in several.
        has_windows = any(len(tensor["dims"]) == 2 for tensor in config["output"] if tensor["name"] == "input_ids")
        names = [output["name"] for output in config["output"]]
        self._step = open_step(folder, config, names, {"has_windows": has_windows})

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request on its own, having made the rows of all of them at once.

        Args:
            requests: The requests that the dynamic batcher joined.

        Returns:
            A response for each, in their order: the tensors, or the error of that request alone.
        """
        step = self._step
        rows: list[Any] = []
        taken: list[slice | Exception] = []
        for request in requests:
            try:
                read = step.read_rows(request)
            except step.refusal as exc:
                taken.append(exc)
                continue
            taken.append(slice(len(rows), len(rows) + len(read)))
            rows.extend(read)
        made = step.encode(rows)
        return [self._respond(made[item]) if isinstance(item, slice) else _refuse(item) for item in taken]

    def _respond(self, made: Sequence[Any]) -> Any:
        error = next((row for row in made if isinstance(row, self._step.refusal)), None)
        if error:
            return _refuse(error)
        try:
            tensors = self._step.stack(made)
        except self._step.refusal as exc:
            return _refuse(exc)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])


def _refuse(error: Exception) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
