"""What goes from a repository: leftovers of what was killed, old versions, whole models."""

import contextlib
import re
import secrets
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from .contents import STAGED_CONFIG, STAGING_PREFIX, list_versions
from .files import move
from .undo import Undo

# A folder that is to become, or was, this version.
_STAGED_VERSION = re.compile(rf"{STAGING_PREFIX}(\d+)-\w+")


def name_staged(version: int) -> str:
    """Return a new name for the folder of a version that is not published yet, or no longer."""
    return f"{STAGING_PREFIX}{version}-{secrets.token_hex(4)}"


def remove_leftovers(repository: Path, name: str, model_names: Iterable[str]) -> None:
    """Remove what a killed change left: staged files, and versions of steps that the public model has not got.

    Such versions are there only while the public model's own is staged, which is therefore removed last. Everything
    else belongs to somebody: a link, or a version that was put there by hand.

    Args:
        repository: The repository, which the caller holds.
        name: The public model.
        model_names: Triton models that belong to it, itself last.
    """
    public = repository / name
    whole = list_versions(public)
    numbers = {int(found[1]) if (found := _STAGED_VERSION.fullmatch(path.name)) else 0 for path in _list_staged(public)}
    # Earlier releases did not record which version a staged folder was of.
    unnamed = max(whole, default=0) if 0 in numbers else None
    for model_name in model_names:
        folder = repository / model_name
        for version in list_versions(folder):
            is_left = version in numbers or (unnamed is not None and version > unnamed)
            if is_left and version not in whole and not (folder / str(version)).is_symlink():
                shutil.rmtree(folder / str(version))
        for path in _list_staged(folder):
            shutil.rmtree(path)
        for path in sorted(folder.glob(f"{STAGED_CONFIG}*")):
            path.unlink()


def remove_version(repository: Path, name: str, model_names: Iterable[str], version: int, undo: Undo) -> None:
    """Take a version away that no configuration names; what is renamed here goes at the end of the change.

    Args:
        repository: The repository, which the caller holds.
        name: The public model.
        model_names: Triton models that belong to it.
        version: The number.
        undo: Takes back what is done.
    """
    # The public model's first: from there on the version is not listed, and what is left of it is a leftover.
    for model_name in sorted(model_names, key=lambda each: each != name):
        folder = repository / model_name / str(version)
        if folder.is_dir() and not folder.is_symlink():
            staged = folder.with_name(name_staged(version))
            undo.add_litter(partial(_remove_staged, staged))
            move(folder, staged, undo)


def _remove_staged(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _list_staged(folder: Path) -> list[Path]:
    entries = sorted(folder.glob(f"{STAGING_PREFIX}*"))
    return [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
