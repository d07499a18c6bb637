"""Questions over HTTP to what answers, and to what drips, floods and breaks off."""

import http.client
import os
import urllib.error

import pytest
from stranger import DRIPS, answering, dripping

from modelyard.exchange import fetch, limit
from server.draining import Retirement, may_be_at_work
from server.endpoints import Endpoints
from server.errors import ControlError
from server.healing.stubs import StubTable
from server.tritonserver.control import Control
from server.tritonserver.control_key import ControlKey
from server.tritonserver.pulse import Answer, Probe

KEY = ControlKey("0" * 64)

# Whole after seconds, if somebody waits for the last byte.
SLOW = b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n[]"


@pytest.mark.parametrize("size", [0, 1, 10_000_000])
def test_an_answer_is_fetched_whole(size: int) -> None:
    with answering("a" * size) as address:
        assert fetch(f"http://{address}/", 30) == b"a" * size


@pytest.mark.parametrize(("beginning", "drop"), DRIPS)
def test_an_answer_that_drips_is_waited_for_no_longer_than_asked(beginning: bytes, drop: bytes) -> None:
    with dripping(beginning, drop) as address, pytest.raises(TimeoutError, match="timed out"):
        fetch(f"http://{address}/", 0.3)


@pytest.mark.parametrize(
    ("beginning", "drop"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n", bytes(1 << 20), marks=pytest.mark.rarer),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + bytes(1 << 20) + b"\r\n"),
        # All there is, as http.client reads it.
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", bytes(1 << 20)),
        pytest.param(b"HTTP/1.1 302 Found\r\nLocation: /other\r\n\r\n", bytes(1 << 20), marks=pytest.mark.rarer),
    ],
)
def test_an_answer_without_end_is_not_read_on(beginning: bytes, drop: bytes) -> None:
    with (
        dripping(beginning, drop) as address,
        pytest.raises(http.client.HTTPException, match="^an answer of more than 268435456 bytes$"),
    ):
        fetch(f"http://{address}/", 30)


@pytest.mark.parametrize("code", ["200 OK", "302 Found\r\nLocation: /other"])
def test_what_the_headers_promise_takes_no_memory_before_it_comes(code: str) -> None:
    beginning = f"HTTP/1.1 {code}\r\nContent-Length: {10**15}\r\n\r\n".encode()
    with dripping(beginning, b" ") as address, pytest.raises(TimeoutError):
        fetch(f"http://{address}/", 0.3)


def test_an_answer_that_breaks_off_is_none() -> None:
    with (
        dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", b"", 0) as address,
        pytest.raises(http.client.IncompleteRead, match="2 bytes read, 98 more expected"),
    ):
        fetch(f"http://{address}/", 10)


def test_a_refusal_is_told_with_its_reason() -> None:
    refusal = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000
    with dripping(refusal, b"") as address, pytest.raises(urllib.error.HTTPError) as caught:
        fetch(f"http://{address}/", 10)
    assert (str(caught.value), caught.value.read()) == ("HTTP Error 400: Bad Request", b"x" * 2000)


def test_an_order_that_is_answered_in_drips_is_not_answered() -> None:
    with dripping(SLOW, b" ") as address:
        control = Control(f"http://{address}", KEY, None)
        with pytest.raises(ControlError, match=r"expected an answer within 0.5 s, got 'timed out'"):
            control.read_parameters("tiny")


def test_a_server_that_drips_shows_no_sign_of_life() -> None:
    with dripping(SLOW, b" ") as address:
        assert Probe(f"http://{address}").ask() is Answer.SILENT


# As ever, its end closes the connection.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_who_is_answered_in_drips_does_not_know_that_nobody_is_at_work() -> None:
    with dripping(SLOW, b" ") as address:
        port = int(address.rpartition(":")[2])
        endpoints = Endpoints(host="127.0.0.1", http_port=port, grpc_port=1, metrics_port=port, status_port=1)
        assert may_be_at_work(endpoints, StubTable(os.getpid()))
        assert not Retirement(endpoints, KEY, [], is_let_in=True).begin()


def test_a_connection_that_is_kept_has_the_whole_time_for_each_question() -> None:
    with answering("[]") as address:
        connection = http.client.HTTPConnection(address)
        for _ in range(3):
            limit(connection, 30)
            connection.request("GET", "/")
            assert connection.getresponse().read() == b"[]"
        connection.close()
