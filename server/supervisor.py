"""Keeps one tritonserver serving: starts it, watches it and its backend processes, and ends it."""

import contextlib
import time
from collections.abc import Callable

from .draining import Retirement, drain
from .endpoints import Endpoints
from .errors import AbortedStartError, ControlError, GaveUpError, ShortageError, StartError
from .following import wishes
from .following.follower import Follower
from .following.model_text import read_inputs
from .following.overlay import Overlay
from .following.published import Published
from .following.rollout import Roller
from .following.verdicts import FAILED, judge_models, render_verdicts
from .healing.absence import Absences
from .healing.healer import Healer
from .healing.work_queue import KNOWN_VERSIONS
from .limits import describe_open_files
from .locations import name_command
from .log import Log
from .shortage import is_shortage
from .status import Status
from .tritonserver.control import Control
from .tritonserver.control_key import hide_key
from .tritonserver.environment_folders import remove_environment_folders
from .tritonserver.process import EXIT_TIMEOUT_S, TritonServer
from .tritonserver.processes import end_children, list_children, read_stat, wants_core
from .tritonserver.pulse import Pulse
from .tritonserver.settings import Settings
from .tritonserver.stillness import STILL_LOOKS, Stillness

# Dead and hung processes are looked for this often.
_INTERVAL_S = 0.1

# A tritonserver that is stopped by a signal for this long is started anew.
_STOPPED_S = 1.0

# One that computes and does not say that it is alive is busy: sixteen bodies that inflate to 120 MB each keep all of
# its threads for ten seconds and more. Only after much longer it is taken for one that runs in circles.
_BUSY_S = 10.0
_SILENT_S = 120.0

# One that does not say so and of which no thread used or wanted a core in so many looks in a row waits for itself.
_IDLE_LOOKS = 12

# One that loads models is looked at this often, to see whether it does.
_LOADING_LOOK_S = 1.0

# Between attempts to start one for which this machine has nothing left: at first, and at most.
_SHORTAGE_PAUSE_S = 0.5
_MAX_SHORTAGE_PAUSE_S = 10.0

# What `infer` is asked with, by the input that a model has.
_QUESTIONS = {"TEXT": '--text "Hello"', "text_input": '--prompt "Once upon a time"', "IMAGE": "--image photo.jpg"}

