"""Triton Python-based backend `python_preprocess`: what clients send to the tensors that its config names.

A model of this backend has no code of its own. What lies in its version folder says what it takes: `tokenizer.json`
texts, `picture.json` encoded pictures.
"""

# tritonserver's stub looks into it at the first answer, which would wait 20 ms for it there.
import asyncio  # noqa: F401
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from request_values import read_values


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
        file = next(name for name in STEPS if (folder / name).is_file())
        self._step = STEPS[file](folder / file, config)

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
        tensors = self._step.stack(made)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])


class TextStep:
    """TEXT, or TEXT and TEXT_PAIR, to token ids."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        # A step imports what it needs: one of pictures holds no tokenizers in memory.
        # Read once, by the first batch that is encoded.
        os.environ.setdefault("RAYON_NUM_THREADS", str(count_threads(config)))
        from texts import RequestTexts
        from tokenization import TextError, TextTokenizer, read_lengths

        self.refusal = TextError
        names = [output["name"] for output in config["output"]]
        # Token ids of shape [windows, seq_len] a row: a text too long for one window is read in several.
        has_windows = any(len(tensor["dims"]) == 2 for tensor in config["output"] if tensor["name"] == "input_ids")
        tokenizer = TextTokenizer(path, names, has_windows=has_windows, lengths=read_lengths(config))
        self.encode, self.stack = tokenizer.encode, tokenizer.stack
        self.read_rows = RequestTexts(config, has_windows=has_windows).read_rows


class PictureStep:
    """IMAGE, an encoded file, to pixels."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        # As above.
        from pictures import PictureError, PictureReader, SentPicture

        self.refusal = PictureError
        self._sent = SentPicture
        (self._input,) = (tensor["name"] for tensor in config["input"])
        names = [output["name"] for output in config["output"]]
        reader = PictureReader(path, names, max_threads=count_threads(config))
        self.encode, self.stack = reader.encode, reader.stack

    def read_rows(self, request: Any) -> list[Any]:
        """Return the pictures of a request.

        Raises:
            PictureError: There is none.
        """
        values = read_values(request, self._input, self.refusal)
        return [self._sent(bytes(value), self._input, row) for row, value in enumerate(values)]


def count_threads(config: Mapping[str, Any]) -> int:
    """Return an instance's share of the cores: one that takes all of them holds up the others."""
    instances: int = sum(group["count"] for group in config["instance_group"])
    return max(1, len(os.sched_getaffinity(0)) // instances)


# What lies in the version folder → what is made of it.
STEPS: Mapping[str, Any] = {"tokenizer.json": TextStep, "picture.json": PictureStep}


def _refuse(error: Exception) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
