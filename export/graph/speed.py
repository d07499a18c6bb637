"""How good, how large and how fast a file of another precision is, beside the fp32 file."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from .files import Feed, find_files, open_session, run_feeds

COSINE = "cosine"
LABEL_AGREEMENT = "label_agreement"

_ROUNDS = 9
_LARGE_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How near a file's answers are to the checkpoint's.

    Attributes:
        metric: `cosine` of each row with the true one, or `label_agreement`, in how many rows the same label wins.
        worst: The smallest over all rows; for label agreement the share of rows. NaN holds no threshold.
        mean: Over all rows.
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
class Speed:
    """CPU time of ONNX Runtime on one thread, both files in the same minute.

    Attributes:
        fp32_ms: Median for all feeds together.
        this_ms: The same for the other file.
    """

    fp32_ms: float
    this_ms: float

    @property
    def ratio(self) -> float:
        """How many times as fast as fp32."""
        return self.fp32_ms / self.this_ms


@dataclass(frozen=True, kw_only=True)
class PrecisionReport:
    """What another precision costs and gains.

    Attributes:
        precision: `fp16`, `bf16` or `int8`.
        quality: Of the file.
        threshold: That `quality.worst` holds.
        model_bytes: Size with weights.
        fp32_bytes: Size of the fp32 file with weights.
        speed: Beside fp32. Not the same twice, so it belongs in no file whose bytes must be.
        kept: Node name → why it stayed fp32.
        measured: How many candidate files were measured to find them.
    """

    precision: str
    quality: Quality
    threshold: float
    model_bytes: int
    fp32_bytes: int
    speed: Speed
    kept: Mapping[str, str]
    measured: int

    @property
    def size_ratio(self) -> float:
        """Its size in parts of fp32's."""
        return self.model_bytes / self.fp32_bytes

    def to_json(self) -> dict[str, Any]:
        """Return everything, the nodes that stayed fp32 sorted under the reason why."""
        reasons: dict[str, list[str]] = {}
        for name, reason in sorted(self.kept.items()):
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


def build_measure(fp32: Path, feeds: Sequence[Feed], metric: str = COSINE, output: int = 0) -> Measure:
    """Return a measure against the verified fp32 file's own answers, for callers without a nearer truth.

    Args:
        fp32: The file that is taken for true.
        feeds: What is asked.
        metric: `COSINE` or `LABEL_AGREEMENT`, over the last axis of the output.
        output: Its index among the graph's outputs; [..., values], fp32.
    """
    expected = [answers[output] for answers in run_feeds(open_session(fp32), feeds)]

    def measure(path: Path) -> Quality:
        got = [answers[output] for answers in run_feeds(open_session(path), feeds)]
        return compare_rows(expected, got, metric)

    return measure


def compare_rows(
    expected: Sequence[npt.NDArray[Any]], got: Sequence[npt.NDArray[Any]], metric: str = COSINE
) -> Quality:
    """Return how near rows of values are, each array [..., values] and of the same shape in both."""
    want, have = (
        np.concatenate([array.reshape(-1, array.shape[-1]).astype(np.float64) for array in arrays])
        for arrays in (expected, got)
    )
    if metric == LABEL_AGREEMENT:
        same = want.argmax(axis=1) == have.argmax(axis=1)
        share = float(same.mean()) if np.isfinite(have).all() else float("nan")
        return Quality(metric=metric, worst=share, mean=share, rows=len(same))
    # A row of zeros or with a NaN has no direction: its cosine is NaN, which holds no threshold.
    with np.errstate(all="ignore"):
        lengths = np.linalg.norm(want, axis=1) * np.linalg.norm(have, axis=1)
        cosines = (want * have).sum(axis=1) / lengths
    return Quality(metric=metric, worst=float(cosines.min()), mean=float(cosines.mean()), rows=len(cosines))


def compare_speed(fp32: Path, this: Path, feeds: Sequence[Feed], rounds: int = _ROUNDS) -> Speed:
    """Measure both files side by side: one thread, warm, in random order, CPU time, medians.

    A busy machine slows both alike; CPU time leaves out what other processes took. Of models that are so large that
    their weights lie in other files, one at a time is loaded.
    """
    order = [fp32, this] * rounds
    random.Random(0).shuffle(order)
    taken_ms: dict[Path, list[float]] = {fp32: [], this: []}
    sessions = {} if len(find_files(fp32)) > 1 else {path: _open_warm(path, feeds) for path in taken_ms}
    if not sessions:
        order = [fp32, this] * _LARGE_ROUNDS
    for path in order:
        session = sessions.get(path) or _open_warm(path, feeds)
        start = time.process_time()
        run_feeds(session, feeds)
        taken_ms[path].append(1000 * (time.process_time() - start))
        del session
    return Speed(
        fp32_ms=round(statistics.median(taken_ms[fp32]), 3), this_ms=round(statistics.median(taken_ms[this]), 3)
    )


def _open_warm(path: Path, feeds: Sequence[Feed]) -> onnxruntime.InferenceSession:
    session = open_session(path)
    run_feeds(session, feeds)
    return session
