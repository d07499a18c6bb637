"""From the verified fp32 graph to a file of another precision, measured beside it."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PrecisionError, format_apart
from .files import Feed, count_bytes
from .onnx_export import EXTERNAL_ABOVE_BYTES
from .precisions import COSINE, LABEL_AGREEMENT, Precision
from .speed import Speed, compare_speed

# Feeds that the speed is measured on.
_SPEED_FEEDS = 4


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How near a file's answers are to the checkpoint's.

    Attributes:
        metric: `cosine` of each row with the true one, or `label_agreement`, in how many rows the same label wins.
        worst: The smallest over all rows; for label agreement the share of rows. NaN holds no threshold.
        mean: Mean over all rows.
        rows: How many there were.
    """

    metric: str
    worst: float
    mean: float
    rows: int

    def __post_init__(self) -> None:
        assert self.metric in (COSINE, LABEL_AGREEMENT), f"Bug: metric {self.metric}"

    def holds(self, threshold: float) -> bool:
        """Tell whether every row is as good as that."""
        return self.worst >= threshold

    def __str__(self) -> str:
        return f"{self.metric.replace('_', ' ')} {self.worst:.6g} at worst, {self.mean:.6g} on average"


# What a candidate file is measured with.
Measure = Callable[[Path], Quality]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a precision's module is given to write its graph from.

    Inputs and outputs keep their names, types and shapes, opset and IR version stay, and the same conversion on the
    same kind of CPU gives the same bytes.

    Attributes:
        source: Plain fp32 graph, verified; its weights may lie in other files beside it.
        destination: The new file, in another folder, which exists; large weights go to `destination` + `.data`.
        feeds: Real text as the model is asked it, with padding; the longest matter most.
        measure: Function that says how good a candidate file is.
        bounds: Metric → what the worst row must hold; the caller holds the written file to it.
        on_step: Called with what is being done.
        external_above_bytes: Size from which on the weights lie in a file of their own.
    """

    source: Path
    destination: Path
    feeds: Sequence[Feed]
    measure: Measure
    bounds: Mapping[str, float]
    on_step: Callable[[str], None] = lambda step: None
    external_above_bytes: int = EXTERNAL_ABOVE_BYTES


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a precision's module has written.

    Attributes:
        quality: Measured on the file at `destination`.
        kept_fp32: Node name → why it stayed fp32.
        measured: How many candidate files were measured.
    """

    quality: Quality
    kept_fp32: Mapping[str, str] = field(default_factory=dict)
    measured: int = 1


# The function `write` of a precision's module. Raises PrecisionError where the graph cannot be converted.
Write = Callable[[Conversion], Converted]


@dataclass(frozen=True, kw_only=True)
class PrecisionReport:
    """What another precision costs and gains.

    Attributes:
        precision: `fp16`, `bf16` or `int8`.
        quality: Quality of the file.
        threshold: Bound that `quality.worst` keeps.
        model_bytes: Size with weights.
        fp32_bytes: Size of the fp32 file with weights.
        speed: Speed beside fp32. It differs from run to run, so no file whose bytes must be the same holds it.
        kept_fp32: Node name → why it stayed fp32.
        measured: How many candidate files were measured to find them.
    """

    precision: str
    quality: Quality
    threshold: float
    model_bytes: int
    fp32_bytes: int
    speed: Speed
    kept_fp32: Mapping[str, str]
    measured: int

    @property
    def size_ratio(self) -> float:
        """Its size in parts of fp32's."""
        return self.model_bytes / self.fp32_bytes

    def to_json(self) -> dict[str, Any]:
        """Return everything, the nodes that stayed fp32 sorted under the reason why."""
        reasons: dict[str, list[str]] = {}
        for name, reason in sorted(self.kept_fp32.items()):
            reasons.setdefault(reason, []).append(name)
        return {
            "precision": self.precision,
            "quality": asdict(self.quality),
            "threshold": self.threshold,
            "model_bytes": self.model_bytes,
            "fp32_bytes": self.fp32_bytes,
            "size_ratio": round(self.size_ratio, 4),
            "speed": {**asdict(self.speed), "ratio": round(self.speed.ratio, 3)},
            "kept_fp32": dict(sorted(reasons.items())),
            "measured": self.measured,
        }


def convert_graph(precision: Precision, conversion: Conversion) -> PrecisionReport:
    """Write the fp32 graph in another precision and say what that costs and gains.

    Raises:
        PrecisionError: A bound is not held, or the graph cannot be converted. The new file may exist then.
    """
    source, destination = conversion.source, conversion.destination
    assert precision.converts, f"Bug: {precision.name} is not written from fp32"
    assert source.parent.resolve() != destination.parent.resolve(), "Bug: weights of both would have the same name"
    written = _load_write(precision)(conversion)
    quality, bound = written.quality, conversion.bounds[written.quality.metric]
    if not quality.holds(bound):
        raise PrecisionError(
            f"{precision.name} does not hold the quality asked for",
            expected=f"{quality.metric.replace('_', ' ')} >= {bound:g}",
            got=format_apart(quality.worst, bound, 6),
            remedy="ask for less, or export with --precision fp32",
        )
    conversion.on_step("measuring speed beside fp32")
    return PrecisionReport(
        precision=precision.name,
        quality=quality,
        threshold=bound,
        model_bytes=count_bytes(destination),
        fp32_bytes=count_bytes(source),
        speed=compare_speed(source, destination, conversion.feeds[:_SPEED_FEEDS]),
        kept_fp32=written.kept_fp32,
        measured=written.measured,
    )


def _load_write(precision: Precision) -> Write:
    write: Write = importlib.import_module(f".{precision.module}", __package__).write
    return write
