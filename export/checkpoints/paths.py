"""Paths that a checkpoint names must lie in the checkpoint."""

from __future__ import annotations

from pathlib import Path

from export.errors import CheckpointError


def check_inside(path: Path, directory: Path) -> None:
    """Refuse a symbolic link at `path` that leads out of `directory`.

    The download cache of Hugging Face is let through: `models--NAME/snapshots/REVISION/FILE` links to
    `models--NAME/blobs/HASH` by design (huggingface_hub, "Understand caching").

    Raises:
        CheckpointError: `path` resolves to somewhere else.
    """
    root, target = directory.resolve(), path.resolve()
    if target.is_relative_to(root):
        return
    if root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs":
        return
    raise CheckpointError(
        f"{path} is a link that leads outside {directory}",
        expected="a file in the checkpoint",
        got=str(target),
        remedy="copy the file itself into the folder if you trust it",
    )
