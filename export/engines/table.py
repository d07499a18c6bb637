"""Every engine by its name: one line here, and one file with its class."""

from collections.abc import Mapping

from ..errors import EngineError
from .engine import Engine, Form
from .onnxruntime_engine import OnnxRuntime
from .openvino_engine import OpenVINO
from .openvino_generation import OpenVINOGeneration
from .tensorrt_engine import TensorRT
from .vllm_engine import VLLM

__all__ = ["AUTO", "ENGINES", "ONNXRUNTIME", "Engine", "list_engines"]

# What `--engine` takes besides the name of an engine: the fastest of those that can be measured here.
AUTO = "auto"

# Whatever else may run what is published: every graph is judged by the target's ONNX Runtime first.
ONNXRUNTIME = OnnxRuntime()

ENGINES: Mapping[str, Engine] = {
    engine.name: engine for engine in (ONNXRUNTIME, OpenVINO(), TensorRT(), OpenVINOGeneration(), VLLM())
}


def list_engines(name: str | None, form: Form) -> list[Engine]:
    """Return the engine of that name, all that are measured for `auto`, or the first that takes what a task hands over.

    Raises:
        EngineError: The one of that name takes something else, or there are none to choose from.
    """
    able = [engine for engine in ENGINES.values() if engine.takes == form]
    if name is None:
        return able[:1]
    chosen = [engine for engine in able if (engine.is_measured if name == AUTO else engine.name == name)]
    if not chosen:
        raise EngineError(
            f"{'no engine can be chosen for' if name == AUTO else ENGINES[name].title + ' does not serve'} this task",
            expected="one of " + ", ".join(other.name for other in able),
            got=name,
            remedy="leave out --engine, or pass another --task",
        )
    return chosen
