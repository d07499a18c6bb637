"""Who is next: callers in turn, and of each caller now the request that has had least, now the one that came first."""

import abc
import asyncio
import contextlib
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
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
    overtaken_by: int = field(default=0, compare=False)


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


class _Line(abc.ABC):
    """Who waits, and for how long.

    Args:
        patience_s: Seconds to wait for a turn.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        # In the order in which they are served.
        self._callers: dict[str, _Caller] = {}
        self._numbers = itertools.count()

    async def _wait(self, caller: str, had: int, size: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._callers.setdefault(caller, _Caller()).add(_Waiting(had, next(self._numbers), size, turn))
        self._go_on()
        if turn.done():
            return
        try:
            done, _ = await asyncio.wait((turn,), timeout=self._patience_s)
        except asyncio.CancelledError:
            self._give_up(turn, caller, size)
            raise
        if not done:
            self._give_up(turn, caller, size)
            what = f"there is too much to do: expected a turn within {self._patience_s:g} s, got none; ask again later."
            raise refuse_for_now(what, is_overload=True)

    def _give_up(self, turn: "asyncio.Future[None]", caller: str, size: int) -> None:
        # It may have come in the moment in which nobody waited for it any more.
        if not turn.cancel():
            self._give_back(caller, size)
        self._go_on()

    @abc.abstractmethod
    def _give_back(self, caller: str, size: int) -> None:
        """Take back what a turn gave."""

    @abc.abstractmethod
    def _go_on(self) -> None:
        """Give turns to whoever may have one."""


class Turns(_Line):
    """Has so much done at a time, of all who wait for a part of something in turn.

    What is not bounded here waits in the server, which answers in the order of arrival: behind a hundred long requests,
    of callers who may have left.

    Args:
        most: Of what is done at a time, in the unit of the sizes.
        patience_s: Seconds to wait for a turn.
    """

    def __init__(self, most: int, patience_s: float) -> None:
        super().__init__(patience_s)
        self._most = self._free = most
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
        task.add_done_callback(partial(self._end, caller, taken))
        return await asyncio.shield(task)

    def _give_back(self, caller: str, size: int) -> None:
        self._free += size

    def _end(self, caller: str, size: int, task: "asyncio.Future[Any]") -> None:
        self._tasks.discard(task)
        self._give_back(caller, size)
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


# How often what is left free a caller may have. With 1, who is alone wrote a quarter fewer tokens a second than with
# all places; the more it is, the fewer find room at once.
_GREED = 3


class Places(_Line):
    """Has so many places, which are held for long, and of which a caller has no more than a multiple of what is free.

    So one caller has three quarters of them, several greedy ones have equal parts with a third of one free, and whoever
    comes next need not wait until one of these has ended (dynamic thresholds: Choudhury and Hahne, IEEE/ACM
    Transactions on Networking 6(2), 1998).

    Args:
        patience_s: Seconds to wait for a place.

    Attributes:
        most: How many there are.
    """

    def __init__(self, patience_s: float) -> None:
        super().__init__(patience_s)
        self.most = 0
        # Of those who hold any.
        self._held: dict[str, int] = {}

    async def take(self, caller: str, had: int, size: int) -> int:
        """Wait for places, and return how many were taken, which are to be given back: of very many half of all.

        Args:
            caller: Who waits.
            had: How many the same request has taken before.
            size: How many are wanted.

        Raises:
            ApiError: They did not become free in time.
        """
        taken = max(1, min(size, self.most // 2))
        await self._wait(caller, had + size, taken)
        return taken

    def give_back(self, caller: str, size: int) -> None:
        """Give back what was taken."""
        self._give_back(caller, size)
        self._go_on()

    def _give_back(self, caller: str, size: int) -> None:
        self._held[caller] -= size
        if not self._held[caller]:
            del self._held[caller]

    def _go_on(self) -> None:
        """Give places while somebody may have them, to one caller after another."""
        while (name := self._choose()) is not None:
            caller = self._callers.pop(name)
            waiting = caller.find_next()
            assert waiting is not None
            self._held[name] = self._held.get(name, 0) + waiting.size
            caller.give_turn(waiting)
            # Behind all others.
            self._callers[name] = caller

    def _choose(self) -> str | None:
        """Return who is next: whoever holds nothing before those who do, who wait until these have something."""
        waiting = {name: first for name, caller in self._callers.items() if (first := caller.find_next())}
        self._callers = {name: self._callers[name] for name in waiting}
        new = [name for name in waiting if name not in self._held]
        for place, name in enumerate(new):
            if self._fits(name, waiting[name].size):
                for other in new[:place]:
                    waiting[other].overtaken_by += waiting[name].size
                return name
            # One who wants many lets those pass who want few, but not for ever.
            if waiting[name].overtaken_by >= self.most:
                return None
        if new:
            return None
        return next((name for name in waiting if self._fits(name, waiting[name].size)), None)

    def _fits(self, caller: str, size: int) -> bool:
        held = sum(self._held.values())
        return not held or self._held.get(caller, 0) + size <= _GREED * (self.most - held - size)


class Share:
    """What one request takes of the places, for one of its parts after another: what goes on is not late.

    Args:
        places: Of all.
        caller: Whose request it is.
    """

    # Until a server has seen that somebody has left, it is at work for nobody.
    _LEAVING_S = 0.5

    def __init__(self, places: Places, caller: str) -> None:
        self._places, self._caller = places, caller
        self._had, self._order = 0, asyncio.Lock()

    @contextlib.asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Hold places for as long as the block takes, or somewhat longer where it is left early.

        Raises:
            ApiError: They did not become free in time.
        """
        async with self._order:
            had, self._had = self._had, self._had + size
            taken = await self._places.take(self._caller, had, size)
        give_back = partial(self._places.give_back, self._caller, taken)
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            asyncio.get_running_loop().call_later(self._LEAVING_S, give_back)
            raise
        except BaseException:
            give_back()
            raise
        give_back()
