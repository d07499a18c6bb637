"""From windows to medians with their spread, and those as Markdown and as a page."""

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment

# What the ratios are taken to: the first of these that was measured.
_BASELINES = ("fastapi", "onnxruntime-fp32-ensemble")

# More work of others than this makes figures of it.
BUSY_CORES = 0.1

# The drawings, in units of the page: a row a contender, its name on the left.
_LEFT, _RIGHT, _ROW = 330, 850, 26


def summarise(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was found at each number of connections.

    Returns:
        `baseline`, the name that ratios are taken to; `levels`, number of connections → a line for each contender;
        `limits`, lines of what engines do without a server; `failures`, name → reason; `others_cores`, how many cores
        other work kept busy, at most. A figure is median, least and most of the rounds.
    """
    found = {each["name"]: each for each in result["contenders"]}
    measured = [name for name in (*_BASELINES, *found) if name in found and found[name]["rounds"]]
    servers = [name for name in measured if found[name]["kind"] != "limit"]
    baseline = servers[0] if servers else ""
    levels = {
        str(level): [
            _summarise_level(each, level, found, baseline)
            for each in found.values()
            if each["rounds"] and each["kind"] != "limit"
        ]
        for level in result["plan"]["levels"]
    }
    limits = [
        _summarise_level(each, 0, found, baseline)
        for each in found.values()
        if each["rounds"] and each["kind"] == "limit"
    ]
    windows = [window for each in found.values() for windows in each["rounds"] for window in windows]
    return {
        "baseline": baseline,
        "levels": levels,
        "limits": limits,
        "failures": {name: each["failure"] for name, each in found.items() if each["failure"]},
        "others_cores": max((window["others_cores"] for window in windows), default=0.0),
    }


def _summarise_level(each: Mapping[str, Any], level: int, found: Mapping[str, Any], baseline: str) -> dict[str, Any]:
    windows = _at(each, level)
    of_limit = _ratios(each, level, found.get(each["limit"]), 0)
    processes = sorted({name for window in windows for name in window["cpu_ms"]})
    cpu_ms = {name: statistics.median(w["cpu_ms"].get(name, 0.0) for w in windows) for name in processes}
    return {
        "name": each["name"],
        "title": each["title"],
        "kind": each["kind"],
        "rounds": len(windows),
        "texts_per_s": _spread(window["texts_per_s"] for window in windows),
        "ratio": _spread(_ratios(each, level, found.get(baseline), level)) if level else None,
        "of_limit": _spread(of_limit),
        "p50_ms": _spread(window["p50_ms"] for window in windows),
        "p99_ms": _spread(window["p99_ms"] for window in windows),
        "mean_batch": _spread(w["mean_batch"] for w in windows if w["mean_batch"] is not None),
        "padding": _spread(w["padding"] for w in windows if w["padding"] is not None),
        "cpu_ms": cpu_ms,
        "cpu_ms_total": sum(cpu_ms.values()),
        "memory_mb": _spread(window["memory_mb"] for window in windows),
        "start_s": _spread(start["start_s"] for start in each["starts"] if "start_s" in start),
        "errors": sum(window["errors"] for window in windows),
    }


def _at(each: Mapping[str, Any], level: int) -> list[Mapping[str, Any]]:
    return [window for windows in each["rounds"] for window in windows if window["connections"] == level]


def _ratios(each: Mapping[str, Any], level: int, other: Mapping[str, Any] | None, other_level: int) -> list[float]:
    """Return how many times as much as another in each round that has both."""
    if other is None:
        return []
    pairs = zip(_at(each, level), _at(other, other_level), strict=False)
    return [mine["texts_per_s"] / theirs["texts_per_s"] for mine, theirs in pairs if theirs["texts_per_s"]]


def _spread(values: Iterable[float]) -> list[float] | None:
    listed = list(values)
    return [statistics.median(listed), min(listed), max(listed)] if listed else None


def format_spread(spread: list[float] | None, digits: int = 0) -> str:
    """Return a figure as people read it: the median, and the least and the most behind it."""
    if spread is None:
        return "\N{EN DASH}"
    middle, least, most = (f"{value:.{digits}f}" for value in spread)
    return middle if least == most else f"{middle} ({least}\N{EN DASH}{most})"


def format_share(spread: list[float] | None) -> str:
    """Return a share of 1 in percent."""
    return format_spread([100 * value for value in spread], 0) if spread else "\N{EN DASH}"


_COLUMNS = {
    "texts/s": lambda line: format_spread(line["texts_per_s"]),
    "ratio": lambda line: format_spread(line["ratio"], 2),
    "of its limit, %": lambda line: format_share(line["of_limit"]),
    "p50 ms": lambda line: format_spread(line["p50_ms"], 1),
    "p99 ms": lambda line: format_spread(line["p99_ms"], 1),
    "mean batch": lambda line: format_spread(line["mean_batch"], 2),
    "padding, %": lambda line: format_share(line["padding"]),
    "CPU ms a text": lambda line: f"{line['cpu_ms_total']:.1f}",
    "MB": lambda line: format_spread(line["memory_mb"]),
    "errors": lambda line: str(line["errors"]),
}


def order(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the fastest first."""
    return sorted(lines, key=lambda line: -line["texts_per_s"][0])


def describe(result: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """Return what must be known to read the figures, sentence by sentence."""
    machine, plan = result["machine"], result["plan"]
    sentences = [
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, commit {machine['commit']}, "
        f"{machine['date']}.",
        f"{plan['texts']} real texts of {plan['words_mean']:.0f} words on average, one a request; "
        f"{plan['rounds_done']} of {plan['rounds']} rounds, {plan['seconds']:g} s a window; median, and the least and "
        f"the most in brackets.",
        f"The ratio is to {summary['baseline'] or 'nothing'}, within a round. Clients and servers share the cores.",
    ]
    if summary["others_cores"] > BUSY_CORES:
        sentences.append(
            f"Other work kept up to {summary['others_cores']:.1f} cores busy meanwhile: repeat it on a quiet machine "
            f"before you quote anything."
        )
    return sentences


def render_markdown(result: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    lines = [*describe(result, summary), ""]
    for level, found in summary["levels"].items():
        lines += [f"## {level} connection{'s' if level != '1' else ''}", "", *_table("", order(found)), ""]
    if summary["limits"]:
        lines += ["## Without a server", ""]
        shown = ("texts/s", "p50 ms", "p99 ms", "CPU ms a text", "MB")
        lines += [*_table("", order(summary["limits"]), shown), ""]
    if processes := _list_processes(summary):
        lines += ["## CPU time of a text by process, ms", "", *processes, ""]
    if summary["failures"]:
        lines += ["## Not measured", "", *(f"- {name}: {why}" for name, why in summary["failures"].items()), ""]
    return "\n".join(lines)


def _table(first: str, lines: Iterable[Mapping[str, Any]], columns: Iterable[str] = _COLUMNS) -> list[str]:
    columns = list(columns)
    head = [f"| {first} | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    return head + [
        f"| {line['title']} | {' | '.join(_COLUMNS[column](line) for column in columns)} |" for line in lines
    ]


def _list_processes(summary: Mapping[str, Any]) -> list[str]:
    if not summary["levels"]:
        return []
    level = _find_middle(summary)
    return [f"At {level} connections:", ""] + [
        f"- {line['title']}: " + ", ".join(f"{name} {used:.2f}" for name, used in line["cpu_ms"].items())
        for line in order(summary["levels"][level])
    ]


def _find_middle(summary: Mapping[str, Any]) -> str:
    return "16" if "16" in summary["levels"] else max(summary["levels"], key=int)


def render_page(result: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return one HTML file that needs no network, no script and no second file."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    limits = order(summary["limits"])
    return template.render(
        sentences=describe(result, summary),
        drawings=[_draw(level, order([*lines, *limits])) for level, lines in summary["levels"].items() if lines],
        tables=[
            (level, [(line["title"], [fill(line) for fill in _COLUMNS.values()]) for line in order([*lines, *limits])])
            for level, lines in summary["levels"].items()
        ],
        columns=list(_COLUMNS),
        processes=[(line["title"], line["cpu_ms"]) for line in order(summary["levels"][_find_middle(summary)])]
        if summary["levels"]
        else [],
        process_level=_find_middle(summary) if summary["levels"] else "",
        failures=summary["failures"],
    )


def _draw(level: str, lines: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return two drawings of one number of connections: bars of texts/s, and lines from p50 to p99."""
    return {
        "level": level,
        "height": _ROW * len(lines) + 30,
        "left": _LEFT,
        "right": _RIGHT,
        "speed": _place(lines, lambda line: line["texts_per_s"], lambda line: line["texts_per_s"][1:]),
        "latency": _place(
            [line for line in lines if line["kind"] != "limit"],
            lambda line: line["p99_ms"],
            lambda line: [line["p50_ms"][0], line["p99_ms"][0]],
        ),
    }


def _place(lines: list[Mapping[str, Any]], value: Any, ends: Any) -> list[dict[str, Any]]:
    most = max([1e-9, *(max(value(line)) for line in lines)])

    def x(number: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * number / most, 1)

    return [
        {
            "title": line["title"],
            "kind": line["kind"],
            "y": _ROW * index + 6,
            "x": x(value(line)[0]),
            "from": x(ends(line)[0]),
            "to": x(ends(line)[1]),
            "texts_per_s": format_spread(line["texts_per_s"]),
            "latency": f"{line['p50_ms'][0]:.1f} to {line['p99_ms'][0]:.1f}",
        }
        for index, line in enumerate(lines)
    ]
