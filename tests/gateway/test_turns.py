"""Who is next at the server: callers in turn, short requests before what is left of long ones, and room for others."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from gateway.errors import ApiError
from gateway.turns import Places, Share, Turns


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


class Held:
    """Places that are held until they are told to end.

    Args:
        most: How many there are.
    """

    def __init__(self, most: int, patience_s: float = 60) -> None:
        self.places = Places(patience_s)
        self.places.most = most
        self.begun = list[str]()
        self._ends: dict[str, asyncio.Event] = {}
        self._shares: dict[str, Share] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def _hold(self, share: Share, name: str, size: int) -> None:
        async with share.hold(size):
            self.begun.append(name)
            await self._ends.setdefault(name, asyncio.Event()).wait()

    async def ask(self, name: str, size: int = 1, request: str = "") -> None:
        """Ask for places, whose name begins with that of a caller; `request` is what they are a part of."""
        share = self._shares.setdefault(request or name, Share(self.places, name[0]))
        self.tasks[name] = asyncio.ensure_future(self._hold(share, name, size))
        await asyncio.sleep(0.01)

    async def end(self, *names: str) -> None:
        """Give back what was taken under these names."""
        for name in names:
            self._ends.setdefault(name, asyncio.Event()).set()
        await asyncio.sleep(0.01)


def test_a_caller_holds_three_times_what_is_free_at_most_and_whoever_comes_next_has_room() -> None:
    async def test() -> None:
        held = Held(64)
        for index in range(50):
            await held.ask(f"a{index}")
        assert held.begun == [f"a{index}" for index in range(48)]
        for index in range(15):
            await held.ask(f"b{index}")
        assert held.begun[48:] == [f"b{index}" for index in range(12)]
        await held.ask("c0")
        assert held.begun[60:] == ["c0"]
        await held.end("a0", "a1")
        assert held.begun[61:] == []
        await held.end("a2")
        assert held.begun[61:] == ["b12"]

    carry_out(test)


def test_who_wants_many_places_is_passed_by_few_and_not_for_ever() -> None:
    async def test() -> None:
        held = Held(8)
        for name, size in (("a0", 3), ("b0", 2), ("c0", 4), ("a1", 1)):
            await held.ask(name, size)
        # Of two who wait the one who holds nothing is next, though the other would fit sooner.
        assert held.begun == ["a0", "b0"]
        for index in range(9):
            await held.ask(f"{'defghijkl'[index]}0")
            await held.end(f"{'defghijkl'[index]}0")
        assert held.begun[2:] == [f"{letter}0" for letter in "defghijk"]
        await held.end("a0", "b0")
        assert held.begun[10:] == ["c0", "a1", "l0"]

    carry_out(test)


@pytest.mark.parametrize("most", [1, 2, 8, 64])
def test_who_wants_more_places_than_there_are_has_them_alone(most: int) -> None:
    async def test() -> None:
        held = Held(most)
        await held.ask("a0", 100)
        await held.ask("a1", 100)
        assert held.begun == ["a0"]
        await held.end("a0")
        assert held.begun == ["a0", "a1"]

    carry_out(test)


def test_who_leaves_early_holds_the_places_until_the_server_has_seen_it() -> None:
    async def test() -> None:
        held = Held(2, patience_s=0.05)
        await held.ask("a0")
        await held.ask("b0")
        held.tasks["a0"].cancel()
        with pytest.raises(ApiError, match=r"expected a turn within 0\.05 s, got none") as caught:
            await held.tasks["b0"]
        assert caught.value.status == 503
        held.places._patience_s = 60
        await held.ask("c0")
        await held.ask("d0")
        held.tasks["d0"].cancel()
        await held.ask("e0")
        assert held.begun == ["a0"]
        await asyncio.wait_for(held.end("c0"), 60)
        while held.begun != ["a0", "c0", "e0"]:
            await asyncio.sleep(0.05)

    carry_out(test)


def test_parts_of_a_request_wait_one_after_another() -> None:
    """A request of many texts goes on for as long as one of them begins in time."""

    async def test() -> None:
        held = Held(2, patience_s=0.3)
        for index in range(6):
            await held.ask(f"a{index}", request="long")
        for index in range(6):
            await asyncio.sleep(0.2)
            await held.end(f"a{index}")
        assert held.begun == [f"a{index}" for index in range(6)]

    carry_out(test)
