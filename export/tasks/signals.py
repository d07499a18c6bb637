"""Images and sounds, as the tensors that their own preprocessing makes of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForAudioClassification,
    AutoModelForCTC,
    AutoModelForImageClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from ..checkpoints.storage.paths import read_json_if_any
from ..errors import ModelError
from ..signature import BATCH, ModelSignature, TensorSignature
from ..weights.several_models import is_of_several, refuse_for_signals
from ..weights.torch_model import load_model
from .base import HeadModule, TaskSource
from .table import IMAGES, SOUNDS, TEXTS
from .tensors import InputRules, SizeRange, TensorTask, ValueRule
from .towers import find_class

# The samples of a waveform.
SAMPLES = "samples"

# The shortest waveform that is tried: models of the wav2vec 2.0 family see 400 samples at once, and two of these
# windows are the least that a normalisation over time can be told from a constant by.
SHORTEST_WAVEFORM = 1000
_LONGEST_WAVEFORM = 16000

# What image models without a size of their own were trained on.
_DEFAULT_IMAGE_SIZE = 224


class SignalTask(TensorTask):
    """A model of one signal: an image, a spectrogram or a waveform in, logits or features out."""

    auto_class: ClassVar[Any]
    output: ClassVar[str]

    def __init__(self, source: TaskSource) -> None:
        if self.auto_class is AutoModel and is_of_several(source.config):
            refuse_for_signals(source.config)
        model, self.unused_tensors = load_model(source.config, source.weights, self.find_class(source.config))
        if self.auto_class is AutoModel and source.config.is_encoder_decoder:
            model = model.get_encoder()
        name = model.main_input_name
        _refuse_texts(model, name)
        dims = self.find_dims(source)
        self.tensors = InputRules(
            rules={name: ValueRule()},
            sizes={SAMPLES: SizeRange(smallest=SHORTEST_WAVEFORM, largest=_LONGEST_WAVEFORM)}
            if SAMPLES in dims
            else {},
        )
        inputs = (TensorSignature(name=name, dtype=torch.float32, dims=dims),)
        module: nn.Module = HeadModule(model, (name,)) if self.output == "logits" else FeatureModule(model, name)
        self.module = module.eval()
        self.signature = ModelSignature(
            inputs=inputs,
            outputs=self.infer_outputs(inputs, [self.output]),
            smallest={symbol: limits.smallest for symbol, limits in self.tensors.sizes.items()},
        )

    def find_class(self, config: PretrainedConfig) -> Any:
        """Return the class of the model, as `load_model` takes it."""
        return self.auto_class

    def find_dims(self, source: TaskSource) -> tuple[str | int, ...]:
        """Return the dimensions of the model's input, the batch first."""
        return read_signal_dims(source.directory, source.config)

    @property
    def description(self) -> str:
        """See `Task`."""
        (given,), (made,) = self.signature.inputs, self.signature.outputs
        return f"{made.name} {_format(made.dims)} of {given.name} {_format(given.dims)}"


class ImageClassification(SignalTask):
    """Logits of an image."""

    auto_class = AutoModelForImageClassification
    output = "logits"


class ImageFeatureExtraction(SignalTask):
    """The last hidden states of an image."""

    auto_class = AutoModel
    output = "last_hidden_state"

    def find_class(self, config: PretrainedConfig) -> Any:
        """See `SignalTask`."""
        return find_class(config)


class AudioClassification(SignalTask):
    """Logits of a sound."""

    auto_class = AutoModelForAudioClassification
    output = "logits"


class SpeechRecognition(SignalTask):
    """Logits of the characters at each frame of a sound, for connectionist temporal classification."""

    auto_class = AutoModelForCTC
    output = "logits"


class AudioFeatureExtraction(SignalTask):
    """The last hidden states of a sound; of an encoder-decoder those of its encoder."""

    auto_class = AutoModel
    output = "last_hidden_state"


class FeatureModule(nn.Module):
    """A model without a head: one tensor in, its last hidden states out."""

    def __init__(self, model: PreTrainedModel, input_name: str) -> None:
        super().__init__()
        self.model = model
        self.input_name = input_name

    def forward(self, signal: Tensor) -> Tensor:
        """Return the last hidden states, [batch, ..., hidden], fp32."""
        states: Tensor = self.model(**{self.input_name: signal}).last_hidden_state
        return states


def _refuse_texts(model: PreTrainedModel, name: str) -> None:
    """Refuse a model that wants texts in the place of its signal.

    Raises:
        ModelError: It does.
    """
    if name in TEXTS:
        raise ModelError(
            f"{type(model).__name__} is not served for pictures or sounds",
            expected=f"a main input among {', '.join((*IMAGES, *SOUNDS))}",
            got=name,
            remedy="pass the --task it was trained for",
        )


def read_signal_dims(directory: Path, config: PretrainedConfig) -> tuple[str | int, ...]:
    """Return the dimensions of the model's input, the batch first.

    Images have the size of the configuration, else of `preprocessor_config.json`; spectrograms that of the
    configuration; waveforms any length.
    """
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        # Whisper halves the frames once (transformers, modeling_whisper.py).
        return (BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return (BATCH, config.max_length, config.num_mel_bins)
    if hasattr(config, "conv_dim") and hasattr(config, "conv_stride"):
        return (BATCH, SAMPLES)
    recorded: Any = read_json_if_any(directory / "preprocessor_config.json") or {}
    sizes = (getattr(config, "image_size", None), recorded.get("crop_size"), recorded.get("size"))
    height, width = next((found for found in map(_read_size, sizes) if found), (_DEFAULT_IMAGE_SIZE,) * 2)
    return (BATCH, getattr(config, "num_channels", 3), height, width)


def _read_size(value: Any) -> tuple[int, int] | None:
    """Return height and width, however transformers wrote them down."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, Sequence) and len(value) == 2:
        return int(value[0]), int(value[1])
    if isinstance(value, Mapping):
        edge = value.get("shortest_edge")
        height, width = value.get("height", edge), value.get("width", edge)
        return (int(height), int(width)) if height and width else None
    return None


def _format(dims: tuple[str | int, ...]) -> str:
    return f"[{', '.join(map(str, dims))}]"
