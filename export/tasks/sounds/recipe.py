"""What a model wants done to a sound before it hears it: read from the checkpoint, and done here as well.

The server does it by the same recipe in code of its own (`backends/python_preprocess/sounds.py`); what is done here is
the reference: soxr's resampling, which librosa has, and transformers' own feature extractor.
"""

import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import soxr
from transformers import AutoFeatureExtractor

from ...checkpoints.storage.paths import has_file, refuse_spoiled_texts
from ...errors import ModelError
from ..processor_file import PROCESSOR_FILE, tell_foreign

# [samples], fp32.
Samples = npt.NDArray[np.float32]

# The one extractor whose sounds have any length; others make spectrograms of one.
_EXTRACTOR = "Wav2Vec2FeatureExtractor"
# Samples a second; more than any file has.
_MAX_RATE = 1_000_000


@dataclass(frozen=True, kw_only=True)
class SoundRecipe:
    """What becomes of a sound; `sound.json` holds these keys.

    Attributes:
        sampling_rate: Samples a second that it is resampled to, once its channels have become their mean.
        normalize: Whether its mean then becomes 0 and its deviation 1.
        shortest: Fewer samples than these are refused: the network was not tried on them.
    """

    sampling_rate: int
    normalize: bool
    shortest: int

    def to_json(self) -> bytes:
        """Return the content of `sound.json`."""
        return (json.dumps(asdict(self)) + "\n").encode()


@dataclass(frozen=True, kw_only=True)
class SoundPreparation:
    """A recipe, and whose it is.

    Attributes:
        recipe: What the server goes by.
        origin: Where it was found, in words.
        reference: The truth: what the graph is given of samples of that rate.
    """

    recipe: SoundRecipe
    origin: str
    reference: Callable[[Samples], Samples]

    def read(self, content: bytes) -> Samples:
        """Return what the graph is given of an encoded sound."""
        values, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
        wanted = self.recipe.sampling_rate
        mono = values.mean(axis=1)
        return self.reference(mono if rate == wanted else soxr.resample(mono, rate, wanted, quality="HQ"))


def find_sound_preparation(directory: Path, tensors_task: str, shortest: int) -> SoundPreparation:
    """Return what the checkpoint records to be done to sounds.

    Args:
        directory: Its folder.
        tensors_task: What it can be served as without.
        shortest: Fewest samples that the network is tried on.

    Raises:
        ModelError: There is no record, or none that the server can follow.
    """
    path = directory / PROCESSOR_FILE
    remedy = f"pass --task {tensors_task}, which is sent samples"
    if not has_file(path):
        raise ModelError(
            f"nothing says what is done to sounds before the model of {directory} hears them",
            expected=f"a {PROCESSOR_FILE} beside the weights",
            got="none",
            remedy=f"put it there, or {remedy}",
        )
    refuse_spoiled_texts(directory, [PROCESSOR_FILE])
    try:
        extractor: Any = AutoFeatureExtractor.from_pretrained(directory, trust_remote_code=False)
    # Whatever transformers makes of a file that it did not write.
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, ImportError) as exc:
        raise ModelError(
            f"{path} is not read",
            expected="a feature extractor of transformers",
            got=tell_foreign(exc),
            remedy=remedy,
        ) from exc
    kind = type(extractor).__name__
    if kind != _EXTRACTOR or extractor.feature_size != 1:
        raise ModelError(
            f"{path} asks for something that is not done in the server",
            expected=f"{_EXTRACTOR} of one feature",
            got=kind if kind != _EXTRACTOR else f"{extractor.feature_size} features",
            remedy=remedy,
        )
    rate, normalize = extractor.sampling_rate, extractor.do_normalize
    checks = (
        ("sampling_rate", rate, f"a whole number from 1 to {_MAX_RATE}", type(rate) is int and 1 <= rate <= _MAX_RATE),
        ("do_normalize", normalize, "true or false", isinstance(normalize, bool)),
    )
    for key, value, expected, is_right in checks:
        if not is_right:
            got = json.dumps(value)[:100]
            raise ModelError(f"{key} in {path} is of another kind", expected=expected, got=got, remedy=remedy)

    def prepare(samples: Samples) -> Samples:
        # Alone, and so never padded; a mask of a sound alone would hide nothing.
        made = extractor(samples, sampling_rate=rate, return_tensors="np")
        found: Samples = made["input_values"][0].astype(np.float32)
        return found

    recipe = SoundRecipe(sampling_rate=rate, normalize=normalize, shortest=shortest)
    return SoundPreparation(recipe=recipe, origin=kind, reference=prepare)
