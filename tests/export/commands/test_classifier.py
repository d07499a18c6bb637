"""A real encoder, fine-tuned by the Trainer with DeepSpeed: what we read of it answers as the Trainer itself did."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import CHECKOUT, run
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from client.command.connection import Connection
from demo.serving import NAME, serve
from export.consolidation.consolidate import consolidate

# The same fp32 weights in other batches: the Trainer pads what it predicts together.
LOGIT_TOLERANCE = 1e-5
# Beside that, ONNX Runtime in place of torch.
SCORE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Trained:
    """A checkpoint, and what its trainer answered: logits [texts, labels]."""

    checkpoint: Path
    texts: list[str]
    logits: np.ndarray
    labels: list[str]


@pytest.fixture(scope="module", params=[3, pytest.param(2, marks=pytest.mark.rarer)])
def trained(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Trained:
    out = tmp_path_factory.mktemp("classifier")
    script = CHECKOUT / "tests" / "trainers" / "train_classifier.py"
    words = [sys.executable, script, checkpoint, out, str(request.param)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads((out / f"zero{request.param}.json").read_text())
    folder = out / f"zero{request.param}" / "checkpoint-6"
    found = Trained(folder, told["texts"], np.array(told["logits"], np.float32), told["labels"])
    assert np.ptp(found.logits, axis=0).min() > 0.2, "the model has learnt something"
    return found


def test_the_consolidated_classifier_answers_as_its_trainer_did(trained: Trained, tmp_path: Path) -> None:
    consolidate(trained.checkpoint, tmp_path / "out")
    model, loading = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        encoded = [tokenizer(text, truncation=True, max_length=128, return_tensors="pt") for text in trained.texts]
        logits = torch.cat([model.eval()(**inputs).logits for inputs in encoded]).numpy()
    assert np.abs(logits - trained.logits).max() < LOGIT_TOLERANCE
    assert (logits.argmax(1) == trained.logits.argmax(1)).all()
    assert [model.config.id2label[index] for index in range(3)] == trained.labels


@pytest.mark.rarer
def test_the_published_and_served_classifier_answers_as_its_trainer_did(trained: Trained, tmp_path: Path) -> None:
    arguments = ("--name", NAME, "--repository", str(tmp_path / "models"), "--json")
    done = run("-m", "export", "run", str(trained.checkpoint), *arguments)
    assert done.code == 0, done.err
    assert json.loads(done.out)["task"] == "text-classification"
    with serve(tmp_path / "models") as addresses:
        server = Connection(addresses.http, "http", 60.0)
        answers = server.infer(server.find_model(NAME), [text.encode() for text in trained.texts])
    scores = np.exp(trained.logits) / np.exp(trained.logits).sum(axis=1, keepdims=True)
    for row, expected in enumerate(scores):
        order = np.argsort(-expected)
        assert [label.decode() for label in answers["LABEL"][row]] == [trained.labels[index] for index in order]
        assert np.abs(answers["SCORE"][row] - expected[order]).max() < SCORE_TOLERANCE
