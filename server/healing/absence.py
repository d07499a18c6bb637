"""Finds models that somebody unloaded, or that are not there for another reason that nobody told of."""

import threading
import time
from collections.abc import Callable, Iterable

from ..errors import ControlError
from ..tritonserver.control import Control

# Between two looks. One of them alone says nothing: while a model is rolled or loaded anew, it may be away.
_INTERVAL_S = 2.0

# What tritonserver calls a version that comes or goes.
_MOVING = ("LOADING", "UNLOADING")


class Absences:
    """Watches whether what should be loaded is. It brings nothing back: who unloads a model may mean it.

    Args:
        control: Control endpoints of the tritonserver.
        say: Logs a line.

    Attributes:
        names: Models that were not ready at two looks in a row.
    """

    def __init__(self, control: Control, say: Callable[[str], None]) -> None:
        self.names: frozenset[str] = frozenset()
        self._control = control
        self._say = say
        self._suspects: frozenset[str] = frozenset()
        self._next_look = 0.0
        self._worker: threading.Thread | None = None

    def look(self, models: Iterable[str]) -> None:
        """Begin a look at these models if one is due; returns at once."""
        now = time.monotonic()
        if now < self._next_look or (self._worker and self._worker.is_alive()):
            return
        self._next_look = now + _INTERVAL_S
        self._worker = threading.Thread(target=self._compare, args=(frozenset(models),), daemon=True)
        self._worker.start()

    def _compare(self, wanted: frozenset[str]) -> None:
        try:
            states = self._control.read_states()
        except ControlError:
            # Whether it answers at all is for others to find out.
            return
        there = {state.name for state in states if state.ready or state.state in _MOVING}
        before, missing = self._suspects, wanted - there
        self._suspects = missing
        absent = missing & (before | self.names)
        for name in sorted(absent - self.names):
            reasons = [state.reason for state in states if state.name == name and state.reason]
            self._say(
                f"warning: {name} is not loaded any more: expected it to answer, got "
                f"'{reasons[0] if reasons else 'no such model'}'; load it again with the control key, or restart the "
                f"server"
            )
        for name in sorted((self.names - absent) & wanted):
            self._say(f"{name} is loaded again")
        self.names = absent
