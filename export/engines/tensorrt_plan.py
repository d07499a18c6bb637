"""What a TensorRT plan is built as, what is known of one, and where it may be served. Needs no TensorRT.

Sources: TensorRT's documentation of 10.x and 11.x (strongly typed networks, migration from 10.x to 11.x, version
compatibility), the operator table of onnx/onnx-tensorrt, and the README of triton-inference-server/tensorrt_backend.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from ..errors import EngineError, list_some
from ..graph.files import Feed
from ..signature import BATCH, SEQ_LEN, WINDOWS, ModelSignature, split_dim
from ..targets import Target
from .engine import AxisRange

PLAN_FILE = "model.plan"

# INT64 inputs, such as token ids, came with TensorRT 10.
_OLDEST = (10, 0)
# Its calibrators, and every flag that let TensorRT choose a precision by itself, went with 11.
_WITHOUT_CALIBRATION = (11, 0)

# What kernels are chosen for, within the bounds: batches and texts as they come, not as they may come. A quarter of
# the largest batch, and 64 tokens, twice the mean of the real English text that `make bench` sends.
_COMMON_SEQ_LEN = 64
_COMMON_BATCH_SHARE = 4

# Windows that one context is read in at most: 5,000 tokens of a model with 384. TensorRT reserves memory for them.
_MAX_WINDOWS = 16

# Marked N for every type in the operator table, from 8.5 to 10.x; the parser has the last word on all others.
_UNSUPPORTED_OPS = frozenset({
    "Bernoulli", "BitShift", "Col2Im", "Compress", "ConcatFromSequence", "ConvInteger", "Det", "DynamicQuantizeLinear",
    "MatMulInteger", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix", "Multinomial", "NegativeLogLikelihoodLoss",
    "Optional", "OptionalGetElement", "OptionalHasElement", "QLinearConv", "QLinearMatMul", "STFT", "SequenceAt",
    "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap",
    "SoftmaxCrossEntropyLoss", "SplitToSequence", "StringNormalizer", "TfIdfVectorizer", "Unique",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ShapeRange:
    """The shapes of one input in an optimisation profile, the batch first."""

    minimum: tuple[int, ...]
    optimum: tuple[int, ...]
    maximum: tuple[int, ...]

    @classmethod
    def fixed(cls, shape: tuple[int, ...]) -> "ShapeRange":
        """Return the range of one shape alone."""
        return cls(minimum=shape, optimum=shape, maximum=shape)


# Input name → its shapes; the inputs of fixed shape need none.
Profile = Mapping[str, ShapeRange]


@dataclass(frozen=True, kw_only=True)
class PrecisionBuild:
    """How TensorRT is told about a precision.

    Attributes:
        set_flags: Names of `BuilderFlag`.
        cleared_flags: The same, of those that are set by default.
        calibrates: Whether scales are measured on sample feeds. TensorRT then chooses each layer's precision among
            `set_flags`; otherwise it keeps to the types of the graph.
    """

    set_flags: tuple[str, ...] = ()
    cleared_flags: tuple[str, ...] = ()
    calibrates: bool = False


# fp32 and fp16 are strongly typed on every version, so that what runs is the graph that was verified, islands of fp32
# included: TensorRT 10.12 deprecated the other way, 11 has no other. int8 up to TensorRT 10 is calibrated and leaves
# each layer's precision to TensorRT; 11 takes only graphs with QuantizeLinear in them.
PRECISION_BUILDS = {
    # TF32 keeps 10 bits of what fp32 multiplies, and is on by default: the verification would fail.
    "fp32": PrecisionBuild(cleared_flags=("TF32",)),
    "fp16": PrecisionBuild(),
    "int8": PrecisionBuild(set_flags=("INT8", "FP16"), calibrates=True),
}


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """Everything that the builder is told, as data.

    Attributes:
        tensorrt_version: Version that builds, and therefore serves.
        precision: What was asked for.
        build: How TensorRT is told about it.
        profiles: One an instance; none for a graph of fixed shapes.
        max_batch_size: Largest batch that the profiles allow.
    """

    tensorrt_version: str
    precision: str
    build: PrecisionBuild
    profiles: tuple[Profile, ...]
    max_batch_size: int

    @property
    def strongly_typed(self) -> bool:
        """Whether TensorRT keeps to the graph's types."""
        return not self.build.calibrates


