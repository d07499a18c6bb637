"""How many positions a model has, and those scaled by how long a text is, which others beside it would share."""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

from ..errors import ModelError

# Whose positions start at pad_token_id + 1 (transformers, modeling_roberta.py, create_position_ids_from_input_ids).
_LIKE_ROBERTA = (
    "altclip_text_model",
    "camembert",
    "clap_text_model",
    "data2vec-text",
    "esm",
    "ibert",
    "longformer",
    "luke",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
# MPNet's start behind this one, whatever it pads with (modeling_mpnet.py, MPNetEmbeddings).
_MPNETS_PADDING = 1


def count_rows_without_position(config: PretrainedConfig) -> int:
    """Return how many rows a table of positions has that no token is ever given, which all come first."""
    is_rotary = getattr(config, "position_embedding_type", "absolute") == "rotary"
    if config.model_type not in _LIKE_ROBERTA or is_rotary:
        return 0
    padding = _MPNETS_PADDING if config.model_type == "mpnet" else config.pad_token_id
    return (padding or 0) + 1


def find_unscaled_length(config: PretrainedConfig) -> int:
    """Return up to how many tokens positions are turned by the short factors of longrope; 0 for all others.

    A text beyond that has all of them turned by the long ones, and so have those that are beside it in one batch
    (transformers 5.23, modeling_rope_utils.py, `longrope_frequency_update`).
    """
    positions = getattr(config, "max_position_embeddings", 0)
    said = [rope.get("original_max_position_embeddings") for rope in _list_ropes(config, "longrope")]
    lengths = [length for length in said if isinstance(length, int) and 0 < length < positions]
    return min(lengths, default=0)


def refuse_scaled(config: PretrainedConfig, task: str, *, reads_text: bool, writes: bool) -> None:
    """Refuse positions whose scale a graph cannot choose for each text, or that nothing keeps from being scaled.

    Args:
        config: The checkpoint's configuration.
        task: Name of the task.
        reads_text: Whether its texts are cut at what a model reads.
        writes: Whether it is served by the engine that writes text, which computes positions by itself.

    Raises:
        ModelError: The model has such positions.
    """
    if (unscaled := find_unscaled_length(config)) and not reads_text:
        raise ModelError(
            f"a model of type {config.model_type} with positions that are scaled by longrope is not served for {task}",
            expected=f"nothing longer than {unscaled} tokens, at which texts are cut",
            got="rows of tokens, which may be longer and change those beside them",
            remedy="pass a --task that reads texts",
        )
    if any(_list_ropes(config, "dynamic")) and not writes:
        raise ModelError(
            f"a model of type {config.model_type} has positions that are scaled by the length of a text",
            expected="the same for every text",
            got="rope_type dynamic",
            remedy='write "default" in its place into rope_parameters (rope_scaling) of config.json: up to '
            f"{getattr(config, 'max_position_embeddings', 0)} tokens the two are the same",
        )


def _list_ropes(config: PretrainedConfig, kind: str) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of this kind: of all layers, or of each type of them."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    for settings in (rope, *rope.values()):
        if isinstance(settings, dict) and settings.get("rope_type") == kind:
            yield settings
