"""What OpenVINO is given to run: a graph, and a file beside it that says how."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import EngineError, list_some
from ..graph.files import Feed, find_files
from ..signature import SEQ_LEN, ModelSignature
from .engine import VerifiedGraph

if TYPE_CHECKING:
    import numpy.typing as npt
    import openvino

MODEL_FILE = "openvino.json"
GRAPH_FILE = "model.onnx"

# Graphs of one length: up to where planning is a small part of a run, as many as all-MiniLM-L6-v2 gains by, and in all
# so many weights besides the first graph's.
_LONGEST = 128
_MOST_LENGTHS = 8
_FEWEST_LENGTHS = 3
_COPIED_WEIGHTS = 88_000_000


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """How a precision is computed.

    Attributes:
        hint: OpenVINO's `INFERENCE_PRECISION_HINT`, the type of what is not quantized.
        instructions: The CPU has one of these, as /proc/cpuinfo calls them. Empty where every CPU computes the same.
    """

    hint: str
    instructions: tuple[str, ...] = ()


_BF16 = Arithmetic(hint="bf16", instructions=("amx_bf16", "avx512_bf16"))

# The fastest first. Without its instructions a CPU computes bf16 in fp32, with nothing gained; sums of products of
# bytes saturate on a CPU without VNNI. What int8 leaves unquantized, the scores of attention among it, is faster in
# bf16, by which all-MiniLM-L6-v2 gains a sixth.
ARITHMETICS: Mapping[str, tuple[Arithmetic, ...]] = {
    "fp32": (Arithmetic(hint="f32"),),
    "bf16": (_BF16,),
    "int8": (
        _BF16,
        Arithmetic(hint="f32", instructions=("amx_int8", "avx512_vnni", "avx_vnni")),
        Arithmetic(hint="f32"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class OpenVinoModel:
    """What `openvino.json` holds, for `backends/python_openvino`.

    Attributes:
        graph: The file beside it that OpenVINO reads.
        hint: See `Arithmetic`.
        instructions: The CPU that serves it must have one of these; empty where any CPU will do.
        openvino: Version that it was proven with, and is served by.
        lengths: Rows of at most so many tokens are padded to that and run, one by one, in a graph of that one shape,
            the smallest first; longer ones in the graph of any shape.
        padding: Input name → what stands in such padding, 0 where it is not named.
        kept_fp32: Products that int8 leaves as they were.
    """

    graph: str
    hint: str
    instructions: tuple[str, ...]
    openvino: str
    lengths: tuple[int, ...] = ()
    padding: Mapping[str, int] = field(default_factory=dict)
    kept_fp32: tuple[str, ...] = ()

    def write(self, path: Path, *, kept_fp32: Sequence[str] = ()) -> None:
        """Write it to `path`."""
        content = asdict(replace(self, kept_fp32=tuple(kept_fp32)))
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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


def choose_arithmetic(precision: str) -> Arithmetic:
    """Return how this CPU computes a precision fastest.

    Raises:
        EngineError: It only emulates it.
    """
    flags = read_cpu_flags()
    ways = ARITHMETICS[precision]
    chosen = next((way for way in ways if not way.instructions or flags & {*way.instructions}), None)
    if chosen is None:
        raise EngineError(
            f"this CPU has no instructions for {precision}",
            expected=f"one of {list_some(ways[0].instructions)}",
            got="none of them in /proc/cpuinfo",
            remedy="pass --precision fp32 or int8, or export on a machine that has them",
        )
    return chosen


def read_cpu_flags() -> set[str]:
    """Return what the CPU can do, as Linux calls it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def describe_model(graph: VerifiedGraph, file: str, model: "openvino.Model") -> OpenVinoModel:
    """Return how the graph in `file` is to be run, on this kind of CPU and by this OpenVINO.

    Args:
        graph: The graph that it was made of, and the precision.
        file: Its name.
        model: The graph in it.
    """
    arithmetic = choose_arithmetic(graph.precision)
    lengths = choose_lengths(model, graph.signature)
    return OpenVinoModel(
        graph=file,
        hint=arithmetic.hint,
        instructions=tuple(sorted(read_cpu_flags() & {*arithmetic.instructions})),
        openvino=find_version(),
        lengths=lengths,
        padding=dict(graph.padding) if lengths else {},
    )


