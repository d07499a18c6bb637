from itertools import groupby
from pathlib import Path

import pytest
from benches.bench_targets import IR_VERSION, OPSET, loads
from harness import CHECKOUT, needs_newest

from export.engines.onnxruntime_process import open_runtime
from export.errors import TargetError
from export.targets import DEFAULT_TARGET, TARGETS, Target, find_releases_for, find_target, require_fits

NEWEST = pytest.param("26.07", marks=needs_newest)


def test_every_month_from_24_10_to_26_07_is_there_once_in_order() -> None:
    months = [f"{year}.{month:02}" for year in (24, 25, 26) for month in range(1, 13)]
    assert [target.release for target in TARGETS] == months[months.index("24.10") : months.index("26.07") + 1]
    for field in ("max_opset", "max_ir_version"):
        values = [getattr(target, field) for target in TARGETS]
        assert values == sorted(values), "a newer release loads no less"
    servers = [tuple(int(part) for part in target.server_version.split(".")) for target in TARGETS]
    assert servers == sorted(set(servers))


def test_the_default_is_the_release_that_the_server_and_the_images_run() -> None:
    assert (DEFAULT_TARGET.release, DEFAULT_TARGET.server_version) == ("24.10", "2.51.0")
    assert "tritonserver:24.10-py3\n" in (CHECKOUT / "docker" / "Dockerfile.gpu").read_text()


@pytest.mark.parametrize("release", ["24.10", "25.08", NEWEST])
def test_the_caps_are_those_of_the_runtime(release: str, tmp_path: Path) -> None:
    target = find_target(release)
    with open_runtime(target) as runtime:
        assert loads(runtime, tmp_path, target.max_opset, target.max_ir_version)
        assert not loads(runtime, tmp_path, target.max_opset + 1, IR_VERSION)
        assert not loads(runtime, tmp_path, OPSET, target.max_ir_version + 1)


@pytest.mark.parametrize(
    ("release", "got", "nearest"),
    [
        ("24.09", "24.09", "24.10"),
        ("27.01", "27.01", "26.07"),
        ("25.13", "25.13", "26.01"),
        ("nvcr.io/nvidia/tritonserver:25.08-py3", "nvcr.io/nvidia/tritonserver:25.08-py3", "25.08"),
        ("2508", "2508", "25.08"),
        ("latest", "latest", "24.10"),
        ("", "nothing", "24.10"),
    ],
)
def test_an_unknown_release_is_refused_with_the_nearest(release: str, got: str, nearest: str) -> None:
    with pytest.raises(TargetError) as caught:
        find_target(release)
    assert str(caught.value) == (
        f"the target {release!r} is not a known Triton release: expected one from 24.10 to 26.07, got {got}; "
        f"the nearest is {nearest}."
    )


@pytest.mark.parametrize(
    ("opset", "ir_version", "oldest", "newest"),
    [(18, 10, "24.10", "26.07"), (22, 10, "25.03", "26.07"), (18, 11, "25.08", "26.07"), (26, 13, "26.07", "26.07")],
)
def test_the_releases_that_load_a_graph_are_found(opset: int, ir_version: int, oldest: str, newest: str) -> None:
    found = find_releases_for(opset, ir_version)
    assert (found[0].release, found[-1].release) == (oldest, newest)
    assert found == [target for target in TARGETS if oldest <= target.release <= newest]


def test_a_graph_that_is_too_new_is_refused_with_the_releases_that_would_do() -> None:
    start = "model.onnx is too new for Triton 24.10: expected at most opset 21 and IR version 10, got "
    for opset, ir_version, rest in (
        (
            22,
            10,
            "opset 22 and IR version 10; pass --target 26.07, the newest release that loads it, or 25.03, the oldest",
        ),
        (
            18,
            11,
            "opset 18 and IR version 11; pass --target 26.07, the newest release that loads it, or 25.08, the oldest",
        ),
        (26, 13, "opset 26 and IR version 13; pass --target 26.07, the only release that loads it"),
        (27, 14, "opset 27 and IR version 14; export it with a lower opset: no release up to 26.07 loads it"),
    ):
        with pytest.raises(TargetError) as caught:
            require_fits("model.onnx", opset, ir_version, DEFAULT_TARGET)
        assert str(caught.value) == start + rest + "."
    require_fits("model.onnx", 21, 10, DEFAULT_TARGET)
    require_fits("model.onnx", 26, 13, find_target("26.07"))


def describe_targets() -> list[str]:
    """Return the rows of the table in docs/targets.md: releases of one ONNX Runtime and one Python in a row."""

    def describe(target: Target) -> tuple[str | int, ...]:
        python = target.python_version.rpartition(".")[0]
        return target.onnxruntime_version, target.max_opset, target.max_ir_version, python

    rows = []
    for cells, group in groupby(TARGETS, describe):
        targets = list(group)
        tensorrt = [target.tensorrt_version or "?" for target in targets]
        row = [", ".join(target.release for target in targets), *map(str, cells), ", ".join(tensorrt)]
        rows.append(f"| {' | '.join(row)} |")
    return rows


def test_the_page_of_targets_holds_the_table() -> None:
    lines = (CHECKOUT / "docs" / "targets.md").read_text(encoding="utf-8").split("\n")
    start = next(index for index, line in enumerate(lines) if line.startswith("| Triton | ONNX Runtime |")) + 2
    expected = describe_targets()
    assert lines[start : start + len(expected)] == expected, "\n".join(["the table should be:", *expected])
