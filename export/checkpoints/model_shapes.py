"""The shapes that a model's configuration gives its tensors, for formats that store none or not all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from export.checkpoints.stored_tensor import StoredTensor
from export.errors import CheckpointError, list_some


def read_model_shapes(directory: Path) -> dict[str, tuple[int, ...]] | None:
    """Return name → shape of every tensor of the model that `config.json` describes; None if that cannot be told.

    The model is built on the meta device, which takes no memory. Imports torch and transformers.
    """
    path = directory / "config.json"
    try:
        architectures = json.loads(path.read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    if len(architectures) != 1 or not isinstance(architectures[0], str):
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


def check_shapes(
    tensors: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]], directory: Path
) -> frozenset[str]:
    """Check the tensors whose names the model has, and return those names.

    Raises:
        CheckpointError: Some have another shape than the model.
    """
    known = frozenset(tensors.keys() & shapes.keys())
    wrong = [name for name in known if tensors[name].shape != shapes[name]]
    if wrong:
        first = min(wrong)
        raise CheckpointError(
            f"weights in {directory} are of another shape than config.json says: {list_some(wrong)}",
            expected=f"{list(shapes[first])} for {first}",
            got=str(list(tensors[first].shape)),
            remedy="the last ranks' files are missing, or config.json is of another model",
        )
    return known
