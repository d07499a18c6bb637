"""The verification report as a page for people: one HTML file that needs no network, no script and no second file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from jinja2 import Environment

from ..graph.precisions import COSINE
from ..tasks.comparison import Bound, choose_worse, format_error, is_bounded_below, is_judged
from . import histogram
from .histogram import Histogram, build_histogram, group_digits

PAGE_FILE = "verification.html"

# What a case says besides its errors.
_CASE_KEYS = ("name", "rows", "seq_len", "passed", "outputs")

# The measure whose values the drawings count.
_DRAWN = "max_abs_error"

# Cases that passed and are shown at once; the others are folded.
_MAX_PASSED = 5

# What the table of a precision shows side by side; whatever else is recorded stands in a list below it.
_PRECISION_KEYS = ("precision", "quality", "threshold", "model_bytes", "fp32_bytes", "size_ratio", "speed")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What was verified, for the head of the page.

    Attributes:
        facts: What → the same in words, such as the checkpoint, its hash, the date, the options.
        before: The version that changes are told from, 0 where there is none that has a lock.
        changes: What is otherwise than in that version.
        warnings: What is odd about the checkpoint, each a sentence with what to do.
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    before: int = 0
    changes: Sequence[str] = ()
    warnings: Sequence[str] = ()


def render_report_page(
    report: Mapping[str, Any], *, name: str, version: int | str, subject: Subject | None = None
) -> str:
    """Return the page. Every text is escaped, and what the report does not hold is left out.

    Args:
        report: Content of `verification.json`.
        name: Name of the model.
        version: Version of the model.
        subject: What was verified; left out where None.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(figure=format_figure, words=_to_words, plain_words=_name_plain)
    environment.tests.update(bounded_below=is_bounded_below)
    template = environment.from_string(resources.files(__package__).joinpath("report_page.html").read_text("utf-8"))
    cases = [case for case in report.get("cases", []) if isinstance(case, Mapping)]
    tolerances = _mapping(report, "tolerances")
    text = template.render(
        name=name,
        version=version,
        report=report,
        cases=cases,
        shown=(ordered := _put_worst_first(cases, tolerances))[: _find_shown(ordered)],
        folded=ordered[_find_shown(ordered) :],
        subject=subject or Subject(),
        failed=sum(not case.get("passed") for case in cases),
        unjudged=sum(not is_judged(case, tolerances) for case in cases),
        accepted=_mapping(report, "accepted_worse"),
        tolerances=tolerances,
        measures=_find_measures(cases, tolerances),
        is_broken=is_broken,
        is_judged=is_judged,
        worst=_find_worst([case for case in cases if is_judged(case, tolerances)], tolerances),
        outputs=_collect_outputs(cases),
        histograms=build_histograms(_mapping(report, "distribution"), tolerances, cases),
        drawing_size=(histogram.WIDTH, histogram.HEIGHT),
        corners=(histogram.LEFT, histogram.TOP, histogram.RIGHT, histogram.BOTTOM),
        precision=_mapping(report, "precision"),
        comparison=_compare_precision(_mapping(report, "precision")),
        rest=list(_flatten({k: v for k, v in _mapping(report, "precision").items() if k not in _PRECISION_KEYS})),
        engines=_mapping(report, "engines"),
        trials=_list_trials(_mapping(report, "engines")),
        versions=_mapping(report, "versions"),
        hashes=_mapping(report, "sha256"),
    )
    # A lone surrogate, as in a file name that is not UTF-8, could not be written.
    return text.encode("utf-8", "replace").decode("utf-8")


def format_figure(value: Any, name: str = "", bound: Any = None) -> str:
    """Return a number as people read it: a share that is nearly 1 with seven digits, an error with two, None as a dash.

    Args:
        value: Whatever a report may hold.
        name: Name of the measure.
        bound: What it is held to, which it must not be taken for.
    """
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return group_digits(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    measure = f"min_{name}" if "cosine" in name or "agreement" in name else name
    return format_error(measure, value, bound if isinstance(bound, int | float) else None)


def is_broken(name: str, value: Any, tolerances: Mapping[str, Any]) -> bool:
    """Tell whether the error `name` is beyond its bound; NaN is, and what has no bound is not."""
    bound = tolerances.get(name)
    if not isinstance(value, int | float) or not isinstance(bound, int | float):
        return False
    return not Bound(name, bound).holds(value)


def build_histograms(
    distribution: Mapping[str, Any], tolerances: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]
) -> list[Histogram]:
    """Return a drawing for each output, with the bound marked that is one on the drawn differences themselves.

    A task may count its error in parts of the largest value, or at length 1: such a bound stands on another scale.
    """
    value = tolerances.get(_DRAWN)
    is_drawable = isinstance(value, int | float) and 0 < value < math.inf and _is_absolute(cases)
    bound = (_DRAWN, float(value)) if is_drawable and value is not None else None
    return [
        build_histogram(name, counted, bound) for name, counted in distribution.items() if isinstance(counted, Mapping)
    ]


