"""Readers of what trainers leave on disk: one folder a family of formats, above what they share."""

from export.checkpoints.formats import open_checkpoint
from export.checkpoints.state_dict import StateDict, TensorSpec
from export.checkpoints.stored_checkpoint import StoredCheckpoint

__all__ = ["StateDict", "StoredCheckpoint", "TensorSpec", "open_checkpoint"]
