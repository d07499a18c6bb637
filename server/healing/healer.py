"""Brings back what dies: a model whose backend process died or hangs, while its neighbours go on serving.

tritonserver 2.51 calls a model ready whose backend process is dead, and fails every request for it, for good.
"""

import contextlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import TypeAlias

from ..errors import ControlError, NoRoomError
from ..limits import frees_enough_threads
from ..status import Status
from ..tritonserver.control import Control
from .stubs import Limits, Stub, StubTable

# Deaths without one answered request in between, and deaths in all, after which a model is left alone for a while.
MAX_STREAK = 5
MAX_DEATHS = 100
MAX_DEATHS_WINDOW_S = 600.0

# So many looks in a row must find a process missing: instances come and go while a model is loaded.
_MISSING_LOOKS = 3

# Between two attempts to load a model: at first, and at most.
_FIRST_PAUSE_S = 0.25
_LAST_PAUSE_S = 60.0

# Where it has no room nothing is ordered, and to look for room costs nothing.
_ROOM_PAUSE_S = 2.0

# For so long at first, and at most: whoever sends what kills it is not to end it for good.
_FIRST_REST_S = 5.0
_LAST_REST_S = 300.0

# What tritonserver says where /dev/shm is full: what died leaves its part of it with tritonserver, see `_retire`.
_NO_SHARED_MEMORY = "Unable to initialize shared memory"

# What a replaced instance gets to answer what it still has, before it is taken for forgotten.
_RETIREMENT_S = 5.0
_RETIREMENT_LIMIT_S = 60.0

# The same where nothing of its model is loaded: nobody is answered until its memory is free.
_UNLOADED_S = 2.0


# Loads a model anew, of which processes of these versions ended; is told what to call once what is left is unloaded.
Reload: TypeAlias = Callable[[str, frozenset[str], Callable[[], None]], None]


