import copy
import json
import math
from html.parser import HTMLParser
from typing import Any

import pytest
from harness import Exported

from export.graph.precisions import FP32
from export.proof.histogram import BOTTOM, LEFT, RIGHT, TOP, build_histogram
from export.proof.report_page import Subject, format_figure, is_broken, render_report_page
from export.proof.tolerances import choose_tolerances
from export.repository.differences import describe_changes

EDGES = [-12.0 + 0.5 * step for step in range(31)]

# Tags that have no end.
VOID = {"meta"}

REPORT: dict[str, Any] = {
    "sha256": {"model.onnx": "ab" * 32},
    "cases": [
        {
            "name": "3 tokens",
            "rows": 1,
            "seq_len": 3,
            "passed": True,
            "max_abs_error": 2.4e-7,
            "min_cosine": 0.99999994,
            "outputs": {"embedding": {"max_abs_error": 2.4e-7, "min_cosine": 0.99999994}},
        },
        {
            "name": "mixed lengths in one batch",
            "rows": 12345,
            "seq_len": 256,
            "passed": False,
            "max_abs_error": 3.2e-3,
            "min_cosine": 0.9991,
            "outputs": {"embedding": {"max_abs_error": 3.2e-3, "min_cosine": 0.9991}},
        },
    ],
    "texts_tokenized": 22,
    "target": "24.10",
    "versions": {"torch": "2.13.0", "onnxruntime": "1.19.2"},
    "passed": False,
    "tolerances": {"max_abs_error": 1e-5, "min_cosine": 0.999999},
    "distribution": {
        "embedding": {"log10_bins": EDGES, "counts": [0] * 10 + [900, 90] + [0] * 6 + [1] + [0] * 11, "exact_zeros": 9}
    },
}

PRECISION = {
    "precision": "int8",
    "quality": {"metric": "label_agreement", "worst": 0.98, "mean": 0.99, "rows": 96},
    "threshold": 0.975,
    "model_bytes": 34_200_000,
    "fp32_bytes": 90_000_000,
    "size_ratio": 0.38,
    "speed": {"fp32_ms": 200.0, "this_ms": 100.0, "ratio": 2.0},
    "kept_fp32": {"too sensitive": ["/layer.0/MatMul", "/layer.5/MatMul"]},
    "measured": 9,
}


