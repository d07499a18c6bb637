"""What runs a published graph: one line in the table here, and one file with its class."""

from collections.abc import Mapping

from ..errors import EngineError
from .engine import Engine, Form
from .onnxruntime_engine import OnnxRuntime
from .openvino_engine import OpenVINO
from .openvino_generation import OpenVINOGeneration
from .tensorrt_engine import TensorRT
from .vllm_engine import VLLM

__all__ = ["ENGINES", "ONNXRUNTIME", "Engine", "choose_engine"]

# Whatever else may run what is published: every graph is judged by the target's ONNX Runtime first.
ONNXRUNTIME = OnnxRuntime()

ENGINES: Mapping[str, Engine] = {
    engine.name: engine for engine in (ONNXRUNTIME, OpenVINO(), TensorRT(), OpenVINOGeneration(), VLLM())
}


def choose_engine(name: str | None, form: Form) -> Engine:
    """Return the engine of that name, or the first that takes what a task hands over.

    Raises:
        EngineError: The one of that name takes something else.
    """
    able = [engine for engine in ENGINES.values() if engine.takes == form]
    if name is None:
        return able[0]
    engine = ENGINES[name]
    if engine not in able:
        raise EngineError(
            f"{engine.title} does not serve this task",
            expected="one of " + ", ".join(other.name for other in able),
            got=name,
            remedy="leave out --engine, or pass another --task",
        )
    return engine
