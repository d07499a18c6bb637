"""What a checkpoint became whose vocabulary was changed on its way into a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints import StoredCheckpoint


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A changed checkpoint, and what belongs to it now.

    Attributes:
        checkpoint: The weights, some of them in files of our own.
        files: Folder with the files that replace the checkpoint's.
        superseded: Patterns of names of files that go where `files` has none of that name.
        config: Key of `config.json` → what it says now.
        warnings: What the reader should know of it, in sentences.
    """

    checkpoint: StoredCheckpoint
    files: Path
    superseded: tuple[str, ...]
    config: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


# Takes the checkpoint, the folder with configuration and tokenizer, and an empty folder to write into.
Fit = Callable[[StoredCheckpoint, Path, Path], Fitted]
