"""Models of several, such as one of texts and one of pictures: what of them is served, and what to do with the rest."""

from typing import Any, NoReturn

import transformers
from transformers import AutoModel, PretrainedConfig

from ..errors import ModelError

# What of a model of several is one of texts, as configurations of transformers name it.
_OF_TEXTS = ("text_config", "decoder")
# What compares pictures with texts makes of each.
_COMPARES = ("get_image_features", "get_text_features")


def is_of_several(config: PretrainedConfig) -> bool:
    """Tell whether one of texts is among several models."""
    return any(getattr(config, name, None) is not None for name in _OF_TEXTS if name in config.sub_configs)


def compares_pictures(config: PretrainedConfig) -> bool:
    """Tell whether its pictures can be served by themselves: it has a vector for a picture, as for a text."""
    own = _find_own_class(config)
    return own is not None and all(hasattr(own, name) for name in _COMPARES)


def refuse_for_texts(config: PretrainedConfig) -> NoReturn:
    """Refuse to serve a model of several for its texts.

    Raises:
        ModelError: Always.
    """
    named = _name_part(config, "TextModelWithProjection") or _name_part(config, "TextModel")
    # Of the towers of texts transformers builds few that were saved alone.
    alone = f"such as {named}, " if named else ""
    served = "" if named else ", if docs/architectures.md lists what it is"
    raise ModelError(
        f"a model of type {config.model_type} as a whole is not served for texts",
        expected="one model, whose configuration has a vocab_size",
        got=f"{type(config).__name__}, of several models",
        remedy=f"save the model of texts in it by itself, {alone}with its tokenizer, and pass that folder{served}"
        + _name_embedding(config),
    )


def refuse_for_signals(config: PretrainedConfig) -> NoReturn:
    """Refuse to serve a model of several for its pictures or sounds.

    Raises:
        ModelError: Always.
    """
    named = _name_part(config, "VisionModel")
    raise ModelError(
        f"a model of type {config.model_type} as a whole is not served for pictures or sounds",
        expected="one model, of pictures or of sounds",
        got=f"{type(config).__name__}, of several models",
        remedy="save the model of pictures or sounds in it by itself" + (f", such as {named}" if named else "")
        + ", and pass that folder" + _name_embedding(config),
    )  # fmt: skip


def _name_embedding(config: PretrainedConfig) -> str:
    return ", or serve the pictures with --task image-embedding" if compares_pictures(config) else ""


def _name_part(config: PretrainedConfig, ending: str) -> str:
    """Return the name of the class of one of several models; empty where nothing builds it from what it saves."""
    own = _find_own_class(config)
    name = "" if own is None else own.__name__.removesuffix("Model") + ending
    part: Any = getattr(transformers, name, None)
    # That of BLIP-2's texts has the configuration of all.
    if part is None or isinstance(config, part.config_class):
        return ""
    # These are built by the class that they name, whatever `AutoModel` knows.
    is_tower = ending in ("VisionModel", "TextModelWithProjection")
    return name if is_tower or part.config_class in AutoModel._model_mapping else ""


def _find_own_class(config: PretrainedConfig) -> Any:
    """Return the class that `AutoModel` builds; None where it builds none."""
    found = AutoModel._model_mapping.get(type(config), None)
    return found[0] if isinstance(found, (tuple, list)) else found
