"""Malformed and oversized HTTP requests: refused in words, and tritonserver is still the same process afterwards."""

import gzip
import http.client
import json
import random
import socket
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import Published
from launcher import Running, running

PATH = "/v2/models/sentence_embedding/infer"
GOOD = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["Hello"]}]}
TIMEOUT_S = 20.0

# Texts that are shorter than they say, beside as many that are not.
SHORTER = 300

# Bodies of random damage on top of those that were thought of.
ROUNDS = 150


def binary(
    size: object, body: bytes, shape: object = (1, 1), header_length: object = None, datatype: str = "BYTES"
) -> tuple[dict, bytes]:
    tensor = {"name": "TEXT", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
    header = json.dumps({"inputs": [tensor]}).encode()
    length = len(header) if header_length is None else header_length
    return {"Inference-Header-Content-Length": str(length)}, header + body


def text(**changes: object) -> tuple[dict, bytes]:
    return {}, json.dumps({"inputs": [GOOD["inputs"][0] | changes]}).encode()


HELLO = b"\x05\0\0\0Hello"
BODIES = {
    "no JSON": ({}, b"Hello"),
    "no object": ({}, b"[1]"),
    "null": ({}, b"null"),
    "no inputs": ({}, b"{}"),
    "inputs of another type": ({}, b'{"inputs": {"name": "TEXT"}}'),
    "200,000 brackets": ({}, b"[" * 200_000),
    "200,000 braces": ({}, b'{"a":' * 200_000),
    "30 MB of zeros": ({}, b"0" * 30_000_000),
    "a shape of no numbers": text(shape=["x", 1]),
    "a negative shape": text(shape=[-1, 1]),
    "a huge shape": text(shape=[2**31, 2**31]),
    "a shape beyond 64 bits": text(shape=[2**70, 1]),
    "a shape of a thousand ones": text(shape=[1] * 1000),
    "a shape for more than there is": text(shape=[32, 1]),
    "an unknown datatype": text(datatype="FP99"),
    "numbers for text": text(data=[1]),
    "binary, fewer bytes than told": binary(9, HELLO[:5]),
    "binary, more bytes than told": binary(9, HELLO * 3),
    "binary, a text longer than the body": binary(9, b"\xff\xff\xff\xffHello"),
    "binary, no bytes": binary(0, b""),
    "binary, a negative size": binary(-9, HELLO),
    "binary, a size beyond 64 bits": binary(2**64 + 9, HELLO),
    "binary, a header longer than the body": binary(9, HELLO, header_length=10**9),
    "binary, a negative header": binary(9, HELLO, header_length=-1),
    "binary, a header cut short": binary(9, HELLO, header_length=10),
    "binary, a huge shape": binary(9, HELLO, shape=[2**31, 2**31]),
    "binary numbers, a huge shape": binary(8, b"\0" * 8, shape=[2**40], datatype="INT64"),
    "numbers, a negative shape": text(datatype="INT64", shape=[-1], data=[1]),
    "numbers for more than there is": text(datatype="INT64", shape=[10_000_000], data=[1]),
}

# tritonserver takes these for something other than they say; an answer is all that is asked for.
TOLERATED = {
    # A batch of which 32 bits hold none.
    "a batch of 2**32": text(shape=[2**32, 1]),
    "nested data": text(data=[[[[["Hello"]]]]]),
    "binary, a header of no number": binary(9, HELLO, header_length="x"),
}


@pytest.fixture(scope="module")
def server(published: Published) -> Iterator[Running]:
    with running(published.repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        yield server


def ask(server: Running, headers: dict, body: bytes) -> int:
    return ask_path(server, PATH, headers, body)[0]


def ask_path(server: Running, path: str, headers: dict, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def assert_unharmed(server: Running, pid: int) -> None:
    assert ask(server, {}, json.dumps(GOOD).encode()) == 200
    assert server.tritonserver == pid, "tritonserver died and was restarted"


@pytest.mark.parametrize("name", BODIES)
def test_a_malformed_body_is_refused(server: Running, name: str) -> None:
    pid = server.tritonserver
    assert 400 <= ask(server, *BODIES[name]) < 600
    assert_unharmed(server, pid)


@pytest.mark.parametrize("body", [HELLO[:-1], HELLO + HELLO[:-1]], ids=["one row", "two rows"])
def test_a_text_that_is_shorter_than_it_says_is_refused_and_nobody_who_asks_at_the_same_time(
    server: Running, body: bytes
) -> None:
    """Triton's Python backend refuses the whole batch for it."""
    good, bad = json.dumps(GOOD).encode(), binary(len(body), body, shape=[body.count(b"\x05"), 1])
    with ThreadPoolExecutor(8) as pool:
        refused = [pool.submit(ask, server, *bad) for _ in range(SHORTER)]
        answered = [pool.submit(ask, server, {}, good) for _ in range(SHORTER)]
        turns = [pool.submit(ask, server, *each) for each in [bad, ({}, good)] * SHORTER]
    assert {future.result() for future in [*refused, *turns[::2]]} == {400}
    assert {future.result() for future in [*answered, *turns[1::2]]} == {200}


@pytest.mark.parametrize("name", TOLERATED)
def test_an_odd_body_is_answered(server: Running, name: str) -> None:
    pid = server.tritonserver
    assert 200 <= ask(server, *TOLERATED[name]) < 600
    assert_unharmed(server, pid)


def packed(name: str, body: bytes) -> tuple[dict, bytes]:
    return {"Content-Encoding": name}, body


def empty_text() -> bytes:
    return json.dumps({"inputs": [GOOD["inputs"][0] | {"data": [""]}]}).encode()


# Body → what the answer says of it. tritonserver itself takes them for one empty text.
LOST = {
    "none": (({}, b""), "has no body"),
    "none, under a title": (({"content-LENGTH": "0"}, b""), "has no body"),
    "none, in many zeros": (({"Content-Length": "000"}, b""), "has no body"),
    "none, and a blank": (({"Content-Length": "0 "}, b""), "has no body"),
    "none, as it is": (({"Transfer-Encoding": "identity", "Content-Length": "0"}, b""), "has no body"),
    "none, as the value of the one input": (({"Inference-Header-Content-Length": "0"}, b""), "has no body"),
    "plain, said to be gzip": (packed("gzip", json.dumps(GOOD).encode()), "nothing out of 'gzip'"),
    "plain, said to be deflate": (packed("deflate", json.dumps(GOOD).encode()), "nothing out of 'deflate'"),
    "no text, said to be gzip": (packed("gzip", bytes(range(100))), "nothing out of 'gzip'"),
    "chunks of nothing": (({"Transfer-Encoding": "chunked"}, b"0\r\n\r\n"), "nothing out of 'chunked'"),
    # They cannot be told apart.
    "an empty text in gzip": (packed("gzip", gzip.compress(empty_text())), "as an empty text has to be"),
}


@pytest.mark.parametrize("name", LOST)
def test_a_body_that_is_lost_on_the_way_is_no_empty_text(server: Running, name: str) -> None:
    sent, reason = LOST[name]
    status, answer = ask_path(server, PATH, *sent)
    assert (status, reason in answer.decode()) == (400, True), answer


@pytest.mark.parametrize("header", ["", "Content-Length:\r\n", "Transfer-Encoding: identity\r\n"])
def test_no_body_and_no_word_of_one_is_no_empty_text(server: Running, header: str) -> None:
    with socket.create_connection(("127.0.0.1", server.http), timeout=TIMEOUT_S) as connection:
        connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n{header}\r\n".encode())
        with connection.makefile("rb") as answer:
            text = answer.read().decode()
    assert text.startswith("HTTP/1.1 400 ")
    assert "the request has no body" in text


def test_an_empty_text_and_packed_texts_are_answered(server: Running) -> None:
    assert ask(server, {}, empty_text()) == 200
    assert ask(server, *packed("identity", empty_text())) == 200
    whole = json.dumps(GOOD).encode()
    _, vector = ask_path(server, PATH, {}, whole)
    assert ask_path(server, PATH, *packed("gzip", gzip.compress(whole))) == (200, vector)
    assert ask_path(server, PATH, *packed("deflate", zlib.compress(whole))) == (200, vector)
    several = {"inputs": [GOOD["inputs"][0] | {"shape": [2, 1], "data": ["", ""]}]}
    assert ask(server, *packed("gzip", gzip.compress(json.dumps(several).encode()))) == 200


def test_random_damage_is_survived(server: Running) -> None:
    pid = server.tritonserver
    dice = random.Random(0)
    headers, whole = binary(9, HELLO)
    for _ in range(ROUNDS):
        body = bytearray(whole)
        for _ in range(dice.randint(1, 8)):
            body[dice.randrange(len(body))] = dice.randrange(256)
        cut = dice.randint(1, len(body))
        ask(server, headers if dice.random() < 0.7 else {}, bytes(body[:cut]))
    assert_unharmed(server, pid)


@pytest.mark.parametrize("length", ["99999999999999999999", "-1", "x"])
def test_a_content_length_that_lies_is_survived(server: Running, length: str) -> None:
    pid = server.tritonserver
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{{}}"
    with socket.create_connection(("127.0.0.1", server.http), timeout=2) as connection:
        connection.sendall(head.encode())
        connection.shutdown(socket.SHUT_WR)
        # An error or a closed connection: both are answers.
        connection.recv(1000)
    assert_unharmed(server, pid)
