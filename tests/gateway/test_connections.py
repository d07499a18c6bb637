"""The gateway's protocol around an application that does nothing else, with its times cut short."""

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from gateway import connections
from gateway.connections import BoundedProtocol

LENGTH = 24 << 20
ASK = b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\n"


class Application:
    """Answers with what was sent, or with as many bytes as no system takes at once."""

    def __init__(self) -> None:
        self.has_left = threading.Event()
        self.headers: list[tuple[bytes, bytes]] = []
        self.paths: list[str] = []
        self.may_go_on = threading.Event()

    async def __call__(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.headers = scope["headers"]
        self.paths.append(scope["path"])
        if scope["path"] == "/busy":
            # In which nobody is read.
            self.may_go_on.wait(30)
        body = body or b"x" * (LENGTH if scope["path"] == "/long" else 1)
        leaving = asyncio.ensure_future(receive())
        head = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for begin in range(0, len(body), 1 << 16):
            await send({"type": "http.response.body", "body": body[begin : begin + (1 << 16)], "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        if (await leaving)["type"] == "http.disconnect":
            self.has_left.set()


class Served:
    """A server in a thread of this process."""

    def __init__(self) -> None:
        self.application = Application()
        options: dict[str, Any] = {"loop": "uvloop", "http": BoundedProtocol, "lifespan": "off", "log_config": None}
        self._server = uvicorn.Server(uvicorn.Config(self.application, ws="none", **options))  # type: ignore[arg-type]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()

    def connect(self, *, receives: int = 0) -> socket.socket:
        connection = socket.socket()
        if receives:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        connection.settimeout(30)
        connection.connect(self._listener.getsockname())
        return connection

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", 0.2)
    monkeypatch.setattr(connections, "_TAKING_TIMEOUT_S", 0.5)
    served = Served()
    yield served
    served.close()


def read_all(connection: socket.socket, pause_s: float = 0) -> bytes:
    got = b""
    while part := connection.recv(1 << 20):
        got += part
        time.sleep(pause_s)
    return got


def test_who_reads_slowly_is_told_all_of_it(served: Served) -> None:
    """For longer than a connection is kept that asks nothing."""
    with served.connect(receives=1 << 19) as connection:
        connection.sendall(ASK)
        head, _, body = read_all(connection, 0.05).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and len(body) == LENGTH


def test_who_takes_nothing_is_cut_off(served: Served) -> None:
    with served.connect(receives=1 << 14) as connection:
        connection.sendall(ASK)
        assert served.application.has_left.wait(30)
        assert len(read_all(connection)) < LENGTH


def test_who_still_reads_makes_no_room_for_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "most", 2)
    with served.connect(receives=1 << 14) as reader, served.connect():
        reader.sendall(ASK)
        got = reader.recv(1 << 12)
        for _ in range(5):
            with served.connect() as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert read_all(connection).startswith(b"HTTP/1.1 200")
        assert len((got + read_all(reader)).partition(b"\r\n\r\n")[2]) == LENGTH


def test_a_wish_for_another_protocol_may_come_in_any_two_pieces(served: Served) -> None:
    asked = b"POST / HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"Content-Length: 5\r\n\r\nhello"
    with served.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for cut in range(1, len(asked)):
            connection.sendall(asked[:cut])
            time.sleep(0.003)
            connection.sendall(asked[cut:])
            got = b""
            while not got.endswith(b"hello"):
                got += connection.recv(1 << 12)
            assert got.startswith(b"HTTP/1.1 200"), (cut, got)
    assert b"upgrade" not in dict(served.application.headers)


def test_headers_behind_a_body_are_passed_over(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"5\r\nhello\r\n0\r\nAuthorization: Bearer x\r\n\r\n")
        assert read_all(connection).endswith(b"hello")
    assert b"authorization" not in dict(served.application.headers)


def test_a_body_in_small_chunks_is_no_head(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n")
        assert len(read_all(connection).partition(b"\r\n\r\n")[2]) == 100_000


def test_who_asks_ahead_and_leaves_or_asks_too_much_ahead_is_no_failure(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in (2, 10_000):
        with served.connect(receives=1 << 14) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(ASK * number)
            connection.recv(1 << 12)
        assert served.application.has_left.wait(30)
        served.application.has_left.clear()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("how", ["reset", "in order"])
def test_what_was_sent_by_who_has_left_is_not_looked_at(served: Served, how: str) -> None:
    application = served.application
    with served.connect() as busy:
        busy.sendall(b"GET /busy HTTP/1.1\r\nHost: x\r\n\r\n")
        while "/busy" not in application.paths:
            time.sleep(0.01)
        with served.connect() as leaving:
            leaving.sendall(b"POST /left HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello")
            if how == "reset":
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with served.connect() as connection:
            connection.sendall(b"GET /next HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            application.may_go_on.set()
            assert read_all(connection).startswith(b"HTTP/1.1 200")
    assert application.paths == ["/busy", "/next"]


BEGUN = b"POST / HTTP/1.1\r\nX: " + b"y" * 30_000


@pytest.mark.parametrize("ahead", [b"", b"GET / HTTP/1.1\r\n\r\n"])
def test_of_heads_that_do_not_end_the_oldest_make_room(
    served: Served, monkeypatch: pytest.MonkeyPatch, ahead: bytes
) -> None:
    monkeypatch.setattr(connections, "_MOST_BEGUN", 100_000)
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", 30)
    with contextlib.ExitStack() as stack:
        begun = [stack.enter_context(served.connect()) for _ in range(10)]
        for connection in begun:
            connection.sendall(ahead + BEGUN)
            # As the next one comes behind it.
            time.sleep(0.02)
        for connection in begun[:7]:
            with contextlib.suppress(ConnectionResetError):
                read_all(connection)
        assert 60_000 < BoundedProtocol.begun <= 100_000
        for connection in begun[7:]:
            connection.sendall(b"\r\nConnection: close\r\n\r\n")
            assert read_all(connection).startswith(b"HTTP/1.1 200")
    assert BoundedProtocol.begun == 0


def test_of_requests_that_were_answered_nothing_is_kept(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", 30)
    with served.connect() as connection:
        for _ in range(3):
            connection.sendall(b"GET /" + b"a" * 15_000 + b"?" + b"b" * 15_000 + b" HTTP/1.1\r\nX: y\r\n\r\n")
            got = b""
            while not got.endswith(b"\r\n\r\nx"):
                got += connection.recv(1000) or pytest.fail("it was closed")
            time.sleep(0.02)
            (kept,) = BoundedProtocol.unasked
            assert not (kept.url or kept.headers or kept.scope or kept.cycle.scope)


def test_what_comes_together_is_no_longer_than_it_is(served: Served) -> None:
    """Short requests in a row, of which none ends where a piece does."""
    asked = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    with served.connect() as connection:
        connection.sendall(asked[:10])
        for _ in range(1000):
            connection.sendall(asked[10:] + asked[:10])
            got = b""
            while not got.endswith(b"\r\n\r\nx"):
                got += connection.recv(1000) or pytest.fail("it was closed")
            assert got.startswith(b"HTTP/1.1 200")
