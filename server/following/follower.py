"""Follows the repository: what becomes active there is served here, within a second or two."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..errors import GoneError, RolloutError
from .changes import Changes
from .damage import compare, find_rest, refuse_damaged
from .failures import FIRST_RETRY_S, Failure, Failures
from .holding import Holdings
from .mapped import MappedFiles, find_readers
from .published import Loaded, Published, find_fault, read_repository, take_files
from .rollout import Roller, refuse_still
from .sums import FileSums, Identity
from .waiting import Followed, Waiting, Waits, drop_told

# Looked at rather than waited for: no notice of a change comes over NFS or into a container's mount.
_INTERVAL_S = 0.5

# Longer than any order to a tritonserver takes that is no more.
_LONGEST_ORDER_S = 10.0

# From here on it is said what waits while a model is loaded: a large one takes minutes by right.
_LONG_S = 10.0

State = Literal["served", "rolling", "failed"]


@dataclass(frozen=True, kw_only=True)
class Following:
    """How far a model is followed.

    Attributes:
        active: Version that the repository says should be served; 0 where there is none any more.
        served: Version that is served; 0 where none is.
        state: `rolling` while it is being changed, `failed` after a try that led to nothing.
        reason: Why it failed, in one sentence; of what is rolling, what it waits for, where it does.
        golden: SHA-256 of the recorded answers of what is served, which another publication of the same number has not;
            empty of all else.
    """

    active: int
    served: int
    state: State
    reason: str = ""
    golden: str = ""


class Follower:
    """Watches a repository and has a running tritonserver serve what is active in it.

    Args:
        repository: The model repository.
        roller: Changes what is served.
        sums: Tells which files have changed since they were published.
        tell: Called with a model's name and how far it is followed, whenever that changes.
        say: Logs a line.
        variant: Name of the configurations that take the place of the usual ones, where a version has them.
    """

    def __init__(
        self,
        repository: Path,
        roller: Roller,
        sums: FileSums,
        tell: Callable[[str, Following], None],
        say: Callable[[str], None],
        variant: str = "",
    ) -> None:
        self._variant = variant
        self._repository = repository
        self._roller = roller
        self._sums = sums
        self._report = tell
        self._say = say
        self._holdings = Holdings(repository)
        self._mapped = MappedFiles()
        # Those whose processes were ended, for they answered from other bytes than they were loaded with.
        self._written: set[str] = set()
        self._changes = Changes(repository)
        self._served: dict[str, Loaded] = {}
        self._failures = Failures(repository)
        self._waits = Waits(repository, variant)
        # What has changed since the worker looked, and what it is busy with.
        self._waiting: Mapping[str, Waiting] = {}
        # Held while that is changed: one thread finds what waits, and another brings it.
        self._finding = threading.Lock()
        self._busy: Published | None = None
        # What tritonserver loads now, and since when.
        self._loading: tuple[Published, float] | None = None
        self._taken: list[Loaded] = []
        # What the repository looked like after the last load; None where nothing was loaded since it was read.
        self._looked: Mapping[str, object] | None = None
        self._seen: Mapping[str, object] | None = None
        # The file system and the folder of the repository.
        self._place: tuple[int, int] | None = None
        self._next_look = 0.0
        # Of which another publication is loaded in the place of the one that is unloaded already.
        self._replaced: set[str] = set()
        # Of the files of each model that a tritonserver is started with.
        self._marks: dict[str, Mapping[Path, Identity]] = {}
        self._worker: threading.Thread | None = None
        self._ended = False

    @property
    def models(self) -> list[str]:
        """Names of every model that tritonserver should have loaded."""
        return [name for published in self.published for name in published.configs]

    @property
    def published(self) -> list[Published]:
        """Every model that should be asked by clients now, with its steps."""
        return [loaded.published for loaded in list(self._served.values())]

    @property
    def known(self) -> list[Published]:
        """The same with those that cannot be served now."""
        return [
            *self.published,
            *(each.wanted for name, each in self._failures.items() if name not in self._served),
        ]

    @property
    def changing(self) -> set[str]:
        """Names of what is being loaded now, and of its steps."""
        return {name for taken in self._taken for name in taken.published.configs}

    @property
    def waiting(self) -> Mapping[str, Waiting]:
        """Name → how it waits, of each model that has changed while others are being loaded."""
        return {**self._waiting}

    @property
    def wanted(self) -> int:
        """How many models clients should be able to ask, those included that cannot be served now."""
        return len({*self._served, *self._failures, *self._replaced})

    def try_each(self, reason: str) -> None:
        """Have a tritonserver that is about to start load nothing, and then one model after another."""
        for name in [*self._served]:
            published = self._served[name].published
            self._forget(published)
            self._failures.doubt(published, reason, delay_s=0.0)
            self._failures[name].is_untried = True
            waits = f"waits until it is its turn to be loaded alone, for {reason}"
            self._tell(name, Following(active=published.version, served=0, state="rolling", reason=waits))

    def leave_out_still(self, models: Collection[str]) -> None:
        """Have tritonserver start without the models that it stood still over, and load them after the others.

        Args:
            models: Names of those, which may be steps.
        """
        for loaded in [*self._served.values()]:
            published = loaded.published
            if still := sorted({*models}.intersection(published.configs)):
                self._forget(published)
                self._fail(published, refuse_still(published, still[0]), None)

    def doubt(self, name: str, reason: str, *, delay_s: float = FIRST_RETRY_S) -> None:
        """Take a model that a tritonserver was started with for one that cannot be served; it is tried again."""
        published = self._served[name].published
        self._forget(published)
        self._failures.doubt(published, reason, delay_s)
        self._tell(name, Following(active=published.version, served=0, state="failed", reason=reason))

    def tell_end(self, how: str, *, is_crash: bool) -> None:
        """Learn how the tritonserver ended that what could not be loaded was cut off by.

        Args:
            how: In words that follow its name.
            is_crash: Whether it ended by itself. Who killed it has nothing to say of the model, which is tried again.
        """
        for failure in self._failures.note_end(how, is_crash=is_crash):
            title = failure.wanted.title
            if failure.is_deadly:
                self._say(f"ERROR: {failure.reason}")
            else:
                self._say(f"{title}: tritonserver {how} as it was loaded. {failure.promise}")
            self._tell_failure(failure)

    def leave_out_touched(self) -> bool:
        """Unload what was loaded while a file of it was touched, and load it once more; return whether there was any.

        It may be another model, and answers already: so this is told without reading a file.
        """
        touched = {name: self._sums.find_touched(marks) for name, marks in self._marks.items() if name in self._served}
        for name in touched:
            if touched[name]:
                self._leave_out(self._served[name], touched[name], delay_s=0.0)
        return any(touched.values())

    def leave_out_damaged(self) -> None:
        """Have tritonserver load no model whose files it would wait for, not find, or find changed."""
        for loaded in [*self._served.values()]:
            published = loaded.published
            parts = published.steps or (published.name,)
            folders = [self._repository / part / str(published.version) for part in parts]
            fault = next(filter(None, map(find_fault, folders)), "") if published.version else ""
            if damage := fault or self._sums.find_changed(loaded.files, since="loaded"):
                self._leave_out(loaded, damage, delay_s=FIRST_RETRY_S)
        self._marks = {name: self._sums.mark(loaded.files) for name, loaded in self._served.items()}

    def _leave_out(self, loaded: Loaded, damage: str, delay_s: float) -> None:
        name = loaded.published.name
        self.doubt(name, damage, delay_s=delay_s)
        # Looked at again as soon as its files are others.
        self._failures[name].wanted = replace(loaded.published, configs={}, damage=damage)
        self._failures[name].known = loaded

    def start(self) -> None:
        """Show all that is active to a tritonserver that is about to start."""
        self._seen, self._place = self._look(), self._changes.find_place()
        found = read_repository(self._repository, self._sums, self._variant).values()
        for published in (each for each in found if not each.damage):
            taken = take_files(self._repository, published, self._sums)
            self._watch(taken)
            self._hold(published)
            self._roller.show(taken)
            self._settle(taken)
            self._marks[published.name] = self._sums.mark(taken.files)
        for published in (each for each in found if each.damage):
            self._fail(published, refuse_damaged(published, None), None)

    def look(self, *, follows: bool) -> None:
        """Begin to follow what has changed, if anything has; returns at once.

        Args:
            follows: Whether to; if not, what failed is tried again all the same.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _INTERVAL_S
        self._stop_written()
        if self._worker and self._worker.is_alive():
            if follows:
                self._tell_waiting(now)
            return
        seen = self._look() if follows else self._seen
        if self._failures:
            mended = self._changes.find_mended({name: each.wanted.version for name, each in self._failures.items()})
            self._failures.hurry(mended=mended)
        due = self._failures.are_due()
        if seen != self._seen or due:
            self._failures.hurry(self._find_changed(seen))
            before, self._seen, self._busy = self._seen, seen, None
            self._waits.begin(self._sums)
            task = self._follow if follows else self._retry
            self._worker = threading.Thread(target=self._carry_out, args=(task,), daemon=True)
            try:
                self._worker.start()
            except RuntimeError:
                # Without a thread nothing was done about it: the next look is to see it as new again.
                self._seen = before
                raise
        else:
            # Taken back meanwhile, or done. Else it waits on, until it is its turn.
            self._waiting = {}
            self._waits.end()

    def _watch(self, taken: Loaded) -> None:
        """Watch the files of what is about to be loaded; who has no descriptor for it now does so at the next look."""
        with contextlib.suppress(OSError):
            self._mapped.open(taken)

    def _stop_written(self) -> None:
        """Have nobody answered from weights that were written over, whatever lies in their place by now."""
        try:
            written = self._mapped.look([*self._served.values(), *self._taken], self._roller.pid)
        except OSError:
            return
        is_busy = self._worker is not None and self._worker.is_alive()
        for name, path in written.items():
            loaded = self._served.get(name)
            if loaded is None:
                # Nobody is answered by it.
                continue
            what = f"warning: {path} was written into while it was being read"
            is_served = path in loaded.files
            if is_served and not is_busy:
                self._say(f"{what}; {loaded.published.title} is unloaded, and loaded anew once it is right")
                self._leave_out(loaded, f"{path} was written into", delay_s=0.0)
            # While something is being loaded, tritonserver takes no other order. What is ended is loaded anew if its
            # files are right. Of a version that is not served any more, or not yet, nothing else is to be ended.
            elif self._mapped.end_readers(path, self._roller.pid):
                self._say(f"{what}; its processes are ended")
                if is_served:
                    self._written.add(name)

    def _find_changed(self, seen: Mapping[str, object] | None) -> set[str]:
        """Return what is another than when it was looked at last; nothing where that is to be done once more."""
        if seen is None or self._seen is None:
            return set()
        return {name for name in {*seen, *self._seen} if seen.get(name) != self._seen.get(name)}

    def _tell_waiting(self, now: float) -> None:
        """Tell what has changed meanwhile; say once that it waits, where what is being loaded takes long."""
        with self._finding:
            self._waiting = self._find_waiting()
        loading, since = self._loading or (None, now)
        waiting = sorted(name for name, each in self._waiting.items() if not each.is_damaged)
        if loading and waiting and now - since >= _LONG_S:
            self._loading = None
            self._say(
                f"{loading.title} has been loading for {now - since:.0f} s; what has changed meanwhile waits until "
                f"that ends: {', '.join(waiting)}"
            )

    def _find_waiting(self) -> Mapping[str, Waiting]:
        followed = Followed(served={**self._served}, failures={**self._failures}, busy=self._busy)
        # Of these, files matter that are not those of a version that is served.
        versions = {name: each.wanted.version for name, each in followed.failures.items()}
        versions |= {name: each.active for name, each in self._waiting.items()}
        look = self._look()
        seen = look and (look, {name: self._changes.list_all(name, each) for name, each in versions.items()})
        try:
            found = self._waits.find(seen, followed)
        # What cannot be read now says nothing, and whoever reads it next says why.
        except (OSError, ValueError):
            return self._waiting
        return found if self._changes.find_place() == self._place else {}

    def wait(self) -> None:
        """Wait for what is under way, until its orders have failed at the latest."""
        if self._worker:
            self._worker.join(timeout=_LONGEST_ORDER_S)

    def end(self) -> None:
        """Begin nothing any more."""
        self._ended = True

    def _look(self) -> Mapping[str, object] | None:
        try:
            return self._changes.look(self.published)
        # A network file system that is away for a moment says nothing about what should be served.
        except OSError:
            return self._seen

    def _carry_out(self, task: Callable[[], None]) -> None:
        """Do what is to be done; after a fault that nobody has thought of, look at the repository again later."""
        try:
            task()
        except Exception as exc:
            self._say(f"ERROR: Bug: {type(exc).__name__} while the repository is followed: {exc}; what is served stays")
            self._seen, self._next_look = None, time.monotonic() + FIRST_RETRY_S

    def _follow(self) -> None:
        place = self._changes.find_place()
        try:
            wanted = read_repository(self._repository, self._sums, self._variant)
        except OSError as exc:
            self._say(f"{self._repository} cannot be looked at: {exc.strerror}; what is served stays")
            self._seen = None
            return
        if place != self._changes.find_place():
            # A mount that goes while it is read says nothing; what is there afterwards is looked at as such.
            self._seen = None
            return
        if not wanted and self._served and place != self._place:
            self._say(f"{self._repository} is another folder than before, and empty; what is served stays")
            return
        self._place = place
        for name in [*self._served]:
            if name in wanted or self._ended:
                continue
            # What is removed goes as a whole.
            if damage := find_rest(self._repository / name, self._served[name].published.version):
                wanted[name] = Published(name=name, version=0, configs={}, damage=damage)
            else:
                self._remove(name)
        # What could not be served and is not to be any more: it was removed, or turned out to be a step.
        for name in self._failures.keys() - wanted.keys():
            del self._failures[name]
            self._tell(name, Following(active=0, served=0, state="served"))
        if not self._bring_all(wanted.values(), self._seen):
            # Those behind it are looked for again.
            self._seen = None

    def _retry(self) -> None:
        wanted = {name: failure.wanted for name, failure in self._failures.items()}
        if any(published.damage for published in wanted.values()):
            with contextlib.suppress(OSError):
                found = read_repository(self._repository, self._sums, self._variant)
                wanted = {name: found.get(name, known) if known.damage else known for name, known in wanted.items()}
        self._bring_all(wanted.values())

    def _bring_all(self, several: Iterable[Published], seen: Mapping[str, object] | None = None) -> bool:
        """Bring one after another; return False if tritonserver ended meanwhile, which is the doing of one of them.

        Args:
            several: What should be served. What has failed as it stands comes last: its next try may take minutes too.
            seen: What the repository looked like before they were read. What has become another since, while one before
                it was loaded, is left to the next look, before anything that has failed. None to bring all.
        """
        self._looked = None
        for published in sorted(several, key=self._failures.find_turn):
            has_failed = self._failures.find_turn(published) > -math.inf
            if self._ended or (has_failed and seen is not None and self._has_changed()):
                break
            if changed := self._find_changed_since(published, seen):
                self._seen = {**(self._seen or {}), **dict.fromkeys(changed)}
            elif not self._bring(published):
                return False
        return True

    def _find_changed_since(self, published: Published, seen: Mapping[str, object] | None) -> set[str]:
        """Return what of a model was another before the last load than after it; nothing where none was."""
        if seen is None or self._looked is None:
            return set()
        loaded = self._served.get(published.name)
        parts = {published.name, *published.configs, *(loaded.published.configs if loaded else ())}
        names = {*parts, *(f"{part}/" for part in parts)}
        return {name for name in names if seen.get(name) != self._looked.get(name)}

    def _has_changed(self) -> bool:
        """Tell whether something in the repository is another since it was looked at, but for the files served."""
        return any(not name.endswith("/") for name in self._find_changed(self._look()))

    def _remove(self, name: str) -> None:
        published = self._served[name].published
        self._failures.pop(name, None)
        self._tell(name, Following(active=0, served=published.version, state="rolling"))
        self._forget(published)
        self._say(f"{name}: is no longer in the repository; unloaded")
        self._tell(name, Following(active=0, served=0, state="served"))

    def _forget(self, published: Published) -> None:
        """Unload what is served."""
        del self._served[published.name]
        self._roller.remove(published)
        self._holdings.release(published)

    def _bring(self, wanted: Published) -> bool:
        """Have a model served, if it can be now; return False if there is no tritonserver any more."""
        self._busy = wanted
        try:
            return self._try(wanted)
        finally:
            self._replaced.discard(wanted.name)

    def _try(self, wanted: Published) -> bool:
        """Do the same, and leave it among those that are replaced."""
        loaded = self._served.get(wanted.name)
        if held := self._compare(wanted, loaded):
            wanted = held.published
        if held and loaded and not wanted.damage and loaded.published.configs == wanted.configs:
            self._settle(held)
        elif self._failures.is_waiting(wanted):
            pass
        elif wanted.damage:
            self._refuse(wanted, loaded, held)
        else:
            start = time.monotonic()
            if loaded and loaded.published.version == wanted.version and not held:
                self._unload_other(loaded.published, wanted)
                loaded = None
            return self._load(wanted, loaded, held, start)
        return True

    def _compare(self, wanted: Published, loaded: Loaded | None) -> Loaded | None:
        """Return what was read before of the version that is wanted, with what became of it; None where it is another.

        What could not be loaded once more is held against what it was before.
        """
        failure = self._failures.get(wanted.name)
        known = loaded or (failure.known if failure else None)
        if known is None or known.published.version != wanted.version:
            return None
        return compare(self._repository, self._sums, known, wanted, asks=loaded is not None)

    def _refuse(self, wanted: Published, loaded: Loaded | None, held: Loaded | None) -> None:
        """Leave what is damaged where it is, and what is served before it, if its answers are worth anything."""
        if loaded and self._answers_from_changed(loaded):
            self._forget(loaded.published)
            loaded = None
        self._fail(wanted, refuse_damaged(wanted, loaded.published if loaded else None), held)

    def _unload_other(self, old: Published, wanted: Published) -> None:
        """Unload another publication of the same number: side by side the two would answer with each other."""
        self._replaced.add(wanted.name)
        self._tell(wanted.name, Following(active=wanted.version, served=0, state="rolling"))
        self._say(f"warning: {wanted.title} is another publication than before; unloaded, and loaded anew")
        self._forget(old)

    def _load(self, wanted: Published, loaded: Loaded | None, held: Loaded | None, start: float) -> bool:
        """Have a model loaded and asked; return False if there is no tritonserver any more.

        Args:
            wanted: Of which no file is damaged.
            loaded: What is served until then.
            held: What was read of the same version before.
            start: When its turn began, by the monotonic clock.
        """
        old = loaded.published if loaded else None
        served = old.version if old else 0
        failure = self._failures.get(wanted.name)
        # One that is tried again has failed until it is served, which a check that comes meanwhile is to know.
        if failure is None or failure.wanted != wanted or failure.is_untried:
            self._tell(wanted.name, Following(active=wanted.version, served=served, state="rolling"))
        self._hold(wanted)
        rest, taken = "", held or take_files(self._repository, wanted, self._sums)
        self._loading, self._taken = (wanted, start), [taken]
        # Before tritonserver reads them.
        self._watch(taken)
        try:
            if loaded:
                rest = self._roller.roll(loaded, taken)
            else:
                self._roller.add(taken)
        except RolloutError as exc:
            if served != wanted.version:
                self._holdings.release(wanted)
            if not self._ended:
                self._fail(wanted, exc, held)
            return not isinstance(exc.__cause__, GoneError)
        finally:
            self._loading, self._taken, self._looked = None, [], self._look()
        if old and served != wanted.version:
            self._holdings.release(old)
        self._settle(taken)
        self._say_served(wanted, served, "" if self._ended else rest, time.monotonic() - start)
        return True

    def _say_served(self, wanted: Published, served: int, rest: str, seconds: float) -> None:
        """Log what a client gets now, and what could not be unloaded of the version before it."""
        if rest:
            self._say(
                f"warning: version {served} of {wanted.name} stays loaded beside version {wanted.version}, which is "
                f"served: expected it to be unloaded, got {rest.rstrip('.')}; its memory is free after a restart."
            )
        before = f", version {served} before" if served and served != wanted.version else ""
        what = f"version {wanted.version} is served" if wanted.version else "is served"
        self._say(f"{wanted.name}: {what}{before}, {seconds:.1f} s")

    def _answers_from_changed(self, loaded: Loaded) -> bool:
        """Tell whether a file that is read as the model answers has other bytes than it was loaded with."""
        if loaded.published.name in self._written:
            return True
        changed = (path for path, digest in loaded.files.items() if self._sums.find_changed({path: digest}))
        with contextlib.suppress(OSError):
            return any(find_readers(path, path.stat().st_ino, self._roller.pid) for path in changed)
        return False

    def _hold(self, published: Published) -> None:
        if reason := self._holdings.hold(published):
            self._say(f"warning: {published.title} cannot be locked: {reason}; `prune` does not see that it is served")

    def _settle(self, loaded: Loaded) -> None:
        published = loaded.published
        self._written.discard(published.name)
        self._served[published.name] = loaded
        self._failures.pop(published.name, None)
        golden = next(iter(loaded.asked.values()), "")
        following = Following(active=published.version, served=published.version, state="served", golden=golden)
        self._tell(published.name, following)

    def _tell(self, name: str, following: Following) -> None:
        with self._finding:
            self._waiting = drop_told(self._waiting, name, following.active)
        self._report(name, following)

    def _fail(self, wanted: Published, error: RolloutError, known: Loaded | None) -> None:
        failure, is_new = self._failures.note(wanted, error, known)
        if wanted.name in self._waiting and not wanted.damage:
            # What becomes of the one before it, and what to do, was said of what the repository had then.
            failure.is_overtaken, failure.reason = True, f"{error.fault}."
        if is_new:
            # How tritonserver ended says whether it is tried again; where nothing is served, nobody is there to do it.
            is_open = failure.is_cut_off or not (self._served or self._worker)
            self._say(f"ERROR: {failure.reason}" if is_open else f"ERROR: {failure.reason} {failure.promise}")
        self._tell_failure(failure)

    def _tell_failure(self, failure: Failure) -> None:
        wanted = failure.wanted
        loaded = self._served.get(wanted.name)
        served = loaded.published.version if loaded else 0
        self._tell(wanted.name, Following(active=wanted.version, served=served, state="failed", reason=failure.reason))
