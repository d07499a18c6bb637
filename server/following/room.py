"""Threads and memory for backend processes that are being started."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from ..limits import check_memory, check_threads_of


@dataclass(frozen=True, kw_only=True)
class Freed:
    """What comes free where a model is unloaded.

    Attributes:
        threads: How many may be started in their place.
        memory: Bytes.
    """

    threads: int = 0
    memory: int = 0


NOTHING = Freed()


class Room:
    """What may be started at the same time: each start alone would find the threads that another one counts on.

    tritonserver 2.51 ends, or waits for ever, where it cannot start one that it wants.
    """

    def __init__(self) -> None:
        self._processes = self._memory = 0
        self._lock = threading.Lock()

    def check(self) -> None:
        """Refuse to start what room is kept for where it has not come free.

        Raises:
            ShortageError: Too few threads may run, or too little memory may be taken.
        """
        with self._lock:
            check_threads_of(self._processes)
            check_memory(self._memory)

    @contextlib.contextmanager
    def keep(self, processes: int, memory: int = 0, freed: Freed = NOTHING) -> Iterator[None]:
        """Keep room for so many backend processes until they have been started.

        Args:
            processes: How many.
            memory: Bytes that all of them take, as far as that is known.
            freed: What comes free before that, which is then to be asked for with `check`.

        Raises:
            ShortageError: There is too little beside what is kept already.
        """
        with self._lock:
            check_threads_of(self._processes + processes, freed.threads)
            if memory:
                check_memory(self._memory + memory, freed.memory)
            self._processes += processes
            self._memory += memory
        try:
            yield
        finally:
            with self._lock:
                self._processes -= processes
                self._memory -= memory
