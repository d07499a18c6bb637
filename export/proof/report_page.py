"""The verification report as a page for people: one HTML file that needs no network, no script and no second file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment

from ..graph.precisions import COSINE
from ..tasks.comparison import Bound, choose_worse, format_error, is_bounded_below
from . import histogram
from .histogram import Histogram, build_histogram, group_digits

PAGE_FILE = "verification.html"

# What a case says besides its errors.
_CASE_KEYS = ("name", "rows", "seq_len", "passed", "outputs")

# What the table of a precision shows side by side; whatever else is recorded stands in a list below it.
_PRECISION_KEYS = ("precision", "quality", "threshold", "model_bytes", "fp32_bytes", "size_ratio", "speed")


def render_report_page(report: Mapping[str, Any], *, name: str, version: int | str) -> str:
    """Return the page. Every text is escaped, and what the report does not hold is left out.

    Args:
        report: Content of `verification.json`.
        name: Name of the model.
        version: Version of the model.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(figure=format_figure, words=_to_words)
    environment.tests.update(bounded_below=is_bounded_below)
    template = environment.from_string(resources.files(__package__).joinpath("report_page.html").read_text("utf-8"))
    cases = [case for case in report.get("cases", []) if isinstance(case, Mapping)]
    tolerances = _mapping(report, "tolerances")
    text = template.render(
        name=name,
        version=version,
        report=report,
        cases=cases,
        failed=sum(not case.get("passed") for case in cases),
        accepted=_mapping(report, "accepted_worse"),
        tolerances=tolerances,
        measures=_find_measures(cases, tolerances),
        is_broken=is_broken,
        worst=_find_worst(cases, tolerances),
        outputs=_collect_outputs(cases),
        histograms=build_histograms(_mapping(report, "distribution"), tolerances),
        drawing_size=(histogram.WIDTH, histogram.HEIGHT),
        corners=(histogram.LEFT, histogram.TOP, histogram.RIGHT, histogram.BOTTOM),
        precision=_mapping(report, "precision"),
        comparison=_compare_precision(_mapping(report, "precision")),
        rest=list(_flatten({k: v for k, v in _mapping(report, "precision").items() if k not in _PRECISION_KEYS})),
        versions=_mapping(report, "versions"),
        hashes=_mapping(report, "sha256"),
    )
    # A lone surrogate, as in a file name that is not UTF-8, could not be written.
    return text.encode("utf-8", "replace").decode("utf-8")


def format_figure(value: Any, name: str = "") -> str:
    """Return a number as people read it: a share that is nearly 1 with seven digits, an error with two, None as a dash.

    Args:
        value: Whatever a report may hold.
        name: Name of the measure.
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
    return f"{value:.7g}" if "cosine" in name or "agreement" in name else format_error(name, value)


def is_broken(name: str, value: Any, tolerances: Mapping[str, Any]) -> bool:
    """Tell whether the error `name` is beyond its bound; NaN is, and what has no bound is not."""
    bound = tolerances.get(name)
    if not isinstance(value, int | float) or not isinstance(bound, int | float):
        return False
    return not Bound(name, bound).holds(value)


def build_histograms(distribution: Mapping[str, Any], tolerances: Mapping[str, Any]) -> list[Histogram]:
    """Return a drawing for each output, with the first tolerance marked that is the largest error allowed."""
    bound = next(
        (
            (key, float(value))
            for key, value in tolerances.items()
            if not is_bounded_below(key) and isinstance(value, int | float) and 0 < value < math.inf
        ),
        None,
    )
    return [
        build_histogram(name, counted, bound) for name, counted in distribution.items() if isinstance(counted, Mapping)
    ]


def _mapping(report: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = report.get(key)
    return value if isinstance(value, Mapping) else {}


def _to_words(name: str) -> str:
    return name.replace("_", " ")


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
    key = next((key for key in tolerances if not is_bounded_below(key)), None)
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
