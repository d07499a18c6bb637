"""From encoded sounds to samples: decoding, mixing, resampling and scaling, without a word about Triton.

The samples are those that transformers' `Wav2Vec2FeatureExtractor` makes of the same sound at the model's rate.
"""

import io
import json
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import soxr
from sent_file import FileError, SentFile

Float32Array = npt.NDArray[np.float32]

# What is decoded. libsndfile knows many more; of OGG and MP3 it does not tell whether the end is missing.
FORMATS = ("WAV", "FLAC")
_ENCODINGS = ("PCM_U8", "PCM_S8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")

# A file, and what it unfolds to: 4 bytes a value while it is decoded. All are looked at before anything is decoded.
MAX_SOUND_BYTES = 32 << 20
MAX_VALUES = 24_000_000
# The first layer of wav2vec 2.0 makes 512 values of every 5 samples, 6.5 MB a second, and up to 32 sounds are joined.
MAX_SECONDS = 30
MIN_RATE, MAX_RATE = 4_000, 192_000

# Of floats that were never brought to -1 to 1; squares of larger ones cannot be added up in fp32.
MAX_LEVEL = float(1 << 31)

# transformers, feature_extraction_wav2vec2.py: what keeps silence from being divided by nothing.
_LEAST_VARIANCE = 1e-7

# More threads than this hold more decoded sounds at once than they gain time.
_MAX_THREADS = 8


@dataclass(frozen=True)
class MadeSound:
    """What a sound became.

    Attributes:
        samples: [samples], fp32.
        sent: What it was made of.
    """

    samples: Float32Array
    sent: SentFile


class SoundReader:
    """A `sound.json`, and the one tensor that is made by it.

    Args:
        path: The `sound.json`.
        tensor_names: Name of the tensor to make.
        max_threads: Sounds that are decoded at once, at most.

    Raises:
        ValueError: Another number of tensors is wanted.
    """

    def __init__(self, path: Path, tensor_names: Sequence[str], *, max_threads: int = _MAX_THREADS) -> None:
        recipe = json.loads(path.read_text(encoding="utf-8"))
        self._rate: int = recipe["sampling_rate"]
        self._normalize: bool = recipe["normalize"]
        self._shortest: int = recipe["shortest"]
        if len(tensor_names) != 1:
            raise ValueError(f"a sound becomes one tensor: expected one, got {', '.join(tensor_names)}")
        (self._tensor_name,) = tensor_names
        threads = min(len(os.sched_getaffinity(0)), max_threads, _MAX_THREADS)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sounds")

    def encode(self, rows: "Sequence[SentFile]") -> "list[MadeSound | FileError]":
        """Return what each sound became, or why it became nothing; all at once, in several threads."""
        return list(self._pool.map(self._try, rows))

    def stack(self, rows: "Sequence[MadeSound]") -> "dict[str, Float32Array]":
        """Return the tensor of one request, [rows, samples].

        Raises:
            FileError: One is longer than another. Padding is not silence to a model that was not trained with it.
        """
        first = rows[0].samples
        for row in rows:
            if row.samples.shape != first.shape:
                raise row.sent.refuse(
                    f"is not as long as row {rows[0].sent.row}: expected {len(first)} samples at {self._rate} Hz, got "
                    f"{len(row.samples)}; send sounds of different lengths in requests of their own"
                )
        return {self._tensor_name: np.stack([row.samples for row in rows])}

    def _try(self, sent: SentFile) -> "MadeSound | FileError":
        try:
            return self._make(sent)
        except FileError as exc:
            return exc

    def _make(self, sent: SentFile) -> MadeSound:
        decoded, rate = decode_sound(sent)
        samples = decoded if rate == self._rate else soxr.resample(decoded, rate, self._rate, quality="HQ")
        if len(samples) < self._shortest:
            raise sent.refuse(
                f"is too short: expected at least {self._shortest} samples at {self._rate} Hz, got {len(samples)}; "
                f"send a longer one"
            )
        if self._normalize:
            samples = (samples - samples.mean()) / np.sqrt(samples.var() + _LEAST_VARIANCE)
        return MadeSound(np.ascontiguousarray(samples, dtype=np.float32), sent)


