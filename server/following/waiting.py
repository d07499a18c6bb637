"""Which models have changed in the repository while tritonserver loads another one, and wait for that."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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


class Glance:
    """Tells what a repository says now, as far as that takes no longer than a moment.

    Args:
        repository: The model repository.
        variant: Name of the configurations that take the place of the usual ones, where a version has them.
    """

    def __init__(self, repository: Path, variant: str) -> None:
        self._repository = repository
        self._variant = variant
        self._seen: object = None
        self._found: Mapping[str, Published] = {}

    def take(self, seen: object) -> Mapping[str, Published]:
        """Return what should be served, whatever the bytes of its files; read only if what is seen is another.

        Raises:
            OSError: The repository cannot be looked at.
        """
        if seen is None or seen != self._seen:
            self._found, self._seen = read_repository(self._repository, None, self._variant), seen
        return self._found


def is_other(found: Published, known: Published | None) -> bool:
    """Tell whether a model should be served otherwise than it was when it was loaded or tried."""
    if not known or found.version != known.version:
        return True
    # Of one that is damaged, nothing more is told.
    return bool(found.configs and known.configs and found.configs != known.configs)
