"""Old versions, and whole models, taken out of a repository; never what servers serve."""

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import RepositoryError, list_some
from .activation import switch
from .change import change
from .config_file import CONFIG_FILE
from .contents import (
    CLAIM_FILE,
    check_published,
    find_active_version,
    list_others,
    list_parts,
    list_remains,
    list_versions,
)
from .files import give_up, move, remove
from .removal import remove_leftovers, remove_version
from .use import seize
from .version import Version, list_recorded


@dataclass(frozen=True, kw_only=True)
class Removed:
    """What was taken out of a repository.

    Attributes:
        name: The public model.
        versions: Those that are gone.
        kept: Those that stay.
        in_use: Those of them that only stay because a server still serves them.
        freed_bytes: Bytes that no other version shares.
    """

    name: str
    versions: tuple[int, ...]
    kept: tuple[int, ...]
    in_use: tuple[int, ...]
    freed_bytes: int


def prune(repository: Path, name: str, *, keep: int) -> Removed:
    """Remove all but the newest versions of a model, and never the active one nor one that is in use.

    Args:
        repository: Where it was published.
        name: The public model.
        keep: How many stay besides the active one, if that is not among them.

    Raises:
        RepositoryError: There is no such model, or the disk fails, perhaps only to remove what is taken out.
    """
    check_published(repository, name)
    with contextlib.ExitStack() as held, change(repository, name, "pruned in") as undo:
        parts = list_parts(repository, name)
        remove_leftovers(repository, name, parts)
        active, there = find_active_version(repository, name), list_recorded(repository, name)
        if there and not active:
            _check_inactive(repository / name)
        old = [number for number in there[: max(0, len(there) - keep)] if number != active]
        in_use = tuple(number for number in old if not held.enter_context(seize(repository / name / str(number))))
        gone = tuple(number for number in old if number not in in_use)
        if active:
            # A switch that was killed may have left steps that name another version still.
            switch(repository, name, Version(repository=repository, name=name, number=active).read_configs(), undo)
        freed = measure_own_bytes(Version(repository=repository, name=name, number=number) for number in gone)
        for number in gone:
            remove_version(repository, name, parts, number, undo)
    if undo.left:
        what = f"old versions of {name} are gone" if gone else f"no version of {name} was to go"
        raise _tell_left(undo.left, what, repository, f"prune {name} --keep {keep}")
    kept = tuple(number for number in there if number not in gone)
    return Removed(name=name, versions=gone, kept=kept, in_use=in_use, freed_bytes=freed)


def remove_model(repository: Path, name: str) -> Removed:
    """Remove a model with all its versions and steps; from the first renaming on, no server can load it.

    So is what is left of one that was removed but for some of it.

    Raises:
        RepositoryError: There is no such model, or the disk fails, perhaps only to remove what is taken out.
    """
    if not list_remains(repository, name):
        check_published(repository, name)
    with change(repository, name, "removed from") as undo:
        parts = list_remains(repository, name)
        remove_leftovers(repository, name, parts)
        versions = tuple(list_versions(repository / name))
        _check_contents(repository, name, parts, versions)
        freed = measure_own_bytes(Version(repository=repository, name=name, number=number) for number in versions)
        # The public model's first: nobody asks for a step by itself.
        for part in reversed(parts):
            folder = repository / part
            if (folder / CONFIG_FILE).exists():
                remove(folder / CLAIM_FILE)
                move(folder / CONFIG_FILE, folder / CLAIM_FILE, undo)
        for version in versions:
            remove_version(repository, name, parts, version, undo)
        undo.add_last(partial(_remove_folders, [repository / part for part in parts]))
    if undo.left:
        raise _tell_left(undo.left, f"{name} is gone", repository, f"remove {name}")
    return Removed(name=name, versions=versions, kept=(), in_use=(), freed_bytes=freed)


def measure_own_bytes(versions: Iterable[Version]) -> int:
    """Return the bytes of files that these versions share with no other."""
    stats = [path.stat() for version in versions for path in version.list_files()]
    links = Counter((stat.st_dev, stat.st_ino) for stat in stats)
    sizes = {(stat.st_dev, stat.st_ino): (stat.st_size, stat.st_nlink) for stat in stats}
    return sum(size for file, (size, link_count) in sizes.items() if links[file] == link_count)


def _check_inactive(folder: Path) -> None:
    """Refuse a public model of which a version is served that nothing names any more.

    Raises:
        RepositoryError: Its configuration is missing, or names no version that is there.
    """
    if (folder / CONFIG_FILE).exists() or not (folder / CLAIM_FILE).exists():
        raise RepositoryError(
            f"it is not known which version of {folder.name} is active",
            expected=f"a {CONFIG_FILE} in {folder} that names one",
            got="one that names no version that is there" if (folder / CONFIG_FILE).exists() else "none",
            remedy=f"make a version active with `activate {folder.name} N` first",
        )


def _check_contents(repository: Path, name: str, parts: Iterable[str], versions: Iterable[int]) -> None:
    """Refuse folders of a model in which something lies that would stay there, and with it the folder.

    Raises:
        RepositoryError: It is nobody's, or of a public model whose folder has another name now.
    """
    if others := list_others(repository, parts, versions):
        raise RepositoryError(
            f"the folders of {name} hold something else as well",
            expected=f"the versions of {repository / name}, and their configurations",
            got=list_some(list(map(str, others))),
            remedy=f"move it away, or give {name} its name back if it was renamed, and `remove {name}` again",
        )


def _remove_folders(folders: Iterable[Path]) -> None:
    """Remove the folders of a model, up to one that cannot be: while the public one is there, the rest can be found.

    Args:
        folders: The public model's last.
    """
    for folder in folders:
        give_up(folder)
        folder.rmdir()


def _tell_left(stopped: BaseException, what: str, repository: Path, again: str) -> RepositoryError:
    """Return the sentence on a removal after which something is still on the disk.

    Args:
        stopped: What the disk said, or an interruption.
        what: What is no longer served.
        repository: Where.
        again: What takes the rest away.
    """
    got = (isinstance(stopped, OSError) and stopped.strerror) or "an interruption"
    where = f" for {stopped.filename}" if isinstance(stopped, OSError) and stopped.filename else ""
    return RepositoryError(
        f"{what} from {repository}, but some of the files stay there",
        got=f"{got}{where}",
        remedy=f"mend the disk or correct the permissions, then `{again}` again takes them away",
    )
