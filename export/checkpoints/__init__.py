"""Readers of what trainers leave on disk: one folder a family of formats, above what they share."""

from .formats import open_checkpoint
from .state_dict import StateDict, TensorSpec
from .stored_checkpoint import StoredCheckpoint

__all__ = ["StateDict", "StoredCheckpoint", "TensorSpec", "open_checkpoint"]
