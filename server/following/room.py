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

    def check_after(self, freed: int, processes: int) -> None:
        """Refuse to end so many threads for so many backend processes where those could not be started even then.

        Raises:
            ShortageError: They could not.
        """
        with self._lock:
            check_threads_of(self._processes + processes, freed)

    @contextlib.contextmanager
    def keep(self, processes: int) -> Iterator[None]:
        """Keep threads for so many backend processes until they have been started.

        Raises:
            ShortageError: Too few may run beside those that are kept already.
        """
        with self._lock:
            check_threads_of(self._processes + processes)
            self._processes += processes
        try:
            yield
        finally:
            with self._lock:
                self._processes -= processes
