"""Models of sounds, served by the real tritonserver, beside transformers' own answers."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import torch
from harness import CHECKOUT, run
from hostile_sounds import list_hostile
from launcher import running
from trainers.architectures import ARCHITECTURES, save_model
from transformers import AutoFeatureExtractor, AutoModelForAudioClassification

from client import Client, ClientError
from client.command.connection import Connection
from export.__main__ import main as run_export_cli
from export.tasks.sounds.samples import draw_sound, encode_sound

NAME = "audio_classification"
LEAN = "audio_lean"
LABELS = {0: "yes", 1: "no", 2: "café", 3: "up", 4: "down", 5: "left"}
# Scores are probabilities in fp32.
TOLERANCE = 1e-4
# Rate, seconds, channels, format and encoding of sounds that no export was proven on.
SOUNDS = (
    (16_000, 0.8, 1, "WAV", "PCM_16"),
    (44_100, 1.1, 2, "FLAC", "PCM_24"),
    (8_000, 0.5, 1, "WAV", "PCM_U8"),
    (48_000, 0.9, 4, "WAV", "FLOAT"),
    (22_050, 2.5, 2, "WAV", "PCM_32"),
)


@dataclass(frozen=True)
class Served:
    """The folder with the checkpoints, and the server that answers for them."""

    folder: Path
    url: str

    def ask(self, name: str, *contents: bytes) -> dict[str, Any]:
        connection = Connection(self.url, "http", 60.0)
        rows = np.array([[content] for content in contents], dtype=np.object_)
        return connection.infer_tensors(connection.describe_model(name), {"AUDIO": rows})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sounds")
    paths = []
    for seed, (rate, seconds, channels, kind, encoding) in enumerate(SOUNDS, 100):
        paths.append(folder / f"{seed}.{kind.lower()}")
        paths[-1].write_bytes(encode_sound(draw_sound(seed, rate, seconds, channels), rate, kind, encoding))
    return paths


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("heard")
    models = ["--repository", str(folder / "models"), "--json"]
    # One whose recipe records a mask, and one without.
    for name, architecture, more in (
        (NAME, "wav2vec2 sounds", []),
        (LEAN, "wavlm sounds", ["--steps", "lean"]),
    ):
        save_model(ARCHITECTURES[architecture], folder / name, id2label=LABELS)
        assert run_export_cli(["run", str(folder / name), "--name", name, "--top-k", "3", *more, *models]) == 0
    with running(folder / "models") as server:
        server.read_until("serving HTTP")
        assert sum("ready, answers as verified" in line for line in server.lines) == 2, "\n".join(server.lines)
        server.follow()
        yield Served(folder, f"127.0.0.1:{server.http}")


def ask_transformers(checkpoint: Path, path: Path) -> tuple[list[str], list[float]]:
    """Return the labels and scores of a sound alone, best first."""
    model = AutoModelForAudioClassification.from_pretrained(checkpoint).eval()
    extractor = AutoFeatureExtractor.from_pretrained(checkpoint)
    values, rate = soundfile.read(path, dtype="float32", always_2d=True)
    samples = soxr.resample(values.mean(axis=1), rate, extractor.sampling_rate)
    with torch.no_grad():
        logits = model(**extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt")).logits
    scores = logits.softmax(dim=-1)[0]
    order = scores.argsort(descending=True)[:3]
    return [LABELS[int(index)] for index in order], scores[order].tolist()


@pytest.mark.parametrize("name", [NAME, LEAN])
def test_labels_and_scores_are_those_of_transformers(name: str, served: Served, files: list[Path]) -> None:
    for path in files:
        labels, scores = ask_transformers(served.folder / name, path)
        got = served.ask(name, path.read_bytes())
        assert [label.decode() for label in got["LABEL"][0]] == labels
        np.testing.assert_allclose(got["SCORE"][0], scores, atol=TOLERANCE)


def test_sounds_of_one_request_are_answered_as_if_alone_or_refused(served: Served, files: list[Path]) -> None:
    contents = [path.read_bytes() for path in files]
    alone = [served.ask(LEAN, content)["SCORE"][0] for content in contents]
    np.testing.assert_allclose(served.ask(LEAN, *contents)["SCORE"], alone, atol=TOLERANCE)
    one = served.ask(NAME, contents[0])["SCORE"][0]
    np.testing.assert_allclose(served.ask(NAME, contents[0], contents[0])["SCORE"], [one, one], atol=TOLERANCE)
    with pytest.raises(ClientError, match="AUDIO row 1 is not as long as row 0: expected 12800 samples at 16000 Hz"):
        served.ask(NAME, *contents)


@pytest.mark.parametrize("name", [NAME, LEAN])
def test_what_is_no_sound_is_refused_and_its_neighbours_answered(name: str, served: Served, files: list[Path]) -> None:
    good = files[0].read_bytes()
    want = served.ask(name, good)["SCORE"]
    for what, content in list_hostile().items():
        with pytest.raises(ClientError, match="AUDIO row 0 "):
            served.ask(name, content)
        assert np.abs(served.ask(name, good)["SCORE"] - want).max() < TOLERANCE, what


def test_the_client_asks_about_folders(served: Served, files: list[Path], tmp_path: Path) -> None:
    for path in files:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "broken.wav").write_bytes(b"RIFF")
    (tmp_path / "notes.txt").write_text("no sound")
    infer = [str(CHECKOUT / "client" / "infer.py"), "--url", served.url, "--model", NAME]
    done = run(*infer, "--audio", str(tmp_path), "--json")
    rows = json.loads(done.out)["results"]
    assert [Path(row["audio"]).name for row in rows] == sorted(path.name for path in tmp_path.iterdir())[:-1]
    assert (done.code, [Path(row["audio"]).name for row in rows if "error" in row]) == (1, ["broken.wav"])
    with Client(served.url, model=NAME) as client:
        found = client.audio([path.read_bytes() for path in files])
        with pytest.raises(ClientError, match="takes no pictures: expected the input IMAGE, got AUDIO"):
            client.image([b""])
    assert [[label.label for label in row] for row in found] == [row["LABEL"] for row in rows if "error" not in row]
    shown = run(*infer, "--audio", str(files[0]))
    assert shown.code == 0 and "1 sound in" in shown.out and "SCORE  LABEL" in shown.out
    shown = run(*infer, "--audio", *map(str, files[:2]), str(tmp_path / "broken.wav"))
    assert shown.code == 1 and ": 2 of 3 sounds in" in shown.out
    shown = run(*infer, "--audio", str(tmp_path / "broken.wav"))
    assert (shown.code, shown.out) == (1, "") and shown.err.startswith(f"error: {tmp_path / 'broken.wav'}: ")
    for wrong, refusal in (
        (["--audio", str(tmp_path / "*.mp3")], "error: there is no sound to send: expected files of .wav, .flac"),
        (["--audio", str(files[0]), "--output", "x.png"], "error: --output draws nothing of a sound: expected --image"),
        (["--audio", str(files[0]), "--text", "x"], "error: --audio goes alone"),
        (["--text", "x"], "error: audio_classification takes sounds: expected --audio and a file, got a text that is "),
        (["--image", str(files[0])], "error: audio_classification takes no pictures: expected the input IMAGE"),
    ):
        done = run(*infer, *wrong)
        assert (done.code, done.err.startswith(refusal)) == (1, True), done.err


PAGE = (CHECKOUT / "docs" / "sounds.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```console\n\$ (.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", [code for code in SHOWN if "speech.wav" in code], ids=lambda code: code.split()[0])
def test_the_page_asks_as_it_says(code: str, served: Served, files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "speech.wav").write_bytes(files[0].read_bytes())
    code = code.replace("localhost:8000", served.url)
    code = code.replace("modelyard infer", f"{sys.executable} {CHECKOUT / 'client' / 'infer.py'}")
    done = subprocess.run(["bash", "-euc", code], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert any(label.encode() in done.stdout for label in LABELS.values())
