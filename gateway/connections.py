"""Connections of callers: so many at a time, of which those that ask nothing make room for new ones."""

import asyncio
import contextlib
import fcntl
import resource
import socket
import sys
import termios
from typing import Any, ClassVar

import orjson
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .errors import ApiError

# In which a request comes whole, once a connection was opened for it or it has begun.
_REQUEST_TIMEOUT_S = 30.0

# In which a caller takes something of an answer that waits for it.
_TAKING_TIMEOUT_S = 30.0

# Longer than most clients keep a connection: one that we close first may lose a request.
KEEP_ALIVE_S = 75

# In which a refusal can be read by who is still sending, and how much may come meanwhile: a connection that is closed
# before loses it.
_REFUSAL_S, _MOST_REFUSED = 1.0, 1 << 20

# Bytes of a request beside its body, and of the requests that are sent before the one ahead of them is answered. What
# is made of a header and of a request takes some bytes more; a chunk is framed by as many.
_MOST_HEAD, _A_HEADER, _A_REQUEST, _A_CHUNK = 32 * 1024, 128, 1024, 16

# Bytes of the line that a head begins with and of what ends it, beside the address, and of what stands around a header.
_A_LINE, _BETWEEN = 18, 4

# Bytes of all of these that nobody has begun to answer: who answers counts them.
_MOST_BEGUN = 64 << 20

# Bytes of an answer that wait for the system to take them, so that a short one goes in one packet.
_BUFFER = 16 * 1024

