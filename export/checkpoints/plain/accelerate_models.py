"""Several models in one folder, as Accelerate's `save_state` leaves them, the second as `model_1.safetensors`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ...errors import CheckpointError, list_some

# Accelerate 1.15, checkpointing.py, `save_accelerator_state`: `_1` before the suffix of the second, and so on.
_LATER = re.compile(r"(model|pytorch_model)_\d+\.(safetensors|bin)")


def refuse_several_models(directory: Path) -> None:
    """Refuse a folder in which more models lie beside the first.

    Raises:
        CheckpointError: They do; the message names every file.
    """
    later = [match for entry in directory.iterdir() if (match := _LATER.fullmatch(entry.name))]
    first = {f"{match[1]}.{match[2]}" for match in later}
    names = [name for name in first if os.path.lexists(directory / name)]
    if names:
        raise CheckpointError(
            f"{directory} holds several models",
            expected="one, as Accelerate saves a model that was prepared alone",
            got=list_some([*names, *(match[0] for match in later)]),
            remedy=f"copy the one to export into a folder of its own, as {min(names)}",
        )
