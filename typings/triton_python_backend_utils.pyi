# The part of the module of tritonserver 2.51's Python backend that backends/ call: some of it is Python beside the
# backend (backends/python/triton_python_backend_utils.py), the rest is built into the stub that embeds the interpreter.
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

class Tensor:
    def __init__(self, name: str, array: npt.NDArray[Any]) -> None: ...
    def name(self) -> str: ...
    def as_numpy(self) -> np.ndarray[Any, np.dtype[Any]]: ...

TRITONSERVER_RESPONSE_COMPLETE_FINAL: int

class TritonError:
    CANCELLED: ClassVar[Any]
    INTERNAL: ClassVar[Any]
    INVALID_ARG: ClassVar[Any]
    UNAVAILABLE: ClassVar[Any]
    def __init__(self, message: str, code: Any = ...) -> None: ...

class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = ..., error: TritonError | None = ...) -> None: ...

class Metric:
    def increment(self, value: float) -> None: ...
    def set(self, value: float) -> None: ...

class MetricFamily:
    COUNTER: ClassVar[Any]
    GAUGE: ClassVar[Any]
    def __init__(self, name: str, description: str, kind: Any) -> None: ...
    def Metric(self, labels: dict[str, str]) -> Metric: ...  # noqa: N802

# None for an optional input that was not sent; the others are always there.
def get_input_tensor_by_name(inference_request: Any, name: str) -> Any: ...
