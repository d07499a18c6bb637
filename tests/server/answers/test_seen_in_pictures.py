"""Models that see several things in a picture, served by the real tritonserver, beside transformers' own answers."""

import base64
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import CHECKOUT, run
from launcher import running
from PIL import Image
from sklearn.datasets import load_sample_images
from trainers.picture_models import (
    save_crowded_yolos,
    save_detr,
    save_padded_detr,
    save_segformer,
    save_yolos,
    save_yolos_of_one_size,
)
from transformers import AutoImageProcessor, AutoModelForObjectDetection, AutoModelForSemanticSegmentation
from transformers.image_utils import load_image

from client.command.connection import Connection
from client.errors import RefusedError
from export.__main__ import main as run_export_cli

# Low enough that random weights see something, and so high that they do not see it everywhere.
THRESHOLD = 0.3
DETECTORS = {"detr": save_detr}
# Those whose graph is given pictures of every shape.
OF_EVERY_SHAPE: tuple[str, ...] = ("detr",)
# Those that are also served by one process alone: here because a file is an answer, there because pictures of several
# shapes or a second input of the graph are.
LEAN: tuple[str, ...] = ("segformer",)
# Of many boxes, and its precisions.
CROWDED = {"crowded": "fp32"}

# One of each way: the others take a minute more; see `make pictures`.
if os.environ.get("MODELYARD_PICTURES"):
    DETECTORS |= {
        "yolos": save_yolos,
        "detr-padded": save_padded_detr,
        "yolos-of-one-size": save_yolos_of_one_size,
    }
    OF_EVERY_SHAPE += ("yolos",)
    LEAN += ("detr", "detr-padded")
    # In bf16 nearly all of its boxes change places, and no answer is the checkpoint's.
    CROWDED |= {"crowded-bf16": "bf16"}


@dataclass(frozen=True)
class Served:
    """The folder with the checkpoints, and the server that answers for them."""

    folder: Path
    url: str
    grpc_url: str

    def ask(self, name: str, *contents: bytes) -> dict[str, Any]:
        connection = Connection(self.url, "http", 60.0)
        rows = np.array([[content] for content in contents], dtype=np.object_)
        return connection.infer_tensors(connection.describe_model(name), {"IMAGE": rows})


@pytest.fixture(scope="module")
def photographs() -> list[bytes]:
    """Return two that lie, one that stands, and one that must be turned to stand."""
    contents = [Path(name).read_bytes() for name in load_sample_images().filenames]
    turned = Image.Exif()
    turned[0x0112] = 6
    for exif in (Image.Exif(), turned):
        file = io.BytesIO()
        image = Image.open(io.BytesIO(contents[0]))
        (image if exif else image.crop((100, 0, 300, 400))).save(file, "PNG", exif=exif)
        contents.append(file.getvalue())
    return contents


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("seen")
    models = ["--repository", str(folder / "models"), "--json"]
    for name, save in DETECTORS.items():
        save(folder / name)
        what = ["run", str(folder / name), "--name", name, "--threshold", str(THRESHOLD), *models]
        assert run_export_cli(what) == 0
    save_segformer(folder / "segformer")
    assert run_export_cli(["run", str(folder / "segformer"), "--name", "segformer", *models]) == 0
    save_crowded_yolos(folder / "crowded")
    for name, precision in CROWDED.items():
        assert run_export_cli(["run", str(folder / "crowded"), "--name", name, "--precision", precision, *models]) == 0
    for name in LEAN:
        what = ["run", str(folder / name), "--name", f"{name}-lean", "--steps", "lean", *models]
        assert run_export_cli([*what, *(["--threshold", str(THRESHOLD)] if name in DETECTORS else [])]) == 0
    with running(folder / "models") as server:
        server.read_until("serving HTTP")
        count = sum("ready, answers as verified" in line for line in server.lines)
        assert count == len(DETECTORS) + len(LEAN) + len(CROWDED) + 1
        server.follow()
        yield Served(folder, f"127.0.0.1:{server.http}", f"127.0.0.1:{server.grpc}")


