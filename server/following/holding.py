"""Holds what is served: a shared lock on its folder, for which whoever prunes the repository leaves it there."""

import contextlib
import fcntl
import os
from pathlib import Path

from .published import Published


class Holdings:
    """Locks on version folders; they go with this process, and need no right to write.

    Args:
        repository: The model repository.
    """

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._held: dict[tuple[str, int], int] = {}

    def hold(self, published: Published) -> str:
        """Hold a version; return why that cannot be done, such as a file system without locks, or nothing."""
        key = (published.name, published.version)
        if not published.version or key in self._held:
            return ""
        descriptor = None
        try:
            descriptor = os.open(self._repository / published.name / str(published.version), os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as exc:
            if descriptor is not None:
                os.close(descriptor)
            return exc.strerror or str(exc)
        self._held[key] = descriptor
        return ""

    def release(self, published: Published) -> None:
        """Hold a version no longer."""
        descriptor = self._held.pop((published.name, published.version), None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)
