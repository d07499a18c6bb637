"""Rules on models of Triton's vLLM backend, by its source (src/model.py at 00ea75b)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..engines.vllm_arguments import ARGUMENTS_FILE, MOUNT, locate
from .finding import Problem
from .model import Model, Repository


def check_arguments(model: Model, _: Repository) -> Iterator[Problem]:
    """Find arguments that no engine is made with."""
    for path in _list_files(model):
        arguments = _read(path)
        if not isinstance(arguments, dict) or not isinstance(arguments.get("model"), str):
            yield Problem(
                path=path,
                what=f"{ARGUMENTS_FILE} does not say which model vLLM is to load",
                instead=f'write an object with `"model": "{locate(model.name, int(path.parent.name))}"`',
            )


def check_place(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a version that loads the weights of another, or weights that are not there."""
    for path in _list_files(model):
        arguments = _read(path)
        place = arguments.get("model") if isinstance(arguments, dict) else None
        own = locate(model.name, int(path.parent.name))
        # What is not in the repository is downloaded, or lies elsewhere in the image.
        if not isinstance(place, str) or not place.startswith(f"{MOUNT}/"):
            continue
        weights = [*path.parent.glob("*.safetensors"), *path.parent.glob("*.bin")]
        there = model.folder.parent / place.removeprefix(f"{MOUNT}/")
        if (weights and place != own) or not there.is_dir():
            yield Problem(
                path=path,
                what=f"version {path.parent.name} of {model.name} loads {place} where the repository is {MOUNT}",
                instead=f'write `"model": "{own}"`',
            )


def check_decoupled(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a configuration with which the backend does not start."""
    policy = model.config.model_transaction_policy
    if model.backend == "vllm" and model.config.HasField("model_transaction_policy") and not policy.decoupled:
        yield Problem(
            path=model.config_path,
            line=model.line("model_transaction_policy"),
            what="the vLLM backend only takes a decoupled model",
            instead="write `model_transaction_policy { decoupled: true }`",
        )


def _list_files(model: Model) -> list[Path]:
    paths = [model.folder / str(version) / ARGUMENTS_FILE for version in model.served]
    return [path for path in paths if model.backend == "vllm" and path.is_file()]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
