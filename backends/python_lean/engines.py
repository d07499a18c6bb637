"""The engines that run a graph in the process that tokenises, one thread each, without a word about Triton."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]

# Names of outputs and a feed to those outputs, in that order.
Run = Callable[[Sequence[str], Mapping[str, Array]], list[Array]]


def open_onnxruntime(path: Path) -> Run:
    """Return a session of one thread, as the backend `onnxruntime` opens it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    # Lengths vary from run to run, and a memory plan is kept for every one of them.
    options.enable_mem_pattern = False
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda names, feed: session.run(names, dict(feed))


def open_openvino(path: Path) -> Run:
    """Return a request of one stream, as the backend `python_openvino` opens it."""
    from compiled import compile_model

    request = compile_model(path, streams=1).create_infer_request()

    def run(names: Sequence[str], feed: Mapping[str, Array]) -> list[Array]:
        answers = request.infer(dict(feed), share_inputs=True)
        return [answers[name] for name in names]

    return run


# The file that an engine loads → how it is opened.
ENGINES: Mapping[str, Callable[[Path], Run]] = {"model.onnx": open_onnxruntime, "openvino.json": open_openvino}
