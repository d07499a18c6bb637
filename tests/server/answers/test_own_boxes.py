"""A detector of one's own whose neighbours are suppressed, served by the real tritonserver, beside torch."""

import io
import json
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
from torch import Tensor
from trainers.own_detector import build
from transformers.image_utils import load_image

from client.command.connection import Connection
from export.__main__ import main as run_export_cli
from export.tasks.pictures.preparation import read_preparation

DETECTOR = CHECKOUT / "tests" / "trainers" / "own_detector.py"
COLOURS = ("red", "green", "blue")
LABELS = [*COLOURS, "nothing"]
THRESHOLD, IOU_THRESHOLD = 0.6, 0.3
ASKED = {"answers": "boxes", "labels": LABELS, "ignored": ["nothing"], "threshold": THRESHOLD}
ASKED |= {"iou_threshold": IOU_THRESHOLD, "top_k": 12}
ONE_SIZE = {"mode": "letterbox", "size": [96, 128], "fill": 114}
BUCKETS = {"mode": "letterbox", "buckets": [[96, 128], [128, 96], [80, 144]], "fill": 114}
CXCYWH = ASKED | {"format": "cxcywh", "unit": "pixels", "function": "sigmoid"}
XYXY = ASKED | {"format": "xyxy", "unit": "parts", "function": "none"}

# Name → the function, its outputs, what it takes, its recipe, what is asked, and options.
MODELS: dict[str, tuple[str, list[str], list[Any], dict[str, Any], dict[str, Any], list[str]]] = {
    "squares": ("build", ["boxes", "logits"], ["batch", 3, 96, 128], ONE_SIZE, CXCYWH, []),
    "parts": ("build_parts", ["logits", "boxes"], ["batch", 3, 96, 128], ONE_SIZE, XYXY, []),
    "shapes": ("build", ["boxes", "logits"], ["batch", 3, "height", "width"], BUCKETS, CXCYWH, ["--steps", "lean"]),
}

# Label, left, top and edge, in pictures of several shapes; their last turned by its EXIF.
Squares = list[tuple[int, int, int, int]]
PICTURES: list[tuple[tuple[int, int], Squares]] = [
    ((261, 193), [(0, 31, 20, 37), (1, 171, 111, 49), (2, 121, 30, 31), (0, 199, 19, 42)]),
    ((150, 300), [(2, 11, 20, 41), (2, 91, 217, 44), (1, 30, 131, 37)]),
    ((330, 150), [(1, 40, 60, 33), (0, 200, 21, 40), (2, 265, 87, 38)]),
    ((64, 64), [(0, 13, 25, 17)]),
    ((240, 170), [(0, 35, 30, 36), (2, 171, 101, 43)]),
]


@dataclass(frozen=True)
class Served:
    """The folder with the recipes, and the server that answers for the models."""

    folder: Path
    url: str
    grpc_url: str
    status: int

    def ask(self, name: str, *contents: bytes) -> dict[str, Any]:
        connection = Connection(self.url, "http", 60.0)
        rows = np.array([[content] for content in contents], dtype=np.object_)
        return connection.infer_tensors(connection.describe_model(name), {"IMAGE": rows})


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    turned = Image.Exif()
    turned[0x0112] = 3
    contents = []
    for index, ((width, height), squares) in enumerate(PICTURES):
        levels = np.full((height, width, 3), 128, dtype=np.uint8)
        for colour, left, top, edge in squares:
            levels[top : top + edge, left : left + edge] = 255 * np.eye(3)[colour]
        image, file = Image.fromarray(levels), io.BytesIO()
        if index == len(PICTURES) - 1:
            image.transpose(Image.Transpose.ROTATE_180).save(file, "PNG", exif=turned)
        else:
            image.save(file, "PNG")
        contents.append(file.getvalue())
    return contents


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("own")
    for name, (function, outputs, shape, recipe, asked, options) in MODELS.items():
        described = {"inputs": {"image": {"shape": shape}}, "outputs": outputs, "answers": asked}
        (folder / f"{name}.json").write_text(json.dumps(described))
        (folder / f"{name}_recipe.json").write_text(json.dumps(recipe))
        what = ["run", "--factory", f"{DETECTOR}:{function}", "--inputs", str(folder / f"{name}.json"), *options]
        what += ["--preprocess", str(folder / f"{name}_recipe.json"), "--name", name]
        assert run_export_cli([*what, "--repository", str(folder / "models"), "--json"]) == 0
    with running(folder / "models") as server:
        server.read_until("serving HTTP")
        assert sum("ready, answers as verified" in line for line in server.lines) == len(MODELS)
        server.follow()
        yield Served(folder, f"127.0.0.1:{server.http}", f"127.0.0.1:{server.grpc}", server.status)


