"""Keeps one tritonserver serving: starts it, watches it and its backend processes, and ends it."""

import time
from collections.abc import Callable, Iterator

from .announcement import announce
from .draining import Retirement, drain
from .errors import AbortedStartError, ControlError, GaveUpError, ShortageError, StartError, fold
from .following import wishes
from .following.failures import FIRST_RETRY_S, LOST_RETRY_S
from .following.follower import Follower
from .following.overlay import Overlay
from .following.published import Published
from .following.rollout import Roller
from .following.sums import FileSums
from .following.verdicts import FAILED, judge_models, render_verdicts
from .limits import describe_few_threads
from .log import Log
from .run import Run
from .shortage import ShortageNotice
from .starting import Start
from .status import Lapse, Status
from .tritonserver.control import Control
from .tritonserver.process import EXIT_TIMEOUT_S
from .tritonserver.settings import Settings
from .watching import INTERVAL_S, Watch

# Between attempts to start one for which this machine has nothing left: at first, and at most.
_SHORTAGE_PAUSE_S = 0.5
_MAX_SHORTAGE_PAUSE_S = 10.0

# Starts in a row that never came to an answer, after which it is given up; and after which the models are loaded one
# after another, so that one that tritonserver does not survive is found and the others are served.
MAX_FAILED_STARTS = 5
_STARTS_TOGETHER = 2


