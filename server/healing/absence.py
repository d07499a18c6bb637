"""Finds models that somebody unloaded, or that are not there for another reason that nobody told of."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..errors import ControlError, fold
from ..tritonserver.control import Control, ModelState

# Between two looks. One of them alone says nothing: while a model is rolled or loaded anew, it may be away.
_INTERVAL_S = 2.0

# What tritonserver calls a version that comes, and one that goes: it lets nobody new in, and goes on writing texts for
# as long as somebody reads them.
_COMING, _GOING = "LOADING", "UNLOADING"


@dataclass(frozen=True, kw_only=True)
class Absence:
    """That a model is not loaded.

    Attributes:
        reason: In one sentence, with what can be done about it.
        seen_at: When tritonserver was asked, as `time.monotonic` tells it.
    """

    reason: str
    seen_at: float


class Absences:
    """Watches whether what should be loaded is. It brings nothing back: who unloads a model may mean it.

    Args:
        control: Control endpoints of the tritonserver.
        say: Logs a line.

    Attributes:
        found: Name → how it was found, of the models that were not ready at two looks in a row.
    """

    def __init__(self, control: Control, say: Callable[[str], None]) -> None:
        self.found: Mapping[str, Absence] = {}
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
        asked_at = time.monotonic()
        try:
            states = self._control.read_states()
        except ControlError:
            # Whether it answers at all is for others to find out.
            return
        there = {state.name for state in states if state.ready or state.state == _COMING}
        before, missing = self._suspects, wanted - there
        self._suspects = missing
        known = self.found
        found = {
            name: Absence(reason=_explain(name, states), seen_at=asked_at)
            for name in sorted(missing & (before | known.keys()))
        }
        self.found = found
        for name in found:
            # One that was still being unloaded may be loaded again only once it is gone, which is told as well.
            if name not in known or found[name].reason != known[name].reason:
                self._say(f"warning: {found[name].reason}")
        for name in sorted((known.keys() - found.keys()) & wanted):
            self._say(f"{name} is loaded again")


def _explain(name: str, states: Iterable[ModelState]) -> str:
    """Return in one sentence that a model is not loaded, with what tritonserver says of it."""
    own = [state for state in states if state.name == name]
    if any(state.state == _GOING for state in own):
        # Loaded meanwhile, a model that still writes would cost tritonserver its memory.
        return (
            f"{name} is being unloaded: expected it to let callers in, got it answering none but those whom it answers "
            f"already; load it again with the control key once these have left, or restart the server"
        )
    got = next((fold(state.reason) for state in own if state.reason), "no such model")
    return (
        f"{name} is not loaded any more: expected it to answer, got '{got}'; load it again with the control key, or "
        f"restart the server"
    )
