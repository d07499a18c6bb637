"""Questions over HTTP of which the whole answer has come by a moment, whoever answers.

The timeout of a socket is that of each look at it: a program that drips, a byte now and then, would hold up the asker
for ever, and one that floods would have all of its memory. No thread is wanted for it, which may be what is lacking.
"""

import functools
import http.client
import io
import select
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

# Far above what a model answers.
_MAX_BYTES = 1 << 28
_PIECE_BYTES = 1 << 16

# Of a refusal.
_REASON_BYTES = 2000


# Between two looks at whether there is still something to wait for.
_LOOK_S = 0.5


class WatchedRequest(urllib.request.Request):
    """A request that is given up before its time where it has become known that no answer will come.

    Args:
        url: Where it goes, unencrypted.
        data: Its body.
        headers: Its headers.
        gives_up: Asked twice a second whether there is nothing to wait for; then `fetch` raises a TimeoutError.
    """

    def __init__(self, url: str, data: bytes, headers: dict[str, str], gives_up: Callable[[], bool]) -> None:
        super().__init__(url, data=data, headers=headers)
        self.gives_up = gives_up


def fetch(request: str | urllib.request.Request, timeout_s: float) -> bytes:
    """Return the body of the answer to a request, or to one for a URL.

    Raises:
        HTTPError: It is refused; the beginning of the reason can be read.
        OSError: Nobody answers, or not within `timeout_s`.
        HTTPException: What answers is no HTTP, breaks off, or does not stop.
    """
    try:
        with _build_opener().open(request, timeout=timeout_s) as response:
            answer: bytes = response.read()
            return answer
    except urllib.error.HTTPError as exc:
        # Here, where what is met as it is read is an error of the exchange.
        with exc:
            reason = exc.read(_REASON_BYTES)
        raise urllib.error.HTTPError(exc.url, exc.code, exc.msg, exc.headers, io.BytesIO(reason)) from exc


def limit(connection: http.client.HTTPConnection, timeout_s: float, gives_up: Callable[[], bool] | None = None) -> None:
    """Have what is asked next over `connection` answered within `timeout_s`, to the last byte, or given up before."""
    connection.timeout = timeout_s
    if connection.sock:
        connection.sock.settimeout(timeout_s)
    end = time.monotonic() + timeout_s
    connection.response_class = functools.partial(_Answer, end, gives_up)  # type: ignore[assignment]


class _Answer(http.client.HTTPResponse):
    """An answer that has to have come by `end`, or until it is given up."""

    def __init__(
        self,
        end: float,
        gives_up: Callable[[], bool] | None,
        connection: socket.socket,
        *arguments: Any,
        **options: Any,
    ) -> None:
        super().__init__(connection, *arguments, **options)
        self.fp = io.BufferedReader(_Source(self.fp.detach(), connection, end, gives_up))

    def read(self, amt: int | None = None) -> bytes:
        """Return so much of the body, or what is left of it.

        Raises:
            IncompleteRead: It broke off.
        """
        if amt is not None:
            return super().read(amt)
        # At once, the memory for what the headers promise would be taken before any of it has come.
        read_piece = functools.partial(super().read, _PIECE_BYTES)
        body = b"".join(iter(read_piece, b""))
        if self.length:
            raise http.client.IncompleteRead(body, self.length)
        return body


class _Source(io.RawIOBase):
    """The bytes that come over a connection: until `end`, and not without end."""

    def __init__(
        self, raw: io.RawIOBase, connection: socket.socket, end: float, gives_up: Callable[[], bool] | None
    ) -> None:
        self._raw, self._connection, self._end, self._gives_up = raw, connection, end, gives_up
        self._count = 0

    def readable(self) -> bool:
        """Return true."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what has come, as `io.RawIOBase` does.

        Raises:
            TimeoutError: It is not whole by now, or given up.
            HTTPException: It is more than anybody would answer.
        """
        if self._gives_up:
            self._watch(self._gives_up)
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left_s)
        count: int | None = self._raw.readinto(buffer)
        self._count += count or 0
        if self._count > _MAX_BYTES:
            raise http.client.HTTPException(f"an answer of more than {_MAX_BYTES} bytes")
        return count

    def _watch(self, gives_up: Callable[[], bool]) -> None:
        """Wait until something has come, or there is nothing more to wait for.

        Raises:
            TimeoutError: It is given up.
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while time.monotonic() < self._end and not poll.poll(_LOOK_S * 1000):
            if gives_up():
                raise TimeoutError("given up")

    def close(self) -> None:
        """Close the connection as well, once nobody else reads it."""
        self._raw.close()
        super().close()


# An answer may send on to HTTPS.
class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Has each connection of urllib's bounded."""

    def do_open(self, http_class: Callable[..., Any], req: urllib.request.Request, **options: Any) -> Any:
        def connect(*arguments: Any, **settings: Any) -> Any:
            connection = http_class(*arguments, **settings)
            limit(connection, connection.timeout, req.gives_up if isinstance(req, WatchedRequest) else None)
            return connection

        return super().do_open(connect, req, **options)


@functools.cache
def _build_opener() -> urllib.request.OpenerDirector:
    # Once: it loads certificates.
    return urllib.request.build_opener(_Handler)
