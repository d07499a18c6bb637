"""Readers of what trainers leave on disk, one module per family of formats."""

from pathlib import Path

from export.checkpoints import huggingface
from export.checkpoints.base import Checkpoint, StateDict, TensorSpec
from export.errors import CheckpointError

__all__ = ["Checkpoint", "StateDict", "TensorSpec", "open_checkpoint"]


def open_checkpoint(directory: Path) -> Checkpoint:
    """Return a reader for the checkpoint in `directory`, whose format is told from the files alone.

    Raises:
        CheckpointError: There is no such folder, or nothing in it is a checkpoint that we read.
    """
    if not directory.is_dir():
        raise CheckpointError(
            f"there is no checkpoint folder {directory}",
            expected="a folder",
            got="a file" if directory.exists() else "nothing",
            remedy="pass the folder that holds the weights",
        )
    if huggingface.recognises(directory):
        return huggingface.open_huggingface(directory)
    found = sorted(entry.name for entry in directory.iterdir())[:8]
    raise CheckpointError(
        f"{directory} holds no checkpoint",
        expected="one of " + ", ".join(huggingface.WEIGHT_FILES),
        got=", ".join(found) if found else "an empty folder",
        remedy="pass the folder that holds the weights",
    )
