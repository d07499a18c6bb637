"""Modules of one's own that are given pictures: what is made of their outputs, here and in the server."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
import torch
from harness import CHECKOUT, load_backend
from openvino import opset13

from export.__main__ import main
from export.engines.openvino_int8 import rank_products
from export.errors import ExportError
from export.identity import list_asked
from export.options import ExportRequest
from export.tasks import tensors
from export.tasks.own_module import build_factory_task
from export.tasks.pictures import images
from export.tasks.pictures.own import FactoryPictures, KeypointAnswers
from export.tasks.pictures.own_boxes import SuppressedBoxes
from export.tasks.pictures.preparation import read_preparation
from export.tasks.pictures.recipe import Recipe
from export.tasks.pictures.samples import build_pictures, draw_picture

answers = load_backend("python_postprocess", "answers")

MODULE = """
import torch


class Flat(torch.nn.Module):
    def forward(self, pixels):
        return pixels.mean((2, 3))


def build():
    return Flat()
"""
NETWORK = """
from torch import nn


def build():
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 16, 1)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)]
    # One label wins by far, whatever random weights and their rounding make of the others.
    layers[-1].bias.data[1] = 9.0
    return nn.Sequential(*layers)
"""
LABELS = {"answers": "labels", "labels": "names.txt", "top_k": 2}


def build(
    folder: Path,
    pictures: Sequence[Path] | None = None,
    *,
    recipe: Recipe = Recipe(mode="exact", size=(8, 8)),  # noqa: B008
    module: str = MODULE,
    **changed: Any,
) -> FactoryPictures:
    (folder / "model.py").write_text(module)
    (folder / "names.txt").write_text("red\ngreen\nblue\n")
    (folder / "recipe.json").write_text(recipe.to_json().decode())
    spec = {"inputs": {"pixels": {"shape": ["batch", 3, 8, 8]}}, "outputs": ["logits"], "answers": LABELS} | changed
    (folder / "inputs.json").write_text(json.dumps({key: value for key, value in spec.items() if value is not None}))
    preparation = read_preparation(str(folder / "recipe.json"))
    task = build_factory_task(
        f"{folder / 'model.py'}:build",
        folder / "inputs.json",
        None,
        build=lambda module, given: FactoryPictures(module, given, preparation=preparation, pictures=pictures),
    )
    assert isinstance(task, FactoryPictures)
    return task


def test_keypoints_are_the_same_by_the_definition_and_in_the_server() -> None:
    """Tops in the middle, at edges and in corners, flat ones, and heatmaps of one row."""
    random = np.random.default_rng(0)
    for height, width in ((16, 12), (3, 3), (2, 5), (1, 4), (1, 1)):
        stride = (64 / height, 48 / width)
        heatmaps = random.standard_normal((6, 4, height, width)).astype(np.float32)
        heatmaps[0, 0] = 0
        heatmaps[1, 0, 0, 0] = heatmaps[1, 1, -1, -1] = heatmaps[1, 2, 0, -1] = 9
        geometry = random.uniform(0.5, 4, (6, 6)).astype(np.float32)
        kind = KeypointAnswers(["a", "b", "c", "d"], stride)
        made = answers.build_postprocess(kind.postprocess)({"heatmaps": heatmaps, "geometry": geometry})
        for row in range(6):
            expected = kind.answer([torch.from_numpy(heatmaps[row : row + 1])], tuple(geometry[row].tolist()))
            assert made["LABEL"][row].tolist() == expected["LABEL"]
            np.testing.assert_allclose(made["KEYPOINT"][row], expected["KEYPOINT"], atol=1e-3)
            np.testing.assert_allclose(made["SCORE"][row], expected["SCORE"], atol=1e-6)


def test_a_parabola_is_found_to_a_fraction_of_a_cell() -> None:
    y, x = np.mgrid[0:16, 0:12]
    heatmap = (10 - (x - 5.3) ** 2 - (y - 8.7) ** 2).astype(np.float32)[None, None]
    geometry = np.array([[1, 1, 0, 0, 48, 64]], dtype=np.float32)
    settings = {"answers": "keypoints", "labels": ["a"], "stride": [4.0, 4.0]}
    place = answers.build_postprocess(settings)({"heatmaps": heatmap, "geometry": geometry})["KEYPOINT"][0, 0]
    np.testing.assert_allclose(place, [(5.3 + 0.5) * 4, (8.7 + 0.5) * 4], atol=1e-3)


def test_places_that_hang_on_the_last_digits_are_not_recorded() -> None:
    kind = KeypointAnswers(["a"], (4.0, 4.0))
    geometry = (1.0, 1.0, 0.0, 0.0, 48.0, 64.0)
    heatmaps = torch.zeros(1, 1, 16, 12)
    heatmaps[0, 0, 4, 4] = heatmaps[0, 0, 9, 9] = 1.0
    assert not kind.is_clear([heatmaps], geometry)
    heatmaps[0, 0, 4, 4] = 1.1
    assert kind.is_clear([heatmaps], geometry)


def test_labels_are_read_from_the_file_beside_the_inputs(tmp_path: Path) -> None:
    task = build(tmp_path)
    assert task.description == "3 labels, softmax, best 2; pictures by " + str(tmp_path / "recipe.json") + " at 8 x 8"
    assert task.step_files["model"] == {"labels.txt": b"red\ngreen\nblue\n"}
    found = task.answer(build_pictures()[0])
    assert len(found["LABEL"]) == 2 and found["SCORE"][0] >= found["SCORE"][1]


def test_without_answers_clients_get_the_outputs(tmp_path: Path) -> None:
    task = build(tmp_path, answers=None)
    contract = task.signature.contract
    assert contract is not None
    assert ([tensor.name for tensor in contract.outputs], contract.postprocess) == (["logits"], None)
    assert len(task.build_golden()["samples"]) == 12


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"inputs": {"pixels": {"shape": ["batch", 3, 8, 9]}}}, "are not what the module takes: expected one input of"),
        ({"answers": {"answers": "box", "labels": ["a"]}}, "labels of the one output logits or keypoints of the one"),
        ({"answers": LABELS | {"labels": ["a", "b"]}}, r"got 2 labels for logits \['batch', 3\]"),
        ({"answers": LABELS | {"labels": "missing.txt"}}, "No such file"),
        ({"answers": LABELS | {"function": "relu"}}, "got function 'relu', top_k 2"),
        ({"answers": LABELS | {"top_k": True}}, "got function 'softmax', top_k True"),
        ({"answers": "labels"}, 'are no object: expected such as .* got "labels"'),
        ({"answers": {"answers": "keypoints", "labels": "names.txt"}}, "got 3 labels for logits"),
        ({"outputs": ["scores"]}, "got 3 labels for scores"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=sentence):
        build(tmp_path, **changed)


BUCKETS = Recipe(mode="letterbox", buckets=((16, 8), (8, 16), (8, 8)))
NAMED = {"pixels": {"shape": ["batch", 3, "height", "width"]}}
POOLED = """
import torch


