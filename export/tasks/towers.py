"""Towers of pictures that were saved alone, without the tower of texts beside them."""

from dataclasses import dataclass
from typing import Any, Literal

import transformers
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

# How their classes end. `AutoModel` leaves the projection of the second out, and does not know all of them.
_ENDINGS = ("VisionModel", "VisionModelWithProjection")


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
    for name in config.architectures or ():
        own = getattr(transformers, name, None)
        if name.endswith(_ENDINGS) and own is not None and isinstance(config, own.config_class):
            return OwnClass(own)
    return AutoModel
