"""A model of pictures through the whole line: proven, served by the real tritonserver, asked about photographs."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http
from harness import CHECKOUT, run
from hostile_pictures import build_odd_tiff, list_hostile
from launcher import Running, running
from PIL import Image
from sklearn.datasets import load_sample_images
from trainers.architectures import ARCHITECTURES, save_model
from transformers import AutoImageProcessor, AutoModelForImageClassification
from transformers.image_utils import load_image

from client import Client, ClientError, UsageError
from client.command.connection import Connection
from demo.serving import Addresses
from export.__main__ import main as run_export_cli

NAME = "image_classification"
# `make hostile-pictures` sends 500.
HOSTILE = int(os.environ.get("MODELYARD_HOSTILE_PICTURES", "36"))
# Scores are probabilities in fp32; what is seen is about 1e-6.
TOLERANCE = 1e-4

LABELS = {0: "tench", 1: "crane", 2: "crane", 3: "water jug", 4: "café", 5: "x" * 80, 6: "g", 7: "h"}


# The brightness of each colour around a place, at a quarter of the size: its top is where a picture is brightest.
POSE = """
import torch


class Pose(torch.nn.Module):
    def forward(self, pixels):
        small = torch.nn.functional.avg_pool2d(pixels, 4)
        return torch.nn.functional.avg_pool2d(small, 3, 1, 1)


def build():
    return Pose()