def choose_lengths(model: "openvino.Model", signature: ModelSignature) -> tuple[int, ...]:
    """Return the lengths in tokens that are worth a graph of their own: none where the weights are many.

    Each copy holds all weights but tables, which are shared. Planning anew takes as long for many weights as for few,
    while a run of many takes so much longer that there is little to win.
    """
    if not signature.can_be_ragged:
        return ()
    weights = sum(
        math.prod(node.shape)
        for node in model.get_ops()
        if node.get_type_name() == "Constant"
        and not any(target.get_node().get_type_name() == "Gather" for target in node.output(0).get_target_inputs())
    )
    count = min(_MOST_LENGTHS, _COPIED_WEIGHTS // max(weights, 1))
    if count < _FEWEST_LENGTHS:
        return ()
    longest = min(_LONGEST, signature.longest[SEQ_LEN])
    return tuple(sorted({min(longest, math.ceil(longest * place / count / 8) * 8) for place in range(1, count + 1)}))


def write_graph(graph: VerifiedGraph, directory: Path) -> None:
    """Copy the graph, and write `openvino.json` beside it, into the empty folder `directory`."""
    import openvino as ov

    # Weights in other files are found by the names that the graph gives them, which stay.
    for file in find_files(graph.path):
        shutil.copyfile(file, directory / (GRAPH_FILE if file == graph.path else file.name))
    model = ov.Core().read_model(str(directory / GRAPH_FILE))
    describe_model(graph, GRAPH_FILE, model).write(directory / MODEL_FILE)


def read_model(path: Path) -> OpenVinoModel:
    """Return what an `openvino.json` of ours says."""
    return OpenVinoModel(**json.loads(path.read_text(encoding="utf-8")))


class OpenVinoRunner:
    """A model in this process, run as each instance of the backend runs it: one stream of one thread.

    Args:
        path: An `openvino.json` that this package wrote.

    Raises:
        EngineError: OpenVINO cannot load it.
    """

    peak_bytes = 0

    def __init__(self, path: Path) -> None:
        import openvino as ov

        described = read_model(path)
        self.versions = {"openvino": described.openvino}
        self._padding = described.padding
        options = build_options(described)

        def compile_graph(model: "openvino.Model") -> "openvino.InferRequest":
            return ov.Core().compile_model(model, "CPU", options).create_infer_request()

        try:
            model = ov.Core().read_model(str(path.with_name(described.graph)))
            self._of_any = compile_graph(model)
            self._of_length = {length: compile_graph(fix_length(model, length)) for length in described.lengths}
        except RuntimeError as exc:
            raise EngineError(f"OpenVINO cannot load {described.graph}", got=_describe(exc)) from exc

    def run(self, output_names: Sequence[str], feeds: Feed) -> "list[npt.NDArray[np.generic]]":
        """See `Runner`."""
        try:
            answers = [request.infer(feed) for request, feed in self._assign(feeds)]
        except RuntimeError as exc:
            raise EngineError("OpenVINO cannot run the graph", got=_describe(exc)) from exc
        if len(answers) == 1:
            # An output of a module of the user's own may have no dimension to join in.
            return [answers[0][name] for name in output_names]
        return [np.concatenate([rows[name] for rows in answers]) for name in output_names]

    def _assign(self, feeds: Feed) -> "Iterator[tuple[openvino.InferRequest, dict[str, npt.NDArray[np.generic]]]]":
        """Yield what runs, and its inputs: all rows at once, or one by one where there is a graph of their length."""
        rows, size = next(iter(feeds.values())).shape[:2] if self._of_length else (0, 0)
        length = next((length for length in self._of_length if length >= size), None)
        if length is None:
            yield self._of_any, dict(feeds)
            return
        for row in range(rows):
            yield (
                self._of_length[length],
                {
                    name: np.pad(
                        array[row : row + 1],
                        ((0, 0), (0, length - size)),
                        constant_values=self._padding.get(name, 0),
                    )
                    for name, array in feeds.items()
                },
            )


def fix_length(model: "openvino.Model", length: int) -> "openvino.Model":
    """Return a copy for one row of so many tokens and nothing else; constants are shared."""
    fixed: openvino.Model = model.clone()
    fixed.reshape({tensor.any_name: [1, length] for tensor in fixed.inputs})
    return fixed


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
