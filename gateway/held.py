"""What requests take of memory until they are answered, and how callers share it."""

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator

from starlette.types import Receive, Scope

from .errors import ApiError, refuse_for_now

# In which a body comes whole.
_BODY_TIMEOUT_S = 30.0

# Bytes that all requests and answers take at a time, half of what a container has, and how many times as much as its
# bytes a body takes until it is answered: where one character of a text needs four bytes all do, and it is sent in
# another form.
_MOST_HELD, _TIMES = 512 << 20, 8

# What is made of a header takes some bytes more, and the address is there several times.
_A_HEADER, _OF_ADDRESS = 128, 4

# What may be given back until it is seen to that it is free.
_COLLECTED = 64 << 20


class Bodies:
    """What all requests that are being answered take: their bodies, and then their answers until those have gone.

    A caller may take more only while it then has no more than what is left for all others: one has half of all at most,
    two have a third each, and whoever has nothing yet always finds room (Choudhury and Hahne, Dynamic queue length
    thresholds for shared-memory packet switches, 1998). A large request leaves as much as itself beside that, so that
    short ones of the same caller find some as well.

    Args:
        most: Bytes of one body.
    """

    def __init__(self, most: int) -> None:
        self._most, self._total = most, max(_MOST_HELD, 3 * _TIMES * most)
        self._taken: Counter[str] = Counter()
        self._sum = self._given_back = 0

    @contextlib.asynccontextmanager
    async def read(self, caller: str, scope: Scope, receive: Receive) -> AsyncIterator["Held"]:
        """Read the body of a request, and hold it, and what is made of it, until it is answered.

        Raises:
            ApiError: It is too large, by itself or beside the others, or encoded, or does not come.
        """
        headers = dict(scope["headers"])
        length = int(headers.get(b"content-length", b"0"))
        if length > self._most:
            raise _refuse_size(self._most, f"{length}")
        if (encoding := headers.get(b"content-encoding", b"identity").decode("latin-1")).lower() != "identity":
            what = (
                f"the body is encoded: expected it as it is, got {encoding[:40]!r}; send it without Content-Encoding."
            )
            raise ApiError(415, what)
        held = Held(self, caller, _measure_head(scope))
        try:
            try:
                await asyncio.wait_for(self._fill(held, length, receive), _BODY_TIMEOUT_S)
            except asyncio.TimeoutError:
                what = f"the body does not come: expected all of it within {_BODY_TIMEOUT_S:g} s."
                raise ApiError(408, what) from None
            yield held
        finally:
            held.release()

    def take(self, caller: str, size: int, whole: int) -> None:
        """Let a caller take more, or less.

        Args:
            caller: Who takes it.
            size: How much more.
            whole: What its request takes then.

        Raises:
            ApiError: There is no room for more.
        """
        if size > 0 and self._taken[caller] + size > self._total - self._sum - size - whole:
            what = f"expected at most {self._total >> 20} MiB of requests and answers at a time, and less of one caller"
            raise refuse_for_now(f"there is too much to do: {what}, got more; ask again later.", is_overload=True)
        self._taken[caller] += size
        self._sum += size
        self._given_back -= min(size, 0)
        if self._given_back > _COLLECTED:
            # An error refers to the frames that it passed through, and these to it: what they hold stays until Python
            # looks for such circles, which it does after so many objects and not after so many bytes.
            gc.collect()
            self._given_back = 0
        if not self._taken[caller]:
            del self._taken[caller]

    async def _fill(self, held: "Held", length: int, receive: Receive) -> None:
        # Before it comes, where its length is told: of many that come at once those that fit do, and none in part.
        held.resize(_TIMES * length)
        more = True
        while more:
            message = await receive()
            held.body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(held.body) > self._most:
                raise _refuse_size(self._most, "more")
            held.resize(_TIMES * max(length, len(held.body)))


class Held:
    """What one request takes.

    Args:
        bodies: Of which it is a part.
        caller: Whose it is.
        head: What it takes beside its body or its answer, as long as there is one of them.

    Attributes:
        body: What has come.
    """

    def __init__(self, bodies: Bodies, caller: str, head: int) -> None:
        self._bodies, self._caller, self._head, self._size = bodies, caller, head, 0
        self.body = bytearray()

    def take_body(self) -> bytearray:
        """Return the body, which is not held any longer."""
        body, self.body = self.body, bytearray()
        return body

    def resize(self, size: int) -> None:
        """Take so much in place of what was taken before.

        Raises:
            ApiError: There is no room for it.
        """
        self._take(self._head + size)

    def release(self) -> None:
        """Take nothing any longer."""
        self._take(0)

    def _take(self, size: int) -> None:
        self._bodies.take(self._caller, size - self._size, size)
        self._size = size


def _measure_head(scope: Scope) -> int:
    headers = sum(len(name) + len(value) + _A_HEADER for name, value in scope["headers"])
    return headers + _OF_ADDRESS * (len(scope["path"]) + len(scope["query_string"]))


def _refuse_size(most: int, got: str) -> ApiError:
    return ApiError(413, f"the body is too large: expected at most {most} bytes, got {got}; ask several times.")
