"""Whether a tritonserver that loads models gets on with it.

The Python backend waits without end for a process of its own whose start failed, and tritonserver with it: nothing is
served, nothing ends, and nothing is said.
"""

import contextlib
from collections.abc import Iterator

from .processes import list_children, read_bytes_read, read_stat, wants_core

# Less than this on a core between two looks is what idle threads take that wake once a second.
_IDLE_TICKS = 1

# Looks in a row that find nothing done; what is loaded from afar reads something in between.
STILL_LOOKS = 60


class Stillness:
    """How long a tritonserver and its backend processes did nothing: no thread computed, and none read a byte.

    Looks are counted, not seconds: while the whole machine sleeps, we look at nothing either.

    Args:
        pid: Id of tritonserver's process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._done = (0, 0)
        self._looks = 0

    def look(self) -> None:
        """Look once; about a second lies between two looks.

        Raises:
            OSError: This process has no descriptor or memory left to look with.
        """
        ticks = read = 0
        is_busy = False
        for pid in self._list_processes():
            stat = read_stat(pid)
            ticks += stat.cpu_ticks if stat else 0
            read += read_bytes_read(pid)
            is_busy = is_busy or wants_core(pid)
        before, self._done = self._done, (ticks, read)
        is_still = not is_busy and abs(ticks - before[0]) <= _IDLE_TICKS and read == before[1]
        self._looks = self._looks + 1 if is_still else 0

    @property
    def is_over(self) -> bool:
        """Whether nothing was done for so long that nothing will be."""
        return self._looks >= STILL_LOOKS

    def _list_processes(self) -> Iterator[int]:
        yield self._pid
        for child in list_children(self._pid):
            # What a backend process starts works for it.
            yield child
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                yield from list_children(child)
