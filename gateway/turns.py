"""Who is next: callers in turn, and of each caller now the request that has had least, now the one that came first."""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from .errors import refuse_for_now

T = TypeVar("T")


@dataclass(order=True)
class _Waiting:
    """A part of a request that waits for its turn."""

    had: int
    number: int
    size: int = field(compare=False)
    turn: "asyncio.Future[None]" = field(compare=False)


class _Caller:
    """What waits of one caller.

    A short request is not to wait for a hundred long ones, nor a long one for all the short ones that come after it.
    """

    def __init__(self) -> None:
        # By what the request has had, and by the order of arrival.
        self._least: list[_Waiting] = []
        self._oldest: deque[_Waiting] = deque()
        self._takes_oldest = False

    def add(self, waiting: _Waiting) -> None:
        heapq.heappush(self._least, waiting)
        self._oldest.append(waiting)

    def find_next(self) -> _Waiting | None:
        """Return what is next; None where nothing waits."""
        while self._least and self._least[0].turn.done():
            heapq.heappop(self._least)
        while self._oldest and self._oldest[0].turn.done():
            self._oldest.popleft()
        if not self._oldest:
            return None
        return self._oldest[0] if self._takes_oldest else self._least[0]

    def give_turn(self, waiting: _Waiting) -> None:
        waiting.turn.set_result(None)
        self._takes_oldest = not self._takes_oldest


class Turns:
    """Has so much done at a time, of all who wait for a part of something in turn.

    What is not bounded here waits in the server, which answers in the order of arrival: behind a hundred long requests,
    of callers who may have left.

    Args:
        most: Of what is done at a time, in the unit of the sizes.
        patience_s: Seconds to wait for a turn.
    """

    def __init__(self, most: int, patience_s: float) -> None:
        self._most = self._free = most
        self._patience_s = patience_s
        # In the order in which they are served.
        self._callers: dict[str, _Caller] = {}
        self._numbers = itertools.count()
        # The event loop itself holds a task by no more than a weak reference.
        self._tasks: set[asyncio.Future[Any]] = set()

    async def run(self, caller: str, had: int, size: int, begin: Callable[[], Awaitable[T]]) -> T:
        """Wait for a turn, and return what comes of what is begun then.

        Who is cancelled before gives the turn up. What has begun goes on to its end, and keeps its place until then.

        Args:
            caller: Who waits.
            had: How much of the same request has been begun before.
            size: How much this part is.
            begin: Begins it.

        Raises:
            ApiError: The turn did not come in time.
        """
        taken = min(size, self._most)
        await self._wait(caller, had + size, taken)
        task = asyncio.ensure_future(begin())
        self._tasks.add(task)
        task.add_done_callback(partial(self._end, taken))
        return await asyncio.shield(task)

    async def _wait(self, caller: str, had: int, size: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._callers.setdefault(caller, _Caller()).add(_Waiting(had, next(self._numbers), size, turn))
        self._go_on()
        if turn.done():
            return
        try:
            done, _ = await asyncio.wait((turn,), timeout=self._patience_s)
        except asyncio.CancelledError:
            self._give_up(turn, size)
            raise
        if not done:
            self._give_up(turn, size)
            what = f"there is too much to do: expected a turn within {self._patience_s:g} s, got none; ask again later."
            raise refuse_for_now(what, is_overload=True)

    def _give_up(self, turn: "asyncio.Future[None]", size: int) -> None:
        # It may have come in the moment in which nobody waited for it any more.
        if not turn.cancel():
            self._free += size
        self._go_on()

    def _end(self, size: int, task: "asyncio.Future[Any]") -> None:
        self._tasks.discard(task)
        self._free += size
        # Whoever left does not ask how it ended.
        if not task.cancelled():
            task.exception()
        self._go_on()

    def _go_on(self) -> None:
        """Give turns while there is something free, to one caller after another."""
        while self._callers:
            name, caller = next(iter(self._callers.items()))
            waiting = caller.find_next()
            # What does not fit yet is waited for: smaller ones behind it would keep it from ever beginning.
            if waiting and waiting.size > self._free:
                return
            del self._callers[name]
            if waiting:
                self._free -= waiting.size
                caller.give_turn(waiting)
                # Behind all others.
                self._callers[name] = caller
