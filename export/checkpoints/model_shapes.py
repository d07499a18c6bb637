"""The shapes that a model's configuration gives its tensors, for formats that store none or not all of them."""

from __future__ import annotations

from pathlib import Path

from export.checkpoints.paths import read_json_beside


def read_model_shapes(directory: Path) -> dict[str, tuple[int, ...]] | None:
    """Return name → shape of every tensor of the model that `config.json` describes; None if that cannot be told.

    The model is built on the meta device, which takes no memory. Imports torch and transformers.
    """
    architectures = read_json_beside(directory / "config.json").get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        return None
    import torch
    import transformers

    model_class = getattr(transformers, architectures[0], None)
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        return None
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            model = model_class(config)
    # A configuration may be wrong in any way, and then it tells no shapes; loading the model will say why.
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RuntimeError):
        return None
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}


def read_vocab_size(directory: Path) -> int | None:
    """Return the size of the vocabulary in `config.json`, of its text part where it has several; None without one."""
    config = read_json_beside(directory / "config.json")
    inner = config.get("text_config")
    size = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if type(size) is int and size > 0 else None
