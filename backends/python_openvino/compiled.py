"""A published graph in OpenVINO, without a word about Triton."""

import json
import sys
from pathlib import Path
from typing import Any

# OpenVINO sends statistics of use unless the package that sends them is missing; to it, it now is.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino  # noqa: E402


def compile_model(path: Path, *, streams: int, threads: int = 1) -> Any:
    """Return the model that `openvino.json` describes, compiled for so many requests side by side.

    Args:
        path: The `openvino.json`.
        streams: Requests that run at a time.
        threads: What each of them has.

    Raises:
        ValueError: This is not what it was proven with.
    """
    described = json.loads(path.read_text(encoding="utf-8"))
    check_cpu(path, described["instructions"])
    version = openvino.__version__.split("-")[0]
    if ".".join(described["openvino"].split(".")[:3]) != ".".join(version.split(".")[:3]):
        raise ValueError(
            f"{path} was proven with another OpenVINO: expected {described['openvino']}, got {version}; install that "
            f"one, or export the model again"
        )
    options = {
        "INFERENCE_PRECISION_HINT": described["hint"],
        "NUM_STREAMS": str(streams),
        "INFERENCE_NUM_THREADS": str(streams * threads),
        # Two processes would pin their threads to the same core.
        "ENABLE_CPU_PINNING": "NO",
    }
    return openvino.Core().compile_model(str(path.with_name(described["graph"])), "CPU", options)


def check_cpu(path: Path, instructions: "list[str]", cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Refuse a CPU that computes otherwise than the one that the model was proven on.

    Raises:
        ValueError: It has none of `instructions`.
    """
    lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    if instructions and not flags & {*instructions}:
        raise ValueError(
            f"{path} was proven on another kind of CPU: expected one with {' or '.join(instructions)}, got "
            f"one without; serve it there, or export the model again on this one"
        )