class Pooled(torch.nn.Module):
    def forward(self, pixels):
        return torch.nn.functional.{}(pixels, {})


def build():
    return Pooled()
"""


def test_pictures_of_several_shapes_are_tried_in_all_of_them(tmp_path: Path) -> None:
    task = build(tmp_path, recipe=BUCKETS, inputs=NAMED)
    assert task.description.endswith(" at 16 x 8 or 8 x 16 or 8 x 8")
    assert task.tested_sizes == "height from 8 to 16, width from 8 to 16"
    assert {row["pixels"].shape for row in task.tensors.samples} == {(3, 16, 8), (3, 8, 16), (3, 8, 8)}
    assert task.signature.inputs[0].dims == ("batch", 3, "height", "width")
    assert task.signature.outputs[0].dims == ("batch", 3)
    assert len(task.build_golden()["samples"]) == 12


def test_an_edge_that_all_buckets_share_is_a_number(tmp_path: Path) -> None:
    inputs = {"pixels": {"shape": ["batch", 3, 8, "wide"]}}
    task = build(tmp_path, recipe=Recipe(mode="exact", buckets=((8, 8), (8, 24))), inputs=inputs)
    assert task.signature.inputs[0].dims == ("batch", 3, 8, "wide")
    with pytest.raises(
        ExportError, match=r"shape \['batch', 3, 8, 'width'\], got pixels torch.float32 \['batch', 3, 8, 8"
    ):
        build(tmp_path, recipe=Recipe(mode="exact", buckets=((8, 8), (8, 24))))


def test_keypoints_of_several_shapes_want_heatmaps_of_one_scale(tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "recipe": BUCKETS,
        "inputs": NAMED,
        "outputs": ["heatmaps"],
        "answers": {"answers": "keypoints", "labels": "names.txt"},
    }
    task = build(tmp_path, module=POOLED.format("avg_pool2d", 4), **asked)
    assert isinstance(task.answers, KeypointAnswers) and task.answers.stride == (4.0, 4.0)
    with pytest.raises(ExportError, match=r"got heatmaps with a place for every \(2.0, 2.0\) or \(2.0, 4.0\) or"):
        build(tmp_path, module=POOLED.format("adaptive_avg_pool2d", 4), **asked)


def test_sizes_beside_those_of_the_buckets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="the sizes under dims have no effect on a module .* got height from 1 to 64"):
        build(tmp_path, recipe=BUCKETS, inputs=NAMED, dims={"height": {"max": 64}})
    with pytest.raises(ExportError, match=r"expected one input of float32 and shape \['batch', 3, 'height', 'width'\]"):
        build(tmp_path, recipe=BUCKETS, inputs={"pixels": {"shape": ["batch", 3, "edge", "edge"]}})


def test_answers_are_refused_where_clients_send_tensors(tmp_path: Path) -> None:
    build(tmp_path)
    with pytest.raises(ExportError, match="have no effect without pictures: expected --preprocess RECIPE, got none"):
        build_factory_task(f"{tmp_path / 'model.py'}:build", tmp_path / "inputs.json", None)


def test_one_process_for_all_steps_is_refused_where_clients_send_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(tmp_path, answers=None)
    export = ["run", "--factory", f"{tmp_path / 'model.py'}:build", "--inputs", str(tmp_path / "inputs.json")]
    assert main([*export, "--name", "flat", "--repository", str(tmp_path / "models"), "--steps", "lean"]) == 1
    assert "--steps lean has no effect on " in (refusal := capsys.readouterr().err)
    assert "expected --preprocess RECIPE, by which it is sent pictures, got --factory " in refusal
    assert not (tmp_path / "models").exists()


def test_large_pictures_are_tried_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_MOST_VALUES", 6 * 3 * 8 * 8 + 1)
    monkeypatch.setattr(images, "_MOST_PIXELS", 20 * 8 * 8)
    cases = {case.name: case for case in build(tmp_path).build_cases()}
    assert {len(batch) for batch in cases["samples in batches of 6"].batches} == {6, 2}
    assert len(cases["samples one by one"].rows) == 20


def write_pictures(folder: Path, count: int) -> Path:
    folder.mkdir()
    for index in range(count):
        draw_picture(index, 30, 20).save(folder / f"{index:02}.JPG", "JPEG")
    (folder / "licence.txt").write_text("not a picture")
    return folder


def test_the_pictures_of_the_user_are_what_it_is_tried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_pictures(tmp_path / "photos", 30)
    task = build(tmp_path, [folder, folder / "03.JPG"])
    assert task.description.endswith(" at 8 x 8, tried on 31 of 31 given") and len(task.tensors.samples) == 31
    monkeypatch.setattr(images, "_MOST_PIXELS", 0)
    task = build(tmp_path, [folder])
    assert task.description.endswith(", tried on 12 of 30 given")
    first, last = (task.preparation.read((folder / name).read_bytes()) for name in ("00.JPG", "27.JPG"))
    assert np.array_equal(task.tensors.samples[0]["pixels"], first)
    assert np.array_equal(task.tensors.samples[-1]["pixels"], last)
    # What a server is asked stays small, and of every kind.
    assert len(task.build_golden()["samples"]) == 12


def test_what_is_not_a_picture_is_refused(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "photos", 1)
    for given, sentence in {
        folder / "licence.txt": "licence.txt cannot be read: expected a whole picture, got 'cannot identify image file",
        folder / "missing.jpg": "missing.jpg cannot be read: expected a whole picture, got '.* No such file",
        tmp_path / "empty": "empty holds no pictures: expected files called .gif, .jpeg, ",
    }.items():
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ExportError, match=sentence):
            build(tmp_path, [given])
    (folder / "01.png").write_bytes((folder / "00.JPG").read_bytes()[:300])
    with pytest.raises(
        ExportError, match="01.png cannot be read: expected a whole picture, got .*; leave it out of --"
    ):
        build(tmp_path, [folder])


def test_int8_is_made_of_the_pictures_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path)
    (tmp_path / "model.py").write_text(NETWORK)
    folder = write_pictures(tmp_path / "photos", 20)
    words = ["run", "--factory", f"{tmp_path / 'model.py'}:build", "--inputs", str(tmp_path / "inputs.json")]
    words += ["--name", "small", "--repository", str(tmp_path / "models"), "--engine", "openvino"]
    recipe = ["--preprocess", str(tmp_path / "recipe.json")]
    assert main([*words, *recipe, "--precision", "int8"]) == 1
    assert "int8 is made for, and judged on, what clients send: expected --pictures FOLDER" in capsys.readouterr().err
    assert main([*words, "--pictures", str(folder)]) == 1
    assert "--pictures has no effect on " in capsys.readouterr().err
    assert not (tmp_path / "models").exists()
    assert main([*words, *recipe, "--precision", "int8", "--pictures", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "min label agreement 1" in told and "tried on 20 of 20 given" in told
    version = tmp_path / "models" / "small" / "1"
    (graph,) = (tmp_path / "models").rglob("model.xml")
    assert "FakeQuantize" in graph.read_text()
    sources = json.loads((version / "modelyard.lock.json").read_text())["sources"]
    assert {"recipe", "pictures"} < set(sources)


def test_products_by_channel_are_held_back_first() -> None:
    random, strides = np.random.default_rng(0), {"strides": [1, 1], "dilations": [1, 1]}
    pixels = opset13.parameter([1, 3, 8, 8], np.float32)
    values, padding = pixels, {"pads_begin": [0, 0], "pads_end": [0, 0]}
    for make, shape in (
        (opset13.convolution, (8, 3, 3, 3)),
        (opset13.group_convolution, (8, 1, 1, 3, 3)),
        (opset13.convolution, (4, 8, 4, 4)),
    ):
        values = make(values, opset13.constant(random.standard_normal(shape, np.float32)), **strides, **padding)
    rows = opset13.reshape(values, opset13.constant(np.array([1, 4])), special_zero=False)
    product = opset13.matmul(rows, opset13.constant(random.standard_normal((4, 3), np.float32)), False, False)
    model = openvino.Model([opset13.result(product)], [pixels])
    feed = {
        pixels.output(0).any_name if pixels.output(0).names else 0: random.standard_normal((1, 3, 8, 8), np.float32)
    }
    first, *others = rank_products(model, [feed])
    kinds = {node.get_friendly_name(): node.get_type_name() for node in model.get_ordered_ops()}
    assert kinds[first] == "GroupConvolution"
    assert sorted(kinds[name] for name in others) == ["Convolution", "Convolution", "MatMul"]


def test_files_that_options_name_are_told_from_what_they_hold(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "photos", 2)
    recipe = tmp_path / "recipe.json"
    recipe.write_text("{}")
    made = ExportRequest(
        checkpoint=tmp_path,
        name="n",
        repository=tmp_path,
        task_options={"preprocess": str(recipe), "pictures": (folder,)},
    )
    found = list_asked(made)
    assert found["recipe"] == [recipe] and {path.name for path in found["pictures"]} >= {"00.JPG", "01.JPG"}
    named = ExportRequest(checkpoint=tmp_path, name="n", repository=tmp_path, task_options={"preprocess": "imagenet"})
    assert list_asked(named) == {"recipe": [], "pictures": []}


BOXES = {"answers": "boxes", "labels": ["a", "b"], "format": "xyxy", "unit": "parts", "function": "sigmoid"}
# Every pixel sees something: its box is made of what it and the next ones are, its logits of its colours.
SEEING = """
import torch