class Page(HTMLParser):
    """The page's text, its elements and their attributes; refuses tags that do not close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data + " "

    def count(self, tag: str, **attributes: str) -> int:
        return sum(
            name == tag and all(found.get(key.rstrip("_")) == value for key, value in attributes.items())
            for name, found in self.elements
        )


def render(report: dict[str, Any], name: str = "tickets", version: int = 3) -> Page:
    return Page(render_report_page(report, name=name, version=version))


def test_a_page_of_a_real_report_says_what_was_tried(exported: Exported) -> None:
    report = json.loads(json.dumps(exported.report.to_json()))
    page = render(report)
    assert "tickets version 3 ✓ Equal to its checkpoint For Triton 24.10 and its ONNX Runtime 1.19.2" in page.text
    assert f"{len(report['cases'])} cases were tried, none failed." in page.text
    for case in report["cases"]:
        assert f"{case['name']} {case['rows']} {case['seq_len']}" in page.text
    for digest in report["sha256"].values():
        assert digest in page.text
    assert page.count("td", class_="bad") == 0


def test_what_failed_is_named_first_and_marked() -> None:
    page = render(REPORT)
    assert "✗ Not equal to its checkpoint" in page.text
    assert (
        "2 cases were tried, 1 failed. The largest abs error is 0.0032, in the case mixed lengths in one batch ; "
        "1e-05 is allowed. 22 texts gave the same token ids in the server's tokenizer as in transformers."
    ) in page.text
    assert "allowed ≤ 1e-05 ≥ 0.999999" in page.text
    assert "mixed lengths in one batch 12 345 256" in page.text
    assert page.count("td", class_="number bad") == 2
    assert "embedding largest plain difference 0.0032 min cosine 0.9991" in page.text


def test_the_distribution_is_drawn_with_the_bound() -> None:
    page = render(REPORT)
    assert page.count("svg") == page.count("figure") == 1
    assert page.count("rect", class_="bar") == 2
    assert page.count("rect", class_="beyond") == 1
    assert page.count("rect", class_="same") == 1
    assert page.count("line", class_="limit") == 1
    assert "allowed: max abs error 1e-05" in page.text
    assert "1e-07 to 3.2e-07: 900" in page.text
    summary = (
        "1000 values, 0.9% of them equal to the bit. The largest differences, 1 of them, lie between 0.001 and 0.0032."
    )
    assert summary in page.text


def test_a_bound_on_another_measure_is_not_drawn() -> None:
    relative = copy.deepcopy(REPORT) | {"tolerances": {"max_relative_error": 1e-4, "min_cosine": 0.99}}
    assert render(relative).count("line", class_="limit") == 0
    # Counted in parts of the largest logit, which is 20.
    scaled = copy.deepcopy(REPORT)
    for case in scaled["cases"]:
        case["outputs"]["embedding"]["max_abs_error"] *= 20
    assert render(scaled).count("line", class_="limit") == 0


def test_the_worst_case_comes_first_and_many_that_passed_are_folded() -> None:
    passed = [REPORT["cases"][0] | {"name": f"case {n:02}", "max_abs_error": n * 1e-8} for n in range(20)]
    page = render(REPORT | {"cases": [*passed, REPORT["cases"][1]]})
    names = ["mixed lengths in one batch", *(f"case {n:02}" for n in reversed(range(20)))]
    listed = page.text.split("The worst first.")[1]
    assert sorted(names, key=listed.index) == names
    assert listed.index("case 15") < listed.index("15 more cases, none failed") < listed.index("case 14")
    assert page.count("details") == 1
    assert render(REPORT).count("details") == 0


def test_what_was_verified_and_what_changed_stand_above_the_figures() -> None:
    lock = {
        "sources": {"checkpoint": {"files": {"model.safetensors": "0" * 64}}},
        "options": {"precision": "fp32", "added_tokens": []},
        "target": {"release": "24.10"},
        "versions": {"torch": "2.13.0"},
    }
    later = {
        "sources": {"checkpoint": {"files": {"model.safetensors": "1" * 64}}, "adapter 1": {"files": {"a.bin": "2"}}},
        "options": {"precision": "fp16", "added_tokens": [{"token": "[NEW]", "initializer": "mean"}]},
        "target": {"release": "25.08"},
        "versions": {"torch": "2.13.0"},
    }
    changes = describe_changes(lock, later)
    assert changes == [
        "adapter 1: now with a.bin",
        "checkpoint: other bytes in model.safetensors",
        "option added tokens: token [NEW], initializer mean, before none",
        "option precision: fp16, before fp32",
        "target: release: 25.08, before 24.10",
    ]
    assert describe_changes(lock, lock) == []
    subject = Subject(facts={"checkpoint": "ZeRO stage 3, 2 ranks", "published": "today"}, before=2, changes=changes)
    page = Page(render_report_page(REPORT, name="tickets", version=3, subject=subject))
    text = page.text
    assert "What was verified checkpoint ZeRO stage 3, 2 ranks published today Since version 2 adapter 1: now" in text
    assert text.index("Since version 2") < text.index("How far the answers are off")
    same = render_report_page(REPORT, name="t", version=3, subject=Subject(facts={"task": "x"}, before=2))
    assert "Since version 2 Made of the same files, with the same options and tools." in Page(same).text
    # Without a version before there is nothing to compare with.
    assert "Since" not in Page(render_report_page(REPORT, name="t", version=1, subject=Subject(facts={"a": "b"}))).text


def test_a_histogram_stays_inside_its_drawing() -> None:
    for counts, zeros, bound in (
        ([5] * 30, 7, ("max_abs_error", 1e-5)),
        ([10**9] + [0] * 29, 0, ("max_abs_error", 1.0)),
        ([0] * 29 + [1], 10**12, ("max_abs_error", 1e-20)),
        ([0] * 30, 0, None),
        ([0] * 30, 3, None),
    ):
        drawing = build_histogram("x", {"log10_bins": EDGES, "counts": counts, "exact_zeros": zeros}, bound)
        bars = [*drawing.bars, *([drawing.equal] if drawing.equal else [])]
        for bar in bars:
            assert bar.x >= LEFT
            assert bar.x + bar.width <= RIGHT
            assert TOP <= bar.y < BOTTOM
            assert bar.y + bar.height == pytest.approx(BOTTOM)
        assert sum(bar.count for bar in bars) == sum(counts) + zeros
        for tick in [*drawing.x_ticks, *([drawing.bound] if drawing.bound else [])]:
            assert LEFT <= tick.position <= RIGHT
        assert len(drawing.x_ticks) <= 8
        assert len(drawing.y_ticks) <= 7
        taller = sorted(bars, key=lambda bar: bar.count)
        assert [bar.height for bar in taller] == sorted(bar.height for bar in bars)


def test_why_a_worse_file_was_accepted_stands_at_the_top() -> None:
    usual, asked = {"max_abs_error": 1e-5, "min_cosine": 0.999}, {"max_abs_error": 0.02, "min_cosine": 0.98}
    accepted = choose_tolerances(usual, FP32, asked, "checked by hand").accepted
    page = render(REPORT | {"accepted_worse": accepted})
    assert "Accepted within wider bounds" in page.text
    assert "Equal to its checkpoint" not in page.text
    assert "Why it was accepted: checked by hand With max abs error at most 0.02 (usually 1e-05)" in page.text
    assert "min cosine at least 0.98 (usually 0.999)." in page.text


def test_a_precision_stands_beside_fp32() -> None:
    page = render(REPORT | {"precision": PRECISION})
    for row in (
        "Precision: int8 beside fp32",
        "size 90.0 MB 34.2 MB 0.38 of the size",
        "CPU time 200.0 ms 100.0 ms 2.00 times as fast",
        "label agreement, at worst 1 0.98 allowed: 0.975",
        "label agreement, on average 1 0.99",
        "kept fp32: too sensitive /layer.0/MatMul, /layer.5/MatMul",
        "measured 9",
    ):
        assert row in page.text
    assert page.count("div", style="width: 50.0%") == 1
    unknown = render(REPORT | {"precision": {"scheme": "fp8", "blocks": [1, 2], "quality": {"worst": math.nan}}})
    assert "scheme fp8" in unknown.text
    assert "blocks 1, 2" in unknown.text
    assert "quality, at worst 1 NaN" in unknown.text


def test_the_largest_error_is_of_the_cases_that_were_judged() -> None:
    report = copy.deepcopy(REPORT)
    report["cases"][1]["passed"] = True
    page = render(report)
    assert "The largest abs error is 2.4e-07, in the case 3 tokens" in page.text
    assert page.text.count("✓ passed") == 1
    assert "2 cases were tried, none failed, 1 was not judged, for no client sends the like." in page.text
    assert page.text.count("not judged") == 2


def test_whatever_is_absent_is_left_out() -> None:
    for key in REPORT:
        render({name: value for name, value in REPORT.items() if name != key})
    page = render({})
    assert "0 cases were tried, none failed." in page.text
    assert page.count("svg") == 0
    bare = render({"cases": [{"name": "one"}, {}], "distribution": {"x": {}, "y": None}, "precision": {}})
    assert "one \N{EN DASH} \N{EN DASH} ✗ failed" in bare.text
    assert "Nothing was counted." in bare.text


def test_nan_and_infinity_are_the_worst() -> None:
    report = copy.deepcopy(REPORT)
    report["cases"][0] |= {"max_abs_error": math.nan, "passed": False}
    report["cases"][0]["outputs"]["embedding"]["max_abs_error"] = math.nan
    report["cases"][1]["min_cosine"] = -math.inf
    page = render(report)
    assert "The largest abs error is NaN, in the case 3 tokens" in page.text
    assert "embedding largest plain difference NaN" in page.text
    assert "-infinite" in page.text


def test_a_hostile_text_is_only_text() -> None:
    hostile = (
        '</title></bdi></q><script>alert(1)</script><img src=x onerror=alert(1)>"\' onload="alert(1) {{ 7 * 7 }} \ud800'
    )
    case = REPORT["cases"][0] | {"name": hostile, "outputs": {hostile: {hostile: 1.0}}, hostile: 0.5}
    report = {
        "sha256": {hostile: hostile},
        "cases": [case],
        "texts_tokenized": hostile,
        "target": hostile,
        "versions": {hostile: hostile, "onnxruntime": hostile},
        "passed": hostile,
        "tolerances": {"max_abs_error": 1e-5, f"max_{hostile}": 1.0, hostile: hostile},
        "distribution": {hostile: REPORT["distribution"]["embedding"]},
        "accepted_worse": {"reason": hostile, "tolerances": {hostile: hostile}},
        "precision": PRECISION | {"precision": hostile, hostile: [hostile], "threshold": hostile},
    }
    html = render_report_page(report, name=hostile, version=hostile)
    html.encode("utf-8")
    page = Page(html)
    plain = render(REPORT | {"accepted_worse": {"reason": "x", "tolerances": {}}, "precision": PRECISION})
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements}
    attributes = {name for _, found in page.elements for name in found}
    assert not {name for name in attributes if name.startswith("on") or name in ("src", "href")}
    assert "{{ 7 * 7 }}" in page.text


def test_the_page_needs_nothing_but_itself() -> None:
    page = render(REPORT | {"precision": PRECISION})
    assert {"script", "link", "img", "iframe", "a"}.isdisjoint(tag for tag, _ in page.elements)
    html = render_report_page(REPORT, name="tickets", version=3)
    assert "http://" not in html
    assert "https://" not in html
    assert "url(" not in html
    assert "default-src 'none'" in html
    assert html == render_report_page(copy.deepcopy(REPORT), name="tickets", version=3)


@pytest.mark.parametrize(
    ("value", "name", "text"),
    [
        (2.44e-7, "max_abs_error", "2.4e-07"),
        (0.99999994, "min_cosine", "0.9999999"),
        (0, "", "0"),
        (1234567, "", "1\N{NO-BREAK SPACE}234\N{NO-BREAK SPACE}567"),
        (True, "", "True"),
        (math.inf, "", "infinite"),
        (None, "", "\N{EN DASH}"),
    ],
)
def test_figures_are_written_for_people(value: Any, name: str, text: str) -> None:
    assert format_figure(value, name) == text


def test_an_error_is_judged_as_the_gate_judges_it() -> None:
    bounds = {"max_abs_error": 1e-5, "min_cosine": 0.99}
    assert not is_broken("max_abs_error", 1e-5, bounds)
    assert is_broken("max_abs_error", 1.1e-5, bounds)
    assert is_broken("max_abs_error", math.nan, bounds)
    assert is_broken("min_cosine", 0.98, bounds)
    assert not is_broken("min_cosine", 0.99, bounds)
    assert not is_broken("other", 5.0, bounds)
