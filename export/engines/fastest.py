"""Which of several engines runs a model fastest on this machine: measured, in rounds that take turns."""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..graph.files import Feed
from .engine import Engine, Run

_ROUNDS = 9

# Of a large model three rounds must do.
_FEWEST_ROUNDS = 3
_LIMIT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of one engine.

    Attributes:
        engine: Name of the engine.
        ms: CPU time of one row: the median of all rounds, the least and the most; None where it was not measured.
        refused: Why it was not.
    """

    engine: str
    ms: tuple[float, float, float] | None = None
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """How an engine was chosen.

    Attributes:
        chosen: Name of the fastest engine of those whose files were proven.
        trials: What became of each, the fastest first.
        rows: How many real inputs were run, each alone and at its own length, on one thread.
        rounds: How often all of them were run by each engine in turn.
        cpu: What it was measured on.
    """

    chosen: str
    trials: tuple[Trial, ...]
    rows: int
    rounds: int
    cpu: str

    def to_json(self) -> dict[str, Any]:
        """Return everything in one object."""
        return asdict(self)

    def describe(self) -> str:
        """Return it in one line."""
        parts = [
            f"{trial.engine} {trial.ms[0]:.2f} ms" if trial.ms else f"{trial.engine} not ({trial.refused})"
            for trial in self.trials
        ]
        return "; ".join(parts)


def choose_fastest(
    files: Mapping[Engine, Path], output_names: Sequence[str], feeds: Sequence[Feed], refused: Mapping[str, str]
) -> EngineChoice:
    """Measure proven files and return the fastest.

    CPU time, not the clock: other work on the machine slows all alike, and takes time from none. What a server does
    around the graph is the same for every engine, and is not measured.

    Args:
        files: Engine → the file that it was proven with; one at least.
        output_names: Outputs of the graph.
        feeds: Real inputs of one row each.
        refused: Name of an engine → why it has no file.
    """
    runs = {engine: engine.open_here(path) for engine, path in files.items()}
    for run in runs.values():
        _run_all(run, output_names, feeds)
    taken: dict[Engine, list[float]] = {engine: [] for engine in runs}
    end = time.monotonic() + _LIMIT_S
    for number in range(_ROUNDS):
        if number >= _FEWEST_ROUNDS and time.monotonic() > end:
            break
        order = list(runs)
        random.Random(number).shuffle(order)
        for engine in order:
            start = time.process_time()
            _run_all(runs[engine], output_names, feeds)
            taken[engine].append(1000 * (time.process_time() - start) / len(feeds))
    trials = [
        Trial(engine=engine.name, ms=(round(statistics.median(ms), 4), round(min(ms), 4), round(max(ms), 4)))
        for engine, ms in taken.items()
    ]
    trials.sort(key=lambda trial: trial.ms or ())
    return EngineChoice(
        chosen=trials[0].engine,
        trials=(*trials, *(Trial(engine=name, refused=reason) for name, reason in refused.items())),
        rows=len(feeds),
        rounds=min(map(len, taken.values())),
        cpu=_read_cpu(),
    )


def _run_all(run: Run, output_names: Sequence[str], feeds: Sequence[Feed]) -> None:
    for feed in feeds:
        run(output_names, feed)


def _read_cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
