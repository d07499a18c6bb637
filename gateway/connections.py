"""Connections of callers: so many at a time, of which those that ask nothing make room for new ones."""

import asyncio
import re
import resource
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# In which a request comes whole, once a connection was opened for it or it has begun.
_REQUEST_TIMEOUT_S = 30.0

# Longer than most clients keep a connection: one that we close first may lose a request.
KEEP_ALIVE_S = 75

# Of clients that would rather speak HTTP/2, such as Java's own, and take an answer in 1.1.
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)

# Descriptors for all else: the server, files of versions that are read, the log.
_OTHERS = 128
_MOST = 8192


def raise_limit() -> int:
    """Raise the limit on open files as far as it may be, and return how many connections there may be at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    wanted = _MOST + _OTHERS
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(1, min(_MOST, max(soft, limit) - _OTHERS))


class BoundedProtocol(HttpToolsProtocol):
    """HTTP as uvicorn speaks it, which itself waits for a request for as long as a caller likes.

    Attributes:
        most: Connections at a time.
        unasked: Those of which no whole request is there, the oldest first.
    """

    most: ClassVar[int] = _MOST
    unasked: ClassVar[dict["BoundedProtocol", asyncio.TimerHandle]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, in the place of the oldest that asks nothing where there are too many."""
        super().connection_made(transport)
        self._expect(_REQUEST_TIMEOUT_S)
        if len(self.connections) > self.most:
            # The new one itself, where all others are being answered.
            next(iter(self.unasked)).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read on; a wish for another protocol is passed over, with which uvicorn would take the body for a request."""
        if self._is_free():
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Let a request take so long to come."""
        super().on_message_begin()
        if self._is_free():
            self._expect(_REQUEST_TIMEOUT_S)

    def on_message_complete(self) -> None:
        """Let its answer take as long as it takes."""
        super().on_message_complete()
        if not self._is_free():
            self._forget()

    def on_response_complete(self) -> None:
        """Keep the connection for the next one."""
        super().on_response_complete()
        if self._is_free():
            self._expect(KEEP_ALIVE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._forget()
        super().connection_lost(exc)

    def _is_free(self) -> bool:
        """Tell whether every request of this connection has been answered."""
        return self.cycle is None or self.cycle.response_complete

    def _expect(self, timeout_s: float) -> None:
        self._forget()
        if not self.transport.is_closing():
            self.unasked[self] = self.loop.call_later(timeout_s, self.transport.abort)

    def _forget(self) -> None:
        if timer := self.unasked.pop(self, None):
            timer.cancel()
