"""DeepSpeed's universal checkpoints: one folder per parameter, made by `ds_to_universal` from a ZeRO checkpoint.

`zero/NAME/fp32.pt` holds the weights: {"param": tensor, ...} from stages 1 and 2, a bare 1-D tensor from stage 3,
whose shape is in the model states that were copied along. With round-robin gradients the conversion itself mixes
parameters up at stages 1 and 2 (DeepSpeed 0.19.8); the copy in training precision shows it, and the checkpoint is
refused when its data is read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

from ...errors import CheckpointError, list_some
from ..pickles.torch_zip import open_torch_zip
from ..storage.paths import check_inside
from ..storage.stored_tensor import StoredTensor
from ..wrapper_names import plain_name
from .files import DeepSpeedFiles
from .states import ModelStates


def read_universal(files: DeepSpeedFiles, models: Sequence[ModelStates]) -> dict[str, StoredTensor]:
    """Return name → fp32 tensor of every parameter that the model states describe as trained.

    Frozen and shared parameters may lie there as well, filled in by the conversion from the 16-bit weights; the model
    states have them more exactly.

    Raises:
        CheckpointError: A parameter is missing, damaged or of another size.
    """
    shapes = {name: shape for group in models[0].groups or [] for name, shape in group.items()}
    if not shapes:
        raise CheckpointError(
            f"{models[0].path} describes no parameters",
            expected="param_shapes",
            got="none",
            remedy="convert the checkpoint again with its model states",
        )
    found = (folder / "fp32.pt" for folder in (files.folder / "zero").iterdir())
    paths = {plain_name(path.parent.name): path for path in found if os.path.lexists(path)}
    missing = shapes.keys() - paths.keys()
    if missing:
        raise CheckpointError(
            f"{files.folder / 'zero'} lacks parameters",
            expected=f"{len(shapes)} folders with fp32.pt",
            got=f"none for {list_some(missing)}",
            remedy="convert the checkpoint again",
        )
    return {name: _read_parameter(paths[name], shape, files) for name, shape in shapes.items()}


def _read_parameter(path: Path, shape: tuple[int, ...], files: DeepSpeedFiles) -> StoredTensor:
    check_inside(path, files.directory)
    content = open_torch_zip(path).content
    tensor = content.get("param") if isinstance(content, dict) else content
    if not isinstance(tensor, StoredTensor) or tensor.numel != prod(shape):
        raise CheckpointError(
            f"{path} holds another parameter",
            expected=f"a tensor of {prod(shape)} elements, {list(shape)}",
            got=f"shape {list(tensor.shape)}" if isinstance(tensor, StoredTensor) else "no tensor",
            remedy="convert the checkpoint again",
        )
    return tensor.reshape(shape)
