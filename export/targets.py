"""The Triton releases that artefacts are written for, and what each of them can load."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """One Triton release.

    Attributes:
        release: The container's tag, year and month.
        server_version: What `/v2` answers as version.
        onnxruntime_version: The ONNX Runtime that its native backend is built with.
        max_opset: The highest ONNX opset which that runtime loads.
        max_ir_version: The highest ONNX IR version which that runtime loads.
    """

    release: str
    server_version: str
    onnxruntime_version: str
    max_opset: int
    max_ir_version: int


# ONNX Runtime: triton-inference-server/server build.py at tag v2.51.0. Opset and IR: the highest that the wheel of
# that ONNX Runtime was seen to load.
DEFAULT_TARGET = Target(
    release="24.10", server_version="2.51.0", onnxruntime_version="1.19.2", max_opset=21, max_ir_version=10
)
