"""A checkpoint as a task is given it."""

from pathlib import Path

from export.checkpoints import open_checkpoint
from export.tasks.base import TaskSource
from export.weights.tokenizer import load_tokenizer
from export.weights.torch_model import load_config
from export.weights.transforms import CastToFloat32


def build_source(directory: Path, **options: object) -> TaskSource:
    checkpoint = open_checkpoint(directory)
    return TaskSource(
        directory=directory,
        config=load_config(directory),
        weights=CastToFloat32(source=checkpoint),
        tokenizer=load_tokenizer(directory),
        max_length=64,
        options=options,
    )