# States of a connection that its caller has closed, by a reset or in order (tcp_states.h).
_CLOSED = (7, 8)

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
    """HTTP as uvicorn speaks it, which itself takes a head of any length, and waits for as long as a caller likes.

    Attributes:
        most: Connections at a time.
        unasked: Those of which no whole request is there, the oldest first.
        begun: Bytes of requests that have begun to come on any of them, and that nobody has begun to answer.
    """

    most: ClassVar[int] = _MOST
    begun: ClassVar[int] = 0
    unasked: ClassVar[dict["BoundedProtocol", asyncio.TimerHandle]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, in the place of the oldest that asks nothing where there are too many."""
        super().connection_made(transport)
        # Nothing more is written before all of it is taken: an answer is over when it has gone.
        transport.set_write_buffer_limits(_BUFFER, 0)
        self._has_head = self._is_whole = self._is_over = self._wishes_upgrade = False
        self._fed = self._read = self._head = self._begun = self._untaken = 0
        self._taking: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None
        self._expect(_REQUEST_TIMEOUT_S)
        if len(self.connections) > self.most:
            # The new one itself, where all others are being answered.
            idle = (each for each in self.unasked if not each.transport.get_write_buffer_size())
            next(idle)._abort()

    def data_received(self, data: bytes) -> None:
        """Read on, unless what has come was refused or its caller is gone: the system holds megabytes of each."""
        if self._has_left():
            self._abort()
            return
        self._fed += len(data)
        if self._is_over:
            if self._fed > _MOST_REFUSED:
                self._abort()
            return
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
            if self._has_head and self._is_whole:
                self._fed = 0
            self._check(self._fed)
        except HttpParserError as exc:
            cause = exc.__context__
            what = f"the request cannot be read: expected HTTP/1.1, got '{exc}'."
            self._refuse(cause if isinstance(cause, ApiError) else ApiError(400, what))
        except ApiError as exc:
            self._refuse(exc)
        self._share_room()

    def eof_received(self) -> None:
        """Take the end of what a caller sends for its leaving, which nobody can tell from it."""

    def on_message_begin(self) -> None:
        """Let a request take so long to come."""
        super().on_message_begin()
        self._has_head = self._is_whole = self._wishes_upgrade = False
        self._read = _A_LINE
        if self._is_free():
            self._head = 0
            self._expect(_REQUEST_TIMEOUT_S)

    def on_url(self, url: bytes) -> None:
        """Take a part of the address."""
        self._read += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header of a bounded head; one behind the body is passed over."""
        self._read += len(name) + len(value) + _BETWEEN
        if not self._has_head:
            self._count(len(name) + len(value) + _A_HEADER)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer, or let it wait for the answers ahead of it."""
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ApiError(405, "the gateway connects nobody: expected what /docs shows, got CONNECT.")
            self._wishes_upgrade = True
            return
        self._has_head = True
        if not self._is_free():
            self._count(_A_REQUEST)
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Leave out what frames a piece of a body."""
        self._fed -= _A_CHUNK

    def on_body(self, body: bytes) -> None:
        """Take a part of a body, which is counted by who asks for it, or here where it comes ahead of its turn."""
        self._fed -= len(body)
        if self.pipeline:
            self._count(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Let its answer take as long as it takes."""
        if self._wishes_upgrade:
            return
        # What is left may be the beginning of the next one, which came with it.
        self._is_whole = True
        self._fed = max(0, self._fed - self._read)
        super().on_message_complete()
        if not self._is_free():
            self._forget()

    def on_response_complete(self) -> None:
        """Keep the connection for the next one."""
        super().on_response_complete()
        if self._is_free():
            self._expect(KEEP_ALIVE_S)
            self._head = 0
            self._drop_answered()
        self._share_room()

    def pause_writing(self) -> None:
        """Wait for the caller to take what is written, for as long as it takes something."""
        super().pause_writing()
        self._untaken = self._count_untaken()
        self._taking = self.loop.call_later(_TAKING_TIMEOUT_S, self._look_again)

    def resume_writing(self) -> None:
        """Write on."""
        super().resume_writing()
        self._stop_looking()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._forget()
        self._stop_looking()
        self._leave()
        self._begin(0)
        super().connection_lost(exc)

    def _has_left(self) -> bool:
        """Tell whether the caller has closed the connection, which is read only behind all that it has sent."""
        try:
            state = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        # Of a connection that is lost, or of none of TCP's.
        except OSError:
            return False
        return bool(state[0] in _CLOSED)

    def _feed(self, data: bytes) -> None:
        """Parse; a wish for another protocol is passed over, with which the parser would take no body."""
        while data:
            try:
                self.parser.feed_data(data)
            except HttpParserUpgrade as exc:
                data = self._write_head() + data[exc.args[0] :]
                self.parser = HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            else:
                return

    def _write_head(self) -> bytes:
        """Return the head that has come, without the wish."""
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _count(self, amount: int) -> None:
        self._head += amount
        self._check(self._head)

    def _check(self, amount: int) -> None:
        if amount > _MOST_HEAD:
            what = f"the head is too large: expected at most {_MOST_HEAD} bytes beside the body, got more"
            raise ApiError(431, f"{what}; send fewer and shorter headers.")

    def _share_room(self) -> None:
        """Count what is held of requests that have begun, and close connections, the oldest first, if it is too much.

        Where those that it is held of all are being answered, it is this one.
        """
        self._begin(max(self._fed, self._head) if self.pipeline or not self._has_head else 0)
        while self._begun and BoundedProtocol.begun > _MOST_BEGUN:
            next((each for each in self.unasked if each._begun), self)._abort()

    def _begin(self, amount: int) -> None:
        BoundedProtocol.begun += amount - self._begun
        self._begun = amount

    def _drop_answered(self) -> None:
        """Let go of a request that was answered: its head may be long, and some of it is there several times."""
        nothing: Any = {}
        # Of the next one a part may have come.
        if self.scope is self.cycle.scope:
            self.url, self.headers, self.scope = b"", [], nothing
        self.cycle.scope = nothing

    def _refuse(self, exc: ApiError) -> None:
        """Tell why nothing more is read, where no answer has begun, and close the connection."""
        self._is_over = True
        if not self._is_free():
            if self.pipeline or self.cycle.response_started:
                self._abort()
                return
            self._leave()
        status, content = exc.to_openai()
        body = orjson.dumps(content)
        said = {b"content-type": b"application/json", b"content-length": b"%d" % len(body), b"connection": b"close"}
        headers = [*self.server_state.default_headers, *said.items()]
        lines = [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", body]))
        self.transport.write_eof()
        self._expect(_REFUSAL_S)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _leave(self) -> None:
        """Tell who answers that nobody is there any more; uvicorn itself tells it to the last request alone."""
        if self._answered and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.waiting_for_100_continue = False
            self._answered.message_event.set()

    def _abort(self) -> None:
        self._begin(0)
        self._leave()
        self.transport.abort()

    def _is_free(self) -> bool:
        """Tell whether every request of this connection has been answered."""
        return self.cycle is None or self.cycle.response_complete

    def _expect(self, timeout_s: float) -> None:
        self._forget()
        self.unasked[self] = self.loop.call_later(timeout_s, self._end)

    def _forget(self) -> None:
        if timer := self.unasked.pop(self, None):
            timer.cancel()

    def _end(self) -> None:
        """Close a connection that asks nothing, unless its caller still takes an answer."""
        untaken = 0 if self._is_over else self._count_untaken()
        if untaken and untaken != self._untaken:
            self._untaken = untaken
            self._expect(_TAKING_TIMEOUT_S)
        else:
            self._abort()

    def _look_again(self) -> None:
        """Close a connection whose caller has taken nothing since."""
        untaken = self._count_untaken()
        if untaken == self._untaken:
            self._abort()
            return
        self._untaken = untaken
        self._taking = self.loop.call_later(_TAKING_TIMEOUT_S, self._look_again)

    def _stop_looking(self) -> None:
        if self._taking:
            self._taking.cancel()
            self._taking = None

    def _count_untaken(self) -> int:
        """Return the bytes of answers that wait here, or in the system, which takes some at once for a slow caller."""
        held = b"\0\0\0\0"
        # Of a connection that is lost.
        with contextlib.suppress(OSError, ValueError):
            held = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, held)
        return self.transport.get_write_buffer_size() + int.from_bytes(held, sys.byteorder)
