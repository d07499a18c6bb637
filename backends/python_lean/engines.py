"""The engines that run a graph in the process that tokenises, without a word about Triton."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]

# Names of outputs and a feed to those outputs, in that order.
Run = Callable[[Sequence[str], Mapping[str, Array]], list[Array]]

# Ends what is done in the background.
Close = Callable[[], None]


def open_onnxruntime(path: Path, threads: int, *, has_cores: bool = False) -> tuple[Run, Close]:
    """Return a session of so many threads, as the backend `onnxruntime` opens it.

    Args:
        path: The graph.
        threads: What it computes with.
        has_cores: Whether there is a core for each thread of all instances.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # A thread that waits for the next operator by spinning is there sooner, and else keeps its core from another
    # instance; between two runs none does.
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(has_cores)))
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Lengths vary from run to run, and a memory plan is kept for every one of them.
    options.enable_mem_pattern = False
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda names, feed: session.run(names, dict(feed)), lambda: None


def open_openvino(path: Path, threads: int, *, has_cores: bool = False) -> tuple[Run, Close]:
    """Return the graph with one stream of so many threads, as the backend `python_openvino` opens it.

    How its threads wait is OpenVINO's own choice, whether there are cores or not.
    """
    from compiled import CompiledGraph

    graph = CompiledGraph(path, threads=threads)
    return graph.run, graph.close


# The file that an engine loads → how it is opened.
ENGINES: Mapping[str, Callable[..., tuple[Run, Close]]] = {
    "model.onnx": open_onnxruntime,
    "openvino.json": open_openvino,
}
