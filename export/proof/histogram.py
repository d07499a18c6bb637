"""The distribution of errors as a drawing: bars over powers of ten, ready for a page to place."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The drawing, in units of its view box, and the axes' corner in it.
WIDTH, HEIGHT = 720.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, WIDTH - 14.0, 28.0, HEIGHT - 54.0

# The bar of what is equal to the bit stands apart: zero has no power of ten.
_EQUAL_WIDTH, _EQUAL_GAP = 34.0, 22.0

# Between two bars.
_GAP = 1.5

# Fewer powers of ten than this would make every distribution look alike.
_MIN_DECADES = 4.0

# More labels than this along the axis would run into one another.
_MAX_X_LABELS = 8


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar: where it is drawn and what it counts."""

    x: float
    y: float
    width: float
    height: float
    count: int
    label: str
    is_beyond: bool = False


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A mark on an axis, at `position` of the view box."""

    position: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How the differences of one output are distributed.

    Attributes:
        name: Name of the output.
        bars: One for each power of ten that occurs.
        equal: The bar of the values that are equal to the bit, or None.
        x_ticks: Powers of ten.
        y_ticks: Counts.
        bound: Where the largest error stands that is allowed, or None.
        summary: The same in a sentence or two.
    """

    name: str
    bars: Sequence[Bar]
    equal: Bar | None
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    bound: Tick | None
    summary: str


@dataclass(frozen=True, kw_only=True)
class _Axes:
    """From powers of ten and counts to places in the drawing.

    Attributes:
        left: Where the axis of powers begins.
        first: The power there.
        last: The power at its right end.
        top: How high the vertical axis goes, as `_rise` counts.
    """

    left: float
    first: float
    last: float
    top: int

    def place_x(self, power: float) -> float:
        return self.left + (power - self.first) / (self.last - self.first) * (RIGHT - self.left)

    def place_y(self, count: int) -> float:
        return BOTTOM - _rise(count) / self.top * (BOTTOM - TOP)

    def build_bar(self, x: float, width: float, count: int, label: str, *, is_beyond: bool = False) -> Bar:
        y = self.place_y(count)
        return Bar(x=x, y=y, width=width, height=BOTTOM - y, count=count, label=label, is_beyond=is_beyond)


def build_histogram(name: str, counted: Mapping[str, Any], bound: tuple[str, float] | None) -> Histogram:
    """Return the drawing of one output's differences.

    Counts stand on a scale of powers of ten as well, so that one stray value among a million can be seen.

    Args:
        name: Name of the output.
        counted: `log10_bins`, the n + 1 edges as powers of ten, the first and last of which hold what lies beyond;
            `counts`, n of them; `exact_zeros`. What is absent is taken for nothing.
        bound: The name of the largest error allowed, and the error; None where nothing is to be marked.
    """
    edges = [float(edge) for edge in counted.get("log10_bins", [])]
    zeros = int(counted.get("exact_zeros", 0))
    used = [
        (low, high, int(count))
        for low, high, count in zip(edges, edges[1:], counted.get("counts", []), strict=False)
        if count
    ]
    power = math.log10(bound[1]) if bound else None
    first, last = _find_range(used, power)
    axes = _Axes(
        left=LEFT + (_EQUAL_WIDTH + _EQUAL_GAP if zeros else 0.0),
        first=first,
        last=last,
        top=math.ceil(_rise(max([zeros, 1, *(count for *_, count in used)]))),
    )
    bars = []
    for low, high, count in used:
        x, width = axes.place_x(low) + _GAP / 2, axes.place_x(high) - axes.place_x(low) - _GAP
        label = f"up to {10**high:.2g}" if low == edges[0] else f"{10**low:.2g} to {10**high:.2g}"
        # A bar that the bound divides may hold values on either side of it.
        is_beyond = power is not None and low >= power - 1e-9
        bars.append(axes.build_bar(x, width, count, label, is_beyond=is_beyond))
    return Histogram(
        name=name,
        bars=bars,
        equal=axes.build_bar(LEFT + 4, _EQUAL_WIDTH, zeros, "equal to the bit") if zeros else None,
        x_ticks=_build_x_ticks(axes),
        y_ticks=[
            Tick(position=axes.place_y(10**digits), label=str(10**digits) if digits < 4 else f"1e{digits}")
            for digits in range(0, axes.top, 1 if axes.top <= 6 else 2)
        ],
        bound=Tick(position=axes.place_x(power), label=f"{bound[0].replace('_', ' ')} {bound[1]:.2g}")
        if bound and power is not None
        else None,
        summary=_summarise(used, zeros),
    )


def group_digits(number: int) -> str:
    """Return a whole number with its thousands apart, from five digits on."""
    return f"{number:,}".replace(",", "\N{NO-BREAK SPACE}") if abs(number) >= 10_000 else str(number)


def _find_range(used: Sequence[tuple[float, float, int]], power: float | None) -> tuple[float, float]:
    """Return the powers of ten that the axis begins and ends with: all that is drawn, the bound, and some air."""
    ends = [edge for low, high, _ in used for edge in (low, high)] + ([power] if power is not None else [])
    first, last = math.floor(min(ends, default=-9.0)) - 0.5, math.ceil(max(ends, default=-5.0)) + 0.5
    return min(first, last - _MIN_DECADES), last


def _rise(count: int) -> float:
    """Return how high `count` stands, in powers of ten; a single value half of one, so that it can be seen."""
    return math.log10(count) + 0.5 if count else 0.0


def _build_x_ticks(axes: _Axes) -> list[Tick]:
    powers = range(math.ceil(axes.first), math.floor(axes.last) + 1)
    step = math.ceil(len(powers) / _MAX_X_LABELS)
    return [Tick(position=axes.place_x(power), label=f"1e{power}") for power in powers[::step]]


def _summarise(used: Sequence[tuple[float, float, int]], zeros: int) -> str:
    total = zeros + sum(count for *_, count in used)
    if not total:
        return "Nothing was counted."
    text = f"{group_digits(total)} values, {zeros / total:.1%} of them equal to the bit."
    if used:
        low, high, count = used[-1]
        text += (
            f" The largest differences, {group_digits(count)} of them, lie between {10**low:.2g} and {10**high:.2g}."
        )
    return text