def check_builds(precision: str, tensorrt_version: str) -> None:
    """Refuse what this TensorRT cannot build.

    Args:
        precision: One of `PRECISION_BUILDS`.
        tensorrt_version: Version of the TensorRT at hand, such as `10.5.0`.

    Raises:
        EngineError: It is too old, or too new for the precision.
    """
    version = parse_version(tensorrt_version)
    if version < _OLDEST:
        raise EngineError(
            "this TensorRT has no INT64 inputs",
            expected=f"TensorRT {_join(_OLDEST)} or newer",
            got=tensorrt_version,
            remedy="export in the image of Triton 24.05 or newer",
        )
    if PRECISION_BUILDS[precision].calibrates and version >= _WITHOUT_CALIBRATION:
        raise EngineError(
            f"TensorRT {tensorrt_version} has no calibration for {precision}",
            expected=f"a version below {_join(_WITHOUT_CALIBRATION)}",
            got=tensorrt_version,
            remedy="pass --precision fp16, or export for a Triton with TensorRT 10",
        )


def check_loads(tensorrt_version: str, target: Target) -> None:
    """Refuse to build a plan that the target would not load: a plan is loaded by the TensorRT that built it.

    Args:
        tensorrt_version: Version of the TensorRT at hand.
        target: Release that is to serve the plan. Its TensorRT is known in as many parts as are compared.

    Raises:
        EngineError: The target has another TensorRT, or which one it has is not known.
    """
    if target.tensorrt_version is None:
        raise EngineError(
            f"the TensorRT of Triton {target.release} is not known",
            expected="a release whose TensorRT is known",
            got=f"a plan of TensorRT {tensorrt_version}",
            remedy="pass another --target, or --engine onnxruntime",
        )
    built, serving = parse_version(tensorrt_version), parse_version(target.tensorrt_version)
    known = min(len(built), len(serving))
    if built[:known] != serving[:known]:
        raise EngineError(
            f"Triton {target.release} does not load a plan of this TensorRT",
            expected=f"TensorRT {target.tensorrt_version}",
            got=tensorrt_version,
            remedy=f"build it in the image of Triton {target.release} (docker/tensorrt/build.sh)",
        )


def plan_build(
    signature: ModelSignature,
    *,
    precision: str,
    tensorrt_version: str,
    max_batch_size: int,
    instances: int = 1,
    ranges: Mapping[str, AxisRange] | None = None,
) -> BuildPlan:
    """Return how to build a plan for `signature`.

    Args:
        signature: Inputs and outputs of the graph.
        precision: One of `PRECISION_BUILDS`.
        tensorrt_version: Version of the TensorRT at hand, such as `10.5.0`.
        max_batch_size: The one in the model's `config.pbtxt`.
        instances: Each gets a profile of its own, for two of them cannot share one at the same time.
        ranges: Symbolic axis → its sizes, instead of those derived from the signature.

    Raises:
        EngineError: This TensorRT cannot do that, or the sizes of an axis are not known.
    """
    check_builds(precision, tensorrt_version)
    return BuildPlan(
        tensorrt_version=tensorrt_version,
        precision=precision,
        build=PRECISION_BUILDS[precision],
        profiles=tuple([derive_profile(signature, max_batch_size, ranges)] * instances)
        if _is_dynamic(signature)
        else (),
        max_batch_size=max_batch_size,
    )


