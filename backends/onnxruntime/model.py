"""Triton Python-based backend `onnxruntime`: stands in where the server has no native backend of that name.

The contract is the native backend's: the same `config.pbtxt`, `model.onnx` in the version folder, inputs and outputs
as the config names them. What the native backend would do and this one does not is refused when the model loads.
"""

# tritonserver's stub looks into it at the first answer, which would wait 20 ms for it there.
import asyncio  # noqa: F401
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import triton_python_backend_utils as pb_utils
from ragged import Joiner

Array = npt.NDArray[Any]

# Parameters of the native backend (triton-inference-server/onnxruntime_backend, README) that mean the same here.
_THREAD_PARAMETERS = {"intra_op_thread_count": "intra_op_num_threads", "inter_op_thread_count": "inter_op_num_threads"}

# `optimization { graph { level } }`, as the native backend reads it.
_GRAPH_LEVELS = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


class TritonPythonModel:
    """One instance of one model: one ONNX Runtime session."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the session that the configuration describes.

        Args:
            args: Triton's arguments, with the path of the model and its configuration as JSON.

        Raises:
            ValueError: The configuration asks for something that only the native backend does, or names a tensor
                that the graph does not have.
        """
        config = json.loads(args["model_config"])
        check_supported(config, args["model_instance_kind"])
        file_name = config.get("default_model_filename") or "model.onnx"
        path = Path(args["model_repository"], args["model_version"], file_name)
        self._session = onnxruntime.InferenceSession(
            str(path), build_session_options(config), providers=["CPUExecutionProvider"]
        )
        self._joiner = Joiner(config)
        self._input_names = [tensor["name"] for tensor in config["input"]]
        self._output_names = [tensor["name"] for tensor in config["output"]]
        self._batched = config["max_batch_size"] > 0
        inputs = {tensor.name: tensor.shape for tensor in self._session.get_inputs()}
        check_names("input", [*self._input_names, *self._joiner.made], list(inputs), exact=True)
        check_names("output", self._output_names, [tensor.name for tensor in self._session.get_outputs()], exact=False)
        for name in sorted(self._joiner.ragged):
            if len(inputs[name]) != 1 or isinstance(inputs[name][0], int):
                raise ValueError(
                    f"the input {name} of {config['name']} is ragged: expected the graph to take rows one behind "
                    f"another, [-1], got {inputs[name]}; leave out `allow_ragged_batch`"
                )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run all requests as one batch and give each its own rows.

        Args:
            requests: Requests of equal shapes but for the batch, and the lengths of ragged inputs, as the dynamic
            batcher joins them.

        Returns:
            A response for each, in their order.
        """
        feeds = [self._read_inputs(request) for request in requests]
        try:
            answers = self._run_joined(feeds) if self._batched else [self._run_joined([feed])[0] for feed in feeds]
        # One request's values (an id outside the vocabulary) fail the whole run: find out whose, and answer the rest.
        except Exception:
            return [self._answer_alone(request, feed) for request, feed in zip(requests, feeds, strict=True)]
        return [self._respond(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def _read_inputs(self, request: Any) -> dict[str, Array]:
        return {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self._input_names}

    def _run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(self._output_names, self._session.run(self._output_names, dict(feed)), strict=True))

    def _run_joined(self, feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        outputs = self._run(self._joiner.join(feeds))
        if len(feeds) == 1:
            return [outputs]
        ends = np.cumsum([len(feed[self._input_names[0]]) for feed in feeds])
        pieces = {name: np.split(array, ends[:-1]) for name, array in outputs.items()}
        return [{name: pieces[name][index] for name in pieces} for index in range(len(feeds))]

    def _answer_alone(self, request: Any, feed: Mapping[str, Array]) -> Any:
        try:
            return self._respond(request, self._run_joined([feed])[0])
        # ONNX Runtime raises one class per kind of fault, without a common base of its own.
        except Exception as exc:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(exc), pb_utils.TritonError.INVALID_ARG))

    def _respond(self, request: Any, answer: Mapping[str, Array]) -> Any:
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, answer[name]) for name in answer if name in wanted])


def check_supported(config: Mapping[str, Any], instance_kind: str) -> None:
    """Refuse a configuration that asks for what only the native backend does.

    Raises:
        ValueError: It does.
    """
    accelerators = (config.get("optimization") or {}).get("execution_accelerators") or {}
    asked = {
        "batch_output": bool(config.get("batch_output")),
        "execution accelerators": any(accelerators.values()),
        "an instance on a GPU": instance_kind == "GPU",
        "sequence batching": "sequence_batching" in config,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"{config['name']} asks for {what}: expected a CPU model; use Triton's native backend")


def build_session_options(config: Mapping[str, Any]) -> onnxruntime.SessionOptions:
    """Return the session options that the configuration's native parameters describe."""
    options = onnxruntime.SessionOptions()
    for parameter, attribute in _THREAD_PARAMETERS.items():
        value = config.get("parameters", {}).get(parameter)
        if value:
            setattr(options, attribute, int(value["string_value"]))
    level = ((config.get("optimization") or {}).get("graph") or {}).get("level", 0)
    options.graph_optimization_level = _GRAPH_LEVELS[level]
    # Lengths vary from run to run, and a memory plan is kept for every one of them.
    options.enable_mem_pattern = False
    return options


def check_names(what: str, configured: Sequence[str], in_graph: Sequence[str], *, exact: bool) -> None:
    """Refuse tensor names that configuration and graph do not share.

    Raises:
        ValueError: Naming both lists.
    """
    if set(configured) - set(in_graph) or (exact and set(in_graph) - set(configured)):
        raise ValueError(
            f"the {what}s of config.pbtxt and of the ONNX graph differ: expected {', '.join(sorted(in_graph))}, "
            f"got {', '.join(sorted(configured))}; publish both from the same export"
        )
