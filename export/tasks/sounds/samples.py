"""Sounds that every export of a model of sounds is checked on: encoded files of each kind, short to long."""

import io
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import soundfile


@cache
def build_sounds() -> Sequence[bytes]:
    """Return encoded sounds of every format, of several rates, of one channel and of several."""
    return (
        encode_sound(draw_sound(0, 16_000, 1.0), 16_000, "WAV", "PCM_16"),
        encode_sound(draw_sound(1, 44_100, 0.7, channels=2), 44_100, "FLAC", "PCM_16"),
        encode_sound(draw_sound(2, 8_000, 1.3), 8_000, "WAV", "PCM_U8"),
        encode_sound(draw_sound(3, 48_000, 0.4, channels=3), 48_000, "WAV", "PCM_24"),
        encode_sound(draw_sound(4, 22_050, 2.0), 22_050, "FLAC", "PCM_24"),
        encode_sound(draw_sound(5, 16_000, 0.2), 16_000, "WAV", "PCM_32"),
        encode_sound(draw_sound(6, 11_025, 0.9), 11_025, "WAV", "FLOAT"),
        encode_sound(draw_sound(7, 8_000, 3.0), 8_000, "WAV", "ULAW"),
    )


def draw_sound(seed: int, rate: int, seconds: float, channels: int = 1) -> npt.NDArray[np.float64]:
    """Return a few tones that swell and fade over noise, as speech does, [samples, channels], within -1 and 1."""
    random = np.random.default_rng(seed)
    time = np.arange(int(rate * seconds))[:, None] / rate
    values = 0.05 * random.standard_normal((len(time), channels))
    for _ in range(5):
        pitch, beat, phase = random.uniform(80, 3000), random.uniform(1, 6), random.uniform(0, 6.3, channels)
        values += 0.15 * np.sin(2 * np.pi * pitch * time + phase) * np.sin(np.pi * beat * time) ** 2
    return np.clip(values, -1, 1)


def encode_sound(values: npt.NDArray[np.float64], rate: int, kind: str, encoding: str) -> bytes:
    """Return samples, [samples, channels], as a file."""
    file = io.BytesIO()
    soundfile.write(file, values, rate, format=kind, subtype=encoding)
    return file.getvalue()
