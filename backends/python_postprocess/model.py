"""Triton Python-based backend `python_postprocess`: the graph's outputs to what clients are answered.

A model of this backend has no code of its own: its version folder holds `postprocess.json`, which says what the
answers are and names the labels; its config names the tensors.
"""

# tritonserver's stub looks into it at the first answer, which would wait 20 ms for it there.
import asyncio  # noqa: F401
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from answers import AnswerError, build_postprocess


class TritonPythonModel:
    """One instance of one model; Triton calls `initialize` once, then `execute` with every batch."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read what the answers of this version are.

        Args:
            args: Triton's arguments, with the path of the model and its configuration as JSON.
        """
        config = json.loads(args["model_config"])
        path = Path(args["model_repository"], args["model_version"], "postprocess.json")
        self._postprocess = build_postprocess(json.loads(path.read_text(encoding="utf-8")))
        self._input_names = [tensor["name"] for tensor in config["input"]]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request on its own.

        Args:
            requests: The requests that the dynamic batcher joined.

        Returns:
            A response for each, in their order: the answers, or the error of that request alone.
        """
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        tensors = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self._input_names}
        try:
            answers = self._postprocess(tensors)
        except AnswerError as exc:
            return _refuse(str(exc))
        # Whoever asks this step itself may send tensors of which no graph makes one beside the other. Raised from here,
        # it would be the end of every request that was joined with this one.
        except (ValueError, LookupError) as exc:
            return _refuse(
                f"the tensors do not belong together: expected those that a graph makes of one request, got '{exc}'; "
                "ask the model that this is a step of"
            )
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, answers[name]) for name in answers if name in wanted])


def _refuse(message: str) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))
