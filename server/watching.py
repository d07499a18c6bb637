"""Whether a tritonserver that has started still serves, and what is said of one that is busy."""

import signal
from collections.abc import Callable

from .limits import describe_open_files
from .run import Run
from .status import Status
from .tritonserver.processes import read_stat, wants_core

# It is looked at this often.
INTERVAL_S = 0.1

# A tritonserver that is stopped by a signal for this long is started anew.
_STOPPED_S = 1.0

# One that computes and does not say that it is alive is busy: sixteen bodies that inflate to 120 MB each keep all of
# its threads for ten seconds and more. Only after much longer it is taken for one that runs in circles.
_BUSY_S = 10.0
_SILENT_S = 120.0

# How it ends by what others do: an operator, or a kernel that is short of memory. Told to end, it does so with 0.
_ENDS_FROM_OUTSIDE = (0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)

# One that does not say so and of which no thread used or wanted a core in so many looks in a row waits for itself.
_IDLE_LOOKS = 12


class Watch:
    """Looks at one run.

    Args:
        run: What has started.
        status: Where callers read whether it answers.
        say: Takes a line for the log.
    """

    def __init__(self, run: Run, status: Status, say: Callable[[str], None]) -> None:
        self._run = run
        self._status = status
        self._say = say
        self._cpu_ticks = -1
        self._idle_looks = 0
        self._is_busy = False
        status.refuse_callers("")

    def find_end(self) -> str | None:
        """Return why this tritonserver serves no more, or None."""
        server, pulse = self._run.server, self._run.pulse
        code = server.poll()
        if code is not None:
            return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if crash := server.find_crash():
            return f"crashed with signal {crash} and did not end"
        if told := self._find_farewell():
            return f"was told to end by signal {told}"
        if pulse.silent_for_s > _STOPPED_S and self._run.is_stopped:
            return "was stopped by a signal"
        if self._is_stuck():
            return f"neither answered nor computed for {_IDLE_LOOKS * INTERVAL_S:g} s"
        silent_for_s = pulse.silent_for_s
        if silent_for_s > _SILENT_S:
            return f"gave no sign of life for {_SILENT_S:g} s"
        if exhaustion := self._run.healer.find_exhaustion():
            return exhaustion
        self._tell_busy(silent_for_s)
        self._tell_refusal()
        return None

    @property
    def has_crashed(self) -> bool:
        """Whether it ended by itself: nobody killed it, told it to end, or stopped it."""
        code = self._run.server.poll()
        return bool(self._run.server.find_crash()) if code is None else code not in _ENDS_FROM_OUTSIDE

    def _find_farewell(self) -> int:
        """Return the signal of which it ends, which nobody here has sent, or 0.

        It takes its time for that, in which it lets nobody in. Its log alone may be wrong.
        """
        told, pulse = self._run.server.told_to_end, self._run.pulse
        if told and not pulse.hangs_up:
            pulse.hurry()
            return 0
        return told

    def _is_stuck(self) -> bool:
        """Tell whether it owes an answer and does nothing about it, look after look.

        Looks are counted, not seconds: while the whole machine sleeps, we look at nothing either.
        """
        stat = read_stat(self._run.server.pid)
        before, self._cpu_ticks = self._cpu_ticks, stat.cpu_ticks if stat else -1
        waits = self._run.pulse.owes_answer and self._cpu_ticks == before and not wants_core(self._run.server.pid)
        self._idle_looks = self._idle_looks + 1 if waits else 0
        return self._idle_looks >= _IDLE_LOOKS

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
        lets_callers_in = self._run.pulse.lets_callers_in
        if lets_callers_in == self._status.lets_callers_in:
            return
        if lets_callers_in:
            self._status.refuse_callers("")
            self._say("tritonserver lets new callers in again")
            return
        reason = (
            f"tritonserver lets no new caller in: expected an answer on a new connection, got none, with "
            f"{describe_open_files(self._run.server.pid)}; close idle connections, bound them in a proxy, or raise the "
            f"limit (ulimit -Hn)"
        )
        self._status.refuse_callers(reason)
        self._say(f"warning: {reason}; who is connected is answered, and nothing is restarted")
