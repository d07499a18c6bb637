"""The verified graph in OpenVINO: built, proven, and refused where it was not proven."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import CHECKOUT, Exported, load_backend

from export.engines.engine import VerifiedGraph
from export.engines.openvino_model import ARITHMETICS, OpenVinoRunner, choose_arithmetic, read_cpu_flags, read_model
from export.engines.table import ENGINES
from export.errors import EngineError
from export.graph.precisions import PRECISIONS
from export.proof.quality import build_measure, list_quality_cases, list_quality_feeds
from export.proof.tolerances import list_tolerances
from export.proof.verify import require_passed, verify
from export.targets import DEFAULT_TARGET

OPENVINO = ENGINES["openvino"]
PROVEN = [name for name, ways in ARITHMETICS.items() if name != "bf16" or read_cpu_flags() & {*ways[0].instructions}]


@pytest.mark.parametrize("precision", PROVEN)
def test_each_precision_holds_its_bounds_in_openvino_itself(exported: Exported, tmp_path: Path, precision: str) -> None:
    task = exported.source.task
    tolerances = list_tolerances(task.tolerances, PRECISIONS[precision])
    measure = build_measure(task, list_quality_cases(task), "min_cosine", DEFAULT_TARGET, OPENVINO)
    graph = VerifiedGraph(
        path=exported.model_file,
        signature=task.signature,
        precision=precision,
        target=DEFAULT_TARGET,
        feeds=list_quality_feeds(task),
        measure=measure,
        bounds={"cosine": tolerances.bounds["min_cosine"]},
    )
    OPENVINO.build(graph, tmp_path)
    path = tmp_path / OPENVINO.model_file
    files = replace(exported.files, model=(path, *(other for other in tmp_path.iterdir() if other != path)))
    report = verify(task=task, files=files, target=DEFAULT_TARGET, tolerances=tolerances, engine=OPENVINO)
    require_passed(report, is_lossy=precision != "fp32")
    assert report.versions["openvino"] == read_model(path).openvino
    assert (report.worst.error > 1e-5) == (precision != "fp32"), "it computes in the precision that it says"


def test_bf16_is_refused_where_it_would_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.engines.openvino_model.read_cpu_flags", lambda: {"avx2"})
    with pytest.raises(
        EngineError, match=r"this CPU has no instructions for bf16: expected one of amx_bf16, avx512_bf1"
    ):
        choose_arithmetic("bf16")


@pytest.mark.parametrize(
    ("flags", "hint"), [({"avx512_bf16", "avx512_vnni"}, "bf16"), ({"avx512_vnni"}, "f32"), ({"avx2"}, "f32")]
)
def test_what_int8_leaves_is_computed_as_fast_as_the_cpu_can(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], hint: str
) -> None:
    monkeypatch.setattr("export.engines.openvino_model.read_cpu_flags", lambda: flags)
    chosen = choose_arithmetic("int8")
    assert chosen.hint == hint
    assert flags & {*chosen.instructions} or flags == {"avx2"}


def test_a_server_refuses_what_was_proven_elsewhere(tmp_path: Path) -> None:
    compiled = load_backend("python_openvino", "compiled")
    path = tmp_path / "openvino.json"
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu avx2\n")
    with pytest.raises(
        ValueError, match=r"another kind of CPU: expected one with avx512_vnni, got one without; serve it"
    ):
        compiled.check_cpu(path, ["avx512_vnni"], cpuinfo)
    path.write_text(json.dumps({"graph": "model.onnx", "hint": "f32", "instructions": [], "openvino": "2025.0.0"}))
    with pytest.raises(ValueError, match=r"another OpenVINO: expected 2025.0.0, got 2026.4.1; install that one, or"):
        compiled.CompiledGraph(path)


@pytest.fixture
def built(exported: Exported, tmp_path: Path) -> Path:
    """`openvino.json` of a small model in fp32, whose padding is marked."""
    graph = VerifiedGraph(
        path=exported.model_file,
        signature=exported.source.task.signature,
        precision="fp32",
        target=DEFAULT_TARGET,
        padding={"input_ids": 7},
    )
    OPENVINO.build(graph, tmp_path)
    return tmp_path / OPENVINO.model_file


def test_a_small_model_has_graphs_of_single_lengths_up_to_what_it_reads(exported: Exported, built: Path) -> None:
    described = read_model(built)
    longest = min(128, exported.source.task.signature.longest["seq_len"])
    assert 3 <= len(described.lengths) <= 8
    assert described.lengths[-1] == longest
    assert [*described.lengths] == sorted({*described.lengths})
    assert described.padding == {"input_ids": 7}


def test_a_graph_whose_weights_are_many_has_none(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.engines.openvino_model._COPIED_WEIGHTS", 1000)
    graph = VerifiedGraph(
        path=exported.model_file, signature=exported.source.task.signature, precision="fp32", target=DEFAULT_TARGET
    )
    OPENVINO.build(graph, tmp_path)
    described = read_model(tmp_path / OPENVINO.model_file)
    assert ([*described.lengths], described.padding) == ([], {})


def _wait_for_lengths() -> None:
    for thread in threading.enumerate():
        if thread.name == "graphs of single lengths":
            thread.join(timeout=60)


def test_rows_are_padded_as_the_tokenizer_pads_and_answered_one_by_one_in_the_server_and_the_proof(
    exported: Exported, built: Path
) -> None:
    signature = exported.source.task.signature
    names = [tensor.name for tensor in signature.outputs]
    described = read_model(built)
    graph = load_backend("python_openvino", "compiled").CompiledGraph(built)
    _wait_for_lengths()
    seen: list[dict[str, np.ndarray]] = []

    class Watched:
        def __init__(self, request: Any) -> None:
            self.infer = lambda feed, **options: (seen.append(dict(feed)), request.infer(feed, **options))[1]

    runner = OpenVinoRunner(built)
    for compiled in (graph, runner):
        compiled._of_length = {length: Watched(request) for length, request in compiled._of_length.items()}
        for rows, size in ((1, 1), (3, described.lengths[1] - 1), (1, described.lengths[-1])):
            length = next(length for length in described.lengths if length >= size)
            feed = {
                tensor.name: np.ones((rows, size), np.int64)
                * (np.arange(1, rows + 1)[:, np.newaxis] if tensor.name == "input_ids" else 1)
                for tensor in signature.inputs
            }
            seen.clear()
            got = compiled.run(names, feed)
            assert [each["input_ids"].shape for each in seen] == [(1, length)] * rows
            for row, each in enumerate(seen):
                assert (each["input_ids"][0, :size] == row + 1).all()
                assert (each["input_ids"][0, size:] == 7).all()
                assert each["attention_mask"].sum() == size
            expected = graph._of_any.infer(feed)
            for name, array in zip(names, got, strict=True):
                assert array.dtype == expected[name].dtype
                np.testing.assert_allclose(array, expected[name], atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("lengths", value) for value in ([0], [-5, 16], ["16"], None, [100_000], [64, 16], {"16": 1})),
        *(("padding", value) for value in ({"input_ids": "x"}, [])),
    ],
)
def test_what_no_length_or_padding_can_be_is_refused_in_one_sentence(built: Path, key: str, value: Any) -> None:
    content = json.loads(built.read_text())
    built.write_text(json.dumps({**content, key: value}))
    with pytest.raises(ValueError, match=rf"openvino.json has wrong {key}: expected .*, got .*; put the file back, or"):
        load_backend("python_openvino", "compiled").CompiledGraph(built)


def test_a_graph_is_closed_while_others_are_compiled(built: Path) -> None:
    graph = load_backend("python_openvino", "compiled").CompiledGraph(built)
    graph.close()
    assert not graph._compiling.is_alive()


def test_a_row_longer_than_all_lengths_runs_as_it_is(exported: Exported, built: Path) -> None:
    content = json.loads(built.read_text())
    built.write_text(json.dumps({**content, "lengths": [2, 4]}))
    graph = load_backend("python_openvino", "compiled").CompiledGraph(built)
    _wait_for_lengths()
    names = [tensor.name for tensor in exported.source.task.signature.outputs]
    feed = {tensor.name: np.ones((1, 5), np.int64) for tensor in exported.source.task.signature.inputs}
    expected = graph._of_any.infer(feed)
    for compiled in (graph, OpenVinoRunner(built)):
        for name, array in zip(names, compiled.run(names, feed), strict=True):
            np.testing.assert_array_equal(array, expected[name])


def test_an_openvino_json_without_lengths_is_served_as_before(exported: Exported, built: Path) -> None:
    content = json.loads(built.read_text())
    built.write_text(json.dumps({key: content[key] for key in ("graph", "hint", "instructions", "openvino")}))
    graph = load_backend("python_openvino", "compiled").CompiledGraph(built)
    names = [tensor.name for tensor in exported.source.task.signature.outputs]
    feed = {tensor.name: np.ones((2, 3), np.int64) for tensor in exported.source.task.signature.inputs}
    assert [len(array) for array in graph.run(names, feed)] == [2] * len(names)
    assert not graph._of_length


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("import export.graph.stateful_decoder", marks=pytest.mark.rarer),
        pytest.param("import export.engines.openvino_generation", marks=pytest.mark.rarer),
        "sys.path.insert(0, 'backends/python_openvino'); import compiled",
        # Which tritonserver alone has; it is only imported here.
        "sys.modules['triton_python_backend_utils'] = mock.MagicMock();"
        "sys.path.insert(0, 'backends/openvino_generate'); import engine",
    ],
)
def test_nothing_is_reported_to_the_makers_of_openvino_and_nncf(first: str) -> None:
    code = (
        f"import sys; from unittest import mock; {first}; import openvino, openvino_genai, nncf;"
        "from nncf.telemetry.wrapper import telemetry as t; print(type(t).__name__, sys.modules['openvino_telemetry'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["MagicMock", "None"]


def test_contracts_name_every_key_of_openvino_json(exported: Exported) -> None:
    page = (CHECKOUT / "docs" / "contracts.md").read_text(encoding="utf-8").split("\n## openvino.json\n")[1]
    keys = [line.split("`")[1] for line in page.split("\n## ")[0].splitlines() if line.startswith("| `")]
    assert keys == [*read_model.__annotations__["return"].__dataclass_fields__]
    assert np.all([key in (CHECKOUT / "backends/python_openvino/compiled.py").read_text() for key in keys[:-1]])