def derive_profile(
    signature: ModelSignature, max_batch_size: int, ranges: Mapping[str, AxisRange] | None = None
) -> dict[str, ShapeRange]:
    """Return the optimisation profile for the inputs that have a symbolic axis.

    Raises:
        EngineError: The sizes of an axis are not known.
    """
    known = {
        BATCH: AxisRange(
            minimum=1, optimum=max(1, max_batch_size // _COMMON_BATCH_SHARE), maximum=max(1, max_batch_size)
        ),
        WINDOWS: AxisRange(minimum=1, optimum=1, maximum=_MAX_WINDOWS),
    }
    if SEQ_LEN in signature.longest:
        longest = signature.longest[SEQ_LEN]
        known[SEQ_LEN] = AxisRange(minimum=1, optimum=min(_COMMON_SEQ_LEN, longest), maximum=longest)
    known |= ranges or {}
    profile = {}
    for tensor in signature.inputs:
        if not tensor.dynamic_axes:
            continue
        unknown = sorted(tensor.symbols - known.keys())
        if unknown:
            raise EngineError(
                f"the sizes of the axis {unknown[0]} of the input {tensor.name} are not known",
                expected=f"one of {list_some(known)}",
                got=unknown[0],
                remedy="say how small and how large it gets",
            )
        axes = [
            _add_ranges([known[symbol] for symbol in split_dim(dim)])
            if isinstance(dim, str)
            else AxisRange(minimum=dim, optimum=dim, maximum=dim)
            for dim in tensor.dims
        ]
        profile[tensor.name] = ShapeRange(
            minimum=tuple(axis.minimum for axis in axes),
            optimum=tuple(axis.optimum for axis in axes),
            maximum=tuple(axis.maximum for axis in axes),
        )
    return profile


def _add_ranges(ranges: Sequence[AxisRange]) -> AxisRange:
    """Return the range of an axis that is several others one after another."""
    return AxisRange(
        minimum=sum(item.minimum for item in ranges),
        optimum=sum(item.optimum for item in ranges),
        maximum=sum(item.maximum for item in ranges),
    )


def build_calibration_batches(feeds: Sequence[Feed], plan: BuildPlan) -> list[dict[str, npt.NDArray[Any]]]:
    """Return the rows of all feeds in batches of one shape: calibration takes no other.

    Rows are padded with zeros to the longest, which is what a mask of zeros hides; the last batch is filled up with
    the first rows.

    Args:
        feeds: Real text; each array [batch, ...], the same inputs and ranks in every feed.
        plan: What is built; its profile gives the size of a batch.

    Raises:
        EngineError: There are no feeds, or a row is longer than the profile admits.
    """
    if not feeds:
        raise EngineError(
            "int8 cannot be calibrated without samples",
            expected="real text",
            got="none",
            remedy="pass --precision fp16",
        )
    rows = sum(len(next(iter(feed.values()))) for feed in feeds)
    profile = plan.profiles[0] if plan.profiles else {}
    size = next((shapes.optimum[0] for shapes in profile.values()), len(next(iter(feeds[0].values()))))
    joined = {}
    for name in feeds[0]:
        arrays = [feed[name] for feed in feeds]
        longest = tuple(max(lengths) for lengths in zip(*(array.shape[1:] for array in arrays), strict=True))
        bound = profile[name].maximum[1:] if name in profile else longest
        if any(length > most for length, most in zip(longest, bound, strict=True)):
            raise EngineError(
                f"the samples of {name} are longer than the optimisation profile admits",
                expected=f"at most {list(bound)}",
                got=str(list(longest)),
                remedy="cut them to the model's longest sequence",
            )
        padded = [
            np.pad(array, [(0, 0), *((0, most - size) for size, most in zip(array.shape[1:], longest, strict=True))])
            for array in arrays
        ]
        joined[name] = np.concatenate(padded)
    order = [index % rows for index in range(-(-rows // size) * size)]
    return [
        {name: np.ascontiguousarray(values[order[start : start + size]]) for name, values in joined.items()}
        for start in range(0, len(order), size)
    ]


def check_operators(graph: Path) -> None:
    """Refuse a graph that TensorRT cannot build, before minutes are spent on it.

    Raises:
        EngineError: It has operators that TensorRT does not know; they are named.
    """
    model = onnx.load(str(graph), load_external_data=False)
    nodes = [node for part in (model.graph, *model.functions) for node in _walk_nodes(part.node)]
    refused = {
        f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        for node in nodes
        if node.domain not in ("", "ai.onnx") or node.op_type in _UNSUPPORTED_OPS
    }
    if refused:
        raise EngineError(
            f"{graph.name} has operators that TensorRT cannot build",
            expected="those of the plain exported graph",
            got=list_some(refused),
            remedy="build the plan from the plain fp32 or fp16 graph; its int8 is calibrated from the fp32 graph",
        )


@dataclass(frozen=True, kw_only=True)
class PlanMetadata:
    """What lies beside a plan as `model.plan.json`, because a plan itself shows nothing before it is loaded.

    Attributes:
        tensorrt_version: Version that built it.
        compute_capability: The one of the GPU that it was built on, such as `9.0`; it runs on no other.
        device: The name of that GPU.
        precision: What was asked for.
        strongly_typed: See `BuildPlan`.
        max_batch_size: See `BuildPlan`.
        profiles: Each input → minimum, optimum and maximum.
        plan_sha256: Hash of the plan.
        onnx_sha256: File name → hash of the verified fp32 graph that all this came from.
    """

    tensorrt_version: str
    compute_capability: str
    device: str
    precision: str
    strongly_typed: bool
    max_batch_size: int
    profiles: list[dict[str, dict[str, list[int]]]]
    plan_sha256: str
    onnx_sha256: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return everything."""
        return asdict(self)


def describe_profiles(profiles: tuple[Profile, ...]) -> list[dict[str, dict[str, list[int]]]]:
    """Return profiles as a JSON file holds them."""
    return [
        {name: {key: list(shape) for key, shape in asdict(shapes).items()} for name, shapes in profile.items()}
        for profile in profiles
    ]


def parse_version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version.

    Raises:
        EngineError: There are none.
    """
    found = re.match(r"\d+(\.\d+)*", text)
    if not found or "." not in found[0]:
        raise EngineError(
            "a TensorRT version cannot be read", expected="numbers, such as 10.5.0", got=text or "nothing"
        )
    return tuple(int(part) for part in found[0].split("."))


def _join(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def _is_dynamic(signature: ModelSignature) -> bool:
    return any(tensor.dynamic_axes for tensor in signature.inputs)


def _walk_nodes(nodes: Any) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _walk_nodes(graph.node)
