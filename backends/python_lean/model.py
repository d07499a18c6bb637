"""Triton Python-based backend `python_lean`: texts, encoded pictures or sounds to answers, in one process.

It does what the steps of an ensemble do, with their own code: no tensor passes between processes, and no row is padded.
Each instance answers one request at a time, on one thread if it is not told otherwise; the queue in front of them is
tritonserver's, and so are its bound, its timeouts and what becomes of a request that nobody waits for any more.

`execute` returns with the answers. Where it returns at once and sends them later (`get_response_sender`), tritonserver
2.51 never ends the requests of a process that died, and counts refusals as answers.
"""

# tritonserver's stub looks into it at the first answer, which would wait 20 ms for it there.
import asyncio  # noqa: F401
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

# How many threads an instance computes with.
_THREADS = "modelyard_threads"
# More than the cores of any machine; the engines hang while they start a hundred thousand.
_MAX_THREADS = 1024

# What the steps of an ensemble are made of lies beside this folder.
_BACKENDS = Path(__file__).resolve().parent.parent
sys.path += [str(_BACKENDS / name) for name in ("python_preprocess", "python_postprocess", "python_openvino")]

# One thread an instance for what it makes of texts: its neighbours use the other cores.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from answers import AnswerError  # noqa: E402
from lean import CancelledError, LeanModel  # noqa: E402
from steps import open_step  # noqa: E402


class TritonPythonModel:
    """One instance of one model; Triton calls `initialize` once, then `execute` with every request."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load this version.

        Args:
            args: Triton's arguments, with the path of the model and its configuration as JSON.

        Raises:
            ValueError: A parameter is not what it must be.
        """
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"], args["model_version"])
        described = json.loads((folder / "lean.json").read_text(encoding="utf-8"))
        self._step = open_step(folder, config, [*described["inputs"], *described["carried"]], described)
        threads = _read_threads(config)
        copies = sum(group["count"] for group in config["instance_group"])
        self._model = LeanModel(
            folder,
            config["default_model_filename"],
            described,
            self._step,
            threads=threads,
            has_cores=copies * threads <= len(os.sched_getaffinity(0)),
        )

    def finalize(self) -> None:
        """End what is done in the background; Triton calls it before the process ends."""
        self._model.close()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request on its own.

        Args:
            requests: The requests that the dynamic batcher joined: one, as the configuration has it.

        Returns:
            A response for each, in their order: the answers, or the error of that request alone.
        """
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            answers = self._model.answer(self._step.read_rows(request), request.is_cancelled)
        except (self._step.refusal, AnswerError) as exc:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(exc), pb_utils.TritonError.INVALID_ARG))
        except CancelledError:
            error = pb_utils.TritonError("the client cancelled the request", pb_utils.TritonError.CANCELLED)
            return pb_utils.InferenceResponse(error=error)
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, answers[name]) for name in answers if name in wanted])


def _read_threads(config: Mapping[str, Any]) -> int:
    text = config.get("parameters", {}).get(_THREADS, {}).get("string_value", "1")
    # Python reads no more than some thousand digits.
    is_count = text.isascii() and text.isdigit() and len(text) <= len(str(_MAX_THREADS))
    if not is_count or not 1 <= int(text) <= _MAX_THREADS:
        raise ValueError(
            f"{config['name']}: expected a number of threads in the parameter {_THREADS}, from 1 to {_MAX_THREADS}, "
            f"got {text!r}"
        )
    return int(text)
