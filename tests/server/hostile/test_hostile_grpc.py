"""Malformed gRPC requests: refused with a status, and tritonserver is still the same process afterwards."""

import random
from collections.abc import Callable, Iterator

import grpc
import pytest
from harness import Published
from launcher import Running, running
from tritonclient.grpc import service_pb2, service_pb2_grpc

HELLO = b"\x05\0\0\0Hello"
TIMEOUT_S = 20.0
ROUNDS = 150

INFER = "/inference.GRPCInferenceService/ModelInfer"


def build(
    *, name: str = "TEXT", datatype: str = "BYTES", shape: tuple[int, ...] = (1, 1), raw: tuple[bytes, ...] = (HELLO,)
) -> bytes:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    request = service_pb2.ModelInferRequest(model_name="sentence_embedding", inputs=[tensor], raw_input_contents=raw)
    return bytes(request.SerializeToString())


GOOD = build()
BODIES = {
    "no protobuf": b"\xff" * 100,
    "cut short": GOOD[:-3],
    "nothing": b"",
    "no tensor": build(raw=()),
    "fewer bytes than told": build(raw=(HELLO[:5],)),
    "more bytes than told": build(raw=(HELLO * 3,)),
    "a text longer than the body": build(raw=(b"\xff\xff\xff\xffHello",)),
    "no bytes": build(raw=(b"",)),
    "a negative shape": build(shape=(-1, 1)),
    "a huge shape": build(shape=(2**31, 2**31)),
    "a shape for more than there is": build(shape=(32, 1)),
    "a shape of a thousand ones": build(shape=(1,) * 1000),
    "numbers, a huge shape": build(datatype="INT64", shape=(2**40,), raw=(b"\0" * 8,)),
    "an unknown datatype": build(datatype="FP99"),
    "an unknown name": build(name="NOBODY"),
}


@pytest.fixture(scope="module")
def server(published: Published) -> Iterator[Running]:
    with running(published.repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        yield server


@pytest.fixture(scope="module")
def ask(server: Running) -> Iterator[Callable[[bytes], object]]:
    """Return a function that sends bytes as a request and returns the status."""
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        call = channel.unary_unary(INFER)

        def send(body: bytes) -> object:
            try:
                call(body, timeout=TIMEOUT_S)
            except grpc.RpcError as exc:
                return exc.code()
            return grpc.StatusCode.OK

        yield send


def assert_unharmed(server: Running, pid: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(service_pb2.ModelInferRequest.FromString(GOOD), timeout=TIMEOUT_S)
    assert len(answer.raw_output_contents[0]) == 4 * 384
    assert server.tritonserver == pid, "tritonserver died and was restarted"


@pytest.mark.parametrize("name", BODIES)
def test_a_malformed_request_is_refused(server: Running, ask: Callable[[bytes], object], name: str) -> None:
    pid = server.tritonserver
    assert ask(BODIES[name]) in {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNIMPLEMENTED,
    }
    assert_unharmed(server, pid)


def test_random_damage_is_survived(server: Running, ask: Callable[[bytes], object]) -> None:
    pid = server.tritonserver
    dice = random.Random(0)
    for _ in range(ROUNDS):
        body = bytearray(GOOD)
        for _ in range(dice.randint(1, 8)):
            body[dice.randrange(len(body))] = dice.randrange(256)
        status = ask(bytes(body[: dice.randint(1, len(body))]))
        assert status not in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
    assert_unharmed(server, pid)
