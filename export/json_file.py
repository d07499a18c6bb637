"""JSON files beside the weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export.errors import CheckpointError


def read_json(path: Path) -> Mapping[str, Any] | list[Any] | None:
    """Return what the JSON file holds, or None where there is no such file.

    Raises:
        CheckpointError: The file is not JSON.
    """
    if not path.is_file():
        return None
    try:
        content: Mapping[str, Any] | list[Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise CheckpointError(
            f"{path} cannot be read", expected="JSON", got=str(exc), remedy="copy the checkpoint again"
        ) from exc
    return content