def suppress(boxes: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    """Return which boxes are kept, best first, as torchvision's `batched_nms`: each label far away from the others."""
    moved = boxes + labels[:, None] * (boxes.max() + 1)
    order = scores.argsort(descending=True, stable=True)
    kept = []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(int(best))
        shared = torch.min(moved[best, 2:], moved[order, 2:]) - torch.max(moved[best, :2], moved[order, :2])
        areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        both = shared.clamp(min=0).prod(dim=1)
        order = order[both / (areas[best] + areas[order] - both) <= IOU_THRESHOLD]
    return torch.tensor(kept)


@pytest.mark.parametrize("name", MODELS)
def test_boxes_are_those_of_torch_and_lie_where_the_squares_are(
    name: str, served: Served, pictures: list[bytes]
) -> None:
    detector = build().eval()
    preparation = read_preparation(str(served.folder / f"{name}_recipe.json"))
    together, seen_by = served.ask(name, *pictures), []
    for row, (content, (_, squares)) in enumerate(zip(pictures, PICTURES, strict=True)):
        image = load_image(Image.open(io.BytesIO(content)))
        with torch.no_grad():
            (found,), (logits,) = detector(torch.from_numpy(preparation.recipe.prepare(image))[None])
        scores, labels = logits[:, :3].sigmoid().max(dim=1)
        likely = torch.nonzero(scores > THRESHOLD)[:, 0]
        seen_by.append(len(likely))
        corners = torch.cat([found[:, :2] - found[:, 2:] / 2, found[:, :2] + found[:, 2:] / 2], dim=1)
        kept = likely[suppress(corners[likely], scores[likely], labels[likely])]
        geometry = torch.tensor(preparation.recipe.find_geometry(image))
        wanted = corners[kept] * geometry[:2].repeat(2) + geometry[2:4].repeat(2)

        answers = served.ask(name, content)
        (seen,), (sure,), (boxes,) = (answers[output] for output in ("LABEL", "SCORE", "BOX"))
        count = int(answers["COUNT"].item())
        assert count == len(kept) == len(squares)
        assert [label.decode() for label in seen] == [LABELS[labels[place]] for place in kept] + [""] * (12 - count)
        np.testing.assert_allclose(sure[:count], scores[kept], atol=1e-4)
        np.testing.assert_allclose(boxes[:count], wanted, atol=0.05)
        assert (boxes[count:] == -1).all() and not sure[count:].any()
        for colour, left, top, edge in squares:
            own = [box for label, box in zip(seen, boxes, strict=True) if label.decode() == COLOURS[colour]]
            assert min(np.abs(box - [left, top, left + edge, top + edge]).max() for box in own) < 0.5
        # What lies beside a picture in a request changes nothing.
        np.testing.assert_allclose(together["BOX"][row], boxes, atol=0.05)
    # Without suppression each square would be answered several times.
    assert sum(seen_by) > 2 * sum(len(squares) for _, squares in PICTURES)


def test_the_client_lists_the_boxes_and_draws_them(served: Served, pictures: list[bytes], tmp_path: Path) -> None:
    picture, drawn = tmp_path / "squares.png", tmp_path / "annotated.png"
    picture.write_bytes(pictures[0])
    infer = [str(CHECKOUT / "client" / "infer.py"), "--url", served.url, "--model", "squares", "--image", str(picture)]
    done = run(*infer, "--output", str(drawn))
    assert done.code == 0, done.err
    assert next(line for line in done.out.splitlines() if "SCORE" in line).split() == ["SCORE", "LABEL", "BOX"]
    (row,) = json.loads(run(*infer, "--json").out)["results"]
    assert row["COUNT"] == [4]
    # The frame of the first square, in the colour of its label.
    before, after = (np.asarray(Image.open(path))[40, 29:35] for path in (picture, drawn))
    assert (before != after).any()


def test_check_and_parity_hold_what_was_proven(served: Served) -> None:
    for name in MODELS:
        golden = served.folder / "models" / name / "1" / "golden.json"
        # What a server is asked before it counts as ready has boxes in it.
        first = json.loads(golden.read_text())["samples"][0]
        (count,) = next(output["data"] for output in first["outputs"] if output["name"] == "COUNT")
        assert count > 0
        done = run("-m", "client.parity", "--golden", str(golden), "--url", served.url, "--grpc-url", served.grpc_url)
        assert done.code == 0, done.out + done.err
    ports = ["--http-port", served.url.split(":")[1], "--grpc-port", served.grpc_url.split(":")[1]]
    ports += ["--status-port", str(served.status)]
    done = run("-m", "server", "check", *ports, "--repository", str(served.folder / "models"))
    assert done.code == 0 and all(f"{name} answers as verified" in done.err for name in MODELS), done.out + done.err
