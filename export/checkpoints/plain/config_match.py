"""Whether the weights are those of the model that a `config.json` describes, and what of it the weights know better.

Judged by names and shapes alone, with the model on the meta device. Where transformers renames or merges tensors of the
architecture on the way, such as each expert's, the rows of its table of tokens alone are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
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
class ConfigMatch:
    """What a configuration says that the weights know better, and what of it the weights cannot fill.

    Attributes:
        sizes: The sizes of the vocabulary that it gets wrong → what the weights say; empty as a rule.
        class_name: The model that it describes; empty where that is not known.
        untrained: Names of that model's head that the weights do not have.
        unused: Names in the weights that it has no place for.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    class_name: str = ""
    untrained: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Match:
    """How the names of a checkpoint and of a model go together.

    Attributes:
        shapes: Name in the checkpoint → its shape and that of the model.
        beyond: Names in the checkpoint that the model has no place for, though they are of one of its parts.
        missing: Names of the model's that the checkpoint lacks, those of heads left out.
        untrained: Those of heads.
        unused: Names in the checkpoint that belong to other heads, those whose bytes have a place or a name left out.
    """

    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    beyond: tuple[str, ...]
    missing: tuple[str, ...]
    untrained: tuple[str, ...]
    unused: tuple[str, ...]

    def describe(self) -> str:
        """Return what does not fit, in words; empty where everything does."""
        unlike = {name: pair for name, pair in self.shapes.items() if pair[0] != pair[1]}
        found = [f"{name} {list(pair[0])} where {list(pair[1])} belongs" for name, pair in sorted(unlike.items())[:1]]
        found += [f"{list_some(self.beyond, 4)} beyond it"] if self.beyond else []
        found += [f"none for {list_some(self.missing, 4)}"] if self.missing else []
        return "; ".join(found)


def match_config(directory: Path, shapes: Shapes, tied: Mapping[str, str] = MappingProxyType({})) -> ConfigMatch:
    """Return how the configuration in `directory` and the weights go together.

    Nothing is said of a configuration that is not there, or whose class transformers does not have or cannot build.

    Args:
        directory: The folder with `config.json`.
        shapes: Name → shape of every tensor.
        tied: Name → the name that holds the same bytes.

    Raises:
        CheckpointError: The weights are not of the model that it describes.
    """
    config = load_described(directory)
    model = None if config is None else build_described(config)
    if model is None:
        return ConfigMatch()
    sizes = _find_sizes(config, model, shapes)
    if _is_converted(model):
        return ConfigMatch(sizes=sizes)
    match = _match(model, shapes, tied)
    said = match.describe()
    if not said:
        return _name_heads(model, match, {})
    if sizes:
        for key, rows in sizes.items():
            setattr(config, key, rows)
        resized = build_described(config)
        again = None if resized is None else _match(resized, shapes, tied)
        if again is not None and not again.describe():
            return _name_heads(model, again, sizes)
    raise CheckpointError(
        f"{directory / 'config.json'} does not describe the weights",
        expected=f"the names and shapes of {type(model).__name__} as it describes it",
        got=said,
        remedy="pass the folder of the model that the checkpoint was trained from with --base",
    )


def _name_heads(model: Any, match: _Match, sizes: Mapping[str, int]) -> ConfigMatch:
    return ConfigMatch(sizes=sizes, class_name=type(model).__name__, untrained=match.untrained, unused=match.unused)


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


def _match(model: Any, shapes: Shapes, tied: Mapping[str, str]) -> _Match:
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
    beyond = tuple(
        name
        for name in shapes
        if name not in found and name.removeprefix(f"{model.base_model_prefix}.").split(".", 1)[0] in parts
    )
    placed = {tied.get(name, name) for name in found}
    others = (name for name in shapes if name not in found and name not in tied and name not in placed)
    parameters = {id(parameter) for parameter in model.parameters()} - held
    missing = [
        name
        for name in _drop(
            (name for name in state if id(state[name]) in parameters),
            _NEW_NAMES,
            model,
            "_keys_to_ignore_on_load_missing",
        )
        if _PARAMETRIZED not in name
    ]
    # A pooler counts with the heads, which are computed from it; a model that is none but itself has no use for it.
    heads = [name for name in missing if not name.startswith(prefix) or name.startswith(f"{prefix}{_POOLER}")]
    return _Match(
        shapes={name: (shapes[name], tuple(state[place].shape)) for name, place in found.items()},
        beyond=tuple(_drop(beyond, _OLD_NAMES, model, "_keys_to_ignore_on_load_unexpected")),
        missing=tuple(name for name in missing if name not in heads),
        untrained=tuple(heads) if prefix else (),
        unused=tuple(
            name
            for name in _drop(others, _OLD_NAMES, model, "_keys_to_ignore_on_load_unexpected")
            if name not in beyond
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
