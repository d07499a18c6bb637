"""Parts of a model that were saved alone: towers of pictures, and encoders of what else has a decoder."""

from dataclasses import dataclass
from typing import Any, Literal

import transformers
from transformers import AutoModel, AutoModelForTextEncoding, PretrainedConfig, PreTrainedModel

from .foreseen import list_names

# How their classes end. `AutoModel` leaves the projection of the second out, and does not know all of them.
_ENDINGS = ("VisionModel", "VisionModelWithProjection")
# Of CLIP's and its relatives' texts, whose vectors are compared with those of pictures or sounds.
_OF_TEXTS = "TextModelWithProjection"
_OF_TEXTS_ALONE = "TextModel"
# T5's and its relatives', of which `AutoModel` builds the decoder as well.
_ENCODER = "EncoderModel"


@dataclass(frozen=True)
class OwnClass:
    """A class of transformers, as `load_model` takes its automatic ones."""

    model_class: type[PreTrainedModel]

    def from_config(
        self, config: PretrainedConfig, *, trust_remote_code: Literal[False], **options: Any
    ) -> PreTrainedModel:
        """Return the model, with random weights; a class of transformers has no code but its own."""
        model: PreTrainedModel = self.model_class._from_config(config, **options)
        return model


def find_class(config: PretrainedConfig) -> Any:
    """Return the class that has a place for all weights: that of a tower of pictures, or else `AutoModel`."""
    return _find_named(config, _ENDINGS) or AutoModel


def find_text_tower(config: PretrainedConfig) -> OwnClass | None:
    """Return the class of a tower of texts that was saved alone with its projection; None for any other model."""
    return _find_named(config, _OF_TEXTS)


def find_text_class(config: PretrainedConfig) -> Any:
    """Return the class of a model of texts: `AutoModel`, or the tower that `config.json` names where that has none."""
    is_known = type(config) in AutoModel._model_mapping
    return AutoModel if is_known else _find_named(config, _OF_TEXTS_ALONE) or AutoModel


def find_encoder(config: PretrainedConfig) -> Any:
    """Return the class of the encoder alone that makes features of a text; None where the whole model does.

    It is the one that `config.json` names, whatever else that says: transformers writes that it is no encoder-decoder.
    A whole encoder-decoder has its encoder taken out.
    """
    if named := _find_named(config, _ENCODER):
        return named
    is_half = config.is_encoder_decoder and type(config) in AutoModelForTextEncoding._model_mapping
    return AutoModelForTextEncoding if is_half else None


def _find_named(config: PretrainedConfig, endings: str | tuple[str, ...]) -> OwnClass | None:
    """Return the first class in `config.json` that ends so and belongs to this configuration."""
    for name in list_names(config.architectures):
        own = getattr(transformers, name, None)
        if name.endswith(endings) and own is not None and isinstance(config, own.config_class):
            return OwnClass(own)
    return None
