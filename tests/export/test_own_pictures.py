"""Modules of one's own that are given pictures: what is made of their outputs, here and in the server."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
import torch
from harness import load_backend
from openvino import opset13

from export.__main__ import main
from export.engines.openvino_int8 import rank_products
from export.errors import ExportError
from export.identity import list_asked
from export.options import ExportRequest
from export.tasks import images, tensors
from export.tasks.own_module import build_factory_task
from export.tasks.own_pictures import FactoryPictures, KeypointAnswers
from export.tasks.picture_preparation import read_preparation
from export.tasks.picture_recipe import Recipe
from export.tasks.picture_samples import build_pictures, draw_picture

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
        ({"answers": {"answers": "boxes", "labels": ["a"]}}, "labels of the one output logits or keypoints of the one"),
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
