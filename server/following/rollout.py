"""Brings a running tritonserver from one version of a model to another, without a request lost on the way.

The order, for a model with steps (an ensemble):

    1. each step serves the old version, which is left alone, and the new one
    2. an ensemble under a name of its own answers for the new version; it is asked for the verified answer
    3. the ensemble itself is pinned to the new version
    4. what is in flight on the old version is answered
    5. each step serves the new version alone

Whatever fails before the third step leaves the old version as it was. A model without steps is tried under another name
and then switched.

tritonserver leaves a version alone that it has loaded when nothing but the list of versions has changed: neither its
files nor any other field of the configuration. So each process of the new version is started once, and none of the old.
Where the two have different configurations, both are loaded again for each step of this order.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from ..errors import ControlError, GoneError, NoRoomError, RolloutError, ShortageError
from ..limits import check_threads, count_threads_of
from ..tritonserver.backend_processes import EndWatch, list_running
from ..tritonserver.control import Control
from ..tritonserver.paced_starts import pacing
from ..tritonserver.stillness import LoadWatch, describe_still_start
from .footprints import Footprints
from .health import JUDGING_PATIENCE_S, LostProcessError, LostServerError, check_answer
from .model_text import rename, replace_field, serve_versions, set_parameter
from .overlay import Overlay
from .published import Loaded, Published, find_fault, find_missing, list_versions
from .room import Freed, Room
from .sums import GOLDEN_FILE, FileSums, Identity
from .wishes import count_instances, is_decoupled, keeps_answers, limits_rate

# A model of this name beside the published one answers for a version that is not served yet.
CANDIDATE_SUFFIX = ".candidate"

# A parameter that no backend reads.
_REVIVAL_PARAMETER = "modelyard_revival"

# What tritonserver 2.51 says of each version that kept a model from loading.
_FAILED_VERSION = re.compile(r"\bversion (\d+) is at UNAVAILABLE state")

# How long requests on the old version may take before its steps are unloaded all the same.
_FLIGHT_LIMIT_S = 60.0
_INTERVAL_S = 0.05

# So long the processes of what was unloaded may take to answer what they still have, and tritonserver to let go of them
# once they have ended.
_UNLOAD_LIMIT_S = 10.0
_LAST_UNLOAD_S = 0.5

# tritonserver starts some for that, and ends where it cannot.
_THREADS_TO_UNLOAD = 4

# What may take threads between a look at them and the end of an unload.
_THREADS_LEFT = 8

# Of the bytes of processes that end, what may be counted on.
_MEMORY_FREED = 0.9


class Roller:
    """Loads, switches and unloads published models in one tritonserver.

    Args:
        repository: Repository that they are published in.
        overlay: What tritonserver is shown of it.
        control: Orders to that tritonserver.
        backend: Folder of its Python backend.
        sums: Tells which files have changed since they were published.
        find_pid: Returns the id of that tritonserver's process.

    Attributes:
        hang: Why that tritonserver will load a model no more; empty as a rule.
    """

    def __init__(
        self,
        repository: Path,
        overlay: Overlay,
        control: Control,
        backend: Path,
        sums: FileSums,
        find_pid: Callable[[], int],
    ) -> None:
        self.hang = ""
        self._find_pid = find_pid
        self._repository = repository
        self._overlay = overlay
        self._control = control
        self._backend = backend
        self._sums = sums
        # Model and version → the sums of all that was loaded with it.
        self._sums_at_load: dict[tuple[str, str], Mapping[Path, str]] = {}
        # Triton model → held while it is changed: it is revived by another thread than the one that rolls it.
        self._changing: dict[str, threading.RLock] = {}
        self._room = Room()
        self._footprints = Footprints(repository, find_pid)
        self._limits_rate = False
        # Model and version → what it was, of those whose answers may lie in the response cache.
        self._cached: dict[tuple[str, int], bytes] = {}

    @property
    def pid(self) -> int:
        """Id of tritonserver's process."""
        return self._find_pid()

    def begin(self, shown: Iterable[Published], *, limits_rate: bool) -> None:
        """Take orders for a tritonserver that is about to start, whose response cache is empty.

        Args:
            shown: What it loads first.
            limits_rate: Whether its rate limiter is on.
        """
        self.hang = ""
        self._limits_rate = limits_rate
        self._cached.clear()
        for published in shown:
            with contextlib.suppress(OSError, ControlError):
                self._check_wishes(published)

    def measure(self, models: Iterable[str]) -> None:
        """Learn what memory one process takes of each of these models, which have just been loaded."""
        self._footprints.measure(models)

    def revive(
        self, model: str, versions: Collection[str] = (), tell_unloaded: Callable[[], None] = lambda: None
    ) -> None:
        """Reload a model as it is shown; what is left of it answers until the new one is ready.

        Args:
            model: Its name.
            versions: Those whose processes ended. Nothing is done where a rollout has replaced all of them meanwhile:
                what it has loaded is whole, and a load would take it from those whom it answers.
            tell_unloaded: Called where what is left of it has been unloaded to make room.

        Raises:
            ControlError: It cannot be loaded.
        """
        with self._change(model):
            if versions and not any(self._overlay.shows(model, version) for version in versions):
                return
            marks = self._check_files(model)
            try:
                config = self._overlay.read_config(model)
                # tritonserver 2.51 takes a load of an unchanged configuration for done.
                self._overlay.write_config(model, set_parameter(config, _REVIVAL_PARAMETER, str(time.time_ns())))
            except OSError as exc:
                raise ControlError(
                    f"{model} cannot be shown to tritonserver", expected="room for its configuration", got=f"'{exc}'"
                ) from exc
            with self._making_room(model, config, tell_unloaded):
                self._order(model)
            try:
                self._check_files(model, marks)
            except ControlError:
                # What has just been loaded is none of what was published.
                with contextlib.suppress(ControlError):
                    self._control.unload(model)
                raise

    @contextlib.contextmanager
    def _making_room(self, model: str, config: str, tell_unloaded: Callable[[], None]) -> Iterator[None]:
        """Keep room for a model; where there is too little beside what is left of it, that is unloaded first.

        Unless it is too little even then: what is left may still answer.

        Raises:
            NoRoomError: There is too little.
        """
        processes = count_instances(config) * len(self._overlay.list_versions(model))
        left = self._footprints.list_left(model)
        memory = processes * self._footprints.estimate(model, left)
        with contextlib.ExitStack() as kept:
            try:
                kept.enter_context(self._room.keep(processes, memory))
            except ShortageError:
                try:
                    kept.enter_context(self._room.keep(processes, memory, _find_freed(processes, left)))
                    check_threads(_THREADS_TO_UNLOAD)
                    self._control.unload(model)
                    tell_unloaded()
                    self._await_unloaded(model)
                    self._room.check()
                except ShortageError as exc:
                    raise _refuse_room(model, exc) from exc
            yield

    @contextlib.contextmanager
    def _keeping_for(self, published: Published, consequence: str, copies: int = 1, memory: int = 0) -> Iterator[None]:
        """Keep room for what is loaded beside all that is: tritonserver would end, with everything that it serves.

        Nothing may have been ordered by then: to undo that takes threads as well.

        Args:
            published: What is to be loaded.
            consequence: What becomes of it.
            copies: How many times it is loaded.
            memory: Bytes that it takes at least, as far as that is known.

        Raises:
            RolloutError: Too few threads may run for its processes, or too little memory may be taken.
        """
        processes = copies * sum(map(count_instances, published.configs.values()))
        with contextlib.ExitStack() as kept:
            try:
                kept.enter_context(self._room.keep(processes, memory))
            except ShortageError as exc:
                raise _refuse(published, exc, consequence) from exc
            yield

    def _change(self, model: str) -> threading.RLock:
        """Return what is held while a model is changed; another one may be loaded meanwhile, for minutes perhaps."""
        return self._changing.setdefault(model, threading.RLock())

    def _order(self, model: str) -> None:
        self._await_unloaded(model)
        watch = LoadWatch(self._find_pid(), model)
        try:
            self._control.load(model, watch.has_stopped)
        except GoneError:
            raise
        except ControlError as exc:
            if watch.has_ended:
                if watch.is_unanswered:
                    self.hang = f"still loads {model}, whose processes have ended"
                raise watch.explain(exc) from exc
            raise
        self._footprints.measure([model])

    def _drain(self, model: str, version: int) -> None:
        """Unload a model that answers in pieces, and wait for those that this version writes.

        tritonserver 2.51 corrupts its heap where a version is loaded in the place of the same one that still writes,
        and dies of it within seconds (4 of 10 times). Beside another version, and of other models, it does not.
        """
        self._control.unload(model)
        self._await_unloaded(model, version, _FLIGHT_LIMIT_S)

    def _await_unloaded(self, model: str, version: int = 0, limit_s: float = _UNLOAD_LIMIT_S) -> None:
        """Wait until what was unloaded of a model is gone, with its processes.

        tritonserver 2.51 corrupts its heap where a model is loaded while the processes of one of that name end, and
        dies of it within seconds. Of processes that were killed it is said for ever that they are being unloaded.
        """
        end = time.monotonic() + limit_s
        last = time.monotonic() + _LAST_UNLOAD_S
        with contextlib.suppress(ControlError, OSError):
            while time.monotonic() < end:
                states = {state.state for state in self._control.read_states() if state.name == model}
                if "UNLOADING" not in states or "READY" in states:
                    return
                if list_running(self._find_pid(), model, version):
                    last = time.monotonic() + _LAST_UNLOAD_S
                elif time.monotonic() > last:
                    return
                time.sleep(_INTERVAL_S)

    def _check_files(self, model: str, marks: Mapping[Path, Identity] | None = None) -> Mapping[Path, Identity]:
        """Refuse to load files that are not as they were published; return marks of them.

        Args:
            model: Its name.
            marks: Those from before it was loaded.

        Raises:
            ControlError: One would be waited for, cannot be read, is missing, has changed, or was touched since it was
                marked.
        """
        found: dict[Path, Identity] = {}
        # Told without reading one, for it answers already.
        touched = self._sums.find_touched(marks or {})
        for version in (folder.name for folder in self._overlay.list_versions(model)):
            part, sums = self._repository / model / version, self._sums_at_load.get((model, version), {})
            fault = touched or find_fault(part) or find_missing(sums, part)
            if fault := fault or self._sums.find_changed(sums, part, since="loaded"):
                raise ControlError(f"{model} cannot be loaded", expected="whole files", got=fault, remedy="mend that")
            found |= self._sums.mark(path for path in sums if part in path.parents)
        return found

    @contextlib.contextmanager
    def _holding(self, taken: Loaded) -> Iterator[None]:
        """Refuse at the end what was loaded meanwhile of files that are not, or were not, as they were taken.

        Raises:
            ValueError: One has changed, or was touched.
        """
        if changed := self._sums.find_changed(taken.files, since="loaded"):
            raise ValueError(changed)
        marks = self._sums.mark(taken.files)
        yield
        # Told without reading one where that is enough, for it answers already.
        if changed := self._sums.find_touched(marks) or self._sums.find_changed(taken.files, since="loaded"):
            raise ValueError(changed)

    def show(self, taken: Loaded) -> None:
        """Show a model to a tritonserver that starts or runs."""
        published = taken.published
        self._note(taken)
        for name, config in published.configs.items():
            versions = [published.version] if published.version else list_versions(self._repository / name)
            self._overlay.show(name, config, self._repository / name, versions)

    def _note(self, taken: Loaded) -> None:
        published = taken.published
        self._sums_at_load |= {(name, str(published.version)): taken.files for name in published.configs}

    def add(self, taken: Loaded) -> None:
        """Load a model that was not there, its steps first.

        Raises:
            RolloutError: It cannot be loaded or does not answer as verified; nothing of it stays loaded.
        """
        published = taken.published
        with self._keeping_for(published, "it is not served"):
            self._add(taken)

    def _add(self, taken: Loaded) -> None:
        published = taken.published
        try:
            self._check_wishes(published)
            self.show(taken)
            with self._holding(taken), pacing(self._backend):
                for name in published.configs:
                    self._order(name)
            self._check(published, published.name)
        except Exception as exc:
            self.remove(published)
            raise _refuse(published, exc, "it is not served") from exc

    def remove(self, published: Published) -> None:
        """Unload a model that is gone, its steps last."""
        for name in reversed([*published.configs]):
            with contextlib.suppress(ControlError):
                self._control.unload(name)
            self._overlay.hide(name)

    def roll(self, served: Loaded, taken: Loaded) -> str:
        """Serve `taken` in place of what is served, two versions or two configurations of one model.

        Returns:
            Why something of the old one stays loaded beside the new one, which is served; empty where nothing does.

        Raises:
            RolloutError: The new one cannot be loaded or does not answer as verified; the old one is served as before.
        """
        old, new = served.published, taken.published
        # tritonserver would load it anew with the other, and its callers would be answered by it until the switch.
        if changed := self._sums.find_changed(served.files, since="loaded"):
            raise _refuse_beside(old, new, self._repository / old.name / str(old.version), changed)
        before = f"version {old.version}" if old.version else "what was loaded"
        # What has no steps is loaded under two names, and the first may end while the second starts.
        copies, memory = 1 if new.steps else 2, self._footprints.estimate_beside(old, new)
        with self._keeping_for(new, f"{before} is served as before", copies, memory):
            return self._roll(served, taken, before)

    def _roll(self, served: Loaded, taken: Loaded, before: str) -> str:
        old, new = served.published, taken.published
        self._note(taken)
        try:
            self._check_wishes(new)
            with self._holding(taken), pacing(self._backend):
                if new.steps and new.version == old.version:
                    self._reconfigure(old, new)
                    return ""
                if new.version and new.steps:
                    self._load_steps(old, new)
                if new.version:
                    with self._candidate(new) as name:
                        self._check(new, name)
                if new.version == old.version and is_decoupled(new.configs[new.name]):
                    self._drain(new.name, new.version)
                self._load(new, [new.name], [new.version])
        except RolloutError:
            self._restore(old, new)
            raise
        # Whatever it is: what was served is to be served on.
        except Exception as exc:
            self._restore(old, new)
            then = "again once tritonserver runs" if isinstance(exc, GoneError) else "as before"
            raise _refuse(new, exc, f"{before} is served {then}") from exc
        return self._finish(old, new)

    def _check_wishes(self, published: Published) -> None:
        """Refuse what tritonserver would pass over in silence, or answer with what another model has answered.

        Raises:
            ControlError: The rate limiter is off, or the number was that of another version, whose answers are kept.
        """
        if not self._limits_rate and any(limits_rate(config) for config in published.configs.values()):
            raise ControlError(
                f"{published.name} asks for the rate limiter",
                expected="it to be on",
                got="a tritonserver without it",
                remedy="restart the server",
            )
        if published.version and keeps_answers(published.configs[published.name]):
            golden = self._repository / published.name / str(published.version) / GOLDEN_FILE
            told = golden.read_bytes()
            if self._cached.setdefault((published.name, published.version), told) != told:
                raise ControlError(
                    f"the response cache may hold answers of another version {published.version}",
                    expected="a number that was not served before",
                    got="other recorded answers",
                    remedy="restart the server",
                )

    def _reconfigure(self, old: Published, new: Published) -> None:
        """Load what has another configuration in the same version; its requests are answered by the one or the other.

        Raises:
            ControlError: It cannot be loaded.
            OSError: The model does not answer then.
            ValueError: It answers otherwise.
        """
        changed = [name for name, config in new.configs.items() if old.configs.get(name) != config]
        self._load(new, changed, [new.version])
        self._check(new, new.name)
        for name in old.steps:
            if name not in new.configs:
                self._drop(name)

    def _load_steps(self, old: Published, new: Published) -> None:
        """Serve both versions of each step that they share, and the new one alone of a step that only it has.

        Raises:
            ControlError: They cannot be served side by side.
        """
        for name in new.steps:
            if name in old.configs and _joins_any_lengths(old.configs[name]) != _joins_any_lengths(new.configs[name]):
                raise ControlError(
                    f"versions {old.version} and {new.version} of {name} cannot be loaded side by side",
                    expected="the same --batching, for both have one configuration",
                    got="rows that are joined in another way",
                    remedy="restart the server, which then loads the active version alone",
                )
        for name in new.steps:
            if name not in old.configs:
                self._load(new, [name], [new.version])
                continue
            config = self._overlay.read_config(name)
            if not _is_alike(name, old, new):
                # A warmup may be longer than what the other version takes.
                config = replace_field(config, "model_warmup")
            versions = {old.version, new.version}
            try:
                self._show_and_load(name, serve_versions(config, versions), self._repository / name, versions)
            except ControlError as exc:
                if {int(number) for number in _FAILED_VERSION.findall(str(exc))} == {old.version} != {new.version}:
                    raise _refuse_beside(old, new, self._repository / name / str(old.version), str(exc)) from exc
                raise

    @contextlib.contextmanager
    def _candidate(self, new: Published) -> Iterator[str]:
        """Serve the new version under a name of its own for a moment."""
        name = new.name + CANDIDATE_SUFFIX
        try:
            # The answer must be the model's own, not one that was kept.
            config = rename(replace_field(new.configs[new.name], "response_cache"), name)
            self._show_and_load(name, config, self._repository / new.name, [new.version])
            yield name
        finally:
            with contextlib.suppress(ControlError):
                self._control.unload(name)
            self._overlay.hide(name)

    def _load(self, published: Published, names: list[str], versions: list[int]) -> None:
        for name in names:
            source = self._repository / name
            shown = versions if published.version else list_versions(source)
            self._show_and_load(name, published.configs[name], source, shown)

    def _show_and_load(self, name: str, config: str, source: Path, versions: Iterable[int]) -> None:
        with self._change(name):
            self._overlay.show(name, config, source, versions)
            self._order(name)

    def _finish(self, old: Published, new: Published) -> str:
        """Unload the old version once nothing is in flight on it; return why that cannot be, if so.

        The new version is served already, so what fails here only costs memory. Where tritonserver is no more, nothing
        stays loaded: the one after it loads what is shown to it, of each step the new version alone.
        """
        if not new.steps:
            return ""
        deadline = time.monotonic() + _FLIGHT_LIMIT_S
        while time.monotonic() < deadline and self._is_busy(old):
            time.sleep(_INTERVAL_S)
        orders = [partial(self._serve_alone, name, new, old) for name in new.steps]
        orders += [partial(self._drop, name) for name in old.steps if name not in new.configs]
        reasons = []
        for order in orders:
            try:
                order()
            except GoneError:
                continue
            except (OSError, ControlError) as exc:
                reasons.append(str(exc))
        return reasons[0] if reasons else ""

    def _drop(self, name: str) -> None:
        """Unload a step that only the version before had, and show it no more, whether that can be said or not."""
        try:
            self._control.unload(name)
        finally:
            self._overlay.hide(name)

    def _serve_alone(self, name: str, one: Published, other: Published) -> None:
        """Serve a model, or a step, from one of two published versions; what is loaded of that is left alone."""
        if one.version and name in other.configs and _is_alike(name, one, other):
            config = serve_versions(self._overlay.read_config(name), [one.version])
            self._show_and_load(name, config, self._repository / name, [one.version])
        else:
            self._load(one, [name], [one.version])

    def _is_busy(self, old: Published) -> bool:
        try:
            states = self._control.read_states()
        except GoneError:
            return False
        # It has no time to answer, as it may be for want of it that requests take so long.
        except ControlError:
            return True
        return any(
            state.name == old.name and state.version == str(old.version) and state.state in ("READY", "UNLOADING")
            for state in states
        )

    def _restore(self, old: Published, new: Published) -> None:
        # The ensemble first, while its steps still serve the old version besides the new one.
        for name in reversed([*new.configs]):
            with contextlib.suppress(OSError, ValueError, ControlError):
                if name in old.configs:
                    self._serve_alone(name, old, new)
                else:
                    self._control.unload(name)
                    self._overlay.hide(name)

    def _check(self, published: Published, name: str) -> None:
        """Ask for the verified answer of a version under the name that serves it.

        Raises:
            GoneError: Nobody is there to answer.
            OSError: It does not answer.
            ValueError: It answers otherwise.
        """
        if published.version:
            try:
                check_answer(
                    self._control.url,
                    self._repository,
                    published.name,
                    str(published.version),
                    served_as=name,
                    patience_s=JUDGING_PATIENCE_S,
                    watch=EndWatch(self._find_pid(), {name, *published.configs}, published.version),
                )
            except LostServerError as exc:
                raise GoneError(name, expected="an answer", got=f"the end of tritonserver ('{exc}')") from exc


