"""The verified graph in OpenVINO: built, proven, and refused where it was not proven."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness import CHECKOUT, Exported, load_backend

from export.engines.engine import VerifiedGraph
from export.engines.openvino_model import ARITHMETICS, check_cpu, read_cpu_flags, read_model
from export.engines.table import ENGINES
from export.errors import EngineError
from export.graph.precisions import PRECISIONS
from export.proof.quality import build_measure, list_quality_cases, list_quality_feeds
from export.proof.tolerances import list_tolerances
from export.proof.verify import require_passed, verify
from export.targets import DEFAULT_TARGET

OPENVINO = ENGINES["openvino"]
PROVEN = [name for name in ARITHMETICS if name != "bf16" or read_cpu_flags() & {*ARITHMETICS["bf16"].instructions}]


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
    require_passed(report)
    assert report.versions["openvino"] == read_model(path).openvino
    assert (report.worst.error > 1e-5) == (precision != "fp32"), "it computes in the precision that it says"


def test_bf16_is_refused_where_it_would_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.engines.openvino_model.read_cpu_flags", lambda: {"avx2"})
    with pytest.raises(
        EngineError, match=r"this CPU has no instructions for bf16: expected one of amx_bf16, avx512_bf1"
    ):
        check_cpu("bf16")


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
        compiled.compile_model(path, streams=1)


def test_nothing_is_reported_to_the_makers_of_openvino_and_nncf() -> None:
    code = (
        "from export.engines.openvino_model import import_openvino; import_openvino(); import nncf, sys;"
        "from nncf.telemetry.wrapper import telemetry as t; print(type(t).__name__, sys.modules['openvino_telemetry'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["MagicMock", "None"]


def test_contracts_name_every_key_of_openvino_json(exported: Exported) -> None:
    page = (CHECKOUT / "docs" / "contracts.md").read_text(encoding="utf-8").split("\n## openvino.json\n")[1]
    keys = [line.split("`")[1] for line in page.split("\n## ")[0].splitlines() if line.startswith("| `")]
    assert keys == [*read_model.__annotations__["return"].__dataclass_fields__]
    assert np.all([key in (CHECKOUT / "backends/python_openvino/compiled.py").read_text() for key in keys[:-1]])
