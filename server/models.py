"""What a model repository holds, as far as a server must know before it starts."""

from pathlib import Path

from .errors import NotFoundError
from .locations import name_command


def list_models(repository: Path) -> list[str]:
    """Return the names of the models that have a configuration and a version, sorted.

    A model with a configuration alone is one that was never published here, such as the demo's in a fresh checkout.

    Raises:
        NotFoundError: There is no repository, or nothing in it to serve.
    """
    if not repository.is_dir():
        raise NotFoundError(
            f"there is no model repository {repository}",
            expected="a folder",
            got="a file" if repository.exists() else "nothing",
            remedy=f"publish a model with `{name_command('run')}`, or pass --repository",
        )
    models = sorted(entry.name for entry in repository.iterdir() if _has_version(entry))
    if not models:
        raise NotFoundError(
            f"{repository} holds nothing to serve",
            expected="a model with config.pbtxt and a numbered version",
            got="none",
            remedy=f"publish one with `{name_command('run')}`",
        )
    return models


def _has_version(directory: Path) -> bool:
    return (directory / "config.pbtxt").is_file() and any(
        entry.is_dir() and entry.name.isdecimal() for entry in directory.iterdir()
    )