@pytest.mark.parametrize("name", DETECTORS)
def test_boxes_are_those_of_transformers(name: str, served: Served, photographs: list[bytes]) -> None:
    model = AutoModelForObjectDetection.from_pretrained(served.folder / name).eval()
    processor = AutoImageProcessor.from_pretrained(served.folder / name, backend="pil")
    # Two of one shape, and then one that lies and one that stands.
    pairs = [(0, 1), (2,), (3,)] if name in OF_EVERY_SHAPE else [(0, 1), (2, 3)]
    parts = [served.ask(name, *(photographs[row] for row in rows)) for rows in pairs]
    answers = {output: np.concatenate([part[output] for part in parts]) for output in parts[0]}
    alone = [served.ask(name, content) for content in photographs]
    counts = []
    for row, content in enumerate(photographs):
        image = load_image(Image.open(io.BytesIO(content)))
        inputs = processor(images=image, return_tensors="pt")
        with torch.no_grad():
            outputs = model(**{key: inputs[key] for key in ("pixel_values", "pixel_mask")[: 1 + ("detr" in name)]})
        sizes = [(image.height, image.width)]
        (want,) = processor.post_process_object_detection(outputs, THRESHOLD, sizes)
        order = want["scores"].argsort(descending=True, stable=True)
        count = int(answers["COUNT"][row, 0])
        counts.append(count)
        assert count == len(order)
        labels = [label.decode() for label in answers["LABEL"][row]]
        assert labels[:count] == [model.config.id2label[int(index)] for index in want["labels"][order]]
        np.testing.assert_allclose(answers["SCORE"][row, :count], want["scores"][order], atol=1e-4)
        np.testing.assert_allclose(answers["BOX"][row, :count], want["boxes"][order], atol=0.05)
        assert set(labels[count:]) <= {""} and not answers["SCORE"][row, count:].any()
        assert (answers["BOX"][row, count:] == -1).all()
        # What lies beside a picture in a request changes nothing.
        np.testing.assert_allclose(alone[row]["BOX"][0], answers["BOX"][row], atol=0.05)
    assert any(counts)


def test_a_hundred_boxes_keep_their_order_in_the_server(served: Served) -> None:
    """Of that many some lie near each other by their scores, which is no tie."""
    golden = served.folder / "models" / "crowded" / "1" / "golden.json"
    counts = [
        output["data"][0]
        for sample in json.loads(golden.read_text())["samples"]
        for output in sample["outputs"]
        if output["name"] == "COUNT"
    ]
    assert len(counts) > 5 and min(counts) > 50
    done = run("-m", "client.parity", "--golden", str(golden), "--url", served.url, "--grpc-url", served.grpc_url)
    assert done.code == 0, done.out + done.err


@pytest.mark.parametrize("name", OF_EVERY_SHAPE)
def test_pictures_of_two_shapes_are_refused_in_one_request_of_the_steps(
    name: str, served: Served, photographs: list[bytes]
) -> None:
    with pytest.raises(RefusedError, match=r"IMAGE row 1 is of another shape than row 0: .*in a request of its own"):
        served.ask(name, photographs[0], photographs[2])


@pytest.mark.parametrize("name", OF_EVERY_SHAPE)
def test_parity_asks_together_only_pictures_of_one_shape(name: str, served: Served) -> None:
    golden = served.folder / "models" / name / "1" / "golden.json"
    count = len(json.loads(golden.read_text())["samples"])
    addresses = ["--url", served.url, "--grpc-url", served.grpc_url]
    done = run("-m", "client.parity", "--golden", str(golden), *addresses, "--json")
    assert done.code == 0, done.out + done.err
    for result in json.loads(done.out):
        assert (result["texts"], result["version"], result["passed"]) == (2 * count, "1", True)
    done = run("-m", "client.parity", "--golden", str(golden), *addresses)
    assert done.out.startswith(f"{name}, version 1\n")


