"""Who is next at the server: callers in turn, short requests before what is left of long ones."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from gateway.errors import ApiError
from gateway.turns import Turns


class Work:
    """What is done in turn, a part at a time, until it is told to end.

    Args:
        most: Parts at a time.
    """

    def __init__(self, most: int = 1, patience_s: float = 60) -> None:
        self.turns, self.begun, self.ended = Turns(most, patience_s), list[str](), list[str]()
        self._tasks: list[asyncio.Task[str]] = []
        self.ends = asyncio.Event()

    async def _do(self, name: str) -> str:
        self.begun.append(name)
        await self.ends.wait()
        self.ended.append(name)
        return name

    async def ask(self, caller: str, name: str, had: int = 0, size: int = 1) -> "asyncio.Task[str]":
        """Ask for a part, which begins or waits."""
        task = asyncio.ensure_future(self.turns.run(caller, had, size, partial(self._do, name)))
        self._tasks.append(task)
        await asyncio.sleep(0.01)
        return task

    async def finish(self) -> list[str]:
        """Let all be done, and return what it was in the order in which it was begun."""
        self.ends.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self.begun


def carry_out(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


def test_callers_are_served_in_turn() -> None:
    async def test() -> None:
        work = Work()
        for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
            await work.ask(name[0], name)
        assert work.begun == ["a1"]
        assert await work.finish() == ["a1", "a2", "b1", "c1", "a3", "b2"]

    carry_out(test)


def test_a_short_request_overtakes_long_ones_and_they_come_to_their_end() -> None:
    async def test() -> None:
        work = Work()
        for part in range(4):
            await work.ask("a", f"long {part}", had=100 * part, size=1)
        for number in range(4):
            await work.ask("a", f"short {number}")
        begun = await work.finish()
        # By turns what has had least, and what has waited for longest.
        assert begun == ["long 0", "short 0", "long 1", "short 1", "long 2", "short 2", "long 3", "short 3"]

    carry_out(test)


def test_what_is_larger_than_everything_is_done_alone_and_what_follows_does_not_keep_it_waiting() -> None:
    async def test() -> None:
        work = Work(most=4)
        await work.ask("a", "small", size=1)
        await work.ask("b", "huge", size=100)
        await work.ask("c", "tiny", size=1)
        assert work.begun == ["small"]
        assert await work.finish() == ["small", "huge", "tiny"]

    carry_out(test)


def test_who_leaves_gives_up_the_turn_and_what_has_begun_goes_on() -> None:
    async def test() -> None:
        work = Work()
        first, second, third = [await work.ask("a", name) for name in ("first", "second", "third")]
        for task in (first, second):
            task.cancel()
        await asyncio.sleep(0.01)
        assert first.cancelled() and second.cancelled() and not third.done()
        # Its place is taken for as long as the server is at work on it.
        assert work.begun == ["first"] and not work.ended
        assert await work.finish() == ["first", "third"]
        assert work.ended == ["first", "third"]

    carry_out(test)


def test_a_turn_that_does_not_come_is_refused_for_now() -> None:
    async def test() -> None:
        work = Work(patience_s=0.05)
        await work.ask("a", "first")
        late = await work.ask("a", "late")
        with pytest.raises(
            ApiError, match=r"there is too much to do: expected a turn within 0\.05 s, got none"
        ) as caught:
            await late
        assert (caught.value.status, caught.value.headers["retry-after"]) == (503, "1")
        assert await work.finish() == ["first"]
        assert await (await work.ask("a", "next")) == "next"

    carry_out(test)
