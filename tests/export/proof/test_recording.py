"""What a version records for a server that starts: answers that its own file gives, within bounds that tell something.

A file of another precision is here a network whose outputs are moved.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from export.errors import VerificationError
from export.proof.recording import Recording, Seen, record_answers
from export.proof.tolerances import Tolerances
from export.tasks.base import Task
from export.tasks.golden import measure_sample
from export.tasks.own_module import FactoryTask, read_spec
from export.tasks.pictures.own import FactoryPictures
from export.tasks.pictures.preparation import read_preparation
from export.tasks.pictures.recipe import Recipe
from modelyard.recorded_answers import measure_answer

Outputs = Sequence[np.ndarray[Any, Any]]
Move = Callable[[Outputs], Outputs]

LOSSY = Tolerances(bounds={"min_cosine": 0.99}, real_inputs_only=True)
FP16 = Tolerances(bounds={"max_relative_error": 0.01, "min_cosine": 0.9999}, is_for_gpus=True)


class Boxes(nn.Module):
    """Two boxes, whose scores lie as far apart as the picture's left half is redder than its right one."""

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        redder = (pixels[:, 0, :, :4] - pixels[:, 0, :, 4:]).mean((1, 2))
        boxes = torch.tensor([[0.0, 0, 4, 8], [4, 0, 8, 8]]).expand(len(pixels), 2, 4)
        return boxes + 0 * redder[:, None, None], 2 + torch.stack([redder, -redder], dim=1)[:, :, None]


class Places(nn.Module):
    """A score of each value, and where the largest is."""

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return values.sin(), values.sin().argmax(dim=1)


@pytest.fixture
def boxes(tmp_path: Path) -> FactoryPictures:
    (tmp_path / "recipe.json").write_bytes(Recipe(mode="exact", size=(8, 8)).to_json())
    answers = {"answers": "boxes", "labels": ["half"], "format": "xyxy", "unit": "pixels", "function": "sigmoid"}
    spec = {"inputs": {"pixels": {"shape": ["batch", 3, 8, 8]}}, "outputs": ["boxes", "logits"], "answers": answers}
    return FactoryPictures(Boxes(), write_spec(tmp_path, spec), preparation=read_preparation(f"{tmp_path}/recipe.json"))


@pytest.fixture
def places(tmp_path: Path) -> FactoryTask:
    spec = {"inputs": {"values": {"shape": ["batch", "width"]}}, "outputs": ["sine", "largest"]}
    return FactoryTask(Places(), write_spec(tmp_path, spec))


def write_spec(folder: Path, spec: Mapping[str, Any]) -> Any:
    (folder / "inputs.json").write_text(json.dumps(spec))
    return read_spec(folder / "inputs.json")


def move_scores(outputs: Outputs) -> Outputs:
    """Prefer the second box by somewhat more, and move both by a hundredth of a pixel."""
    places, logits = outputs
    return [places + np.float32(0.01), logits + np.array([[0.0], [0.3]], dtype=np.float32)]


def record(task: Task, judged: Tolerances, move: Move, seen: Seen | None = None) -> Recording:
    return record_answers(task, judged, seen or Seen(), run_moved(task, move))


def run_moved(task: Task, move: Move) -> Callable[..., Outputs]:
    module = task.module

    def run(names: Sequence[str], feeds: Mapping[str, Any]) -> Outputs:
        with torch.no_grad():
            return move([output.numpy() for output in module(*map(torch.from_numpy, feeds.values()))])

    return run


def measure_own(task: Task, golden: Mapping[str, Any], move: Move) -> list[float]:
    """Return how far the moved network is from each recorded answer, by the server's own measure, which may refuse."""
    with task.answered_by(run_moved(task, move)):
        own = {str(sample["inputs"]): sample["outputs"] for sample in task.build_golden()["samples"]}
    return [
        measure_answer(sample["outputs"], own[str(sample["inputs"])], golden["tolerances"])
        for sample in golden["samples"]
    ]


def test_boxes_that_change_places_are_not_recorded_and_the_others_are_bounded_in_pixels(boxes: FactoryPictures) -> None:
    whole = boxes.build_golden()["samples"]
    recording = record(boxes, LOSSY, move_scores)
    golden = recording.golden
    assert 0 < len(golden["samples"]) < len(whole)
    assert recording.note == (
        f"recorded for the check of a server are not {len(whole) - len(golden['samples'])} of {len(whole)} answers, "
        "which this precision moves"
    )
    bound = golden["tolerances"]["max_abs_error"]
    errors = measure_own(boxes, golden, move_scores)
    assert bound / 2 < max(errors) < bound < 5
    # What is recorded stays the checkpoint's own.
    assert all(sample in whole for sample in golden["samples"])


def test_what_a_gpu_may_be_off_is_counted_in_pixels_as_well(boxes: FactoryPictures) -> None:
    narrow = record(boxes, FP16, move_scores).golden["tolerances"]["max_abs_error"]
    wide = record(boxes, FP16, move_scores, Seen(room=2.0)).golden["tolerances"]["max_abs_error"]
    assert wide == pytest.approx(narrow * 2 / 1.5)
    # However little the proof was off, a box beyond is another one.
    assert record(boxes, FP16, move_scores, Seen(room=1e4)).golden["tolerances"]["max_abs_error"] == 5.0


def test_a_file_that_gives_none_of_the_answers_records_its_own_and_says_so(boxes: FactoryPictures) -> None:
    def exchange(outputs: Outputs) -> Outputs:
        return [outputs[0], outputs[1][:, ::-1].copy()]

    recording = record(boxes, LOSSY, exchange)
    assert "are the file's own answers" in recording.note
    assert measure_own(boxes, recording.golden, exchange) == [0.0] * len(recording.golden["samples"])
    with pytest.raises(VerificationError, match="gives none of the answers that a server is asked for when it starts"):
        record(boxes, Tolerances(bounds=boxes.tolerances), exchange)


def test_an_integer_that_flips_is_left_out_and_no_bound_is_infinite(places: FactoryTask) -> None:
    def flip(outputs: Outputs) -> Outputs:
        return [outputs[0] * np.float32(1.01), outputs[1] + 1]

    recording = record(places, LOSSY, flip, Seen(answers={"max_relative_error": 0.02}))
    (sample,) = recording.golden["samples"]
    assert [tensor["name"] for tensor in sample["outputs"]] == ["sine"]
    assert recording.golden["tolerances"]["max_relative_error"] == pytest.approx(0.03)
    assert recording.note.endswith("are not the values of largest, which this precision moves")
    with places.answered_by(run_moved(places, flip)):
        assert measure_answer(
            sample["outputs"], places.build_golden()["samples"][0]["outputs"], recording.golden["tolerances"]
        ) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("bounds", [{"max_abs_error": 1.0}, {"max_relative_error": 1.0}])
def test_the_export_measures_as_the_server_does(bounds: Mapping[str, float]) -> None:
    def tensors(*scores: float) -> list[dict[str, Any]]:
        named = {"name": "LABEL", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}
        labels = [] if "max_relative_error" in bounds else [named]
        return [*labels, {"name": "SCORE", "datatype": "FP32", "shape": [2], "data": list(scores)}]

    wanted, had = tensors(0.4, 0.2), tensors(0.3, 0.25)
    assert measure_sample(wanted, had, bounds) == pytest.approx(measure_answer(wanted, had, bounds))
    assert measure_sample(wanted, tensors(float("nan"), 0.2), bounds) == float("inf")
    assert measure_sample(wanted, [*wanted[:-1], wanted[-1] | {"shape": [1, 2]}], bounds) == float("inf")
