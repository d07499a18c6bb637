"""Which task a checkpoint was trained for, and the task built from it."""

import importlib
from collections.abc import Mapping
from pathlib import Path

import transformers
from transformers import PretrainedConfig

from ..checkpoints import TensorSpec
from ..errors import ModelError
from .base import Task, TaskSource
from .foreseen import choose_served, list_for_architecture, list_names
from .table import TASKS, TEXTS, TaskEntry, check_task_options

# How the classes of models without a head end, of pictures and of sounds.
_HEADLESS = ("Model", "VisionModel")


def find_task_name(directory: Path, config: PretrainedConfig, specs: Mapping[str, TensorSpec]) -> str:
    """Return the name of the task that the checkpoint was trained for.

    Args:
        directory: The checkpoint's folder.
        config: The checkpoint's configuration.
        specs: Names, shapes and dtypes of its tensors.

    Raises:
        ModelError: It cannot be determined.
    """
    for entry in TASKS.values():
        if load_class(entry).recognises(directory, config, specs):
            return entry.name
    architectures = list_names(config.architectures)
    for architecture in architectures:
        if names := list_for_architecture(architecture, _find_main_input(architecture) or TEXTS[0]):
            return choose_served(names, directory)
    inputs = {main_input for architecture in architectures if (main_input := _find_main_input(architecture))}
    entries = [entry for entry in TASKS.values() if inputs.intersection(entry.inputs)] or list(TASKS.values())
    raise ModelError(
        f"what {directory} is to be served as cannot be determined",
        expected="an architecture that ends in "
        + ", ".join(dict.fromkeys(ending for entry in entries for ending in entry.architectures)),
        got=", ".join(architectures) or "none in config.json",
        remedy="pass --task "
        + ", ".join(entry.name for entry in entries if inputs.intersection(TEXTS) or not inputs or _is_headless(entry)),
    )


def _find_main_input(architecture: str) -> str | None:
    """Return what transformers calls the main input of a class; None of a class that it does not have."""
    main_input: str | None = getattr(getattr(transformers, architecture, None), "main_input_name", None)
    return main_input


def _is_headless(entry: TaskEntry) -> bool:
    """Tell whether a task serves what any model of its kind has, below the head that it was trained with."""
    return any(ending in _HEADLESS for ending in entry.architectures)


def must_read_text(name: str) -> bool:
    """Tell whether the task `name` cannot be served without a tokenizer."""
    return TASKS[name].must_read_text


def writes_text(name: str) -> bool:
    """Tell whether the task `name` is served by the engine that writes text."""
    return TASKS[name].form == "decoder"


def may_read_text(name: str) -> bool:
    """Tell whether the task `name` can make use of a tokenizer."""
    return load_class(TASKS[name]).tokenizer_use != "none"


def is_ensemble(name: str) -> bool:
    """Tell whether steps stand around the graph of the task `name`."""
    return load_class(TASKS[name]).is_ensemble


def build_task(name: str, source: TaskSource) -> Task:
    """Return the task `name`, built from the checkpoint and ready to be exported.

    Raises:
        ModelError: The weights do not fit the task, or an option belongs to another one.
    """
    entry = TASKS[name]
    check_task_options(name, source.options)
    # A class says how it is built from a checkpoint, which the abstract one leaves open.
    task_class: type = load_class(entry)
    task: Task = task_class(source)
    task.name, task.source_warnings = name, source.warnings
    return task


def load_class(entry: TaskEntry) -> type[Task]:
    """Return the class that an entry of the table names."""
    module, _, name = entry.place.partition(":")
    task_class: type[Task] = getattr(importlib.import_module(f".{module}", __package__), name)
    return task_class
