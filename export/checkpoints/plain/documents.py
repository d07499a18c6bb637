"""What describes a model beside its weights: of use as far as it can be read."""

import os
from pathlib import Path

from ..storage.paths import MAX_JSON_BYTES, check_inside, open_regular, read_json

_DOCUMENTS = ("config.json", "tokenizer.json", "tokenizer_config.json")


def check_documents(directory: Path, *, may_lead_outside: bool = False) -> None:
    """Refuse a configuration or a tokenizer that is there and cannot be read.

    Args:
        directory: The folder that they lie in.
        may_lead_outside: Whether links out of it are let through, where nothing is copied.

    Raises:
        CheckpointError: It is damaged, is not a regular file, or is a link that leads outside.
    """
    for path in (directory / name for name in _DOCUMENTS):
        if os.path.lexists(path):
            if not may_lead_outside:
                check_inside(path, directory)
            open_regular(path).close()
            # What is larger is not looked at.
            if path.stat().st_size <= MAX_JSON_BYTES:
                read_json(path)
