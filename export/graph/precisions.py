"""From the verified fp32 graph to a file of another precision, measured beside it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import PrecisionError
from .files import Feed, count_bytes, load_graph, measure_ranges
from .float16 import write_bfloat16, write_float16
from .int8 import write_int8
from .islands import find_islands
from .onnx_export import EXTERNAL_ABOVE_BYTES
from .speed import (
    COSINE,
    LABEL_AGREEMENT,
    Measure,
    PrecisionReport,
    Quality,
    Speed,
    build_measure,
    compare_rows,
    compare_speed,
)

__all__ = [
    "COSINE",
    "LABEL_AGREEMENT",
    "PRECISIONS",
    "THRESHOLDS",
    "Feed",
    "Measure",
    "PrecisionReport",
    "Quality",
    "Speed",
    "build_measure",
    "compare_rows",
    "compare_speed",
    "write_precision",
]

PRECISIONS = ("fp32", "fp16", "bf16", "int8")

# What a file must hold unless the caller asks for something else, by precision and metric. fp16 rounds by 5e-4, bf16
# by 4e-3, each time another way, and so the direction of a vector moves far less. For int8 see the README: on
# all-MiniLM-L6-v2 and text in several languages everything in int8 holds 0.969; 0.99 keeps a quarter of the nodes.
THRESHOLDS = {
    "fp16": {COSINE: 0.9999, LABEL_AGREEMENT: 0.99},
    "bf16": {COSINE: 0.999, LABEL_AGREEMENT: 0.99},
    "int8": {COSINE: 0.99, LABEL_AGREEMENT: 0.98},
}

# Feeds that the speed is measured on.
_SPEED_FEEDS = 4


def write_precision(
    precision: str,
    source: Path,
    destination: Path,
    *,
    feeds: Sequence[Feed],
    measure: Measure,
    threshold: float | None = None,
    on_step: Callable[[str], None] = lambda step: None,
    external_above_bytes: int = EXTERNAL_ABOVE_BYTES,
) -> PrecisionReport:
    """Write the fp32 graph `source` in another precision and say what that costs and gains.

    The same graph, feeds and kind of CPU give the same bytes. Inputs and outputs keep their names, types and shapes,
    opset and IR version stay. Large weights lie in `destination` + `.data`.

    Args:
        precision: `fp16`, `bf16` or `int8`.
        source: Plain fp32, verified; its weights may lie in other files beside it.
        destination: Of the new file, in another folder, which exists.
        feeds: Real text as the model is asked it, with padding; the longest matter most. fp16 looks for values that
            are too large on them, int8 for nodes that are too sensitive.
        measure: Says how good a candidate file is. Called once for fp16 and bf16, some ten times for int8.
        threshold: What the worst row must hold; from `THRESHOLDS` where None.
        on_step: Told what is being done.
        external_above_bytes: From which size on the weights lie in a file of their own.

    Raises:
        PrecisionError: The threshold is not held, or the graph cannot be converted. `destination` may exist then.
    """
    assert precision in THRESHOLDS, f"Bug: precision {precision}"
    assert source.parent.resolve() != destination.parent.resolve(), "Bug: weights of both would bear the same name"
    bounds = THRESHOLDS[precision] if threshold is None else dict.fromkeys((COSINE, LABEL_AGREEMENT), threshold)
    kept: dict[str, str] = {}
    measured = 1
    if precision == "int8":
        on_step("ranking nodes by what int8 does to them")
        result = write_int8(
            source,
            destination,
            feeds,
            measure=measure,
            bounds=bounds,
            external_above_bytes=external_above_bytes,
        )
        kept, quality, measured = result.kept, result.quality, result.measured
    else:
        if precision == "fp16":
            on_step("looking for values beyond fp16")
            ranges = measure_ranges(source, feeds, destination.parent, external_above_bytes=external_above_bytes)
            kept = find_islands(load_graph(source), ranges)
            write_float16(source, destination, kept, external_above_bytes=external_above_bytes)
        else:
            write_bfloat16(source, destination, external_above_bytes=external_above_bytes)
        quality = measure(destination)
    bound = bounds[quality.metric]
    if not quality.holds(bound):
        raise PrecisionError(
            f"{precision} does not hold the quality asked for",
            expected=f"{quality.metric.replace('_', ' ')} >= {bound:g}",
            got=f"{quality.worst:.6g}",
            remedy="ask for less, or export with --precision fp32",
        )
    on_step("measuring speed beside fp32")
    return PrecisionReport(
        precision=precision,
        quality=quality,
        threshold=bound,
        model_bytes=count_bytes(destination),
        fp32_bytes=count_bytes(source),
        speed=compare_speed(source, destination, feeds[:_SPEED_FEEDS]),
        kept=kept,
        measured=measured,
    )
