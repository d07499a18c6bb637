"""Whether the weights are those of the model that a `config.json` describes, and what of it the weights know better.

Judged by names and shapes alone, with the model on the meta device; of tensors that transformers joins or splits while
it loads them, such as each expert's, by names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...errors import CheckpointError, list_some
from ..adapter_names import holds_factors
from ..wrapper_names import find_holder, name_holder
from .model_shapes import (
    ALL_INPUT_EMBEDDINGS,
    build_base,
    build_described,
    find_class_name,
    list_conversions,
    load_described,
    load_headless,
    names_no_class,
    refuse_too_many_layers,
    rename_as_built,
)
from .value_model import VALUE_HEAD, find_value_model

Shapes = Mapping[str, tuple[int, ...]]

# What older releases saved and newer ones compute or call otherwise, and what no model needs.
_OLD_NAMES = (
    *(".position_ids", ".token_type_ids", ".masked_bias", ".attn.bias", ".inv_freq", ".embed_positions.weights"),
    *(".gamma", ".beta", ".weight_g", ".weight_v"),
)
_NEW_NAMES = ("LayerNorm.weight", "LayerNorm.bias")
_PARAMETRIZED = ".parametrizations."
# Of a model without a head it is not part of what is computed.
_POOLER = "pooler."
# Of the ends of a model's names, in weights that hold it beside another.
_LEAST_SHARE = 0.75
# Keys of the configuration that say how many rows the table of tokens has.
_SIZE_KEYS = ("vocab_size", "decoder_vocab_size")
# Those of Marian's where the encoder reads other tokens than the decoder writes.
_TWO_TABLES = MappingProxyType(
    {"vocab_size": "model.encoder.embed_tokens.weight", "decoder_vocab_size": "model.decoder.embed_tokens.weight"}
)


@dataclass(frozen=True, kw_only=True)
class ConfigMatch:
    """What a configuration says that the weights know better, and what of it the weights cannot fill.

    Attributes:
        sizes: The sizes of the vocabulary that it gets wrong, such as `text_config.vocab_size` → what the weights say;
            empty as a rule.
        class_name: The model that it describes; empty where that is not known.
        untrained: Names of that model's head that the weights do not have.
        unused: Names in the weights that it has no place for.
        unbuilt: The model that it describes, where transformers has it and cannot build it: nothing was compared.
        names_none: Whether it names a type of model and no class of it, so that nothing was compared either.
        value_model: What stands in front of the names of a reward model's; empty for every other model.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    class_name: str = ""
    untrained: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    unbuilt: str = ""
    names_none: bool = False
    value_model: str = ""


# Trainers can leave out what was not trained, such as torch with `ignore_frozen_params`.
_MERGE = (
    "export the checkpoint itself with modelyard run, which merges an adapter's factors (DeepSpeed-Chat's with "
    "--lora-scaling, peft's with its adapter_config.json beside them); here they would be copied as they are"
)
_SAVE_ALL = ", or save the checkpoint again with every parameter, frozen ones as well"


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

    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    beyond: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def lacks_only(self) -> bool:
        """Whether all fits that is there."""
        return not self.beyond and all(found == wanted for found, wanted in self.shapes.values())

    def describe(self) -> str:
        """Return what does not fit, in words; empty where everything does."""
        unlike = {name: pair for name, pair in self.shapes.items() if pair[0] != pair[1]}
        found = [f"{name} {list(pair[0])} where {list(pair[1])} belongs" for name, pair in sorted(unlike.items())[:1]]
        found += [f"{list_some(self.beyond, 4)} beyond it"] if self.beyond else []
        found += [f"none for {list_some(self.missing, 4)}"] if self.missing else []
        return "; ".join(found)