@pytest.fixture
def narrow() -> bytes:
    """Return a picture of which hardly anything is left on one edge."""
    file = io.BytesIO()
    Image.new("RGB", (1, 500)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.skipif("yolos" not in DETECTORS, reason="every kind of detector takes two minutes: make pictures")
def test_a_picture_of_which_no_edge_is_left_is_refused(served: Served, narrow: bytes) -> None:
    with pytest.raises(RefusedError, match="is too long and narrow: expected 16 pixels on each edge once"):
        served.ask("yolos", narrow)


def test_a_narrow_picture_has_finite_scores(served: Served, narrow: bytes) -> None:
    (score,) = served.ask("detr", narrow)["SCORE"]
    assert np.isfinite(score).all()


def test_the_client_draws_boxes_and_lists_them(served: Served, tmp_path: Path) -> None:
    photograph, drawn = load_sample_images().filenames[0], tmp_path / "annotated.png"
    infer = [str(CHECKOUT / "client" / "infer.py"), "--url", served.url, "--model", "detr", "--image", photograph]
    done = run(*infer, "--output", str(drawn))
    assert done.code == 0, done.err
    heading = next(line for line in done.out.splitlines() if "SCORE" in line)
    assert heading.split() == ["SCORE", "LABEL", "BOX"]
    (row,) = json.loads(run(*infer, "--json").out)["results"]
    assert done.out.count("\n") >= row["COUNT"][0] + 3
    before, after = (np.asarray(load_image(str(path)), dtype=np.int64) for path in (photograph, drawn))
    assert before.shape == after.shape and np.abs(before - after).max() > 100


def test_a_map_is_that_of_transformers(served: Served, photographs: list[bytes]) -> None:
    model = AutoModelForSemanticSegmentation.from_pretrained(served.folder / "segformer").eval()
    processor = AutoImageProcessor.from_pretrained(served.folder / "segformer", backend="pil")
    answers = served.ask("segformer", *photographs)
    seen = set()
    for row, content in enumerate(photographs):
        image = load_image(Image.open(io.BytesIO(content)))
        with torch.no_grad():
            outputs = model(**processor(images=image, return_tensors="pt"))
        (want,) = processor.post_process_semantic_segmentation(outputs, [(image.height, image.width)])
        drawn = Image.open(io.BytesIO(answers["MAP"][row, 0]))
        assert (drawn.format, drawn.mode, drawn.size) == ("PNG", "P", image.size)
        got = np.asarray(drawn)
        # Two labels may be as likely as each other, to the last digits.
        assert (got != want.numpy()).mean() < 1e-3
        counts = np.bincount(got.reshape(-1), minlength=model.config.num_labels)
        count = int(answers["COUNT"][row, 0])
        ids = answers["ID"][row, :count]
        seen |= {*ids.tolist()}
        assert count == (counts > 0).sum() and (np.diff(counts[ids]) <= 0).all()
        assert [label.decode() for label in answers["LABEL"][row, :count]] == [model.config.id2label[i] for i in ids]
        np.testing.assert_allclose(answers["SHARE"][row, :count], counts[ids] / got.size, rtol=1e-6)
        assert (answers["ID"][row, count:] == -1).all() and not answers["SHARE"][row, count:].any()
    assert len(seen) > 1


def test_the_client_lays_a_map_over_a_picture_and_lists_what_it_shows(served: Served, tmp_path: Path) -> None:
    photograph, drawn = load_sample_images().filenames[0], tmp_path / "annotated.png"
    infer = [str(CHECKOUT / "client" / "infer.py"), "--url", served.url, "--model", "segformer", "--image", photograph]
    done = run(*infer, "--output", str(drawn))
    assert done.code == 0, done.err
    heading = next(line for line in done.out.splitlines() if "SHARE" in line)
    assert heading.split() == ["SHARE", "ID", "LABEL"]
    (row,) = json.loads(run(*infer, "--json").out)["results"]
    assert Image.open(io.BytesIO(base64.b64decode(row["MAP"][0]))).size == load_image(photograph).size
    table = done.out.splitlines()
    assert len(table[table.index(heading) + 3 :]) == row["COUNT"][0]
    before, after = (np.asarray(load_image(str(path)), dtype=np.int64) for path in (photograph, drawn))
    assert before.shape == after.shape and np.abs(before - after).mean() > 10


@pytest.mark.parametrize("name", LEAN)
def test_one_process_answers_as_the_steps_do(name: str, served: Served, photographs: list[bytes]) -> None:
    (lean,) = (served.folder / "models" / f"{name}-lean").glob("[0-9]*")
    assert (lean / "lean.json").is_file() and not (served.folder / "models" / f"{name}-lean_model").exists()
    one_by_one = [served.ask(name, content) for content in photographs]
    wanted = {output: np.concatenate([answers[output] for answers in one_by_one]) for output in one_by_one[0]}
    got = served.ask(f"{name}-lean", *photographs)
    assert wanted.keys() == got.keys()
    for output, values in wanted.items():
        if values.dtype == np.object_:
            assert got[output].tolist() == values.tolist(), output
        else:
            np.testing.assert_allclose(got[output], values, rtol=1e-5, atol=1e-4)
    refusals = []
    for model in (name, f"{name}-lean"):
        with pytest.raises(RefusedError) as refused:
            served.ask(model, photographs[0], photographs[1][:-2000])
        refusals.append(str(refused.value).split("IMAGE row ")[1])
    assert refusals[0] == refusals[1] and refusals[0].startswith("1 is damaged")


def test_a_map_of_what_the_network_does_not_see_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_segformer(tmp_path / "segformer")
    export = ["run", str(tmp_path / "segformer"), "--name", "map", "--repository", str(tmp_path / "models")]
    assert run_export_cli([*export, "--preprocess", "imagenet"]) == 1
    refusal = capsys.readouterr().err
    assert "got mode shortest_edge, cropped to 224 x 224; pass --preprocess FILE with mode exact" in refusal
    assert not (tmp_path / "models").exists()


def test_padding_that_a_model_is_not_told_of_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_yolos(tmp_path / "yolos")
    processor = {
        "image_processor_type": "YolosImageProcessor",
        "size": {"shortest_edge": 64, "longest_edge": 160},
        "pad_size": {"height": 160, "width": 160},
    }
    (tmp_path / "yolos" / "preprocessor_config.json").write_text(json.dumps(processor))
    assert (
        run_export_cli(["run", str(tmp_path / "yolos"), "--name", "yolos", "--repository", str(tmp_path / "models")])
        == 1
    )
    refusal = capsys.readouterr().err
    assert "pads pictures, and the model is not told where: expected a model that takes pixel_mask" in refusal
    assert not (tmp_path / "models").exists()
