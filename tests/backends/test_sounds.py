"""The half of `python_preprocess` that decodes sounds, beside transformers' own feature extractor."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import load_backend
from hostile_sounds import list_hostile
from transformers import Wav2Vec2FeatureExtractor

from export.errors import CheckpointError, ModelError
from export.tasks.processor_file import PROCESSOR_FILE
from export.tasks.sounds.recipe import SoundRecipe, find_sound_preparation
from export.tasks.sounds.samples import build_sounds, draw_sound, encode_sound

load_backend("python_preprocess", "sent_file")
sounds = load_backend("python_preprocess", "sounds")

RECIPE = SoundRecipe(sampling_rate=16_000, normalize=True, shortest=1000)
# What 8, 16, 24 and 32 bits and floats leave of a value between -1 and 1.
STEPS = {"PCM_U8": 2**-7, "PCM_16": 2**-15, "PCM_24": 2**-23, "PCM_32": 2**-23, "FLOAT": 2**-23, "DOUBLE": 2**-23}


def open_reader(folder: Path, recipe: SoundRecipe = RECIPE) -> Any:
    path = folder / "sound.json"
    path.write_bytes(recipe.to_json())
    return sounds.SoundReader(path, ["input_values"])


def send(*contents: bytes) -> list[Any]:
    return [sounds.SentFile(content, "AUDIO", row) for row, content in enumerate(contents)]


@pytest.mark.parametrize("normalize", [True, False])
def test_samples_are_those_of_the_feature_extractor(normalize: bool, tmp_path: Path) -> None:
    Wav2Vec2FeatureExtractor(do_normalize=normalize, return_attention_mask=True).save_pretrained(tmp_path)
    preparation = find_sound_preparation(tmp_path, "", 1000)
    assert preparation.recipe == SoundRecipe(sampling_rate=16_000, normalize=normalize, shortest=1000)
    made = open_reader(tmp_path, preparation.recipe).encode(send(*build_sounds()))
    for row, content in zip(made, build_sounds(), strict=True):
        want = preparation.read(content)
        assert row.samples.dtype == want.dtype == np.float32
        np.testing.assert_allclose(row.samples, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "encoding"), [*(("WAV", encoding) for encoding in STEPS), ("FLAC", "PCM_16"), ("FLAC", "PCM_24")]
)
def test_what_was_encoded_is_what_is_heard(kind: str, encoding: str, tmp_path: Path) -> None:
    values = 0.9 * draw_sound(3, 16_000, 0.3, channels=2)
    recipe = SoundRecipe(sampling_rate=16_000, normalize=False, shortest=1000)
    (made,) = open_reader(tmp_path, recipe).encode(send(encode_sound(values, 16_000, kind, encoding)))
    np.testing.assert_allclose(made.samples, values.mean(axis=1), rtol=0, atol=1.01 * STEPS[encoding])


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000])
def test_a_tone_of_another_rate_is_the_same_tone(rate: int, tmp_path: Path) -> None:
    """The truth is the sine itself; a filter has nothing to go by at the two ends."""
    recipe = SoundRecipe(sampling_rate=16_000, normalize=False, shortest=1000)
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(rate)[:, None] / rate)
    (made,) = open_reader(tmp_path, recipe).encode(send(encode_sound(tone, rate, "WAV", "FLOAT")))
    assert len(made.samples) == 16_000
    want = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    np.testing.assert_allclose(made.samples[500:-500], want[500:-500], atol=1e-4)


@pytest.mark.parametrize("what", list_hostile())
def test_what_is_no_whole_sound_is_refused_alone(what: str, tmp_path: Path) -> None:
    good = build_sounds()[0]
    before, bad, after = open_reader(tmp_path).encode(send(good, list_hostile()[what], good))
    assert isinstance(bad, sounds.FileError), what
    refusal = str(bad)
    assert refusal.startswith("AUDIO row 1 ") and ": expected " in refusal and ", got " in refusal
    assert "<_io." not in refusal and "\n" not in refusal
    assert (before.samples == after.samples).all()


def test_sounds_of_different_lengths_are_not_padded(tmp_path: Path) -> None:
    reader = open_reader(tmp_path)
    short, long = (encode_sound(draw_sound(0, 16_000, seconds), 16_000, "WAV", "PCM_16") for seconds in (0.5, 0.6))
    made = reader.encode(send(short, short, long))
    assert reader.stack(made[:2])["input_values"].shape == (2, 8000)
    with pytest.raises(sounds.FileError, match="AUDIO row 2 is not as long as row 0: expected 8000 samples at 16000"):
        reader.stack(made)


@pytest.mark.parametrize(
    ("processor", "got"),
    [
        (None, "got none"),
        ({"feature_extractor_type": "ASTFeatureExtractor", "num_mel_bins": 16}, "got ASTFeatureExtractor"),
        ({"feature_extractor_type": "NobodysExtractor"}, "expected a feature extractor of transformers"),
        ({"feature_extractor_type": "Wav2Vec2FeatureExtractor", "feature_size": 2}, "got 2 features"),
    ],
)
def test_what_the_server_cannot_do_is_refused(processor: dict[str, Any] | None, got: str, tmp_path: Path) -> None:
    if processor:
        (tmp_path / PROCESSOR_FILE).write_text(json.dumps(processor))
    with pytest.raises(ModelError, match=got) as refused:
        find_sound_preparation(tmp_path, "audio-classification-tensors", 1000)
    assert "pass --task audio-classification-tensors" in str(refused.value)


def test_a_byte_order_mark_is_named_with_what_helps(tmp_path: Path) -> None:
    (tmp_path / PROCESSOR_FILE).write_text("{}", encoding="utf-8-sig")
    with pytest.raises(CheckpointError, match="got a byte order mark in front; save it as UTF-8 without"):
        find_sound_preparation(tmp_path, "x", 1000)


@pytest.mark.parametrize("key", ["sampling_rate", "do_normalize"])
@pytest.mark.parametrize("value", ["abc", "16000", None, [16000], {"a": 1}, 0, -1, 1.5, 10**30, float("nan")])
def test_a_value_of_another_kind_is_refused_in_a_sentence(key: str, value: Any, tmp_path: Path) -> None:
    processor = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "feature_size": 1, key: value}
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps(processor))
    with pytest.raises(ModelError, match=f"^{key} in .* is of another kind: expected .*, got .*; pass --task x, "):
        find_sound_preparation(tmp_path, "x", 1000)
