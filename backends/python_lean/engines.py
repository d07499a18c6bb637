"""The engines that run a graph in the process that tokenises, without a word about Triton."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]

# Names of outputs and a feed to those outputs, in that order.
Run = Callable[[Sequence[str], Mapping[str, Array]], list[Array]]


def open_onnxruntime(path: Path, threads: int) -> Run:
    """Return a session of so many threads, as the backend `onnxruntime` opens it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # A thread that waits for work would keep its core from the other instances.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Lengths vary from run to run, and a memory plan is kept for every one of them.
    options.enable_mem_pattern = False
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda names, feed: session.run(names, dict(feed))


def open_openvino(path: Path, threads: int) -> Run:
    """Return a request of one stream and so many threads, as the backend `python_openvino` opens it."""
    from compiled import compile_model

    request = compile_model(path, streams=1, threads=threads).create_infer_request()

    def run(names: Sequence[str], feed: Mapping[str, Array]) -> list[Array]:
        answers = request.infer(dict(feed), share_inputs=True)
        return [answers[name] for name in names]

    return run


# The file that an engine loads → how it is opened.
ENGINES: Mapping[str, Callable[[Path, int], Run]] = {"model.onnx": open_onnxruntime, "openvino.json": open_openvino}
