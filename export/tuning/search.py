"""The best of many ways to serve: all are measured a little, and the better ones again and longer."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Way = TypeVar("Way", bound=Hashable)

# Of those that a round has measured, one in so many is measured again, so many times as long.
_SHRINK = 3

# The last ones take turns: what else the machine is at meets all of them.
_FINALISTS = 3
_TURNS = 3


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of one way to serve.

    Attributes:
        requests_per_s: Requests answered in a second.
        p50_ms: Within how many milliseconds half of them were.
        p99_ms: Within how many 99 in 100 were.
    """

    requests_per_s: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, kw_only=True)
class Tried(Generic[Way]):
    """A way to serve, and how it did.

    Attributes:
        way: How it was served.
        figures: The median, by requests per second, of the longest measurements that there are of it.
        rounds: How many rounds it stayed in.
        least: The fewest requests per second that these measurements found.
        most: The most.
    """

    way: Way
    figures: Figures
    rounds: int
    least: float
    most: float


def plan_rounds(ways: int) -> list[int]:
    """Return how many of so many ways are measured in each round, the last of which is the final."""
    rounds = [ways]
    while rounds[-1] > _FINALISTS:
        rounds.append(max(_FINALISTS, math.ceil(rounds[-1] / _SHRINK)))
    return rounds


def search(
    ways: Sequence[Way],
    measure: Callable[[Way, int, int], Figures],
    *,
    p99_ms: float,
    has_time: Callable[[], bool],
) -> list[Tried[Way]]:
    """Return all ways that were measured, the best first.

    The best answers the most requests of those that hold the limit; of those that do not, it is the one nearest to it.

    Args:
        ways: What to try; the first is how it is served now, which stays until the final.
        measure: Measures a way, for so many times the shortest time, and for the how-manieth time.
        p99_ms: The limit.
        has_time: Tells whether to go on.
    """
    found: dict[Way, list[Figures]] = {}
    rounds: dict[Way, int] = {}
    left = list(ways)

    def rank(way: Way) -> tuple[bool, float]:
        return _rank(_median(found[way]), p99_ms)

    plan = plan_rounds(len(ways))
    for number, count in enumerate(plan):
        if number:
            left = sorted(left, key=rank, reverse=True)[:count]
            left += [ways[0]] if ways[0] not in left else []
        is_final = number == len(plan) - 1
        measured: dict[Way, list[Figures]] = {way: [] for way in left}
        for turn in range(_TURNS if is_final else 1):
            for way in left:
                # One is always measured.
                if has_time() or not (found or measured[ways[0]]):
                    measured[way].append(measure(way, _SHRINK**number, turn))
        # What was measured shorter counts where there was no time for more.
        found |= {way: figures for way, figures in measured.items() if figures}
        rounds |= {way: number + 1 for way, figures in measured.items() if figures}
        if is_final or not has_time():
            break
    return [_describe(way, found[way], rounds[way]) for way in sorted(found, key=lambda way: _order(way, rank, rounds))]


def _order(way: Way, rank: Callable[[Way], tuple[bool, float]], rounds: dict[Way, int]) -> tuple[int, bool, float]:
    """Return what sorts those of later rounds to the front: figures of different rounds are not of the same length."""
    holds, value = rank(way)
    return -rounds[way], not holds, -value


def _rank(figures: Figures, p99_ms: float) -> tuple[bool, float]:
    holds = figures.p99_ms <= p99_ms
    return holds, figures.requests_per_s if holds else -figures.p99_ms


def _median(figures: Sequence[Figures]) -> Figures:
    return sorted(figures, key=lambda each: each.requests_per_s)[len(figures) // 2]


def _describe(way: Way, figures: Sequence[Figures], rounds: int) -> Tried[Way]:
    rates = [each.requests_per_s for each in figures]
    return Tried(way=way, figures=_median(figures), rounds=rounds, least=min(rates), most=max(rates))
