"""Whether the weights are those of the model that a `config.json` describes, and what of it the weights know better.

Judged by names and shapes alone, with the model on the meta device. Where transformers renames or merges tensors of the
architecture on the way, such as each expert's, the rows of its table of tokens alone are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, list_some
from .model_shapes import build_described, load_described

Shapes = Mapping[str, tuple[int, ...]]

# What older releases saved and newer ones compute or call otherwise, and what no model needs.
_OLD_NAMES = (
    *(".position_ids", ".token_type_ids", ".masked_bias", ".attn.bias", ".inv_freq"),
    *(".gamma", ".beta", ".weight_g", ".weight_v"),
)
_NEW_NAMES = ("LayerNorm.weight", "LayerNorm.bias")
_PARAMETRIZED = ".parametrizations."
# Of a model without a head it is not part of what is computed.
_POOLER = "pooler."
# Keys of the configuration that say how many rows the table of tokens has.
_SIZE_KEYS = ("vocab_size", "decoder_vocab_size")


@dataclass(frozen=True, kw_only=True)
class _Match:
    """How the names of a checkpoint and of a model go together.

    Attributes:
        shapes: Name in the checkpoint → its shape and that of the model.
        beyond: Names in the checkpoint that the model has no place for, though they are of one of its parts.
        missing: Names of the model's that the checkpoint lacks, those of heads left out.
    """

    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    beyond: tuple[str, ...]
    missing: tuple[str, ...]

    def describe(self) -> str:
        """Return what does not fit, in words; empty where everything does."""
        unlike = {name: pair for name, pair in self.shapes.items() if pair[0] != pair[1]}
        found = [f"{name} {list(pair[0])} where {list(pair[1])} belongs" for name, pair in sorted(unlike.items())[:1]]
        found += [f"{list_some(self.beyond, 4)} beyond it"] if self.beyond else []
        found += [f"none for {list_some(self.missing, 4)}"] if self.missing else []
        return "; ".join(found)


def match_config(directory: Path, shapes: Shapes) -> dict[str, int]:
    """Return the sizes of the vocabulary that `config.json` gets wrong → what the weights say; empty as a rule.

    Nothing is said of a configuration that is not there, or whose class transformers does not have or cannot build.

    Args:
        directory: The folder with `config.json`.
        shapes: Name → shape of every tensor.

    Raises:
        CheckpointError: The weights are not of the model that it describes.
    """
    config = load_described(directory)
    model = None if config is None else build_described(config)
    if model is None:
        return {}
    sizes = _find_sizes(config, model, shapes)
    if _is_converted(model):
        return sizes
    said = _match(model, shapes).describe()
    if not said:
        return {}
    if sizes:
        for key, rows in sizes.items():
            setattr(config, key, rows)
        resized = build_described(config)
        if resized is not None and not _match(resized, shapes).describe():
            return sizes
    raise CheckpointError(
        f"{directory / 'config.json'} does not describe the weights",
        expected=f"the names and shapes of {type(model).__name__} as it describes it",
        got=said,
        remedy="pass the folder of the model that the checkpoint was trained from with --base",
    )


def _is_converted(model: Any) -> bool:
    """Tell whether transformers changes tensors of this architecture while it loads them, or may do so."""
    if getattr(model.config, "quantization_config", None) is not None:
        return True
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping

        return bool(get_model_conversion_mapping(model, add_legacy=False))
    # It is transformers' own, and may be another in another release.
    except Exception:
        return True


def _match(model: Any, shapes: Shapes) -> _Match:
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    found: dict[str, str] = {}
    for name in shapes:
        outer = (name, f"{prefix}{name}", name.removeprefix(f"{model.base_model_prefix}."))
        place = next((candidate for candidate in outer if candidate in state), None)
        if place is not None:
            found[name] = place
    own = [name for name in state if name.startswith(prefix)]
    parts = {name.removeprefix(prefix).split(".", 1)[0] for name in own}
    held = {id(state[place]) for place in found.values()}
    beyond = (
        name
        for name in shapes
        if name not in found and name.removeprefix(f"{model.base_model_prefix}.").split(".", 1)[0] in parts
    )
    parameters = {id(parameter) for parameter in model.parameters()}
    missing = (name for name in own if id(state[name]) in parameters - held)
    return _Match(
        shapes={name: (shapes[name], tuple(state[place].shape)) for name, place in found.items()},
        beyond=tuple(_drop(beyond, _OLD_NAMES, model, "_keys_to_ignore_on_load_unexpected")),
        missing=tuple(
            name
            for name in _drop(missing, _NEW_NAMES, model, "_keys_to_ignore_on_load_missing")
            if not name.removeprefix(prefix).startswith(_POOLER) and _PARAMETRIZED not in name
        ),
    )


def _drop(names: Iterable[str], endings: tuple[str, ...], model: Any, ignored: str) -> Iterable[str]:
    """Return the names that count: neither endings that differ between releases nor what the class itself ignores."""
    patterns = [re.compile(pattern) for pattern in getattr(model, ignored, None) or ()]
    return (
        name for name in names if not name.endswith(endings) and not any(pattern.search(name) for pattern in patterns)
    )


def _find_sizes(config: Any, model: Any, shapes: Shapes) -> dict[str, int]:
    """Return the sizes with which the table of tokens has as many rows as the weights; empty where it has, or unknown.

    The table is found by the end of its name, which stays where transformers renames what stands before it.
    """
    try:
        table = model.get_input_embeddings().weight
    # Of sounds and pictures: there is none, or no table.
    except (AttributeError, NotImplementedError):
        return {}
    names = (name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is table)
    ends = tuple("." + ".".join(name.split(".")[-2:]) for name in names)
    tables = [shape for name, shape in shapes.items() if f".{name}".endswith(ends)]
    rows = {shape[0] for shape in tables if shape[1:] == tuple(table.shape[1:])}
    size = getattr(config, "vocab_size", None)
    if len(rows) != 1 or type(size) is not int:
        return {}
    more = rows.pop() - table.shape[0]
    return {key: size + more for key in _SIZE_KEYS if more and getattr(config, key, None) == size}
