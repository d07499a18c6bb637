"""One tritonserver from its launch to its end, with what watches and heals it meanwhile."""

import contextlib
import http.client
import time

from modelyard.exchange import fetch

from .errors import ControlError, ShortageError, StrangerError
from .healing.absence import Absences
from .healing.healer import Healer, Reload
from .healing.work_queue import KNOWN_VERSIONS
from .log import Log
from .shortage import is_shortage
from .status import Status
from .tritonserver.control import Control
from .tritonserver.environment_folders import remove_environment_folders
from .tritonserver.process import TritonServer
from .tritonserver.processes import read_stat
from .tritonserver.pulse import Pulse
from .tritonserver.settings import Settings

_METRICS_TIMEOUT_S = 1.0


class Run:
    """A tritonserver that was launched.

    Args:
        settings: What to serve, and how.
        models: Names of the models to load.
        options: What their configurations ask of the server.
        control: Its control endpoints.
        status: Where deaths and revivals are counted.
        log: Where to tell of it.
        revive: Loads those versions of a model anew.

    Attributes:
        server: The process.
        pulse: Whether it answers.
        healer: Its backend processes.
        absences: The models that it has lost.
        is_version_known: Whether it has told which tritonserver it is.
        has_ended_loads: Whether loads failed because we ended what a signal had stopped.
        standing_still: Names of the models that it was loading when nothing was done any more.

    Raises:
        ShortageError: This machine has not what it takes.
    """

    def __init__(
        self,
        settings: Settings,
        models: list[str],
        options: list[str],
        *,
        control: Control,
        status: Status,
        log: Log,
        revive: Reload,
    ) -> None:
        self._control = control
        self._say = log.say
        self._metrics_url = f"{settings.endpoints.metrics_url}/metrics"
        self._launched_at = time.time()
        self.server = TritonServer(settings, models, options, log)
        try:
            self.pulse = Pulse(settings.endpoints.http_url)
        except RuntimeError as exc:
            self.server.kill()
            raise ShortageError("tritonserver cannot be watched", expected="a thread for it", got=f"'{exc}'") from exc
        self.healer = Healer(self.server.pid, control, status, log.say, revive)
        self.absences = Absences(control, log.say)
        self.is_version_known = False
        self.has_ended_loads = False
        self.standing_still: set[str] = set()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        stat = read_stat(self.server.pid)
        return stat is not None and stat.state == "T"

    def learn_version(self) -> bool:
        """Find out what can be told of this tritonserver's backend processes; return False if another program answers.

        That one has taken the port before tritonserver did, which ends once it wants it.
        """
        table = self.healer.table
        try:
            version = self._control.read_version()
        except StrangerError:
            return False
        except ControlError as exc:
            # Nobody reads what may lie elsewhere.
            if table.reads_queues:
                self._say(
                    f"warning: backend processes that hang are not found until tritonserver tells which it is: {exc}"
                )
            table.reads_queues = False
            return True
        self.is_version_known = True
        table.reads_queues = version in KNOWN_VERSIONS
        if version not in KNOWN_VERSIONS:
            self._say(
                f"warning: dead and stopped backend processes are found, those that hang are not: expected "
                f"tritonserver {', '.join(KNOWN_VERSIONS)}, got {version}"
            )
        return True

    def tells_metrics(self) -> bool:
        """Tell whether it answers on its metrics port, the last that it opens: where it cannot, it ends.

        Raises:
            OSError: This process has not what it takes to ask.
        """
        try:
            return b"nv_" in fetch(self._metrics_url, _METRICS_TIMEOUT_S)
        except (OSError, http.client.HTTPException) as exc:
            cause = getattr(exc, "reason", exc)
            if isinstance(cause, OSError) and is_shortage(cause):
                raise cause from exc
            return False

    def is_all_in_stubs(self) -> bool:
        """Tell whether every model that is loaded runs in backend processes, of which we can tell what they are at."""
        try:
            in_stubs = {stub.model for stub in self.healer.table.refresh()}
            ready = {state.name for state in self._control.read_states() if state.ready}
            return all(name in in_stubs or self._control.is_ensemble(name) for name in ready)
        except (OSError, ControlError):
            return False

    def end(self) -> None:
        """Leave nothing of it behind."""
        self.pulse.end()
        # Its processes first: they notice its end late, and hold its log open until then.
        self.healer.end()
        self.server.kill()
        # What cannot be looked at for want of something is left for the next end.
        with contextlib.suppress(OSError, MemoryError):
            remove_environment_folders(self._launched_at)