# Starts in a row that never came to an answer, after which it is given up.
MAX_FAILED_STARTS = 5


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
        encrypted = any(word.startswith("--grpc-use-s") for word in settings.passed_options)
        grpc_address = None if encrypted else settings.endpoints.grpc_address
        self._control = Control(settings.endpoints.http_url, settings.key, grpc_address)
        self._shortage = ""
        overlay = Overlay(settings.overlay)
        self._roller = Roller(settings.repository, overlay, self._control, settings.backends / "python")
        self._follower = Follower(settings.repository, self._roller, status.follow, log.say, settings.variant)
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
                self._say(_describe(self._settings.endpoints, self._follower.published))
            while not self._stops():
                self._watch()
                time.sleep(_INTERVAL_S)
            return self._stop()
        finally:
            self._end()

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

    def _watch(self) -> None:
        """Look once at everything, and do what is to be done about it.

        Raises:
            GaveUpError: None of several tritonservers would start.
        """
        try:
            if reason := self._find_end():
                self._restart(reason)
            if not self._is_version_known and not self._pulse.owes_answer:
                self._learn_version()
            self._follower.look(follows=self._settings.follows)
            self._healer.look(self._follower.models)
            # What was given up was said of louder.
            self._absences.look(name for name in self._follower.models if name not in self._healer.down)
            self._count_models()
        except (OSError, MemoryError, RuntimeError) as exc:
            if not is_shortage(exc):
                raise
            self._tell_shortage(str(exc))
        else:
            self._tell_shortage("")

    def _count_models(self) -> None:
        """Tell the status how many models answer: all parts of each, as far as anything is known of them."""
        away = self._healer.down | self._absences.names
        served = [item for item in self._follower.published if not away & item.configs.keys()]
        self._status.count_models(len(served), self._follower.wanted)

    def _tell_shortage(self, shortage: str) -> None:
        """Say once that we cannot look, for want of what, and once that we can again."""
        if shortage and not self._shortage:
            self._say(f"warning: cannot look after tritonserver for now: {shortage}; what serves goes on serving")
        elif self._shortage and not shortage:
            self._say("can look after tritonserver again")
        self._shortage = shortage

    def _launch(self) -> None:
        """Start a tritonserver.

        Raises:
            ShortageError: This machine has not what it takes.
        """
        shown = self._follower.published
        configs = [text for published in shown for text in published.configs.values()]
        passed = self._settings.passed_options
        options = wishes.list_options(configs, self._settings.caches, passed)
        self._roller.begin(shown, limits_rate=wishes.has_option([*options, *passed], "rate-limit"))
        launched_at = time.time()
        server = TritonServer(self._settings, self._follower.models, options, self._log)
        try:
            pulse = Pulse(self._settings.endpoints.http_url)
        except RuntimeError as exc:
            server.kill()
            raise ShortageError("tritonserver cannot be watched", expected="a thread for it", got=f"'{exc}'") from exc
        self._server, self._pulse, self._launched_at = server, pulse, launched_at
        self._healer = Healer(server.pid, self._control, self._status, self._say, self._roller.revive)
        self._absences = Absences(self._control, self._say)
        self._cpu_ticks, self._idle_looks, self._is_busy = -1, 0, False
        self._is_key_hidden = self._is_version_known = False
        self._status.refuse_callers("")

    def _end(self) -> None:
        """Leave nothing of this tritonserver behind."""
        self._pulse.end()
        # Its processes first: they notice its end late, and hold its log open until then.
        self._healer.end()
        self._server.kill()
        # What cannot be looked at for want of something is left for the next end.
        with contextlib.suppress(OSError, MemoryError):
            remove_environment_folders(self._launched_at)

    def _wait_until_live(self) -> bool:
        """Wait for its first word; return False if we are asked to stop before.

        Raises:
            AbortedStartError: It was killed, or does nothing any more.
            StartError: It ended instead.
        """
        start = told = looked = time.monotonic()
        stillness = Stillness(self._server.pid)
        while not self._stops():
            try:
                if self._look_at_start():
                    return True
            except (OSError, MemoryError) as exc:
                # It may have started all the same; that is found out once it can be looked at.
                if not is_shortage(exc):
                    raise
                self._tell_shortage(str(exc))
            else:
                self._tell_shortage("")
            if time.monotonic() - looked > _LOADING_LOOK_S:
                looked = time.monotonic()
                self._look_for_stillness(stillness)
            if time.monotonic() - told > 5:
                told = time.monotonic()
                self._say(f"loading models, {told - start:.0f} s")
            time.sleep(0.05)
        return False

    def _look_at_start(self) -> bool:
        """Look once at one that starts; return whether it has started.

        Raises:
            AbortedStartError: It was killed.
            StartError: It ended instead.
            OSError: This process has no descriptor left to look with.
        """
        live = self._pulse.has_answered
        # It has parsed its arguments by the time it starts the first backend process.
        if not self._is_key_hidden and (live or list_children(self._server.pid)):
            if not hide_key(self._settings.key, self._server.pid):
                self._say("warning: the control key stands in the process list; see docs/threat_model.md")
            self._is_key_hidden = True
        if live:
            self._learn_version()
            self._learn_processes()
            return True
        self._end_lost_loads()
        if self._is_stopped():
            self._server.kill()
        code = self._server.poll()
        if code is not None:
            # Under load it aborts now and then, for an exception between it and a process that it starts.
            raise (AbortedStartError if code < 0 else StartError)(
                "tritonserver could not start",
                expected=f"it to listen on {self._settings.endpoints.http_url}",
                got=f"signal {-code}" if code < 0 else f"exit code {code}",
                remedy="see its log above",
            )
        return False

    def _look_for_stillness(self, stillness: Stillness) -> None:
        """See that it gets on with loading.

        Raises:
            AbortedStartError: It does not.
        """
        try:
            stillness.look()
        except (OSError, MemoryError) as exc:
            # That we cannot look is not that it stands still.
            if not is_shortage(exc):
                raise
        if stillness.is_over:
            # A process that is stopped does not notice the end of its parent.
            end_children(self._server.pid)
            raise AbortedStartError(
                "tritonserver stands still while it loads models",
                expected="one of its processes to compute or to read",
                got=f"nothing done in {STILL_LOOKS} looks",
            )

    def _learn_version(self) -> None:
        """Find out what can be told of this tritonserver's backend processes."""
        try:
            version = self._control.read_version()
        except ControlError as exc:
            # Nobody reads what may lie elsewhere.
            if self._healer.table.reads_queues:
                self._say(
                    f"warning: backend processes that hang are not found until tritonserver tells which it is: {exc}"
                )
            self._healer.table.reads_queues = False
            return
        self._is_version_known = True
        self._healer.table.reads_queues = version in KNOWN_VERSIONS
        if version not in KNOWN_VERSIONS:
            self._say(
                f"warning: dead and stopped backend processes are found, those that hang are not: expected "
                f"tritonserver {', '.join(KNOWN_VERSIONS)}, got {version}"
            )

    def _learn_processes(self) -> None:
        """See every backend process once: one that dies before it was ever seen leaves a zombie without a name."""
        with contextlib.suppress(OSError):
            self._healer.table.refresh()

    def _end_lost_loads(self) -> None:
        """Have it start without a model whose process died as it loaded."""
        with contextlib.suppress(OSError):
            self._healer.table.refresh()
            self._healer.table.end_lost_loads()

    def _find_end(self) -> str | None:
        """Return why this tritonserver serves no more, or None."""
        code = self._server.poll()
        if code is not None:
            return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if crash := self._server.find_crash():
            return f"crashed with signal {crash} and did not end"
        if self._pulse.silent_for_s > _STOPPED_S and self._is_stopped():
            return "was stopped by a signal"
        if self._is_stuck():
            return f"neither answered nor computed for {_IDLE_LOOKS * _INTERVAL_S:g} s"
        silent_for_s = self._pulse.silent_for_s
        if silent_for_s > _SILENT_S:
            return f"gave no sign of life for {_SILENT_S:g} s"
        if exhaustion := self._healer.find_exhaustion():
            return exhaustion
        self._tell_busy(silent_for_s)
        self._tell_refusal()
        return None

    def _is_stopped(self) -> bool:
        stat = read_stat(self._server.pid)
        return stat is not None and stat.state == "T"

    def _tell_busy(self, silent_for_s: float) -> None:
        """Say when it has no thread left to answer, for what it is at, and when it has again."""
        if not self._is_busy and silent_for_s > _BUSY_S:
            self._is_busy = True
            self._status.ready = False
            self._say(f"warning: tritonserver computes and has not answered for {_BUSY_S:g} s; it is left to finish")
        elif self._is_busy and not silent_for_s:
            self._is_busy = False
            self._status.ready = True
            self._say("tritonserver answers again")

    def _tell_refusal(self) -> None:
        """Say when it lets nobody new in, and when it does again. Who is connected is answered: it is left alone."""
        if self._pulse.lets_callers_in == self._status.lets_callers_in:
            return
        if self._pulse.lets_callers_in:
            self._status.refuse_callers("")
            self._say("tritonserver lets new callers in again")
            return
        reason = (
            f"tritonserver lets no new caller in: expected an answer on a new connection, got none, with "
            f"{describe_open_files(self._server.pid)}; close idle connections, bound them in a proxy, or raise the "
            f"limit (ulimit -Hn)"
        )
        self._status.refuse_callers(reason)
        self._say(f"warning: {reason}; who is connected is answered, and nothing is restarted")

    def _is_stuck(self) -> bool:
        """Tell whether it owes an answer and does nothing about it, look after look.

        Looks are counted, not seconds: while the whole machine sleeps, we look at nothing either.
        """
        stat = read_stat(self._server.pid)
        before, self._cpu_ticks = self._cpu_ticks, stat.cpu_ticks if stat else -1
        waits = self._pulse.owes_answer and self._cpu_ticks == before and not wants_core(self._server.pid)
        self._idle_looks = self._idle_looks + 1 if waits else 0
        return self._idle_looks >= _IDLE_LOOKS

    def _restart(self, reason: str) -> None:
        """Start a new tritonserver in place of the one that `reason` tells of.

        Raises:
            GaveUpError: None of several would start.
        """
        start = time.monotonic()
        self._status.ready = False
        for attempt in range(MAX_FAILED_STARTS):
            self._say(f"tritonserver {reason}; starting it anew")
            self._end()
            # A rollout fails with the tritonserver that it was about, and leaves shown what was served before.
            self._follower.wait()
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
        reasons = {state.name: " ".join(state.reason.split()) for state in states if state.reason}
        for published in self._follower.published:
            if missing := [name for name in published.configs if name not in ready]:
                reason = next((reasons[name] for name in missing if name in reasons), f"{missing[0]} is not loaded")
                self._say(f"{published.name}: cannot be loaded, and is tried again: {reason}")
                self._follower.doubt(published.name, reason)

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
            time.sleep(_INTERVAL_S)

    def _stop(self) -> bool:
        if not self._status.is_welcoming:
            return True
        asked = self._stops()
        self._status.ready = False
        # One that is stopped by a signal could neither be asked nor end.
        self._server.resume()
        self._say(f"stopping: answering what is in flight, {EXIT_TIMEOUT_S} s at most; once more to stop at once")
        self._follower.end()
        self._pulse.end()
        public = [item.name for item in self._follower.published]
        is_let_in = self._pulse.lets_callers_in
        all_stubs = is_let_in and self._runs_in_stubs()
        retirement = Retirement(self._settings.endpoints, self._settings.key, public, is_let_in=is_let_in)
        return drain(
            self._server,
            self._settings.endpoints,
            self._healer.table,
            retirement,
            all_stubs=all_stubs,
            hurry=lambda: self._stops() > asked,
        )

    def _report_models(self) -> None:
        """Say of every model whether it answers.

        Raises:
            StartError: None does.
        """
        verdicts = judge_models(self._settings, self._control, self._follower.models)
        for line in render_verdicts(verdicts):
            self._say(line)
        public = {item.name for item in self._follower.published}
        if not any(verdict.answers and verdict.model in public for verdict in verdicts):
            raise StartError(
                f"no model of {self._settings.repository} can be served",
                expected=f"at least one of {', '.join(self._follower.models)} to load",
                got="none",
                remedy="see the log above",
            )
        answering = {verdict.model for verdict in verdicts if verdict.answers}
        failed = {verdict.model: verdict.text for verdict in verdicts if verdict.model not in answering}
        for published in self._follower.published:
            if reasons := [failed[name] for name in published.configs if name in failed]:
                self._follower.doubt(published.name, reasons[0].removeprefix(FAILED))
        self._count_models()

    def _runs_in_stubs(self) -> bool:
        """Tell whether every model that is loaded runs in backend processes, of which we can tell what they are at."""
        try:
            in_stubs = {stub.model for stub in self._healer.table.refresh()}
            ready = {state.name for state in self._control.read_states() if state.ready}
            return all(name in in_stubs or self._control.is_ensemble(name) for name in ready)
        except (OSError, ControlError):
            return False


def _describe(endpoints: Endpoints, models: list[Published]) -> str:
    return (
        f"serving HTTP on {endpoints.host}:{endpoints.http_port}, gRPC on {endpoints.host}:{endpoints.grpc_port}, "
        f"metrics on {endpoints.host}:{endpoints.metrics_port}, status on {endpoints.host}:{endpoints.status_port}\n"
        f"Next: {_name_next(endpoints, models)}    (Ctrl-C here stops the server)"
    )


def _name_next(endpoints: Endpoints, models: list[Published]) -> str:
    """Return a command that asks one of the models; one of tensors has nothing that could be typed."""
    for model in models:
        for input_name, question in _QUESTIONS.items():
            if input_name in read_inputs(model.configs[model.name]):
                named = f" --model {model.name}" if len(models) > 1 else ""
                return f"{name_command('infer')} --url localhost:{endpoints.http_port}{named} {question}"
    return name_command("check")
