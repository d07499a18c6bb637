"""JSON files beside the weights."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoints.storage import paths


def read_json(path: Path) -> Mapping[str, Any] | list[Any] | None:
    """Return what the JSON file holds, or None where there is no such file.

    Raises:
        CheckpointError: The file is not JSON, is not a regular file, or is too large.
    """
    if not os.path.lexists(path):
        return None
    content: Mapping[str, Any] | list[Any] = paths.read_json(path)
    return content