def match_config(directory: Path, shapes: Shapes, tied: Mapping[str, str] = MappingProxyType({})) -> ConfigMatch:
    """Return how the configuration in `directory` and the weights go together.

    Nothing is said of a configuration that is not there, or whose class transformers does not have.

    Args:
        directory: The folder with `config.json`.
        shapes: Name → shape of every tensor.
        tied: Name → the name that holds the same bytes.

    Raises:
        CheckpointError: The weights are not of the model that it describes.
    """
    refuse_too_many_layers(directory, len(shapes))
    config = load_headless(directory) if (front := find_value_model(shapes)) else None
    if config is not None:
        inner = {name.removeprefix(front): shape for name, shape in shapes.items() if name != VALUE_HEAD}
        inner_tied = {name.removeprefix(front): of.removeprefix(front) for name, of in tied.items()}
        return replace(_match_model(directory, config, inner, inner_tied), value_model=front)
    return _match_model(directory, load_described(directory), shapes, tied)


def _match_model(directory: Path, config: Any, shapes: Shapes, tied: Mapping[str, str]) -> ConfigMatch:
    model = None if config is None else build_described(config)
    if model is None:
        if names_none := names_no_class(directory):
            _refuse_held(directory, shapes)
        return ConfigMatch(unbuilt=find_class_name(directory), names_none=names_none)
    sizes, conversions = _find_sizes(config, model, shapes), list_conversions(model)
    if conversions is None:
        return ConfigMatch(sizes=sizes)
    match = _match(model, shapes, tied, conversions)
    said = match.describe()
    if not said:
        return _name_heads(model, match, {})
    if sizes:
        for key, rows in sizes.items():
            *outer, last = key.split(".")
            setattr(reduce(getattr, outer, config), last, rows)
        resized = build_described(config)
        again = None if resized is None else _match(resized, shapes, tied, conversions)
        if again is not None and not again.describe():
            return _name_heads(model, again, sizes)
    remedy = "pass the folder of the model that the checkpoint was trained from with --base"
    if holds_factors(shapes):
        remedy = _MERGE
    elif front := find_holder(match.missing, shapes):
        remedy = name_holder(front)
    elif match.lacks_only:
        remedy += _SAVE_ALL
    raise CheckpointError(
        f"{directory / 'config.json'} does not describe the weights",
        expected=f"the names and shapes of {type(model).__name__} as it describes it",
        got=said,
        remedy=remedy,
    )


def _refuse_held(directory: Path, shapes: Shapes) -> None:
    """Refuse weights of the model without a head that stand behind a name which no class of its type has there.

    Raises:
        CheckpointError: They do.
    """
    base = build_base(directory)
    # Under some heads it is built without its pooler, a weight and a bias.
    front = find_holder(base.state_dict(), shapes, may_lack=2) if base is not None else ""
    holder = front.removesuffix(f"{base.base_model_prefix}.") if front else ""
    # Beside others it is a part of a model, such as a reward model's.
    if holder and all(name.startswith(holder) for name in shapes):
        raise CheckpointError(
            f"{directory / 'config.json'} does not describe the weights",
            expected=f"the names of a model of type {base.config.model_type}",
            got=f"all of them behind {holder}",
            remedy=f"{name_holder(holder)}, or name under architectures in config.json the class that has them there",
        )


def _name_heads(model: Any, match: _Match, sizes: Mapping[str, int]) -> ConfigMatch:
    return ConfigMatch(sizes=sizes, class_name=type(model).__name__, untrained=match.untrained, unused=match.unused)


def _match(model: Any, shapes: Shapes, tied: Mapping[str, str], conversions: Sequence[Any]) -> _Match:
    if not conversions:
        return _match_names(model, shapes, tied)
    rough = _match_roughly(model, shapes, conversions)
    if rough.describe():
        return rough
    state = model.state_dict()
    renamed = rename_as_built(model, shapes, conversions)
    names = {name: new for name, (new, joined) in renamed.items() if not joined}
    if not renamed or len(set(names.values())) < len(names):
        return rough
    by_name = {names[name]: shapes[name] for name in names}
    # What is joined or split has other shapes in the model, and one name of those that it gets there.
    parents = {_cut_end(new) for new, joined in renamed.values() if joined}
    made = [name for name in state if _cut_end(name) in parents and name not in by_name]
    by_name |= {name: tuple(state[name].shape) for name in made}
    by_name |= {new: shapes[name] for name, (new, joined) in renamed.items() if joined and new not in state}
    return _match_names(model, by_name, {names[name]: names.get(of, of) for name, of in tied.items() if name in names})