class Seeing(torch.nn.Module):
    def __init__(self, numbers, labels, flat):
        super().__init__()
        self.numbers, self.labels, self.flat = numbers, labels, flat

    def forward(self, pixels):
        places = pixels.flatten(2).transpose(1, 2).repeat(1, 1, 2)
        boxes, logits = places[..., : self.numbers], places[..., : self.labels]
        return boxes, (logits[:, :5] if self.flat == "fewer" else logits.mean(1) if self.flat else logits)


def build(numbers=4, labels=2, flat=False):
    return Seeing(numbers, labels, flat)
"""


def build_boxes(folder: Path, *, asked: dict[str, Any] | None = None, **changed: Any) -> FactoryPictures:
    spec: dict[str, Any] = {"outputs": ["boxes", "logits"], "answers": BOXES | (asked or {})}
    return build(folder, module=SEEING, **(spec | changed))


def test_boxes_are_asked_for_with_defaults_that_are_told(tmp_path: Path) -> None:
    task = build_boxes(tmp_path)
    assert task.description.startswith(
        "boxes of 2 labels, sigmoid, that score above 0.5, neighbours suppressed above an IoU of 0.5, best 64;"
    )
    contract = task.signature.contract
    assert contract is not None
    assert {tensor.name: tensor.dims for tensor in contract.outputs} == {
        "LABEL": ("batch", 64),
        "SCORE": ("batch", 64),
        "BOX": ("batch", 64, 4),
        "COUNT": ("batch", 1),
    }
    assert task.postprocess is not None and task.postprocess["unit"] == [8.0, 8.0]
    # As many as places and labels are, and as are asked for.
    assert build_boxes(tmp_path, asked={"multi_label": True}).postprocess["top_k"] == 100  # type: ignore[index]
    assert build_boxes(tmp_path, asked={"top_k": 7}).postprocess["top_k"] == 7  # type: ignore[index]


def test_the_page_asks_for_boxes_by_every_key(tmp_path: Path) -> None:
    page = (CHECKOUT / "docs" / "pictures.md").read_text(encoding="utf-8")
    section = page.split("### Boxes of your own network")[1].split("\n## ")[0]
    (shown,) = re.findall(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    asked = json.loads(shown)["answers"]
    arguments = {"labels": len(asked["labels"])}
    task = build_boxes(tmp_path, answers=asked, arguments=arguments, outputs=json.loads(shown)["outputs"])
    assert task.description.startswith("boxes of 3 labels, sigmoid, that score above 0.25, ")
    keys = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert task.postprocess is not None and {"answers", "labels", *keys} == task.postprocess.keys()


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"tresh": 0.5}, "got the unknown key tresh, to which threshold is the nearest; correct the file of --inputs"),
        ({"threshold": 1.5}, "got threshold 1.5 in place of a number from 0 to below 1;"),
        ({"threshold": True}, "got threshold true in place of a number"),
        ({"iou_threshold": -0.1}, "got iou_threshold -0.1 in place of a number from 0 to 1"),
        ({"top_k": 0}, "got top_k 0 in place of a whole number from 1 to 1000"),
        ({"format": "xywh"}, 'got format "xywh" in place of xyxy or cxcywh'),
        ({"unit": ["parts"]}, r'got unit \["parts"\] in place of pixels or parts'),
        ({"function": ["relu"]}, r'got function \["relu"\] in place of one of softmax, sigmoid, none'),
        ({"multi_label": 1}, "got multi_label 1 in place of true or false"),
        ({"ignored": ["c"]}, r'got ignored \["c"\] in place of some of the labels, in a list'),
        ({"ignored": ["a", "b"]}, "in place of some of the labels"),
        ({"ignored": [["a"]]}, "in place of some of the labels"),
        ({"labels": ["a"]}, r"got boxes \['batch', 64, 4\] and logits \['batch', 64, 2\] for 1 labels"),
    ],
)
def test_boxes_that_are_asked_for_otherwise_are_refused(asked: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=sentence) as refused:
        build_boxes(tmp_path, asked=asked)
    assert "expected boxes of the outputs boxes [batch, places, 4] and logits [batch, places, la" in str(refused.value)


@pytest.mark.parametrize("key", ["format", "unit", "function"])
def test_what_boxes_are_is_not_guessed(key: str, tmp_path: Path) -> None:
    asked = {name: value for name, value in BOXES.items() if name != key}
    with pytest.raises(ExportError, match=f"got no {key}, which is "):
        build_boxes(tmp_path, answers=asked)


@pytest.mark.parametrize(
    ("changed", "got"),
    [
        ({"outputs": ["boxes", "scores"]}, r"got boxes \['batch', 64, 4\] and scores \['batch', 64, 2\];"),
        ({"arguments": {"numbers": 5}}, r"got boxes \['batch', 64, 5\] and logits"),
        ({"arguments": {"flat": "fewer"}}, r"got boxes \['batch', 64, 4\] and logits \['batch', 5, 2\]"),
        ({"arguments": {"flat": True}}, r"and logits \['batch', 2\]"),
    ],
)
def test_outputs_that_are_no_boxes_are_refused(changed: dict[str, Any], got: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=got):
        build_boxes(tmp_path, **changed)
    module = MODULE.replace("mean((2, 3))", "flatten(2)")
    with pytest.raises(ExportError, match=r"got boxes \['batch', 3, 64\];"):
        build(tmp_path, module=module, outputs=["boxes"], answers=BOXES)


def test_parts_of_pictures_of_several_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="got parts of 16 x 8 or 8 x 16 or 8 x 8 pixels, .*; answer in pixels of it"):
        build_boxes(tmp_path, recipe=BUCKETS, inputs=NAMED)
    task = build_boxes(tmp_path, recipe=BUCKETS, inputs=NAMED, asked={"unit": "pixels"})
    assert task.postprocess is not None and task.postprocess["top_k"] == 100


def suppress(**changed: Any) -> SuppressedBoxes:
    settings: dict[str, Any] = {
        "names": ["boxes", "logits"],
        "labels": ["a", "b"],
        "ignored": [],
        "format": "xyxy",
        "unit": (1.0, 1.0),
        "function": "none",
        "threshold": 0.5,
        "iou_threshold": 0.5,
        "top_k": 3,
        "multi_label": False,
    }
    return SuppressedBoxes(**(settings | changed))


PLAIN = (1.0, 1.0, 0.0, 0.0, 48.0, 64.0)
LEFT, SHIFTED, FAR = [0.0, 0, 10, 10], [2.0, 0, 12, 10], [30.0, 30, 40, 40]


@pytest.mark.parametrize(
    ("boxes", "scores", "is_clear"),
    [
        # A neighbour that surely is suppressed may score as it likes, also at the threshold.
        ([LEFT, SHIFTED, FAR], [[0.9, 0], [0.500005, 0], [0.7, 0]], True),
        ([LEFT, SHIFTED, FAR], [[0.9, 0], [0.6, 0], [0.500005, 0]], False),
        # Which of two neighbours is the likelier decides which box is answered; of two labels both are.
        ([LEFT, SHIFTED, FAR], [[0.9, 0], [0.899995, 0], [0.7, 0]], False),
        ([LEFT, SHIFTED, FAR], [[0.9, 0], [0, 0.899995], [0.7, 0]], False),
        ([LEFT, SHIFTED, FAR], [[0.9, 0], [0, 0.8], [0.7, 0]], True),
        # Half of what they cover together is in both.
        ([LEFT, [0.0, 0, 10, 5], FAR], [[0.9, 0], [0.8, 0], [0.7, 0]], False),
        # A place whose label is not clear, and one that is suppressed whose label is.
        ([LEFT, SHIFTED, FAR], [[0.9, 0], [0.8, 0.7], [0.700005, 0.7]], False),
        ([LEFT, SHIFTED, FAR], [[0.9, 0], [0.8, 0.7], [0.700005, 0.6]], True),
        ([LEFT], [[0.4, 0.4]], True),
    ],
)
def test_boxes_that_hang_on_the_last_digits_are_not_recorded(
    boxes: list[list[float]], scores: list[list[float]], is_clear: bool
) -> None:
    outputs = [torch.tensor([boxes]), torch.tensor([scores])]
    assert suppress().is_clear(outputs, PLAIN) == is_clear


def test_what_is_behind_the_best_hangs_on_nothing() -> None:
    outputs = [torch.tensor([[LEFT, FAR, SHIFTED]]), torch.tensor([[[0.9, 0], [0.8, 0], [0, 0.500005]]])]
    assert not suppress().is_clear(outputs, PLAIN) and suppress(top_k=2).is_clear(outputs, PLAIN)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "none"])
@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("kind_of_box", ["xyxy", "cxcywh"])
def test_boxes_are_the_same_by_the_definition_and_in_the_server(
    function: str, multi_label: bool, kind_of_box: str
) -> None:
    """Crowded, of equal scores, without an area, and none at all."""
    random = np.random.default_rng(0)
    load_backend("python_postprocess", "boxes")
    for places, crowd in ((300, 30), (40, 300), (1, 1)):
        kind = suppress(
            labels=["a", "b", "c"],
            ignored=["b"],
            unit=(3.0, 2.0),
            function=function,
            format=kind_of_box,
            multi_label=multi_label,
            threshold=0.4,
            top_k=25,
        )
        boxes = random.uniform(0, crowd, (3, places, 4)).astype(np.float32)
        logits = random.uniform(-1, 1, (3, places, 3)).round(1).astype(np.float32)
        logits[2] = -100
        geometry = random.uniform(0.5, 4, (3, 6)).astype(np.float32)
        tensors = {"boxes": boxes, "logits": logits, "geometry": geometry}
        made = answers.build_postprocess(kind.postprocess)(tensors)
        for row in range(3):
            outputs = [torch.from_numpy(tensors[name][row : row + 1]) for name in kind.names]
            expected = kind.answer(outputs, tuple(geometry[row].tolist()))
            assert made["LABEL"][row].tolist() == expected["LABEL"]
            assert made["COUNT"][row].tolist() == expected["COUNT"]
            np.testing.assert_allclose(made["BOX"][row], expected["BOX"], rtol=1e-5, atol=1e-4)
            np.testing.assert_allclose(made["SCORE"][row], expected["SCORE"], atol=1e-6)