class Supervisor:
    """One tritonserver after another, of which each serves until it dies.

    Args:
        settings: What to serve, and how.
        status: Where to count what happens.
        stops: Tells how often we were asked to stop.
        log: Where to tell of it.

    Raises:
        ShortageError: The first cannot even be started.
    """

    def __init__(self, settings: Settings, status: Status, stops: Callable[[], int], log: Log) -> None:
        self._settings = settings
        self._status = status
        self._stops = stops
        self._log = log
        self._say = log.say
        self._notice = ShortageNotice(log.say)
        encrypted = any(word.startswith("--grpc-use-s") for word in settings.passed_options)
        grpc_address = None if encrypted else settings.endpoints.grpc_address
        self._control = Control(settings.endpoints.http_url, settings.key, grpc_address)
        overlay = Overlay(settings.overlay)
        sums = FileSums()
        backend = settings.backends / "python"
        self._roller = Roller(settings.repository, overlay, self._control, backend, sums, lambda: self._run.server.pid)
        # Whether some that it could not start with are loaded later, one after another.
        self._loads_each = False
        self._follower = Follower(settings.repository, self._roller, sums, status.follow, log.say, settings.variant)
        self._follower.start()
        self._launch()

    def run(self) -> bool:
        """Serve until we are asked to stop; return whether everything in flight was answered then.

        Raises:
            StartError: It cannot start, or no model can be served.
            GaveUpError: It died again and again.
        """
        try:
            if self._begin():
                self._report_models()
                self._status.ready = True
                self._say(announce(self._settings.endpoints, self._settings.repository, self._follower.published))
            while not self._stops():
                self._look()
                time.sleep(INTERVAL_S)
            return self._stop()
        finally:
            self._run.end()

    def _launch(self) -> None:
        """Start a tritonserver.

        Raises:
            ShortageError: This machine has not what it takes.
        """
        shown = self._follower.published
        configs = [text for published in self._follower.known for text in published.configs.values()]
        if few := describe_few_threads(wishes.count_processes(configs)):
            self._say(f"warning: {few}")
        passed = self._settings.passed_options
        options = wishes.list_options(configs, self._settings.caches, passed)
        self._roller.begin(shown, limits_rate=wishes.has_option([*options, *passed], "rate-limit"))
        self._run = Run(
            self._settings,
            self._follower.models,
            options,
            control=self._control,
            status=self._status,
            log=self._log,
            revive=self._roller.revive,
        )
        self._watch = Watch(self._run, self._status, self._say)

    def _begin(self) -> bool:
        """Wait for the first word of the first; return False if we are asked to stop before.

        Raises:
            StartError: It ended instead.
            GaveUpError: It was killed or stood still, and so did several others.
        """
        try:
            return self._wait_until_live()
        except AbortedStartError as exc:
            self._say(str(exc))
            self._restart("did not start")
            return not self._stops()

    def _wait_until_live(self) -> bool:
        return Start(self._run, self._settings, self._notice, self._say).wait(self._stops)

    def _look(self) -> None:
        """Look once at everything, and do what is to be done about it.

        Raises:
            GaveUpError: None of several tritonservers would start.
        """
        with self._notice.of_shortage():
            if reason := self._watch.find_end() or self._roller.hang:
                self._restart(reason)
            if not self._run.is_version_known and not self._run.pulse.owes_answer:
                self._run.learn_version()
            self._follower.look(follows=self._settings.follows)
            self._status.tell_waiting(self._follower.waiting)
            healer = self._run.healer
            self._status.expect(self._follower.models)
            healer.look(self._follower.models)
            self._run.absences.look(self._list_left_alone())
            self._count_models()

    def _list_left_alone(self) -> Iterator[str]:
        """Yield the names of models, and of their steps, whose absence somebody else must have brought about.

        What is brought back, or changed, by us is told of as that, and takes with it what it is a step of.
        """
        ours = self._run.healer.down | self._follower.changing
        for published in self._follower.published:
            if ours.isdisjoint(published.configs):
                yield from published.configs

    def _count_models(self) -> None:
        """Tell the status how many models answer: all parts of each, as far as anything is known of them."""
        published = self._follower.published
        found = {item.name: self._find_lapse(item) for item in published}
        lapses = {name: lapse for name, lapse in found.items() if lapse}
        lost = sum(not lapse.answers for lapse in lapses.values())
        self._status.count_models(len(published) - lost, self._follower.wanted)
        self._status.tell_lapses(lapses)

    def _find_lapse(self, published: Published) -> Lapse | None:
        """Return what is lost of a model; None where all of it is there."""
        down, faults, absences = self._run.healer.down, self._run.healer.faults, self._run.absences.found
        parts = [*published.configs]
        lost = next((absences[name] for name in parts if name in absences), None)
        if reason := next((faults[name] for name in parts if name in faults), ""):
            return Lapse(reason=reason, answers=not lost and down.isdisjoint(parts))
        if not down.isdisjoint(parts):
            return Lapse(reason="", answers=False)
        return Lapse(reason=lost.reason, answers=False, seen_at=lost.seen_at) if lost else None

    def _restart(self, reason: str) -> None:
        """Start a new tritonserver in place of the one that `reason` tells of.

        Raises:
            GaveUpError: None of several would start.
        """
        start = time.monotonic()
        self._status.ready = False
        how, is_crash = reason, self._watch.has_crashed
        for attempt in range(MAX_FAILED_STARTS):
            self._say(f"tritonserver {reason}; starting it anew")
            self._run.end()
            # A rollout fails with the tritonserver that it was about, and leaves shown what was served before.
            self._follower.wait()
            self._follower.tell_end(how, is_crash=is_crash)
            self._follower.leave_out_damaged()
            self._leave_out_still()
            if attempt == _STARTS_TOGETHER:
                self._say("loading one model after another, to find the one that tritonserver does not survive")
                self._loads_each = True
                self._follower.try_each(f"tritonserver {reason} with all models")
            self._status.count_restart()
            self._launch_when_possible()
            try:
                if not self._wait_until_live():
                    return
            except StartError as exc:
                self._say(str(exc))
                reason = "did not start"
                time.sleep(0.25 * 2**attempt)
                continue
            # Files may have become others while they were loaded, and it answers from these.
            self._follower.leave_out_touched()
            self._doubt_what_is_missing()
            self._count_models()
            self._status.ready = True
            self._say(f"tritonserver answers again, {time.monotonic() - start:.1f} s after its end was found")
            return
        raise GaveUpError(
            "tritonserver was given up",
            expected="it to start",
            got=f"{MAX_FAILED_STARTS} failures in a row",
            remedy="see its log above",
        )

    def _leave_out_still(self) -> None:
        """Start without what the tritonserver before stood still over; it is tried again, after the others."""
        if self._run.standing_still:
            self._loads_each = True
            self._follower.leave_out_still(self._run.standing_still)

    def _launch_when_possible(self) -> None:
        """Start a tritonserver, after however many attempts this machine has what it takes, or we are asked to stop."""
        pause_s = _SHORTAGE_PAUSE_S
        while not self._stops():
            try:
                self._launch()
                return
            except ShortageError as exc:
                self._say(f"{exc} Trying again in {pause_s:g} s.")
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _MAX_SHORTAGE_PAUSE_S)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stops() and time.monotonic() < end:
            time.sleep(INTERVAL_S)

    def _report_models(self) -> None:
        """Say of every model whether it answers.

        Raises:
            StartError: None does.
        """
        is_any_touched = self._follower.leave_out_touched()
        verdicts = judge_models(self._settings, self._control, self._follower.published, self._run.server.pid)
        for line in render_verdicts(verdicts):
            self._say(line)
        self._roller.measure(self._follower.models)
        public = {item.name for item in self._follower.published}
        does_any_answer = any(verdict.answers and verdict.model in public for verdict in verdicts)
        lost = {verdict.model for verdict in verdicts if verdict.was_lost}
        is_any_tried_again = is_any_touched or self._loads_each or self._run.has_ended_loads or bool(lost)
        known = ", ".join(item.name for item in self._follower.known)
        if not (does_any_answer or is_any_tried_again):
            raise StartError(
                f"no model of {self._settings.repository} can be served",
                expected=f"at least one of {known} to load" if known else "a model that clients can ask",
                got="none",
                remedy="see the log above",
            )
        answering = {verdict.model for verdict in verdicts if verdict.answers}
        failed = {verdict.model: verdict.text for verdict in verdicts if verdict.model not in answering}
        for published in self._follower.published:
            if reasons := [failed[name] for name in published.configs if name in failed]:
                delay_s = FIRST_RETRY_S if lost.isdisjoint(published.configs) else LOST_RETRY_S
                self._follower.doubt(published.name, reasons[0].removeprefix(FAILED), delay_s=delay_s)
        self._count_models()

    def _doubt_what_is_missing(self) -> None:
        """Have tried again what a tritonserver that was started anew could not load: a file or room may come back."""
        try:
            states = self._control.read_states()
        except ControlError as exc:
            self._say(f"warning: what was loaded is not known, and is tried again: {exc}")
            # To load what is loaded already does nothing.
            for published in self._follower.published:
                self._follower.doubt(published.name, f"whether it was loaded is not known: {exc}")
            return
        ready = {state.name for state in states if state.ready}
        reasons = {state.name: fold(state.reason) for state in states if state.reason}
        for published in self._follower.published:
            if missing := [name for name in published.configs if name not in ready]:
                reason = next((reasons[name] for name in missing if name in reasons), f"{missing[0]} is not loaded")
                self._say(f"{published.name}: cannot be loaded, and is tried again: {reason}")
                self._follower.doubt(published.name, reason)

    def _stop(self) -> bool:
        if not self._status.is_welcoming:
            return True
        asked = self._stops()
        self._status.ready = False
        run = self._run
        # One that is stopped by a signal could neither be asked nor end.
        run.server.resume()
        self._say(f"stopping: answering what is in flight, {EXIT_TIMEOUT_S} s at most; once more to stop at once")
        self._follower.end()
        run.healer.rest()
        run.pulse.end()
        public = [item.name for item in self._follower.published]
        is_let_in = run.pulse.lets_callers_in
        all_stubs = is_let_in and run.is_all_in_stubs()
        retirement = Retirement(self._settings.endpoints, self._settings.key, public, is_let_in=is_let_in)
        return drain(
            run.server,
            self._settings.endpoints,
            run.healer.table,
            retirement,
            all_stubs=all_stubs,
            hurry=lambda: self._stops() > asked,
        )