def _cut_end(name: str) -> str:
    """Return the path of the part that a tensor's layer is of, such as `mlp` of `mlp.up_proj.weight`."""
    return ".".join(name.split(".")[:-2])


def _match_roughly(model: Any, shapes: Shapes, conversions: Sequence[Any]) -> _Match:
    """Return what does not fit whatever transformers joins: another table of tokens, or not one name in common."""
    converted = [str(pattern) for conversion in conversions for pattern in conversion.target_patterns]
    state, ends = model.state_dict(), _list_ends(model)
    tables = {name: shape for name, shape in shapes.items() if f".{name}".endswith(ends)} if ends else {}
    if ends and not tables and not any(end.split(".")[1] in pattern for end in ends for pattern in converted):
        return _Match(missing=tuple(end[1:] for end in ends))
    expected = tuple(_find_table(model).shape) if ends else ()
    if tables and expected not in tables.values():
        name, shape = next(iter(tables.items()))
        return _Match(shapes={name: (shape, expected)})
    own, theirs = ({_cut(name) for name in names} for names in (state, shapes))
    tokens = tuple(f".{name}" for name in ALL_INPUT_EMBEDDINGS)
    beyond = tuple(name for name in shapes if f".{name}".endswith(tokens))
    # A model of pictures may be saved with that of texts beside it: then most of its names are there.
    if beyond and not any(end.endswith(tokens) for end in own) and len(own & theirs) < _LEAST_SHARE * len(own):
        return _Match(beyond=beyond)
    return _Match() if own & theirs else _Match(beyond=tuple(shapes))


def _match_names(model: Any, shapes: Shapes, tied: Mapping[str, str]) -> _Match:
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
    if not getattr(config, "share_encoder_decoder_embeddings", True):
        two = {key: shapes[name] for key, name in _TWO_TABLES.items() if name in shapes}
        return {key: rows for key, (rows, *_) in two.items() if rows != getattr(config, key)}
    table, ends = _find_table(model), _list_ends(model)
    if not ends:
        return {}
    tables = [shape for name, shape in shapes.items() if f".{name}".endswith(ends)]
    rows = {shape[0] for shape in tables if shape[1:] == tuple(table.shape[1:])}
    found = {
        f"{prefix}{key}": getattr(inner, key, None) for prefix, inner in _list_configs(config) for key in _SIZE_KEYS
    }
    # Most tables have the size's rows; where they are padded, the model's own configuration says of what.
    own = getattr(config, "vocab_size", None)
    size = own if type(own) is int else table.shape[0]
    if len(rows) != 1:
        return {}
    more = rows.pop() - table.shape[0]
    return {key: size + more for key, value in found.items() if more and type(value) is int and value == size}


def _list_configs(config: Any) -> list[tuple[str, Any]]:
    """Return what stands before a key, such as `text_config.`, and the configuration that it is of; its own first."""
    inner = ((name, getattr(config, name, None)) for name in getattr(config, "sub_configs", {}))
    return [("", config), *((f"{name}.", part) for name, part in inner if part is not None)]


def _find_table(model: Any) -> Any:
    """Return the parameter with a row for each token; None where there is none."""
    try:
        table = model.get_input_embeddings().weight
    # Of sounds and pictures: there is none, or no table. Of both, transformers may not tell which part has it.
    except (AttributeError, NotImplementedError):
        table = None
    if table is not None and len(table.shape) == 2:
        return table
    ends = tuple(f".{name}" for name in ALL_INPUT_EMBEDDINGS)
    named = [parameter for name, parameter in model.named_parameters() if f".{name}".endswith(ends)]
    return named[0] if len(named) == 1 else None


def _list_ends(model: Any) -> tuple[str, ...]:
    """Return the ends of the names of the table of tokens, which may be tied; empty where there is none."""
    table = _find_table(model)
    names = (name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is table)
    return tuple(dict.fromkeys(_cut(name) for name in names))


def _cut(name: str) -> str:
    """Return the end of a name, which stays where transformers renames what stands before it."""
    return "." + ".".join(name.split(".")[-2:])
