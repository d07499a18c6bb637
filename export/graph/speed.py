"""How fast a file of another precision is, beside the fp32 file."""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnxruntime

from .files import Feed, find_files, open_session, run_feeds

_ROUNDS = 9
_LARGE_ROUNDS = 3


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
