"""Files that are no sounds, or no whole ones, or far larger than they look; the same ones in every run."""

import io
import struct
from collections.abc import Mapping
from functools import cache

import numpy as np
import soundfile

from export.tasks.sounds.samples import draw_sound, encode_sound


@cache
def list_hostile() -> Mapping[str, bytes]:
    """Return what each file is, and the file; every one of them must be refused."""
    sound = draw_sound(0, 16_000, 0.5)
    wave, flac = (encode_sound(sound, 16_000, kind, "PCM_16") for kind in ("WAV", "FLAC"))
    broken = sound.copy()
    broken[100] = np.nan
    endless = broken.copy()
    endless[100] = np.inf
    spoiled = bytearray(flac)
    spoiled[len(flac) // 2] ^= 0xFF
    return {
        "nothing": b"",
        "one byte": b"R",
        "a page": b"%PDF-1.7 and more of it",
        "half a WAV": wave[: len(wave) // 2],
        "half a FLAC": flac[: len(flac) // 2],
        "a WAV without its last byte": wave[:-1],
        "a FLAC without its last byte": flac[:-1],
        "a beginning": wave[:12],
        "a head": wave[:44],
        "a FLAC's beginning": flac[:4],
        "a FLAC's head": flac[:42],
        "a spoiled FLAC": bytes(spoiled),
        "no samples": encode_sound(sound[:0], 16_000, "WAV", "PCM_16"),
        "too few samples": encode_sound(sound[:300], 16_000, "WAV", "PCM_16"),
        "no number": encode_sound(broken, 16_000, "WAV", "FLOAT"),
        "infinity": encode_sound(endless, 16_000, "WAV", "FLOAT"),
        "deafening": encode_sound(sound * 3e38, 16_000, "WAV", "DOUBLE"),
        "a WAV that claims hours": _claim(wave, 0xFFFFFFF0),
        "a FLAC that claims hours": flac[:21] + b"\xff" * 5 + flac[26:],
        "a minute and more of silence": encode_sound(np.zeros((16_000 * 61, 1)), 16_000, "FLAC", "PCM_16"),
        "many channels": encode_sound(np.zeros((192_000 * 60, 8)), 192_000, "FLAC", "PCM_16"),
        "one sample a second": encode_sound(sound, 1, "WAV", "PCM_16"),
        "a rate of millions": encode_sound(sound, 2_000_000, "WAV", "PCM_16"),
        "no channels": wave[:22] + b"\0\0" + wave[24:],
        "no bits": wave[:34] + b"\0\0" + wave[36:],
        "another encoding": encode_sound(sound, 16_000, "WAV", "IMA_ADPCM"),
        "another format": _encode_ogg(sound),
        "big-endian": b"RIFX" + wave[4:],
        "too many bytes": wave + bytes(33 << 20),
    }


def _claim(wave: bytes, size: int) -> bytes:
    place = wave.index(b"data") + 4
    return wave[:place] + struct.pack("<I", size) + wave[place + 4 :]


def _encode_ogg(sound: "np.ndarray[tuple[int, int], np.dtype[np.float64]]") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, sound, 16_000, format="OGG", subtype="VORBIS")
    return file.getvalue()