def _is_alike(name: str, old: Published, new: Published) -> bool:
    """Tell whether two versions of a step have one configuration, but for their numbers."""
    return serve_versions(old.configs[name], [new.version]) == serve_versions(new.configs[name], [new.version])


def _joins_any_lengths(config: str) -> bool:
    """Tell whether a graph is given rows of any lengths one behind another."""
    return "allow_ragged_batch" in config


def _refuse_beside(old: Published, new: Published, folder: Path, got: str) -> RolloutError:
    return RolloutError(
        f"{new.title} cannot be loaded beside version {old.version}",
        expected=f"{folder} as it was when it was loaded",
        got=got,
        remedy=f"version {old.version} is served as before; bring its files back, or restart the server, which then "
        f"loads version {new.version} alone",
    )


def refuse_still(published: Published, model: str) -> RolloutError:
    """Return why a model is not served that tritonserver stood still over as it started.

    Args:
        published: The model.
        model: Name of the part of it that was being loaded.
    """
    return _refuse(published, describe_still_start(model), "it is not served")


def _find_freed(processes: int, left: Sequence[int]) -> Freed:
    """Return what surely comes free where what is left of a model is unloaded, of so many processes."""
    threads = count_threads_of(processes, len(left)) - _THREADS_LEFT
    return Freed(threads=max(0, threads), memory=int(_MEMORY_FREED * sum(left)))


def _refuse_room(model: str, error: ShortageError) -> NoRoomError:
    return NoRoomError(
        f"{model} cannot be loaded", expected="room for its processes", got=error.fault, remedy=error.remedy
    )


def _refuse(published: Published, exc: Exception, consequence: str) -> RolloutError:
    if published.version:
        expected, remedy = "it to load and to answer as verified", "activate another version or export it again"
    else:
        expected, remedy = "it to load", "mend its folder (the log tells more) or take it out of the repository"
    if isinstance(exc, ShortageError) or (isinstance(exc, OSError) and exc.errno):
        # What the system refused, such as a write to a full disk, is nobody's fault who published it.
        remedy = "mend that, and it is tried again"
    elif isinstance(exc, LostProcessError):
        remedy = "look for what ended it, such as a kernel that was short of memory"
    # Of what nobody has thought of, the kind says more than the words.
    is_told = isinstance(exc, (OSError, ValueError, ControlError, ShortageError))
    got = str(exc) if is_told else f"{type(exc).__name__}: {exc}"
    return RolloutError(
        f"{published.title} cannot be served", expected=expected, got=got, remedy=f"{consequence}, {remedy}"
    )
