"""The model that an adapter was trained in, without its weights: its names, and which layers and tables are unusual."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import transformers
from torch import Tensor
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, WeightTransform, rename_source_key
from transformers.pytorch_utils import Conv1D

from .torch_model import build_on_meta


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """What merging asks of an architecture.

    Attributes:
        transposed: Paths of the layers that keep their weight as [in, out].
        shared: Name of a matrix → every name of that matrix in the model, where it has several.
        tensors: Every tensor by its name, on the meta device.
        prefix: What the names of a model without a head lack, as transformers has it.
        conversions: What transformers makes of the names in files.
    """

    transposed: frozenset[str]
    shared: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, Tensor]
    prefix: str
    conversions: tuple[WeightTransform, ...]

    def is_transposed(self, path: str) -> bool:
        """Tell whether a layer keeps its weight as [in, out]; the path may lack a prefix or have another before it."""
        return _find_end(path, self.transposed) is not None

    def find_shared(self, name: str) -> tuple[str, ...]:
        """Return the model's other names of a tensor, none where it has this one alone."""
        own = _find_end(name, self.shared)
        return () if own is None else tuple(each for each in self.shared[own] if each != own)

    def rename(self, name: str) -> str:
        """Return the model's name of a tensor in a file, or the same where the file's tensors are joined or split.

        Releases of transformers name the layers of some architectures differently, and files as the older ones did.
        """
        plain = [each for each in self.conversions if isinstance(each, WeightRenaming)]
        others = [each for each in self.conversions if not isinstance(each, WeightRenaming)]
        new, joined = rename_source_key(name, plain, others, self.prefix, dict(self.tensors))
        return name if joined else new


def describe_model(config: PretrainedConfig) -> TrainedModel:
    """Return what the architecture that a configuration names is like.

    Raises:
        ModelError: transformers cannot build it.
    """
    model = build_on_meta(config, _find_class(config))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dim() > 1:
            names.setdefault(id(parameter), []).append(name)
    return TrainedModel(
        transposed=frozenset(path for path, module in model.named_modules() if isinstance(module, Conv1D)),
        shared={name: tuple(several) for several in names.values() if len(several) > 1 for name in several},
        tensors=model.state_dict(),
        prefix=model.base_model_prefix,
        conversions=tuple(get_model_conversion_mapping(model)),
    )


def _find_class(config: PretrainedConfig) -> type[PreTrainedModel] | type[AutoModel]:
    """Return the class that the configuration names first, or that of the model without a head."""
    named = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    is_right = isinstance(named, type) and issubclass(named, PreTrainedModel)
    return named if is_right and named.config_class is type(config) else AutoModel


def _find_end(name: str, known: Collection[str]) -> str | None:
    """Return the one of `known` that is `name`, or its end, or that ends in it."""
    if name in known:
        return name
    found = [each for each in known if name.endswith(f".{each}") or each.endswith(f".{name}")]
    return found[0] if len(found) == 1 else None
