"""How far an export may be off: by precision, and by what a user explicitly accepts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SettingsError
from ..graph.precisions import COSINE, LABEL_AGREEMENT, PERPLEXITY_RISE, Precision
from ..tasks.comparison import Bound

# The tolerance that belongs to a metric of quality.
QUALITY_KEYS = {"min_cosine": COSINE, "min_label_agreement": LABEL_AGREEMENT}


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """What the cases of a verification are judged by.

    Attributes:
        bounds: Error → what it may be.
        real_inputs_only: Whether only inputs such as users send are judged.
        is_for_gpus: Whether a server may be off by all that is allowed, though the proof was not: see `Precision`.
        shares_scales: Whether the rows of a batch move each other in a graph of the precision: see `Precision`.
        accepted: Why bounds are wider than the default ones, and which; None where they are not.
    """

    bounds: Mapping[str, float]
    real_inputs_only: bool = False
    is_for_gpus: bool = False
    shares_scales: bool = False
    accepted: Mapping[str, Any] | None = None


def choose_tolerances(
    exact: Mapping[str, float], precision: Precision, requested: Mapping[str, float], accept_worse: str | None
) -> Tolerances:
    """Return the tolerances of a precision, changed as asked for.

    Args:
        exact: The task's tolerances in fp32.
        precision: The precision to verify.
        requested: Error → another bound.
        accept_worse: The reason for which wider bounds are accepted.

    Raises:
        SettingsError: A bound does not apply to the task, is wider without a reason, or a reason comes without one.
    """
    usual = scale_tolerances(exact, precision)
    unknown = sorted(set(requested) - set(usual))
    if unknown:
        raise SettingsError(
            f"the tolerance {unknown[0]} does not apply here", expected="one of " + ", ".join(usual), got=unknown[0]
        )
    wider = {name: value for name, value in requested.items() if not Bound(name, usual[name]).holds(value)}
    if wider and not accept_worse:
        name, value = next(iter(wider.items()))
        raise SettingsError(
            f"the tolerance {name} is wider than what {precision.name} is held to",
            expected=f"{usual[name]:g} or stricter",
            got=f"{value:g}",
            remedy="pass --accept-worse with the reason, which the report will state",
        )
    if accept_worse and not wider:
        raise SettingsError(
            "--accept-worse accepts nothing", expected="a --tolerance that is wider than the usual one", got="none"
        )
    accepted = {
        "reason": accept_worse,
        "tolerances": {name: {"usual": usual[name], "accepted": value} for name, value in wider.items()},
    }
    return Tolerances(
        bounds=usual | dict(requested),
        real_inputs_only=_is_of_real_inputs(exact, precision),
        is_for_gpus=precision.is_for_gpus,
        shares_scales=precision.shares_scales,
        accepted=accepted if wider else None,
    )


def list_tolerances(exact: Mapping[str, float], precision: Precision) -> Tolerances:
    """Return the usual tolerances of a precision, of a task that has `exact` in fp32."""
    return Tolerances(
        bounds=scale_tolerances(exact, precision),
        real_inputs_only=_is_of_real_inputs(exact, precision),
        is_for_gpus=precision.is_for_gpus,
        shares_scales=precision.shares_scales,
    )


def _is_of_real_inputs(exact: Mapping[str, float], precision: Precision) -> bool:
    # What is written after random tokens is nearly a matter of chance.
    return precision.real_inputs_only or (precision.converts and PERPLEXITY_RISE in exact)


def scale_tolerances(exact: Mapping[str, float], precision: Precision) -> dict[str, float]:
    """Return what a task's tolerances become in `precision`.

    Where single values may be off by anything, one of them is left: the task's measure of quality.
    """
    if precision.converts and PERPLEXITY_RISE in exact:
        return dict(precision.writing)
    thresholds = precision.thresholds
    qualities = {name: thresholds.get(QUALITY_KEYS[name], exact[name]) for name in exact if name in QUALITY_KEYS}
    factor = precision.error_factor
    if factor is None:
        name = find_quality_key(exact)
        return {name: qualities[name]}
    return {name: qualities.get(name, value * factor) for name, value in exact.items()}


def find_quality_key(exact: Mapping[str, float]) -> str:
    """Return the tolerance that says how good a lossy file is: of labels where there are any, else of directions."""
    return "min_label_agreement" if "min_label_agreement" in exact else "min_cosine"