class ModelHealer:
    """Watches the backend processes of one model and loads it anew when one of them is no more."""

    def __init__(
        self,
        model: str,
        control: Control,
        status: Status,
        say: Callable[[str], None],
        reload: Reload,
    ) -> None:
        self.model = model
        self._reload = reload
        # Whether it died too often, and is not loaded for a while.
        self.is_resting = False
        self._rests = 0
        # From the end of a process until the model is loaded anew; what is left of it may answer all the same.
        self.is_reviving = False
        # Whether nothing of it is loaded meanwhile, so that what its processes still have is all that they will have.
        self.is_unloaded = False
        # Why it could not be loaded anew when that was last tried; empty where it could.
        self.fault = ""
        # Whether it was not even ordered to be loaded for want of room.
        self.lacks_room = False
        # Whether it cannot be loaded for want of shared memory, and what those had of it that were replaced before, by
        # the moment of that.
        self.lacks_shared_memory = False
        self.replaced_regions: dict[str, float] = {}
        self._ended = False
        status.mark_given_up(model, False)
        self._control = control
        self._status = status
        self._say = say
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._streak = 0
        self._answers_at_start = 0
        self._expected = 0
        self._missing_looks = 0
        self._suspicion: tuple[int, frozenset[int]] | None = None
        self._worker: threading.Thread | None = None
        self._replaced: list[tuple[Stub, float]] = []

    def look(self, stubs: list[Stub]) -> None:
        """Find the dead and the hung among `stubs`, and start to bring the model back."""
        if self._worker and self._worker.is_alive():
            self._end_held_up(stubs)
            if self.is_unloaded:
                self._retire(_UNLOADED_S)
            return
        self._retire(_RETIREMENT_S)
        ends, versions = [], set()
        for stub in stubs:
            if stub.handled:
                continue
            if stub.has_ended_well:
                # tritonserver ended it, with its version or because another took its place. If not, it is missed below.
                pass
            elif stub.died_loading:
                # What it was started for fails, and is tried again or not by whoever asked for it.
                self._status.count_death(self.model, "died")
                self._say(f"{self.model}: {stub.describe()} {stub.describe_end()} while it loaded its model")
            elif stub.is_dead and stub.is_replaced_by(stubs):
                # It ended before its model was served, and what was loaded then is whole.
                self._status.count_death(self.model, "died")
                self._say(f"{self.model}: {stub.describe()} {stub.describe_end()}; another has taken its place")
            elif stub.is_dead:
                ends.append(f"{stub.describe()} {stub.describe_end()}")
                self._status.count_death(self.model, "died")
            elif hang := stub.find_hang():
                ends.append(f"{stub.describe()} {hang} and was ended")
                self._status.count_death(self.model, "hung")
                # Its requests fail at once instead of never.
                stub.kill()
            else:
                continue
            stub.handled = True
            versions.add(stub.version)
        living = [stub for stub in stubs if not stub.handled]
        if ends:
            self._start_worker(self._replace_in_worker, stubs, "; ".join(ends), frozenset(versions))
        elif len(living) < self._expected:
            self._missing_looks += 1
            if self._missing_looks >= _MISSING_LOOKS:
                self._missing_looks = 0
                self._start_worker(self._investigate, stubs, living)
        else:
            self._expected, self._missing_looks = len(living), 0
            if unknown := [stub for stub in living if stub.has_loaded and stub.limits is None]:
                # Not here: a tritonserver that hangs would hold up the look that is to find that out.
                self._start_worker(self._learn, unknown)

    def _end_held_up(self, stubs: list[Stub]) -> None:
        """End what does not go on while the model is loaded anew, which may be under way for long.

        Whoever asks what hangs of the old ones is to be refused, not to wait. For a new one that a signal has stopped
        tritonserver waits without end if that load fails.
        """
        for stub in stubs:
            if stub.is_dead:
                continue
            if stub.handled and stub.find_hang():
                stub.kill()
            elif stub.has_loaded and stub.is_stopped:
                told = "was stopped by a signal while a model was loaded, and was ended"
                self._say(f"{self.model}: {stub.describe()} {told}")
                stub.kill()
                stub.steady_since = time.monotonic()

    def _learn(self, stubs: list[Stub]) -> None:
        """Find out, if that can be done now, how many processes there should be, and how long their work may take.

        One that died before the first look is not counted by any look.
        """
        try:
            parameters = self._control.read_parameters(self.model)
            self._expected = max(self._expected, self._control.count_instances(self.model))
        except ControlError:
            return
        given = {}
        for limit in fields(Limits):
            text = parameters.get(f"modelyard_{limit.name}", "")
            with contextlib.suppress(ValueError):
                given[limit.name] = float(text)
            if text and not given.get(limit.name, 0) > 0:
                self._say(
                    f"warning: {self.model}: expected a positive number of seconds in the parameter "
                    f"modelyard_{limit.name}, got '{text}'; the default of {limit.default:g} is used."
                )
                given.pop(limit.name, None)
        for stub in stubs:
            stub.limits = Limits(**given)

    @property
    def processes(self) -> int:
        """How many there should be."""
        return self._expected

    def list_forgotten(self, *, dead: bool = False) -> list[str]:
        """Return the regions of what was replaced, or unloaded, long enough ago for tritonserver to let go of it.

        Args:
            dead: Those as well of a model of which no process is left.
        """
        # What was replaced just now is given back a moment later.
        until = time.monotonic() - _RETIREMENT_S
        replaced = dict(self.replaced_regions)
        if self.is_unloaded or (dead and all(stub.is_dead for stub, _ in self._replaced)):
            replaced |= {stub.region.name: since for stub, since in self._replaced}
        return [name for name, at in replaced.items() if at < until]

    def end(self) -> None:
        """Try nothing any more: the tritonserver of this model is no more."""
        self._ended = True

    def _investigate(self, stubs: list[Stub], living: list[Stub]) -> None:
        """Find out why there are fewer processes than there were: a death that was never seen, or another config.

        A process that dies before the first look at it leaves a nameless zombie.
        """
        try:
            expected = self._control.count_instances(self.model)
        except ControlError:
            return
        if len(living) >= expected:
            self._expected, self._suspicion = expected, None
            return
        # What was loaded since that look has processes it did not see: twice the same must be found.
        before, self._suspicion = self._suspicion, (expected, frozenset(stub.pid for stub in living))
        if self._suspicion != before:
            return
        self._suspicion = None
        self._status.count_death(self.model, "died")
        reason = f"{expected - len(living)} of {expected} instances died as they started"
        self._replace_in_worker(stubs, reason, frozenset())

    def _start_worker(self, target: Callable[..., None], *arguments: object) -> None:
        self._worker = threading.Thread(target=target, args=arguments, daemon=True)
        self._worker.start()

    def _replace_in_worker(self, stubs: list[Stub], reason: str, versions: frozenset[str]) -> None:
        now = time.monotonic()
        self._deaths.append(now)
        # Instances are replaced together, so what dies of the old ones from here on is not a new death.
        for stub in stubs:
            stub.handled = True
        known = {stub for stub, _ in self._replaced}
        self._replaced += [(stub, now) for stub in stubs if stub not in known]
        self._revive(reason, versions)

    def _revive(self, reason: str, versions: frozenset[str]) -> None:
        """Load the model anew, however often that takes: what it lacks, a file perhaps, or room, may come back.

        Args:
            reason: What happened.
            versions: Of those that ended; empty where that is not known.
        """
        start, self.is_reviving = time.monotonic(), True
        self._say(f"{self.model}: {reason}; loading it anew")
        is_counted, pause_s = False, _FIRST_PAUSE_S
        while not self._ended:
            try:
                if not is_counted:
                    answers = self._control.count_answers(self.model)
                    has_answered = answers > self._answers_at_start
                    self._streak = 1 if has_answered else self._streak + 1
                    self._rests = 0 if has_answered else self._rests
                    is_counted = True
                    if self._dies_too_often():
                        self._rest()
                self._reload(self.model, versions, self._note_unloaded)
                # Loading resets the statistics, and the warmup's answers are counted in them.
                self._answers_at_start = self._control.count_answers(self.model)
            except ControlError as exc:
                if not is_counted and self._is_gone():
                    self.is_reviving, self.fault = False, ""
                    self._say(f"{self.model}: it has been unloaded meanwhile, and is not loaded anew")
                    return
                self._tell_failure(exc)
                self._pause(min(pause_s, _ROOM_PAUSE_S) if self.lacks_room else pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
                continue
            if self.is_resting:
                self._status.mark_given_up(self.model, False)
            self.is_reviving = self.is_resting = self.is_unloaded = False
            self.lacks_shared_memory = self.lacks_room = False
            self.fault = ""
            now = time.monotonic()
            self.replaced_regions = {stub.region.name: now for stub, _ in self._replaced} | self.replaced_regions
            self._status.count_revival(self.model)
            self._say(f"{self.model}: answers again, {time.monotonic() - start:.1f} s after its end was found")
            return

    def _is_gone(self) -> bool:
        """Tell whether tritonserver has let go of the model, as somebody has told it to."""
        try:
            states = {state.state for state in self._control.read_states() if state.name == self.model}
        except ControlError:
            return False
        return bool(states) and states <= {"UNLOADING", "UNAVAILABLE"}

    def _tell_failure(self, exc: ControlError) -> None:
        """Tell why it cannot be loaded anew, once for each reason."""
        lacked_room, self.lacks_room = self.lacks_room, isinstance(exc, NoRoomError)
        self.lacks_shared_memory = _NO_SHARED_MEMORY in str(exc)
        if self._ended or str(exc) == self.fault:
            return
        self.fault = str(exc)
        # How much room there is is another number every time.
        if not (lacked_room and self.lacks_room):
            pace = f"every {_ROOM_PAUSE_S:g} s" if self.lacks_room else "ever more rarely"
            self._say(f"{self.model}: cannot be loaded anew, and is tried again {pace}: {self.fault}")

    def _note_unloaded(self) -> None:
        self.is_unloaded = True

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._ended and time.monotonic() < end:
            time.sleep(min(0.25, seconds))

    def _dies_too_often(self) -> bool:
        recent = [moment for moment in self._deaths if time.monotonic() - moment < MAX_DEATHS_WINDOW_S]
        return self._streak > MAX_STREAK or len(recent) >= MAX_DEATHS

    def _rest(self) -> None:
        """Leave it unloaded for a while, longer each time until it answers: to load it takes its neighbours' time."""
        rest_s = min(_FIRST_REST_S * 2**self._rests, _LAST_REST_S)
        self._rests += 1
        self.is_resting, self.fault = True, f"{self.model} died {len(self._deaths)} times, and is tried again later"
        self._status.mark_given_up(self.model, True)
        self._say(
            f"ERROR: {self.model} is unloaded for {rest_s:g} s: expected it to stay alive, got {len(self._deaths)} "
            f"deaths, {self._streak} of them in a row without an answer; look for the cause above."
        )
        try:
            self._control.unload(self.model)
        except ControlError as exc:
            self._say(f"{self.model}: cannot be unloaded either: {exc}")
        else:
            self._note_unloaded()
        self._pause(rest_s)

    def _retire(self, after_s: float) -> None:
        """End the instances that tritonserver replaced and then forgot.

        2.51 never releases a model of which one request failed for a dead process, and keeps its other processes, and
        the shared memory of all of them until it ends itself.

        Args:
            after_s: How long after its model's process had died each of them is taken for forgotten if it is idle.
        """
        now = time.monotonic()
        for stub, since in self._replaced:
            age = now - since
            if (age > after_s and stub.is_idle) or age > _RETIREMENT_LIMIT_S:
                stub.kill()
        self._replaced = [(stub, since) for stub, since in self._replaced if now - since <= _RETIREMENT_LIMIT_S]


class Healer:
    """Watches all backend processes of one tritonserver."""

    def __init__(
        self,
        tritonserver_pid: int,
        control: Control,
        status: Status,
        say: Callable[[str], None],
        reload: Reload,
    ) -> None:
        self.table = StubTable(tritonserver_pid)
        self._say = say
        self._make = partial(ModelHealer, control=control, status=status, say=say, reload=reload)
        self._models: dict[str, ModelHealer] = {}
        # Names of models of which nothing answers.
        self.down: set[str] = set()
        self._crowded_look = 0.0
        # How many threads it had with its processes when each of these was there.
        self._threads_when_whole = math.inf

    def look(self, models: Iterable[str]) -> None:
        """Look at every process once, and start to bring back what needs it.

        Args:
            models: Names of those that should run now.
        """
        wanted = [*models]
        for name, healer in self._models.items():
            if name not in wanted:
                healer.end()
        self._models = {model: self._models.get(model) or self._make(model) for model in wanted}
        stubs = self.table.refresh()
        # Whatever order is under way: it waits for what is stopped.
        for told in self.table.end_stopped_loads():
            self._say(told)
        self.table.end_lost_waits()
        for name, healer in self._models.items():
            healer.look([stub for stub in stubs if stub.model == name])
        there = Counter(stub.model for stub in stubs if stub.has_loaded and not stub.handled)
        if there and all(healer.processes <= there[name] for name, healer in self._models.items()):
            self._threads_when_whole = self.table.count_threads()
        # Of a model that is loaded anew: what was there before may answer, what is new does not yet, and may fail.
        left = {stub.model for stub in stubs if stub.handled and not stub.is_dead}
        self.down = {
            name
            for name, healer in self._models.items()
            if healer.is_resting or (healer.is_reviving and (healer.is_unloaded or name not in left))
        }

    @property
    def faults(self) -> dict[str, str]:
        """Model → why it could not be loaded anew."""
        return {name: healer.fault for name, healer in self._models.items() if healer.fault}

    def find_exhaustion(self) -> str:
        """Return why this tritonserver cannot be healed any more, or nothing: what the dead held is used up.

        Where others have taken the memory, its end would give nothing back, and its other models answer.
        """
        lacking = [name for name, healer in self._models.items() if healer.lacks_shared_memory]
        if lacking and (kept := self._count_kept()):
            return (
                f"keeps the shared memory of backend processes that were replaced, {kept} of them, and has none left "
                f"to load {lacking[0]} with"
            )
        # To count threads takes a look at every process.
        crowded = [name for name in self.down if name in self._models and self._models[name].lacks_room]
        if not crowded or time.monotonic() < self._crowded_look:
            return ""
        self._crowded_look = time.monotonic() + _ROOM_PAUSE_S
        held, kept = self.table.count_threads(), self._count_kept(dead=True)
        for name in crowded if kept else ():
            if frees_enough_threads(kept, self._models[name].processes, held, self._threads_when_whole):
                return (
                    f"keeps threads of backend processes that were replaced, {kept} of them, and leaves too few to "
                    f"load {name} with"
                )
        return ""

    def _count_kept(self, *, dead: bool = False) -> int:
        """Return of how many replaced processes, or dead ones, tritonserver keeps what it had for them."""
        names = [name for each in self._models.values() for name in each.list_forgotten(dead=dead)]
        return self.table.count_regions(names)

    def rest(self) -> None:
        """Try nothing any more."""
        for healer in self._models.values():
            healer.end()

    def end(self) -> None:
        """Clear away what a dead tritonserver left, and try nothing any more."""
        self.rest()
        self.table.clear_away()
