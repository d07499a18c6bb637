"""Readers of what trainers leave on disk: one folder a family of formats, above what they share."""

from .formats import open_checkpoint
from .state_dict import StateDict, TensorSpec
from .storage.joined_folders import join_folders
from .stored_checkpoint import StoredCheckpoint

__all__ = ["StateDict", "StoredCheckpoint", "TensorSpec", "join_folders", "open_checkpoint"]