"""
POSE_INPUTS = {
    "inputs": {"image": {"shape": ["batch", 3, 64, 48]}},
    "outputs": ["heatmaps"],
    "answers": {"answers": "keypoints", "labels": ["reddest", "greenest", "bluest"]},
}


# The same network, given pictures in whichever of three shapes is most like their own.
BUCKETS = [[64, 48], [48, 64], [40, 80]]
SHAPES_INPUTS = {"inputs": {"image": {"shape": ["batch", 3, "height", "width"]}}}


@dataclass(frozen=True)
class Served:
    """The checkpoint, and the server that answers for it."""

    checkpoint: Path
    repository: Path
    addresses: Addresses

    def ask(self, *contents: bytes, protocol: str = "http", name: str = NAME) -> dict[str, Any]:
        connection = Connection(getattr(self.addresses, protocol), protocol, 60.0)
        rows = np.array([[content] for content in contents], dtype=np.object_)
        return connection.infer_tensors(connection.describe_model(name), {"IMAGE": rows})


@pytest.fixture(scope="module")
def photographs() -> list[Path]:
    return [Path(name) for name in load_sample_images().filenames]


@pytest.fixture(scope="module")
def launched(models: Path) -> Iterator[Running]:
    with running(models / "models") as server:
        server.read_until("serving HTTP")
        proven = [line.split()[0] for line in server.lines if "ready, answers as verified" in line]
        assert proven == [NAME, "lean_shapes", "pose", "shapes"]
        server.follow()
        yield server


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pictures")
    save_model(ARCHITECTURES["vit classification"], directory / "vit", id2label=LABELS)
    # Crops and another filter than the usual one.
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 36},
        "crop_size": {"height": 32, "width": 32},
    }
    (directory / "vit" / "preprocessor_config.json").write_text(json.dumps(processor))
    what = ["run", str(directory / "vit"), "--name", NAME, "--repository", str(directory / "models"), "--json"]
    assert run_export_cli(what) == 0
    (directory / "pose.py").write_text(POSE)
    (directory / "pose.json").write_text(json.dumps(POSE_INPUTS))
    (directory / "recipe.json").write_text(json.dumps({"mode": "letterbox", "size": [64, 48], "scale": 1.0}))
    what = ["run", "--factory", f"{directory / 'pose.py'}:build", "--inputs", str(directory / "pose.json")]
    what += ["--preprocess", str(directory / "recipe.json"), "--name", "pose"]
    assert run_export_cli([*what, "--repository", str(directory / "models"), "--json"]) == 0
    (directory / "shapes.json").write_text(json.dumps(POSE_INPUTS | SHAPES_INPUTS))
    (directory / "buckets.json").write_text(json.dumps({"mode": "letterbox", "buckets": BUCKETS, "scale": 1.0}))
    what = ["run", "--factory", f"{directory / 'pose.py'}:build", "--inputs", str(directory / "shapes.json")]
    what += ["--preprocess", str(directory / "buckets.json"), "--repository", str(directory / "models"), "--json"]
    assert run_export_cli([*what, "--name", "shapes"]) == 0
    assert run_export_cli([*what, "--name", "lean_shapes", "--steps", "lean"]) == 0
    return directory


@pytest.fixture(scope="module")
def served(launched: Running, models: Path) -> Served:
    addresses = Addresses(
        http=f"127.0.0.1:{launched.http}",
        grpc=f"127.0.0.1:{launched.grpc}",
        metrics=f"127.0.0.1:{launched.metrics}",
        status=f"127.0.0.1:{launched.status}",
    )
    return Served(models / "vit", models / "models", addresses)


def test_photographs_get_the_labels_and_scores_of_the_checkpoint(served: Served, photographs: list[Path]) -> None:
    model = AutoModelForImageClassification.from_pretrained(served.checkpoint).eval()
    processor = AutoImageProcessor.from_pretrained(served.checkpoint, backend="pil")
    with torch.no_grad():
        inputs = processor([load_image(str(path)) for path in photographs], return_tensors="pt")
        scores, order = model(**inputs).logits.softmax(dim=1).topk(5)
    for protocol in ("http", "grpc"):
        answers = served.ask(*(path.read_bytes() for path in photographs), protocol=protocol)
        labels = [[label.decode() for label in row] for row in answers["LABEL"]]
        assert labels == [[LABELS[int(index)] for index in row] for row in order]
        assert np.abs(answers["SCORE"] - scores.numpy()).max() < TOLERANCE


def test_hostile_pictures_are_refused_and_their_neighbours_answered(
    launched: Running, served: Served, photographs: list[Path]
) -> None:
    """Good and bad ones at the same time, so that the batcher joins them."""
    good = photographs[0].read_bytes()
    expected = served.ask(good)["SCORE"]

    def send(content: bytes) -> Any:
        try:
            return served.ask(content)["SCORE"]
        except ClientError as exc:
            return str(exc)

    hostile = list(list_hostile(HOSTILE))
    preprocess = f"{NAME}_preprocess"
    before = {stub.pid for stub in launched.find_stubs(preprocess)}
    with ThreadPoolExecutor(8) as pool:
        # Once to see what such pictures take at most, and then again.
        for content in (content for _, content, _ in hostile[:18]):
            send(content)
        resident = sum(map(read_resident_bytes, before))
        sent = [(pool.submit(send, content), pool.submit(send, good)) for _, content, _ in hostile]
        for (what, _, is_refused), (bad, neighbour) in zip(hostile, sent, strict=True):
            assert np.abs(neighbour.result() - expected).max() < TOLERANCE, what
            answer = bad.result()
            assert isinstance(answer, str) or not is_refused, what
            assert not isinstance(answer, str) or "IMAGE row 0 " in answer, (what, answer)
    with pytest.raises(ClientError, match="IMAGE row 1 is empty: expected a file of JPEG, PNG, WEBP, GIF, TIFF"):
        served.ask(good, b"")
    assert {stub.pid for stub in launched.find_stubs(preprocess)} == before, "a process was replaced"
    # What is odd in a file does not stand in the log at each picture.
    for _ in range(3):
        served.ask(build_odd_tiff(284))
    assert not [line for line in launched.lines if "Warning" in line and "PIL" in line]
    assert sum(map(read_resident_bytes, before)) - resident < 300_000_000


def read_resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_keypoints_lie_where_they_are_in_the_original_picture(served: Served) -> None:
    """Soft spots drawn at places that are known, in pictures of another shape and turned by their EXIF."""
    spots = [[(90.0, 40.0), (300.0, 120.0), (200.0, 75.0)], [(80.0, 111.0), (211.0, 50.0), (330.0, 135.0)]]
    turned = Image.Exif()
    turned[0x0112] = 3
    for places in spots:
        y, x = np.mgrid[0:180, 0:400] + 0.5
        levels = [250 * np.exp(-((x - left) ** 2 + (y - top) ** 2) / 1800) for left, top in places]
        image = Image.fromarray(np.stack(levels, axis=2).astype(np.uint8))
        files = [io.BytesIO(), io.BytesIO()]
        image.save(files[0], "PNG")
        image.transpose(Image.Transpose.ROTATE_180).save(files[1], "JPEG", quality=95, exif=turned)
        answers = served.ask(*(file.getvalue() for file in files), name="pose")
        assert answers["LABEL"].tolist() == [[b"reddest", b"greenest", b"bluest"]] * 2
        # One pixel of what the graph sees is 8 of the picture, and one of its heatmaps 33.
        assert np.abs(answers["KEYPOINT"] - np.array(places)).max() < 4


@pytest.mark.parametrize("name", ["shapes", "lean_shapes"])
def test_keypoints_lie_where_they_are_in_pictures_of_every_shape(served: Served, name: str) -> None:
    places = [(40.0, 40.0), (150.0, 60.0), (100.0, 75.0)]
    files = []
    for width, height in ((240, 180), (180, 240), (320, 130)):
        y, x = np.mgrid[0:height, 0:width] + 0.5
        levels = [250 * np.exp(-((x - left) ** 2 + (y - top) ** 2) / 800) for left, top in places]
        files.append(io.BytesIO())
        Image.fromarray(np.stack(levels, axis=2).astype(np.uint8)).save(files[-1], "PNG")
    contents = [file.getvalue() for file in files]
    # Whatever shapes are asked about at once.
    with ThreadPoolExecutor(8) as pool:
        for answers in pool.map(lambda content: served.ask(content, name=name), contents * 8):
            assert np.abs(answers["KEYPOINT"] - np.array(places)).max() < 3
    if name == "lean_shapes":
        assert np.abs(served.ask(*contents, name=name)["KEYPOINT"] - np.array(places)).max() < 3
    else:
        with pytest.raises(ClientError, match="IMAGE row 1 is of another shape than row 0: .* send it in a request of"):
            served.ask(*contents, name=name)


def test_parity_holds_over_the_transports_that_carry_bytes(served: Served) -> None:
    golden = served.repository / NAME / "1" / "golden.json"
    urls = ["--url", served.addresses.http, "--grpc-url", served.addresses.grpc]
    done = run("-m", "client.parity", "--golden", str(golden), *urls, "--json")
    assert done.code == 0, done.out + done.err
    assert [result["transport"] for result in json.loads(done.out)] == ["HTTP binary", "gRPC"]


def test_tritons_classification_extension_names_the_labels(served: Served) -> None:
    client = tritonclient.http.InferenceServerClient(served.addresses.http)
    pixels = tritonclient.http.InferInput("pixel_values", [1, 3, 32, 32], "FP32")
    pixels.set_data_from_numpy(np.zeros((1, 3, 32, 32), dtype=np.float32))
    wanted = tritonclient.http.InferRequestedOutput("logits", class_count=8)
    answer = client.infer(f"{NAME}_model", [pixels], outputs=[wanted]).as_numpy("logits")
    named = {int(item.split(b":")[1]): item.decode().split(":", 2)[2] for item in answer.reshape(-1)}
    assert named == LABELS


def test_the_client_asks_about_folders_and_draws(served: Served, photographs: list[Path], tmp_path: Path) -> None:
    infer = [str(CHECKOUT / "client" / "infer.py"), "--url", served.addresses.http, "--model", NAME]
    for path in photographs:
        shutil.copy(path, tmp_path)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    (tmp_path / "notes.txt").write_text("no picture")
    done = run(*infer, "--image", str(tmp_path), "--json")
    rows = json.loads(done.out)["results"]
    assert [Path(row["image"]).name for row in rows] == ["broken.png", "china.jpg", "flower.jpg"]
    assert (done.code, ["error" in row for row in rows]) == (1, [True, False, False])
    with Client(served.addresses.grpc, protocol="grpc", model=NAME) as client:
        found = client.image([path.read_bytes() for path in sorted(photographs)])
        refusal = r"picture 0 is not a file's bytes: expected bytes, got str; read the file, as pathlib"
        with pytest.raises(UsageError, match=refusal):
            client.image([str(photographs[0])])  # type: ignore[list-item]
    assert [[label.label for label in row] for row in found] == [row["LABEL"] for row in rows[1:]]
    assert len(rows[1]["LABEL"]) == 5 and "broken.png: the server refused the request: " in done.err
    drawn = tmp_path / "annotated.png"
    done = run(*infer, "--image", str(photographs[0]), "--output", str(drawn))
    assert done.code == 0 and "SCORE  LABEL" in done.out
    before, after = (np.asarray(load_image(str(path)), dtype=np.int64) for path in (photographs[0], drawn))
    assert before.shape == after.shape and np.abs(before - after).max() > 100
    refused = run(*infer, "--image", str(tmp_path / "*.bmp"))
    assert (refused.code, refused.err.startswith("error: there is no picture to send: expected files of")) == (1, True)


PAGE = (CHECKOUT / "docs" / "pictures.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```console\n\$ (.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", [code for code in SHOWN if "photo.jpg" in code], ids=lambda code: code.split()[0])
def test_the_page_asks_as_it_says(code: str, served: Served, photographs: list[Path], tmp_path: Path) -> None:
    shutil.copy(photographs[0], tmp_path / "photo.jpg")
    code = code.replace("localhost:8000", served.addresses.http)
    code = code.replace("modelyard infer", f"{sys.executable} {CHECKOUT / 'client' / 'infer.py'}")
    done = subprocess.run(["bash", "-euc", code], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert any(label.encode() in done.stdout for label in ("crane", "tench"))
