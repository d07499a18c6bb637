"""Decoders in bf16 and int8: what each costs is measured against the checkpoint, and held to the table's bounds."""

import json
from pathlib import Path
from typing import Any

import pytest
from trainers.writers import save_trained_writer, save_writer

from export.__main__ import main
from export.engines.openvino_model import choose_arithmetic
from export.errors import EngineError
from export.graph.precisions import PERPLEXITY_RISE, PRECISIONS


def can_compute(precision: str) -> bool:
    try:
        choose_arithmetic(precision)
    except EngineError:
        return False
    return True


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trained_writer(tmp_path_factory.mktemp("llama") / "checkpoint")


@pytest.fixture(scope="module")
def repository(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version in each precision that this machine computes."""
    repository = tmp_path_factory.mktemp("lossy") / "models"
    for precision in ("fp32", "int8", "bf16"):
        asked = ["run", str(checkpoint), "--name", "writer", "--repository", str(repository), "--precision", precision]
        assert main(asked) == (0 if can_compute(precision) else 1)
    return repository


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("precision", "version"), [("int8", 2), ("bf16", 3)])
def test_what_a_precision_costs_is_measured_and_bounded(repository: Path, precision: str, version: int) -> None:
    if not can_compute(precision):
        pytest.skip(f"this CPU only emulates {precision}; run it on one with its instructions")
    folder = repository / "writer" / str(version)
    report = read_json(folder / "verification.json")
    assert report["tolerances"] == PRECISIONS[precision].writing
    cases = {case["name"]: case for case in report["cases"]}
    real = cases["prompts one by one"]
    # Something was lost, or nothing was converted.
    assert 1e-4 < real["max_relative_error"] <= report["tolerances"]["max_relative_error"]
    perplexity = cases["perplexity of real text"]
    assert perplexity["rows"] >= 4 and 0 != perplexity[PERPLEXITY_RISE] <= report["tolerances"][PERPLEXITY_RISE]
    assert read_json(folder / "properties.json")["KV_CACHE_PRECISION"] == "u8"


def test_weights_are_a_quarter_in_int8_and_whole_in_fp32(repository: Path) -> None:
    sizes = [(repository / "writer" / str(number) / "openvino_model.bin").stat().st_size for number in (1, 2)]
    assert sizes[1] < 0.4 * sizes[0]
    report = read_json(repository / "writer" / "1" / "verification.json")
    perplexity = next(case for case in report["cases"] if case["name"] == "perplexity of real text")
    assert abs(perplexity[PERPLEXITY_RISE]) < 1e-5


def test_what_exceeds_a_bound_is_refused_and_not_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Random weights make much of a small difference.
    checkpoint = save_writer("llama", tmp_path / "checkpoint")
    asked = ["run", str(checkpoint), "--name", "writer", "--repository", str(tmp_path / "models")]
    assert main([*asked, "--precision", "int8"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "is not equal to the checkpoint" in told
    assert "see every case in the table above, and ask for less with --tolerance and --accept-worse, or pass" in told
    assert not (tmp_path / "models" / "writer" / "1").exists()
