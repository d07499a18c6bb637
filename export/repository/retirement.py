"""Old versions, and whole models, taken out of a repository; never what servers serve."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import RepositoryError
from .activation import switch
from .change import change
from .config_file import CONFIG_FILE
from .contents import CLAIM_FILE, find_active_version, list_models, list_parts, list_versions
from .files import give_up, move
from .removal import remove_leftovers, remove_version
from .version import Version


@dataclass(frozen=True, kw_only=True)
class Removed:
    """What was taken out of a repository.

    Attributes:
        name: The public model.
        versions: Those that are gone.
        kept: Those that stay.
        freed_bytes: Bytes that no other version shares.
    """

    name: str
    versions: tuple[int, ...]
    kept: tuple[int, ...]
    freed_bytes: int


def prune(repository: Path, name: str, *, keep: int) -> Removed:
    """Remove all but the newest versions of a model, and never the active one.

    Args:
        repository: Where it was published.
        name: The public model.
        keep: How many stay besides the active one, if that is not among them.

    Raises:
        RepositoryError: There is no such model, or the disk fails.
    """
    check_published(repository, name)
    with change(repository, name, "pruned in") as undo:
        parts = list_parts(repository, name)
        remove_leftovers(repository, name, parts)
        active, there = find_active_version(repository, name), list_versions(repository / name)
        kept = {*there[-keep:], active}
        versions = tuple(version for version in there if version not in kept)
        if active:
            # A switch that was killed may have left steps that name another version still.
            switch(repository, name, Version(repository=repository, name=name, number=active).read_configs(), undo)
        freed = sum(measure_own_bytes(Version(repository=repository, name=name, number=each)) for each in versions)
        for version in versions:
            remove_version(repository, name, parts, version, undo)
    return Removed(name=name, versions=versions, kept=tuple(sorted({*there} & kept)), freed_bytes=freed)


def remove_model(repository: Path, name: str) -> Removed:
    """Remove a model with all its versions and steps; from the first renaming on, no server can load it.

    Raises:
        RepositoryError: There is no such model, or the disk fails.
    """
    check_published(repository, name)
    with change(repository, name, "removed from") as undo:
        parts = list_parts(repository, name)
        remove_leftovers(repository, name, parts)
        versions = tuple(list_versions(repository / name))
        freed = sum(measure_own_bytes(Version(repository=repository, name=name, number=each)) for each in versions)
        # The public model's first: nobody asks for a step by itself.
        for part in reversed(parts):
            folder = repository / part
            undo.add_last(partial(_remove_folder, folder))
            if (folder / CONFIG_FILE).exists():
                (folder / CLAIM_FILE).unlink(missing_ok=True)
                move(folder / CONFIG_FILE, folder / CLAIM_FILE, undo)
        for version in versions:
            remove_version(repository, name, parts, version, undo)
    return Removed(name=name, versions=versions, kept=(), freed_bytes=freed)


def check_published(repository: Path, name: str) -> None:
    """Refuse the name of a model that modelyard did not publish here.

    Raises:
        RepositoryError: It is not there, or is another's.
    """
    known = list_models(repository)
    if name not in known:
        raise RepositoryError(
            f"{repository} holds no model {name} of modelyard's",
            expected=f"one of {', '.join(known)}" if known else "a published model",
            got=name,
            remedy="see `versions list`",
        )


def measure_own_bytes(version: Version) -> int:
    """Return the bytes of a version's files that no other version shares."""
    return sum(path.stat().st_size for path in version.list_files() if path.stat().st_nlink == 1)


def _remove_folder(folder: Path) -> None:
    give_up(folder)
    folder.rmdir()