def decode_sound(sent: SentFile) -> "tuple[Float32Array, int]":
    """Return the mean of the channels, [samples], from -1 to 1 unless a file of floats says otherwise, and the rate.

    Raises:
        FileError: It is too large, of another kind, or damaged.
    """
    check_beginning(sent)
    try:
        file = soundfile.SoundFile(io.BytesIO(sent.content))
    # Whatever libsndfile's readers meet in bytes that are anybody's.
    except Exception as exc:
        raise sent.refuse(f"is damaged: expected a whole sound, got '{_name(exc)}' in its head") from exc
    with file:
        check_head(sent, file)
        try:
            values = file.read(dtype="float32", always_2d=True)
        # As above.
        except Exception as exc:
            raise sent.refuse(f"is damaged: expected a whole {file.format}, got '{_name(exc)}'; send it again") from exc
        if len(values) != file.frames:
            raise sent.refuse(
                f"is damaged: expected {file.frames} samples a channel, as its head says, got {len(values)}; "
                f"send it again"
            )
        rate: int = file.samplerate
    worst = np.abs(values).max()
    # NaN is not smaller than anything.
    if not worst <= MAX_LEVEL:
        raise sent.refuse(
            f"holds values that are no sound: expected numbers from -1 to 1, at most {MAX_LEVEL:g}, got {worst:g}; "
            f"save it again"
        )
    return values[:, 0] if values.shape[1] == 1 else values.mean(axis=1), rate


def check_beginning(sent: SentFile) -> None:
    """Refuse what is not a file of ours by its size or its first bytes, and a WAV whose end is missing.

    Raises:
        FileError: It is.
    """
    content = sent.content
    if len(content) > MAX_SOUND_BYTES:
        raise sent.refuse(
            f"is too large: expected at most {MAX_SOUND_BYTES} bytes, got {len(content)}; send a shorter sound"
        )
    if not content:
        raise sent.refuse(f"is empty: expected a file of {', '.join(FORMATS)}, got no bytes")
    if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
        check_length(sent)
    elif content[:4] != b"fLaC":
        raise sent.refuse(
            f"is not a sound: expected a file of {', '.join(FORMATS)}, got one that begins with {content[:8]!r}"
        )


def check_length(sent: SentFile) -> None:
    """Refuse a WAV that is shorter than it says: libsndfile would read what is left of it without a word.

    Raises:
        FileError: It is, or says nothing.
    """
    place, content = 12, sent.content
    while place + 8 <= len(content):
        kind, size = struct.unpack_from("<4sI", content, place)
        place += 8
        if kind == b"data":
            if size > len(content) - place:
                raise sent.refuse(
                    f"is damaged: expected {size} bytes of sound, as its head says, got {len(content) - place}; send a "
                    f"whole file, not what was written through a pipe"
                )
            return
        # Chunks begin at even places.
        place += size + size % 2
    raise sent.refuse("is damaged: expected a WAV with its sound, got one that has no chunk 'data'; send it again")


def check_head(sent: SentFile, file: Any) -> None:
    """Refuse what the head says, before it is believed.

    Raises:
        FileError: It is of another encoding, too long, too short, or has too many channels or too few.
    """
    if file.subtype not in _ENCODINGS:
        raise sent.refuse(
            f"is of an encoding that is not read: expected one of {', '.join(_ENCODINGS)}, got {file.subtype}; save it "
            f"as PCM of 16 bits"
        )
    if not MIN_RATE <= file.samplerate <= MAX_RATE:
        raise sent.refuse(
            f"has another rate than sounds have: expected {MIN_RATE} to {MAX_RATE} Hz, got {file.samplerate}; "
            f"resample it"
        )
    if not 0 < file.frames <= MAX_SECONDS * file.samplerate:
        raise sent.refuse(
            f"is too {'long' if file.frames > 0 else 'short'}: expected at least one sample and at most {MAX_SECONDS} "
            f"s, got {file.frames} samples at {file.samplerate} Hz; send another part"
        )
    if file.frames * file.channels > MAX_VALUES:
        raise sent.refuse(
            f"has too many values: expected at most {MAX_VALUES}, got {file.channels} channels of {file.frames}; "
            f"send one channel"
        )


def _name(exc: Exception) -> str:
    lines = str(exc).splitlines()
    text = lines[0] if lines else type(exc).__name__
    # libsndfile says where the bytes lie in this process.
    return text.rpartition(">: ")[2].rstrip(".")[:120]
