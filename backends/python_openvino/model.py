"""Triton Python-based backend `python_openvino`: runs a graph in OpenVINO, on the CPU.

A model of this backend has no code of its own: its version folder holds `openvino.json`, which says how the graph
beside it is run. A CPU or an OpenVINO other than it was proven with is refused when the model loads.
"""

# tritonserver's stub looks into it at the first answer, which would wait 20 ms for it there.
import asyncio  # noqa: F401
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from compiled import CompiledGraph

Array = npt.NDArray[Any]


class TritonPythonModel:
    """One instance of one model: one stream of one thread."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Compile the graph of this version.

        Args:
            args: Triton's arguments, with the path of the model and its configuration as JSON.

        Raises:
            ValueError: It was proven with other instructions or another OpenVINO, or names other tensors.
        """
        config = json.loads(args["model_config"])
        path = Path(args["model_repository"], args["model_version"], config["default_model_filename"])
        self._input_names = [tensor["name"] for tensor in config["input"]]
        self._output_names = [tensor["name"] for tensor in config["output"]]
        self._batched = config["max_batch_size"] > 0
        self._graph = CompiledGraph(path)

    def finalize(self) -> None:
        """End what is done in the background; Triton calls it before the process ends."""
        self._graph.close()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run all requests as one batch and give each its own rows.

        Args:
            requests: Requests of equal shapes but for the batch, as the dynamic batcher joins them.

        Returns:
            A response for each, in their order.
        """
        feeds = [self._read_inputs(request) for request in requests]
        try:
            answers = self._run_joined(feeds) if self._batched else [self._run(feed) for feed in feeds]
        # One request's values may fail the whole run: find out whose, and answer the rest.
        except RuntimeError:
            return [self._answer_alone(request, feed) for request, feed in zip(requests, feeds, strict=True)]
        return [self._respond(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def _read_inputs(self, request: Any) -> dict[str, Array]:
        return {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self._input_names}

    def _run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(self._output_names, self._graph.run(self._output_names, feed), strict=True))

    def _run_joined(self, feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        if len(feeds) == 1:
            return [self._run(feeds[0])]
        outputs = self._run({name: np.concatenate([feed[name] for feed in feeds]) for name in self._input_names})
        ends = np.cumsum([len(feed[self._input_names[0]]) for feed in feeds])
        pieces = {name: np.split(array, ends[:-1]) for name, array in outputs.items()}
        return [{name: pieces[name][index] for name in pieces} for index in range(len(feeds))]

    def _answer_alone(self, request: Any, feed: Mapping[str, Array]) -> Any:
        try:
            return self._respond(request, self._run(feed))
        except RuntimeError as exc:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(exc), pb_utils.TritonError.INVALID_ARG))

    def _respond(self, request: Any, answer: Mapping[str, Array]) -> Any:
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, answer[name]) for name in answer if name in wanted])