def _is_absolute(cases: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether the error that is judged is the largest plain difference, up to rounding, in every case."""
    for case in cases:
        plain = [values.get(_DRAWN, 0.0) for values in _mapping(case, "outputs").values()]
        judged = case.get(_DRAWN)
        if plain and isinstance(judged, int | float) and not math.isclose(judged, max(plain), rel_tol=0.5):
            return False
    return True


def _put_worst_first(cases: Sequence[Mapping[str, Any]], tolerances: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what failed, then the rest, each with the largest error in parts of its bound first."""

    def rank(case: Mapping[str, Any]) -> tuple[bool, float]:
        key = _find_judged(tolerances)
        error, bound = case.get(key or ""), tolerances.get(key or "")
        if not isinstance(error, int | float) or not isinstance(bound, int | float):
            return bool(case.get("passed")), 0.0
        return bool(case.get("passed")), -math.inf if math.isnan(error) else -float(error)

    return sorted(cases, key=rank)


def _find_shown(ordered: Sequence[Mapping[str, Any]]) -> int:
    """Return how many cases are shown at once: all that failed, and a few of the others, or all where few are left."""
    count = sum(not case.get("passed") for case in ordered) + _MAX_PASSED
    return count if len(ordered) > count + 2 else len(ordered)


def _find_judged(tolerances: Mapping[str, Any]) -> str | None:
    return next((key for key in tolerances if not is_bounded_below(key)), None)


def _mapping(report: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = report.get(key)
    return value if isinstance(value, Mapping) else {}


def _list_trials(engines: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what became of each engine, as far as it can be shown: three times, or a reason."""
    trials = engines.get("trials")
    listed = [trial for trial in trials if isinstance(trial, Mapping)] if isinstance(trials, list | tuple) else []
    return [trial for trial in listed if trial.get("refused") or _is_spread(trial.get("ms"))]


def _is_spread(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(isinstance(ms, int | float) for ms in value)


def _to_words(name: str) -> str:
    return name.replace("_", " ")


def _name_plain(name: str) -> str:
    """Return what a measure of an output as it is is called; not as the error that is judged, which is another one."""
    return "largest plain difference" if name == _DRAWN else _to_words(name)


def _find_measures(cases: Iterable[Mapping[str, Any]], tolerances: Mapping[str, Any]) -> list[str]:
    """Return the errors that the table has columns for: those with a bound first."""
    found = dict.fromkeys(tolerances)
    for case in cases:
        found.update(
            dict.fromkeys(
                key for key, value in case.items() if key not in _CASE_KEYS and isinstance(value, int | float)
            )
        )
    return list(found)


def _find_worst(cases: Sequence[Mapping[str, Any]], tolerances: Mapping[str, Any]) -> tuple[str, str, Any] | None:
    """Return the case with the largest error of the first kind that is bounded from above, the kind and the error."""
    key = _find_judged(tolerances)
    measured = [case for case in cases if key and isinstance(case.get(key), int | float)]
    if key is None or not measured:
        return None
    worst = max(measured, key=lambda case: math.inf if math.isnan(case[key]) else case[key])
    return str(worst.get("name")), key, worst[key]


def _collect_outputs(cases: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return output → measure → the worst of all cases."""
    worst: dict[str, dict[str, float]] = {}
    for case in cases:
        for output, values in _mapping(case, "outputs").items():
            kept = worst.setdefault(output, {})
            for key, value in values.items():
                kept[key] = choose_worse(key, value, kept.get(key, value))
    return worst


def _compare_precision(precision: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows in which a precision stands beside fp32: what, both figures, their lengths as bars, in words."""
    rows = []
    fp32, this = precision.get("fp32_bytes"), precision.get("model_bytes")
    if fp32 and this:
        rows.append(_compare("size", fp32, this, [f"{fp32 / 1e6:.1f} MB", f"{this / 1e6:.1f} MB"], "of the size"))
    speed = _mapping(precision, "speed")
    fp32, this = speed.get("fp32_ms"), speed.get("this_ms")
    if fp32 and this:
        row = _compare("CPU time", fp32, this, [f"{fp32:.1f} ms", f"{this:.1f} ms"], "")
        rows.append(row | {"ratio": f"{fp32 / this:.2f} times as fast"})
    quality = _mapping(precision, "quality")
    for key in ("worst", "mean"):
        if isinstance(value := quality.get(key), int | float):
            metric = _to_words(str(quality.get("metric", "quality")))
            figures = ["1", format_figure(float(value), COSINE)]
            row = _compare(f"{metric}, {'at worst' if key == 'worst' else 'on average'}", 1.0, value, figures, "")
            bound = format_figure(precision.get("threshold"), COSINE) if key == "worst" else ""
            rows.append(row | {"ratio": f"allowed: {bound}" if bound else ""})
    return rows


def _compare(what: str, fp32: float, this: float, figures: Sequence[str], unit: str) -> dict[str, Any]:
    # NaN, and what is below zero, has no length.
    lengths = [value if 0 <= value < math.inf else 0.0 for value in (fp32, this)]
    shares = [100 * length / (max(lengths) or 1.0) for length in lengths]
    return {"what": what, "figures": figures, "shares": shares, "ratio": f"{this / fp32:.2f} {unit}".strip()}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        label = f"{prefix}{_to_words(str(key))}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{label}: ")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield label, ", ".join(format_figure(item) for item in value) or "none"
        else:
            yield label, format_figure(value, str(key))
