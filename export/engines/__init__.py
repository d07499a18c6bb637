"""What runs a published graph: one line in the table here, and one file with its class."""

from collections.abc import Mapping

from .engine import Engine
from .onnxruntime_engine import OnnxRuntime
from .openvino_engine import OpenVINO
from .tensorrt_engine import TensorRT

__all__ = ["ENGINES", "ONNXRUNTIME", "Engine"]

# Whatever else may run what is published: every graph is judged by the target's ONNX Runtime first.
ONNXRUNTIME = OnnxRuntime()

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (ONNXRUNTIME, OpenVINO(), TensorRT())}
