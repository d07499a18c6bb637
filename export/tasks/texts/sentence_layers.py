"""The layers that Sentence-Transformers keeps behind its pooling, each in a folder of its own."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...checkpoints import open_checkpoint
from ...checkpoints.plain.sentence_modules import SentenceModule
from ...checkpoints.storage.paths import read_json_if_any
from ...errors import ModelError

# Sentence-Transformers, Dense.py: the activations that its models are saved with.
_ACTIVATIONS = {
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.linear.Identity": nn.Identity,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
    "torch.nn.modules.activation.GELU": nn.GELU,
    "torch.nn.modules.activation.Sigmoid": nn.Sigmoid,
}


def build_layers(modules: Iterable[SentenceModule]) -> nn.Sequential:
    """Return what vectors, [batch, hidden], go through between pooling and normalising, with its weights.

    Args:
        modules: Those behind the pooling, each of a class in `LAYERS`.

    Raises:
        CheckpointError: Weights cannot be read.
        ModelError: A layer is not exported as it is configured, or has other weights than that.
    """
    return nn.Sequential(*(LAYERS[module.kind](module.folder) for module in modules))


def load_dense(directory: Path) -> nn.Sequential:
    """Return a linear layer and its activation, as Sentence-Transformers' `Dense` saved them.

    Raises:
        CheckpointError: Its weights cannot be read.
        ModelError: Its activation is not known, or its weights have another shape than its configuration says.
    """
    settings: Any = read_json_if_any(directory / "config.json") or {}
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if activation not in _ACTIVATIONS:
        raise ModelError(
            f"the activation in {directory} is not exported",
            expected="one of " + ", ".join(name.rsplit(".", 1)[-1] for name in _ACTIVATIONS),
            got=activation,
            remedy="export a checkpoint with one of these",
        )
    weights = _read_weights(directory, "linear", (settings.get("out_features"), settings.get("in_features")))
    made, taken = weights["weight"].shape
    layer = nn.Linear(taken, made, bias="bias" in weights)
    layer.load_state_dict(weights)
    return nn.Sequential(layer, _ACTIVATIONS[activation]()).requires_grad_(False)


def load_layer_norm(directory: Path) -> nn.LayerNorm:
    """Return what Sentence-Transformers' `LayerNorm` saved.

    Raises:
        CheckpointError: Its weights cannot be read.
        ModelError: They have another shape than its configuration says.
    """
    settings: Any = read_json_if_any(directory / "config.json") or {}
    weights = _read_weights(directory, "norm", (settings.get("dimension"),))
    layer = nn.LayerNorm(weights["weight"].shape)
    layer.load_state_dict(weights)
    return layer.requires_grad_(False)


def _read_weights(directory: Path, prefix: str, wanted: tuple[object, ...]) -> dict[str, Tensor]:
    """Return a module's tensors by their names without its prefix, fp32.

    Args:
        directory: Folder of the module.
        prefix: Its part of their names.
        wanted: Shape of its weight by its configuration.

    Raises:
        CheckpointError: They cannot be read.
        ModelError: The weight has another shape.
    """
    weights = open_checkpoint(directory)
    specs = weights.specs()
    name = f"{prefix}.weight"
    shape = specs[name].shape if name in specs else ()
    if shape != wanted:
        raise ModelError(
            f"{directory} holds other weights than its config.json says",
            expected=f"{name} {list(wanted)}",
            got=f"{list(shape)}" if shape else "none",
            remedy="copy the folder again",
        )
    return {each.removeprefix(f"{prefix}."): weights.read(each).float() for each in specs}


class _UnitLength(nn.Module):
    """`Normalize` in front of other layers."""

    def forward(self, vectors: Tensor) -> Tensor:
        return nn.functional.normalize(vectors, p=2.0, dim=1)


# Class of a module behind the pooling → what makes a layer of its folder.
LAYERS: Mapping[str, Callable[[Path], nn.Module]] = {
    "Dense": load_dense,
    "LayerNorm": load_layer_norm,
    # In use it leaves all as it is.
    "Dropout": lambda _: nn.Identity(),
    "Normalize": lambda _: _UnitLength(),
}
