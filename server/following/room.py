"""Threads for backend processes that are being started."""

import contextlib
import threading
from collections.abc import Iterator

from ..limits import check_threads_of


class Room:
    """What may be started at the same time: each start alone would find the threads that another one counts on.

    tritonserver 2.51 ends, or waits for ever, where it cannot start one that it wants.
    """

    def __init__(self) -> None:
        self._processes = 0
        self._lock = threading.Lock()

    def check(self) -> None:
        """Refuse to start what threads are kept for where they have not come free.

        Raises:
            ShortageError: Too few may run.
        """
        with self._lock:
            check_threads_of(self._processes)

    @contextlib.contextmanager
    def keep(self, processes: int, freed: int = 0) -> Iterator[None]:
        """Keep threads for so many backend processes until they have been started.

        Args:
            processes: How many.
            freed: Threads that end before that, which are then to be asked for with `check`.

        Raises:
            ShortageError: Too few may run beside those that are kept already.
        """
        with self._lock:
            check_threads_of(self._processes + processes, freed)
            self._processes += processes
        try:
            yield
        finally:
            with self._lock:
                self._processes -= processes
