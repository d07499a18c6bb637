"""Which models have changed in the repository while tritonserver loads another one, and wait for that."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .damage import find_rest
from .published import Published, read_repository


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A model that has changed and is not looked at yet.

    Attributes:
        active: Version that the repository says should be served; 0 where there is none any more.
        reason: What it waits for, in words that follow its name.
    """

    active: int
    reason: str


def drop_told(waiting: Mapping[str, Waiting], name: str, active: int) -> dict[str, Waiting]:
    """Return what still waits once it was told how far a model is followed to a version.

    What is told of one version says nothing of another that has become active since: that goes on waiting.
    """
    return {waits: each for waits, each in waiting.items() if waits != name or each.active != active}


class Waits:
    """Tells what has changed in a repository, as far as that takes no longer than a moment.

    Args:
        repository: The model repository.
        variant: Name of the configurations that take the place of the usual ones, where a version has them.
    """

    def __init__(self, repository: Path, variant: str) -> None:
        self._repository = repository
        self._variant = variant
        self._seen: object = None
        self._found: Mapping[str, Published] = {}

    def find(self, seen: object, known: Mapping[str, Published], busy: Published | None) -> Mapping[str, Waiting]:
        """Return what should be served otherwise than it is, whatever the bytes of its files.

        Args:
            seen: What the repository looks like; it is read only if that is another than before.
            known: Name → what was loaded, or tried last.
            busy: What is being loaded now.

        Raises:
            OSError: The repository cannot be looked at.
        """
        known = {**known, busy.name: busy} if busy else known
        if seen is None or seen != self._seen:
            self._found, self._seen = read_repository(self._repository, None, self._variant), seen
        active = {name: each.version for name, each in self._found.items() if _is_other(each, known.get(name))}
        gone = known.keys() - self._found.keys()
        active |= {name: 0 for name in gone if not find_rest(self._repository / name, known[name].version)}
        reason = f"waits until {busy.title} is loaded" if busy else "waits until the repository has been read"
        return {name: Waiting(active=version, reason=reason) for name, version in active.items()}


def _is_other(found: Published, known: Published | None) -> bool:
    """Tell whether a model should be served otherwise than it was when it was loaded or tried."""
    if not known or found.version != known.version:
        return True
    # Of one that is damaged, nothing more is told.
    return bool(found.configs and known.configs and found.configs != known.configs)
