"""Whether a tritonserver that loads models gets on with it.

The Python backend waits without end for a process of its own whose start failed, and tritonserver with it: nothing is
served, nothing ends, and nothing is said.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

from ..errors import ControlError
from .backend_processes import read_model_folder
from .processes import kill, list_children, read_bytes_read, read_stat, wants_core

# So much on a core between two looks is what the idle threads of a process take that wake once a second.
_IDLE_TICKS = 1

# Looks in a row that find nothing done; what is loaded from afar reads something in between.
STILL_LOOKS = 60


# The same of a model that is loaded beside others, whose loading holds up nobody who is served.
_STILL_LOAD_LOOKS = 300
_LOAD_LOOK_S = 1.0

# So long tritonserver may take to say that a load has failed whose processes are gone.
_LAST_WORD_S = 10.0


class Stillness:
    """How long processes did nothing: no thread computed, and none read a byte.

    Looks are counted, not seconds: while the whole machine sleeps, we look at nothing either.

    Args:
        list_processes: Returns the ids of the processes.
    """

    def __init__(self, list_processes: Callable[[], Iterable[int]]) -> None:
        self._list_processes = list_processes
        # Id of each process → its ticks on a core and the bytes that it has read.
        self._done: dict[int, tuple[int, int]] = {}
        self._looks = 0

    def look(self) -> None:
        """Look once; about a second lies between two looks.

        Raises:
            OSError: This process has no descriptor or memory left to look with.
        """
        done: dict[int, tuple[int, int]] = {}
        is_busy = False
        for pid in self._list_processes():
            stat = read_stat(pid)
            done[pid] = (stat.cpu_ticks if stat else 0, read_bytes_read(pid))
            is_busy = is_busy or wants_core(pid)
        before, self._done = self._done, done
        is_still = not is_busy and before.keys() == done.keys() and all(_idled(before[pid], done[pid]) for pid in done)
        self._looks = self._looks + 1 if is_still else 0

    @property
    def is_over(self) -> bool:
        """Whether nothing was done for so long that nothing will be."""
        return self.lasts(STILL_LOOKS)

    @property
    def finding(self) -> str:
        """What the last looks have found, in words."""
        return f"nothing done in {self._looks} looks"

    def lasts(self, looks: int) -> bool:
        """Tell whether so many looks in a row found nothing done."""
        return self._looks >= looks


class LoadWatch:
    """Whether a tritonserver that serves others gets on with loading a model, however long that takes.

    The backend processes that it has started for the model since the watch began are looked at; where there were none,
    as with a backend that loads in tritonserver itself, it is what serves the others as well, and is never still while
    it answers them. Processes that did nothing for long are ended, for tritonserver would wait for them for ever, and
    with it whoever orders the same again.

    Args:
        pid: Id of tritonserver's process.
        model: Name of the model.
    """

    def __init__(self, pid: int, model: str) -> None:
        self._pid = pid
        self._model = model
        self._before = {*list_children(pid)}
        self._stillness = Stillness(self._list_watched)
        self._next_look = 0.0
        self._has_started = False
        self._ended_at: float | None = None
        self._is_unanswered = False

    @property
    def has_ended(self) -> bool:
        """Whether the processes were ended."""
        return self._ended_at is not None

    @property
    def is_unanswered(self) -> bool:
        """Whether tritonserver, too, waits for ever: the processes were ended, and it did not say that the load failed.

        2.51 does where the system let it start only some of the threads that it wants for an instance.
        """
        return self._is_unanswered

    def explain(self, error: ControlError) -> ControlError:
        """Return why a load has failed whose processes were ended, which tritonserver does not know."""
        return _describe(self._model, _STILL_LOAD_LOOKS, f", so they were ended ('{error.fault}')")

    def has_stopped(self) -> bool:
        """Look, if a second has passed since the last look; return whether no answer will come.

        That is so some seconds after the processes were ended.
        """
        now = time.monotonic()
        if self._ended_at is not None:
            is_late = now > self._ended_at + _LAST_WORD_S
            self._is_unanswered = is_late and self._has_started
            return is_late
        if now >= self._next_look:
            self._next_look = now + _LOAD_LOOK_S
            # That we cannot look is not that it stands still.
            with contextlib.suppress(OSError, MemoryError):
                self._stillness.look()
                if self._stillness.lasts(_STILL_LOAD_LOOKS):
                    self._end()
                    self._ended_at = now
        return False

    def _list_watched(self) -> list[int]:
        new = self._list_new()
        self._has_started = self._has_started or bool(new)
        return [*_list_with_children(new)] if self._has_started else [self._pid]

    def _list_new(self) -> list[int]:
        new = (child for child in list_children(self._pid) if child not in self._before)
        return [child for child in new if (folder := read_model_folder(child)) and folder.parent.name == self._model]

    def _end(self) -> None:
        for pid in self._list_new():
            if stat := read_stat(pid):
                kill(pid, stat.started)


def describe_still_start(model: str) -> ControlError:
    """Return why a model is not loaded that tritonserver stood still over as it started."""
    return _describe(model, STILL_LOOKS, "")


def _describe(model: str, looks: int, end: str) -> ControlError:
    return ControlError(
        f"{model} stands still while it is loaded",
        expected="one of its processes to compute or to read",
        got=f"nothing done in {looks} looks{end}",
    )


def list_server(pid: int) -> Iterator[int]:
    """Yield the processes of a tritonserver: itself, its backend processes, and what these have started."""
    yield pid
    yield from _list_with_children(list_children(pid))


def _idled(before: tuple[int, int], now: tuple[int, int]) -> bool:
    """Tell whether a process has done nothing between two looks, by its ticks and what it has read."""
    return abs(now[0] - before[0]) <= _IDLE_TICKS and now[1] == before[1]


def _list_with_children(pids: Iterable[int]) -> Iterator[int]:
    for pid in pids:
        # What a backend process starts works for it.
        yield pid
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield from list_children(pid)
