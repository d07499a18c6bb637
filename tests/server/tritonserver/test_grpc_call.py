"""A call in the launcher's own gRPC against a server of grpcio's, and against what is no gRPC at all."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from stranger import dripping

from server.tritonserver.grpc_call import GrpcError, call

METHOD = "/yard.Service/Order"

# Longer than the seven bits that a length has at first, and than a frame is meant to be.
REASONS = ("no", "näh: 100 %\nand more", "x" * 200, "y" * 5_000)


class _Orders(grpc.GenericRpcHandler):
    """Refuses with the reason that the request holds, and says what came with one that holds none."""

    def __init__(self) -> None:
        self.came: dict[str, str] = {}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method != METHOD:
            return None
        self.came = {key: str(value) for key, value in details.invocation_metadata}

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if request:
                context.abort(grpc.StatusCode.INTERNAL, request.decode())
            return b"done" * 10_000

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture(scope="module")
def orders() -> Iterator[tuple[_Orders, tuple[str, int]]]:
    handler = _Orders()
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield handler, ("127.0.0.1", port)
    server.stop(None)


def test_a_call_ends_well_and_brings_its_headers(orders: tuple[_Orders, tuple[str, int]]) -> None:
    handler, address = orders
    for value in ("a", "b" * 127, "c" * 128, "d" * 1_000):
        call(address, METHOD, b"", {"key": value}, 10)
        assert handler.came["key"] == value


@pytest.mark.parametrize("reason", REASONS, ids=len)
def test_a_call_that_is_refused_says_why(orders: tuple[_Orders, tuple[str, int]], reason: str) -> None:
    with pytest.raises(GrpcError) as refusal:
        call(orders[1], METHOD, reason.encode(), {}, 10)
    assert str(refusal.value) == reason


def test_a_method_that_is_not_there_is_refused(orders: tuple[_Orders, tuple[str, int]]) -> None:
    with pytest.raises(GrpcError, match="Method not found"):
        call(orders[1], "/yard.Service/Other", b"", {}, 10)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\0\0\4\4\0\0\0\0\0",
        # Headers that end the answer and hold nothing, half a number, half a string.
        *(bytes([0, 0, len(block), 1, 5, 0, 0, 0, 1]) + block for block in (b"", b"\0\x7f\xff", b"\0\x05ab")),
        # The stream is reset, the connection is given up.
        b"\0\0\4\3\0\0\0\0\1\0\0\0\1",
        b"\0\0\x08\7\0\0\0\0\0\0\0\0\0\0\0\0\1",
    ],
)
def test_what_is_no_answer_of_grpc_is_an_error_of_the_system(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1 << 16)

        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises(OSError):
            call(("127.0.0.1", listener.getsockname()[1]), METHOD, b"", {}, 5)
        serving.join()


def test_a_server_that_says_nothing_is_waited_for_no_longer_than_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError):
        call(("127.0.0.1", listener.getsockname()[1]), METHOD, b"", {}, 0.2)


def test_a_call_without_an_answer_ends_once_there_is_nothing_to_wait_for() -> None:
    asked: list[bool] = []

    def gives_up() -> bool:
        asked.append(len(asked) == 2)
        return asked[-1]

    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        call(silent.getsockname()[:2], METHOD, b"", {}, 300, gives_up=gives_up)
    assert asked == [False, False, True]


@pytest.mark.parametrize("drop", [b"\0\0\0\4\0\0\0\0\0", b"\0\0\0\4\1\0\0\0\0" * 10_000])
def test_a_server_that_never_comes_to_its_answer_is_waited_for_no_longer_than_asked(drop: bytes) -> None:
    with dripping(b"\0\0\0\4\0\0\0\0\0", drop) as address, pytest.raises(TimeoutError):
        call(("127.0.0.1", int(address.rpartition(":")[2])), METHOD, b"", {}, 0.2)
