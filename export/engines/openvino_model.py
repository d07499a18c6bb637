"""What OpenVINO is given to run: a graph, and a file beside it that says how."""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EngineError, list_some
from ..graph.files import Feed, find_files
from .engine import VerifiedGraph

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import openvino

MODEL_FILE = "openvino.json"
GRAPH_FILE = "model.onnx"


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """How a precision is computed.

    Attributes:
        hint: OpenVINO's `INFERENCE_PRECISION_HINT`, the type of what is not quantized.
        instructions: The CPU has one of these, as /proc/cpuinfo calls them. Empty where every CPU computes the same.
        is_required: Whether a CPU without them is refused; else it is only recorded that the proof had them, because
            it rounds otherwise without.
    """

    hint: str
    instructions: tuple[str, ...] = ()
    is_required: bool = False


# Without its instructions a CPU computes bf16 in fp32, with nothing gained; sums of products of bytes saturate on a CPU
# without VNNI.
ARITHMETICS: Mapping[str, Arithmetic] = {
    "fp32": Arithmetic(hint="f32"),
    "bf16": Arithmetic(hint="bf16", instructions=("amx_bf16", "avx512_bf16"), is_required=True),
    "int8": Arithmetic(hint="f32", instructions=("amx_int8", "avx512_vnni", "avx_vnni")),
}


@dataclass(frozen=True, kw_only=True)
class OpenVinoModel:
    """What `openvino.json` holds, for `backends/python_openvino`.

    Attributes:
        graph: The file beside it that OpenVINO reads.
        hint: See `Arithmetic`.
        instructions: The CPU that serves it must have one of these; empty where any CPU will do.
        openvino: Version that it was proven with, and is served by.
        kept_fp32: Products that int8 leaves as they were.
    """

    graph: str
    hint: str
    instructions: tuple[str, ...]
    openvino: str
    kept_fp32: tuple[str, ...] = ()

    def write(self, path: Path, *, kept_fp32: Sequence[str] = ()) -> None:
        """Write it to `path`."""
        content = asdict(replace(self, kept_fp32=tuple(kept_fp32)))
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def import_openvino() -> Any:
    """Return the module, having seen to it that nothing is reported to its makers.

    It and NNCF send statistics of use unless the package that sends them is missing; to them it now is.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


def find_version() -> str:
    """Return the version of the OpenVINO at hand.

    Raises:
        EngineError: There is none.
    """
    try:
        return metadata.version("openvino")
    except metadata.PackageNotFoundError:
        raise EngineError(
            "OpenVINO is not installed",
            expected="the package openvino",
            got="none",
            remedy="install it, or pass --engine onnxruntime",
        ) from None


def check_cpu(precision: str) -> None:
    """Refuse a precision that this CPU only emulates.

    Raises:
        EngineError: It does.
    """
    arithmetic = ARITHMETICS[precision]
    if arithmetic.is_required and not read_cpu_flags() & {*arithmetic.instructions}:
        raise EngineError(
            f"this CPU has no instructions for {precision}",
            expected=f"one of {list_some(arithmetic.instructions)}",
            got="none of them in /proc/cpuinfo",
            remedy="pass --precision fp32 or int8, or export on a machine that has them",
        )


def read_cpu_flags() -> set[str]:
    """Return what the CPU can do, as Linux calls it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def describe_model(precision: str, graph: str) -> OpenVinoModel:
    """Return how the file `graph` is to be run in a precision, on this kind of CPU and by this OpenVINO."""
    arithmetic = ARITHMETICS[precision]
    return OpenVinoModel(
        graph=graph,
        hint=arithmetic.hint,
        instructions=tuple(sorted(read_cpu_flags() & {*arithmetic.instructions})),
        openvino=find_version(),
    )


def write_graph(graph: VerifiedGraph, directory: Path) -> None:
    """Copy the graph, and write `openvino.json` beside it, into the empty folder `directory`."""
    describe_model(graph.precision, GRAPH_FILE).write(directory / MODEL_FILE)
    # Weights in other files are found by the names that the graph gives them, which stay.
    for file in find_files(graph.path):
        shutil.copyfile(file, directory / (GRAPH_FILE if file == graph.path else file.name))


def read_model(path: Path) -> OpenVinoModel:
    """Return what an `openvino.json` of ours says."""
    return OpenVinoModel(**json.loads(path.read_text(encoding="utf-8")))


class OpenVinoRunner:
    """A model in this process: one stream of one thread, as each instance of the backend has.

    Args:
        path: An `openvino.json` that this package wrote.

    Raises:
        EngineError: OpenVINO cannot load it.
    """

    peak_bytes = 0

    def __init__(self, path: Path) -> None:
        ov = import_openvino()
        described = read_model(path)
        self.versions = {"openvino": described.openvino}
        try:
            compiled = ov.Core().compile_model(str(path.with_name(described.graph)), "CPU", build_options(described))
            self._request: openvino.InferRequest = compiled.create_infer_request()
        except RuntimeError as exc:
            raise EngineError(f"OpenVINO cannot load {described.graph}", got=_describe(exc)) from exc

    def run(self, output_names: Sequence[str], feeds: Feed) -> "list[npt.NDArray[np.generic]]":
        """See `Runner`."""
        try:
            answers = self._request.infer(dict(feeds))
        except RuntimeError as exc:
            raise EngineError("OpenVINO cannot run the graph", got=_describe(exc)) from exc
        return [answers[name] for name in output_names]


def build_options(model: OpenVinoModel) -> dict[str, str]:
    """Return the options that one instance compiles a model with."""
    return {
        "INFERENCE_PRECISION_HINT": model.hint,
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": "1",
        # Two processes would pin their threads to the same core.
        "ENABLE_CPU_PINNING": "NO",
    }


def _describe(exc: Exception) -> str:
    """Return the last line of OpenVINO's message that says something, without the places in its source."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return (lines[-1] if lines else type(exc).__name__)[:500].rstrip(".")
