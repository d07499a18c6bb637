"""Which models have changed in the repository while tritonserver loads another one: they wait, or are damaged."""

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .damage import compare, find_rest, refuse_damaged
from .failures import Failure
from .published import Loaded, Published, find_gone, read_repository
from .sums import FileSums

# For so long files are looked into before the answer is left to the next look.
_MOMENT_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A model that has changed and is not looked at yet.

    Attributes:
        active: Version that the repository says should be served; 0 where there is none any more.
        reason: What it waits for, in words that follow its name; of what is damaged, why it cannot be served, in one
            sentence.
        is_damaged: Whether it cannot be served as it is there.
    """

    active: int
    reason: str
    is_damaged: bool = False


def drop_told(waiting: Mapping[str, Waiting], name: str, active: int) -> dict[str, Waiting]:
    """Return what still waits once it was told how far a model is followed to a version.

    What is told of one version says nothing of another that has become active since: that goes on waiting.
    """
    return {waits: each for waits, each in waiting.items() if waits != name or each.active != active}


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What is known of the models while one is loaded.

    Attributes:
        served: Name → what was loaded.
        failures: Name → the last failure of what could not be served.
        busy: What is being loaded now.
    """

    served: Mapping[str, Loaded]
    failures: Mapping[str, Failure]
    busy: Published | None

    def find_old(self, name: str) -> Published | None:
        """Return what is served of a model."""
        return self.served[name].published if name in self.served else None

    def find_tried(self, name: str) -> Published | None:
        """Return what was tried last of a model, which says more of it than what is served as before."""
        if self.busy and self.busy.name == name:
            return self.busy
        return self.failures[name].wanted if name in self.failures else self.find_old(name)

    def find_known(self, name: str) -> Loaded | None:
        """Return what a model is held against where its version is the same."""
        failure = self.failures.get(name)
        return self.served.get(name) or (failure.known if failure else None)


class _Examination(threading.Thread):
    """Reads a repository as whoever brings its models does, files included, which may take long.

    Args:
        repository: The model repository.
        variant: As for `Waits`.
        sums: Tells which files have changed; nobody else may use it meanwhile.
        seen: What the repository looked like before.
        followed: What is known of the models.
    """

    def __init__(self, repository: Path, variant: str, sums: FileSums, seen: object, followed: Followed) -> None:
        super().__init__(daemon=True)
        self.seen = seen
        self.found: Mapping[str, Published] = {}
        # Name → what is wrong with the version that is served until another one is.
        self.lost: Mapping[str, str] = {}
        self._read = (repository, sums, variant)
        self._followed = followed

    def run(self) -> None:
        # What cannot be read now says nothing, and whoever reads it next says why.
        with contextlib.suppress(OSError, ValueError):
            self.found = {name: self._hold(wanted) for name, wanted in read_repository(*self._read).items()}
            self.lost = {name: self._find_lost(wanted) for name, wanted in self.found.items()}

    def _find_lost(self, wanted: Published) -> str:
        served = self._followed.served.get(wanted.name)
        if not served or served.published.version == wanted.version:
            return ""
        repository, sums, _ = self._read
        return find_gone(repository, served) or sums.find_changed(served.files, since="loaded")

    def _hold(self, wanted: Published) -> Published:
        """Hold a model against what was loaded of it."""
        repository, sums, _ = self._read
        known = self._followed.find_known(wanted.name)
        if not known or known.published.version != wanted.version:
            return wanted
        held = compare(repository, sums, known, wanted, asks=wanted.name in self._followed.served)
        return held.published if held else wanted


