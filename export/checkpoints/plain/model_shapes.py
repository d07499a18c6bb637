"""The shapes that a model's configuration gives its tensors, for formats that store none or not all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..storage.paths import read_json_beside

# What transformers' decoders, and most encoders, call their input embedding.
INPUT_EMBEDDINGS = (
    "wte.weight",
    "embed_tokens.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
    "embed_in.weight",
)
# And of CLIP's text, and of T5 and BART.
ALL_INPUT_EMBEDDINGS = (*INPUT_EMBEDDINGS, "token_embedding.weight", "shared.weight")


# Of layers alone no architecture of transformers has as many, and hardly one as many more than tensors.
_MAX_LAYERS = 1000


def refuse_too_many_layers(directory: Path, tensors: int) -> None:
    """Refuse a configuration that names far more layers than the weights can be of: to build them takes hours.

    Args:
        directory: The folder with `config.json`.
        tensors: How many there are in the checkpoint.

    Raises:
        CheckpointError: It does.
    """
    path = directory / "config.json"
    content = read_json_beside(path)
    most = max(tensors, _MAX_LAYERS)
    parts = [("", content), *((f"{key}.", value) for key, value in content.items() if isinstance(value, dict))]
    for front, part in parts:
        for key, value in part.items():
            if key.endswith(("layers", "layer")) and type(value) is int and value > most:
                raise CheckpointError(
                    f"{front}{key} in {path} cannot be that of the weights",
                    expected=f"{most} at most, for there are {tensors} tensors",
                    got=str(value),
                    remedy="correct it, or use the config.json that the checkpoint was trained with",
                )


def read_model_shapes(directory: Path) -> dict[str, tuple[int, ...]] | None:
    """Return name → shape of every tensor of the model that `config.json` describes; None if that cannot be determined.

    The model is built on the meta device, which takes no memory. Imports torch and transformers.
    """
    state = _build_state(directory)
    return None if state is None else {name: tuple(tensor.shape) for name, tensor in state.items()}


def read_model_ties(directory: Path) -> dict[str, str]:
    """Return each second name of a tied parameter of that model → the first; empty if that cannot be determined.

    Imports torch and transformers.
    """
    first: dict[int, str] = {}
    ties = {}
    for name, tensor in (_build_state(directory) or {}).items():
        holder = first.setdefault(id(tensor), name)
        if holder != name:
            ties[name] = holder
    return ties


def _build_state(directory: Path) -> dict[str, Any] | None:
    """Return the state dict of the model on the meta device: one object under every name of a tied parameter."""
    config = load_described(directory)
    model = None if config is None else build_described(config)
    if model is None:
        return None
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return state


def load_described(directory: Path) -> Any:
    """Return the configuration in `directory`; None without one that names a class and that transformers reads."""
    return None if _read_class_name(directory) is None else _load_config(directory)


def load_headless(directory: Path) -> Any:
    """Return the same, naming the class of its type without a head; None where transformers has none."""
    from transformers import AutoModel

    config = _load_config(directory)
    found: Any = None if config is None else AutoModel._model_mapping.get(type(config), None)
    if found is None:
        return None
    config.architectures = [(found[0] if isinstance(found, (tuple, list)) else found).__name__]
    return config


def _load_config(directory: Path) -> Any:
    import transformers

    # What it says of values that it takes all the same.
    transformers.utils.logging.set_verbosity_error()
    try:
        return transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    # A configuration may be wrong in any way, and then it tells no shapes; loading the model will say why.
    except Exception:
        return None


def find_class_name(directory: Path) -> str:
    """Return the class that the configuration in `directory` names; empty where transformers has none of this name."""
    name = _read_class_name(directory)
    return name if name is not None and _find_class(name) else ""


def names_no_class(directory: Path) -> bool:
    """Tell whether the configuration in `directory` says which type a model is of, and of no class that it has one."""
    content = read_json_beside(directory / "config.json")
    return bool(content.get("model_type")) and not content.get("architectures")


def _read_class_name(directory: Path) -> str | None:
    architectures = read_json_beside(directory / "config.json").get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        return None
    return architectures[0]


def _find_class(name: str) -> Any:
    import transformers

    found = getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def build_described(config: Any) -> Any:
    """Return the model of the class that a configuration names, on the meta device; None where that cannot be built."""
    import torch

    model_class = _find_class(config.architectures[0])
    if model_class is None:
        return None
    try:
        with torch.device("meta"):
            model = model_class(config)
        # Without memory the first releases of transformers 5 leave it.
        model.tie_weights()
        return model
    # As above: values are looked up in tables, divided by and taken for sizes.
    except Exception:
        return None


def build_base(directory: Path) -> Any:
    """Return the model without a head of the type in `directory`, on the meta device; None where none can be built."""
    import torch
    from transformers import AutoModel

    config = _load_config(directory)
    try:
        with torch.device("meta"):
            return None if config is None else AutoModel.from_config(config, trust_remote_code=False)
    # As above.
    except Exception:
        return None


def list_conversions(model: Any) -> list[Any] | None:
    """Return how transformers renames, joins and splits tensors while it loads them; None where that is not known."""
    if getattr(model.config, "quantization_config", None) is not None:
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping

        return list(get_model_conversion_mapping(model, add_legacy=False))
    # It is transformers' own, and may be another in another release.
    except Exception:
        return None


def rename_as_built(model: Any, names: Iterable[str], conversions: Sequence[Any]) -> dict[str, tuple[str, bool]]:
    """Return name → the model's name, and whether it is joined with others or split; none where that is not known.

    Args:
        model: The model, on the meta device.
        names: Names in files, or the model's own.
        conversions: What `list_conversions` returns.
    """
    try:
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        plain = [each for each in conversions if isinstance(each, WeightRenaming)]
        others = [each for each in conversions if not isinstance(each, WeightRenaming)]
        state = model.state_dict()
        renamed = {name: rename_source_key(name, plain, others, model.base_model_prefix, state) for name in names}
    # As above.
    except Exception:
        return {}
    return {name: (new, bool(joined)) for name, (new, joined) in renamed.items()}


def read_vocab_size(directory: Path) -> int | None:
    """Return the size of the vocabulary in `config.json`, of its text part where it has several; None without one."""
    config = read_json_beside(directory / "config.json")
    inner = config.get("text_config")
    size = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if type(size) is int and size > 0 else None
