"""The model that an adapter was trained in, without its weights: its names, and which layers and tables are unusual."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from ..checkpoints.plain.model_shapes import list_conversions, rename_as_built
from ..errors import ModelError
from .torch_model import build_on_meta, find_named_class, make_buildable

# peft 0.21, utils/peft_types.py, TaskType.
_LANGUAGE_MODELS = ("CAUSAL_LM", "SEQ_2_SEQ_LM")


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """What merging asks of an architecture.

    Attributes:
        transposed: Paths of the layers that keep their weight as [in, out].
        shared: Tensor name → every name of that tensor in the model, where it has several.
        tables: Names of the input and the output embedding, where it has them.
        built: The model itself, on the meta device.
    """

    transposed: frozenset[str]
    shared: Mapping[str, tuple[str, ...]]
    tables: tuple[str, ...]
    built: PreTrainedModel

    def is_transposed(self, path: str) -> bool:
        """Tell whether a layer keeps its weight as [in, out]; the path may lack a prefix or have another before it."""
        return _find_end(path, self.transposed) is not None

    def find_shared(self, name: str) -> tuple[str, ...]:
        """Return the model's other names of a tensor, none where it has this one alone."""
        own = _find_end(name, self.shared)
        return () if own is None else tuple(each for each in self.shared[own] if each != own)

    def is_matrix(self, name: str) -> bool:
        """Tell whether a tensor is one that the model shares, and has more than one dimension."""
        own = _find_end(name, self.shared)
        return own is not None and self.built.get_parameter(own).dim() > 1

    def is_table(self, name: str) -> bool:
        """Tell whether a tensor is the input or the output embedding."""
        return _find_end(name, self.tables) is not None

    def rename(self, names: Collection[str]) -> dict[str, str]:
        """Return the model's name of each tensor in files, the same for one that is joined with others or split.

        Releases of transformers name the layers of some architectures differently, and files as the older ones did.
        """
        return {name: name if joined else new for name, (new, joined) in self._list_places(names).items()}

    def find_places(self, names: Collection[str]) -> dict[str, str]:
        """Return the model's tensor that each tensor in files becomes, or a part of it."""
        return {name: new for name, (new, _) in self._list_places(names).items()}

    def _list_places(self, names: Collection[str]) -> dict[str, tuple[str, bool]]:
        conversions = list_conversions(self.built)
        places = {} if conversions is None else rename_as_built(self.built, names, conversions)
        if names and not places:
            raise ModelError(
                f"what {type(self.built).__name__} calls the tensors of files cannot be told",
                expected="a release of transformers that says how it renames them",
                got=f"transformers {transformers.__version__}",
                remedy="merge the adapter with peft and export the result",
            )
        return places


def describe_model(config: PretrainedConfig, trained_for: object = None) -> TrainedModel:
    """Return what the architecture that a configuration names is like.

    Args:
        config: The checkpoint's configuration.
        trained_for: peft's `task_type`; of a language model the head counts, for it may share its table.

    Raises:
        ModelError: transformers cannot build it.
    """
    model = build_on_meta(make_buildable(config), _find_class(config, trained_for))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parts = (model.get_input_embeddings, model.get_output_embeddings)
    return TrainedModel(
        transposed=frozenset(path for path, module in model.named_modules() if isinstance(module, Conv1D)),
        shared={name: tuple(several) for several in names.values() if len(several) > 1 for name in several},
        tables=tuple(dict.fromkeys(name for part in parts for name in _list_weights(model, part))),
        built=model,
    )


def _list_weights(model: PreTrainedModel, find_part: Callable[[], Any]) -> list[str]:
    """Return the names of a layer's weight; none where the architecture has no such layer."""
    try:
        weight = getattr(find_part(), "weight", None)
    # Of pictures and sounds transformers may not tell.
    except (AttributeError, NotImplementedError):
        return []
    return [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]


def _find_class(config: PretrainedConfig, trained_for: object) -> Any:
    """Return the class that the configuration names first, with the head of a language model where it shares its table.

    A head that is tied to its inputs needs no weights: a checkpoint without one may have been trained with it.
    """
    named: Any = find_named_class(config)
    headless: Any = AutoModel._model_mapping.get(type(config), None)
    is_headless = named is not None and named is headless
    is_tied = getattr(config, "tie_word_embeddings", False)
    if is_tied and (named is None or (is_headless and trained_for in _LANGUAGE_MODELS)):
        heads = (AutoModelForSeq2SeqLM, AutoModelForCausalLM, AutoModelForMaskedLM)
        named = next((head for head in heads if type(config) in head._model_mapping), named)
    return named or AutoModel


def _find_end(name: str, known: Collection[str]) -> str | None:
    """Return the one of `known` that is `name`, or its end, or that ends in it."""
    if name in known:
        return name
    found = [each for each in known if name.endswith(f".{each}") or each.endswith(f".{name}")]
    return found[0] if len(found) == 1 else None


def find_ends(target: str, names: Iterable[str]) -> list[str]:
    """Return the names that are `target`, or that have more before it."""
    return [name for name in names if name == target or name.endswith(f".{target}")]
