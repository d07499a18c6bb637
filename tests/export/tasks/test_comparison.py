import math

import pytest

from export.tasks.comparison import Bound, choose_worse, describe_bounds, describe_errors, is_within


@pytest.mark.parametrize(
    ("name", "value", "kept", "broken"),
    [("max_abs_error", 1e-5, (0.0, 1e-5), (1.1e-5, math.inf)), ("min_cosine", 0.99, (0.99, 1.0), (0.98, -1.0))],
)
def test_a_bound_is_kept_on_its_side_and_never_by_what_is_no_number(
    name: str, value: float, kept: tuple[float, ...], broken: tuple[float, ...]
) -> None:
    bound = Bound(name, value)
    assert all(bound.holds(error) for error in kept)
    assert not any(bound.holds(error) for error in (*broken, math.nan))
    assert is_within({name: kept[0]}, {name: value})
    assert not is_within({name: math.nan}, {name: value})


def test_the_worse_of_two_is_the_larger_error_the_smaller_share_or_no_number() -> None:
    assert choose_worse("max_abs_error", 1e-5, 1e-3) == 1e-3
    assert choose_worse("min_cosine", 0.9, 0.99) == 0.9
    for pair in ((math.nan, 0.5), (0.5, math.nan)):
        assert math.isnan(choose_worse("max_abs_error", *pair))
        assert math.isnan(choose_worse("min_cosine", *pair))


def test_errors_and_bounds_are_written_for_people() -> None:
    values = {"max_abs_error": 1e-5, "min_label_agreement": 0.98}
    assert describe_errors(values) == "max abs error 1e-05, min label agreement 0.98"
    assert describe_bounds(values) == "max abs error <= 1e-05, min label agreement >= 0.98"


def test_an_error_beyond_its_bound_never_reads_like_the_bound() -> None:
    bounds = {"max_abs_error": 1e-4, "min_cosine": 0.999999, "max_relative_error": 1.05e-4}
    errors = {"max_abs_error": 1.0004e-4, "min_cosine": 0.99999899999, "max_relative_error": 1.1e-4}
    assert describe_errors(errors, bounds) == (
        "max abs error 0.00010004, min cosine 0.99999899999, max relative error 0.00011"
    )
    assert describe_bounds(bounds) == (
        "max abs error <= 0.0001, min cosine >= 0.999999, max relative error <= 0.000105"
    )
    assert describe_errors({"max_abs_error": 1e-4}, bounds) == "max abs error 0.0001"
    assert describe_errors({"max_abs_error": float("nan")}, bounds) == "max abs error nan"
