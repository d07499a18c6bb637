"""A trained MobileNetV2, as torchvision published it, exported, served, and asked about photographs."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import CHECKOUT, run
from launcher import running
from PIL import Image
from sklearn.datasets import load_sample_images
from trainers.mobilenet import build, fetch_weights

from client.command.connection import Connection

pytestmark = pytest.mark.skipif(
    not os.environ.get("MODELYARD_PICTURES"), reason="a trained model of pictures is fetched; `make pictures`"
)

NAME = "image_classification"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch_weights(tmp_path_factory.mktemp("trained"))


def prepare(path: Path) -> torch.Tensor:
    """Return what torchvision's preset makes of a photograph, step by step."""
    image = Image.open(path).convert("RGB")
    width, height = image.size
    size = (256, int(256 * height / width)) if width <= height else (int(256 * width / height), 256)
    left, top = (round((edge - 224) / 2) for edge in size)
    levels = np.asarray(image.resize(size, Image.Resampling.BILINEAR).crop((left, top, left + 224, top + 224)))
    pixels = torch.from_numpy(levels.copy()).permute(2, 0, 1) / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((pixels - mean[:, None, None]) / std[:, None, None])[None]


def test_photographs_are_what_the_module_says_they_are(weights: Path, tmp_path: Path) -> None:
    labels = [str(index) for index in range(1000)]
    spec = {
        "inputs": {"pixel_values": {"shape": ["batch", 3, 224, 224]}},
        "outputs": ["logits"],
        "answers": {"answers": "labels", "labels": labels},
    }
    (tmp_path / "inputs.json").write_text(json.dumps(spec))
    module = CHECKOUT / "tests" / "trainers" / "mobilenet.py"
    what = [str(weights), "--factory", f"{module}:build", "--inputs", str(tmp_path / "inputs.json")]
    what += ["--preprocess", "imagenet", "--name", NAME, "--repository", str(tmp_path / "models")]
    done = run("-m", "export", "run", *what)
    assert done.code == 0, done.err
    model = build().eval()
    model.load_state_dict(torch.load(weights / "mobilenet.pth", weights_only=True))
    with running(tmp_path / "models") as server:
        server.read_until("ready, answers as verified")
        server.read_until("serving HTTP")
        connection = Connection(f"127.0.0.1:{server.http}", "http", 60.0)
        for name in load_sample_images().filenames:
            with torch.no_grad():
                scores, order = model(prepare(Path(name))).softmax(dim=1)[0].topk(5)
            rows = np.array([[Path(name).read_bytes()]], dtype=np.object_)
            answers = connection.infer_tensors(connection.describe_model(NAME), {"IMAGE": rows})
            assert [int(label) for label in answers["LABEL"][0]] == order.tolist()
            assert np.abs(answers["SCORE"][0] - scores.numpy()).max() < 1e-4
            # 698 palace; 599 honeycomb: a trained model, not an equal one of random weights.
            assert int(order[0]) in (698, 599) and scores[0] > 0.5