class Waits:
    """Tells what has changed in a repository, as far as that takes no longer than a moment.

    Args:
        repository: The model repository.
        variant: Name of the configurations that take the place of the usual ones, where a version has them.
    """

    def __init__(self, repository: Path, variant: str) -> None:
        self._repository = repository
        self._variant = variant
        self._sums = FileSums()
        self._seen: object = None
        self._found: Mapping[str, Published] = {}
        # What looks into files, and what has done so last.
        self._examining: _Examination | None = None
        self._examined: _Examination | None = None

    def begin(self, sums: FileSums) -> None:
        """Look at everything anew: another thread is about to bring what has changed, and uses the sums."""
        self._sums = sums.copy()
        self._seen, self._examining = None, None
        if self._examined:
            # What it found is said until more is known.
            self._examined.seen = object()

    def end(self) -> None:
        """Forget what was found: nothing waits."""
        self._examining = self._examined = None

    def find(self, seen: object, followed: Followed) -> Mapping[str, Waiting]:
        """Return what should be served otherwise than it is, and what cannot be served as it is there.

        Args:
            seen: What the repository looks like; it is read only if that is another than before.
            followed: What is known of the models.

        Raises:
            OSError: The repository cannot be looked at.
        """
        if seen is None or seen != self._seen:
            self._found, self._seen = read_repository(self._repository, None, self._variant), seen
        self._examine(followed)
        busy = {followed.busy.name} if followed.busy else set()
        names = {*self._found, *followed.served, *followed.failures, *busy}
        found = {name: self._judge(name, followed) for name in sorted(names)}
        return {name: each for name, each in found.items() if each}

    def _examine(self, followed: Followed) -> None:
        """Have files looked into, one look after another; large ones that were touched take longer than a moment."""
        last = self._examining or self._examined
        if self._examining is None and (last is None or last.seen != self._seen):
            self._examining = _Examination(self._repository, self._variant, self._sums, self._seen, followed)
            self._examining.start()
            self._examining.join(_MOMENT_S)
        if self._examining and not self._examining.is_alive():
            self._examined, self._examining = self._examining, None

    def _judge(self, name: str, followed: Followed) -> Waiting | None:
        """Return how a model waits; None where it is to be served as it is, or where that is told already."""
        busy, old, tried = followed.busy, followed.find_old(name), followed.find_tried(name)
        waits = f"waits until {busy.title} is loaded" if busy else "waits until the repository has been read"
        wanted = self._find_wanted(name)
        if not wanted:
            rest = find_rest(self._repository / name, tried.version if tried else 0)
            if not rest:
                return Waiting(active=0, reason=waits)
            if not old:
                return None
            wanted = Published(name=name, version=0, configs={}, damage=rest)
        if wanted.damage:
            # Of what is being loaded, that tells it itself.
            is_loaded = busy and busy.name == name and busy.version == wanted.version
            if wanted == tried or is_loaded:
                return None
            return Waiting(active=wanted.version, reason=str(refuse_damaged(wanted, old)), is_damaged=True)
        if old and (lost := self._examined.lost.get(name) if self._examined else ""):
            reason = f"{wanted.title} {waits}, and of {old.title}, which is to answer until then, {lost}; mend that"
            return Waiting(active=wanted.version, reason=f"{reason}.", is_damaged=True)
        return Waiting(active=wanted.version, reason=waits) if self._is_other(wanted, tried) else None

    def _find_wanted(self, name: str) -> Published | None:
        """Return what should be served of a model, with what is wrong with it as far as that is known."""
        wanted, examined = self._found.get(name), self._examined and self._examined.found.get(name)
        if not wanted or not examined or examined.version != wanted.version:
            return wanted
        # As long as its files are being looked into anew, they are what they were.
        is_known = self._is_examined() or (examined.damage and not wanted.damage)
        return examined if is_known else wanted

    def _is_examined(self) -> bool:
        return self._examined is not None and self._examined.seen == self._seen

    def _is_other(self, wanted: Published, tried: Published | None) -> bool:
        """Tell whether a whole model should be served otherwise than it was when it was loaded or tried."""
        if not tried or wanted.version != tried.version:
            return True
        if tried.damage:
            # It is whole again, which is known once its files have been looked into.
            return self._is_examined()
        return bool(wanted.configs and tried.configs and wanted.configs != tried.configs)
