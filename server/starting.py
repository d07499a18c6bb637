"""The wait for the first word of a tritonserver that was launched."""

import contextlib
import time
from collections.abc import Callable
from functools import partial

from .errors import AbortedStartError, StartError
from .run import Run
from .shortage import ShortageNotice, is_shortage
from .tritonserver.control_key import hide_key
from .tritonserver.processes import end_children, list_children
from .tritonserver.settings import Settings
from .tritonserver.stillness import Stillness, list_server

# It is looked at this often, ...
_INTERVAL_S = 0.05
_LAST_PORT_S = 0.01

# ... this often at whether it gets on with loading, ...
_LOADING_LOOK_S = 1.0

# ... and told of this often.
_TELLING_S = 5.0


class Start:
    """The start of one run.

    Args:
        run: What was launched.
        settings: What it serves, and how.
        notice: Tells that it cannot be looked at.
        say: Takes a line for the log.
    """

    def __init__(self, run: Run, settings: Settings, notice: ShortageNotice, say: Callable[[str], None]) -> None:
        self._run = run
        self._settings = settings
        self._notice = notice
        self._say = say
        self._stillness = Stillness(partial(list_server, run.server.pid))
        self._is_key_hidden = False

    def wait(self, stops: Callable[[], int]) -> bool:
        """Wait until it answers; return False if we are asked to stop before.

        Args:
            stops: Tells how often we were asked to stop.

        Raises:
            AbortedStartError: It was killed, or does nothing any more.
            StartError: It ended instead.
        """
        start = told = looked = time.monotonic()
        while not stops():
            # It may have started all the same; that is found out once it can be looked at.
            with self._notice.of_shortage():
                if self._look():
                    return True
            if time.monotonic() - looked > _LOADING_LOOK_S:
                looked = time.monotonic()
                self._look_for_stillness()
            if time.monotonic() - told > _TELLING_S:
                told = time.monotonic()
                which = ", ".join(sorted(self._run.healer.table.list_loading()))
                self._say(f"loading models, {told - start:.0f} s{which and f', {which} among them'}")
            self._pause()
        return False

    def _pause(self) -> None:
        # The first answer ends it: from then on others are answered as well, and the last port is there in a moment.
        if self._run.pulse.has_answered:
            time.sleep(_LAST_PORT_S)
        else:
            self._run.pulse.wait_for_answer(_INTERVAL_S)

    def _look(self) -> bool:
        """Look once; return whether it has started.

        Raises:
            AbortedStartError: It was killed.
            StartError: It ended instead.
            OSError: This process has no descriptor left to look with.
        """
        live = self._run.pulse.has_answered
        # It has parsed its arguments by the time it starts the first backend process.
        if not self._is_key_hidden and (live or list_children(self._run.server.pid)):
            if not hide_key(self._settings.key, self._run.server.pid):
                self._say("warning: the control key stands in the process list; see docs/threat_model.md")
            self._is_key_hidden = True
        # Every backend process is seen once: one that dies before it was ever seen leaves a zombie without a name.
        with contextlib.suppress(OSError):
            self._run.healer.table.refresh()
            if not live:
                # It is to start without a model whose process died, or was stopped, as it loaded.
                for told in self._run.healer.table.end_stopped_loads():
                    self._run.has_ended_loads = True
                    self._say(told)
                self._run.healer.table.end_lost_waits()
        if live and self._run.learn_version() and self._run.tells_metrics():
            return True
        if self._run.is_stopped:
            self._run.server.kill()
        if self._run.pulse.is_denied:
            self._run.server.kill()
            raise StartError(
                "tritonserver started, but serves nothing",
                expected=f"{self._settings.endpoints.http_url}/v2/health/live to say that it is alive",
                got="that it is not",
                remedy="see its log above, and correct what stands behind --",
            )
        code = self._run.server.poll()
        if code is not None:
            # Under load it aborts now and then, for an exception between it and a process that it starts.
            raise (AbortedStartError if code < 0 else StartError)(
                "tritonserver could not start",
                expected=f"it to listen on {self._settings.endpoints.http_url}",
                got=f"signal {-code}" if code < 0 else f"exit code {code}",
                remedy="see its log above",
            )
        return False

    def _look_for_stillness(self) -> None:
        """See that it gets on with loading.

        Raises:
            AbortedStartError: It does not.
        """
        try:
            self._stillness.look()
        except (OSError, MemoryError) as exc:
            # That we cannot look is not that it stands still.
            if not is_shortage(exc):
                raise
        if self._stillness.is_over:
            self._run.standing_still = self._run.healer.table.list_loading()
            # A process that is stopped does not notice the end of its parent.
            end_children(self._run.server.pid)
            raise AbortedStartError(
                "tritonserver stands still while it loads models",
                expected="one of its processes to compute or to read",
                got=self._stillness.finding,
            )
