"""What a model repository holds, as far as a server must know before it starts."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import EmptyError, NotFoundError, UsageError
from ..locations import name_command, name_opening
from .published import list_variants, read_repository
from .sums import FileSums

_INTERVAL_S = 0.5


def list_models(repository: Path) -> list[str]:
    """Return the names of the models that have a configuration and a version, sorted.

    A model with a configuration alone is one that was never published here, such as the demo's in a fresh checkout.

    Raises:
        NotFoundError: There is no repository, or it cannot be read.
        EmptyError: There is nothing in it to serve.
    """
    try:
        is_folder, is_there = repository.is_dir(), repository.exists()
    except OSError as exc:
        raise NotFoundError(
            f"{repository} cannot be looked at",
            expected="folders above it that this user may enter",
            got=f"'{exc.strerror}' for user {os.geteuid()}",
            remedy="let this user enter them, serve it as its owner, or pass another --repository",
        ) from exc
    if not is_folder:
        raise NotFoundError(
            f"there is no model repository {repository}",
            expected="a folder",
            got="a file" if is_there else "nothing",
            remedy=f"publish a model with `{name_command('run')}`, or pass --repository",
        )
    models: list[str] = []
    closed: PermissionError | None = None
    try:
        for entry in sorted(repository.iterdir()):
            try:
                models += [entry.name] * _has_version(entry)
            except PermissionError as exc:
                closed = exc
    except PermissionError as exc:
        closed = exc
    # One of several that cannot be read keeps nobody from serving the others.
    if closed and not models:
        raise NotFoundError(
            f"{closed.filename} cannot be read",
            expected="a folder that this user may read",
            got=f"'{closed.strerror}' for user {os.geteuid()}",
            remedy=f"open it, as in `{name_opening(repository)}`, or serve it as its owner",
        ) from closed
    if not models:
        raise EmptyError(
            f"{repository} holds nothing to serve",
            expected="a model with config.pbtxt and a numbered version",
            got="none",
            remedy=f"publish one with `{name_command('run')}`",
        )
    return models


def check_variant(repository: Path, name: str) -> None:
    """Refuse the name of a variant that no version has; empty is none.

    Raises:
        UsageError: There is none of that name.
    """
    known = list_variants(repository)
    if name and name not in known:
        raise UsageError(
            f"no version in {repository} has configurations of the name {name}",
            expected=f"one of {', '.join(sorted(known))}" if known else "a version with such",
            got=f"'{name}'",
            remedy="pass another --model-config-name, or export with a table of that name in modelyard.toml",
        )


def wait_for_model(repository: Path, say: Callable[[str], None], stops: Callable[[], int]) -> bool:
    """Wait until there is a whole model to serve, and return whether there is; False if we are asked to stop before.

    Args:
        repository: The model repository.
        say: Called with a line, once, if there is something to wait for.
        stops: Tells how often we were asked to stop.

    Raises:
        NotFoundError: There is no such folder, or it cannot be read.
    """
    told, sums = False, FileSums()
    while not stops():
        try:
            list_models(repository)
            if read_repository(repository, sums):
                return True
        except EmptyError:
            pass
        if not told:
            told = True
            say(f"{repository} holds nothing to serve yet; waiting for what `{name_command('run')}` publishes there")
        time.sleep(_INTERVAL_S)
    return False


def _has_version(directory: Path) -> bool:
    return (directory / "config.pbtxt").is_file() and any(
        entry.is_dir() and entry.name.isdecimal() for entry in directory.iterdir()
    )
