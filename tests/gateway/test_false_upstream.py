"""A server of models that answers the gateway in its protocol, and with what no model can have made."""

import asyncio
import contextlib
import itertools
import struct
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from launcher import find_ports
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as protocol

from client.model import Model, Tensor
from gateway.errors import ApiError
from gateway.published import read_published
from gateway.upstream import GENERATION, Served, Upstream

TEXTS = Tensor(name="TEXT", datatype="BYTES", shape=(-1, 1))
VECTORS = Tensor(name="EMBEDDING", datatype="FP32", shape=(-1, 2))

# Output → its type, and how its values travel.
PIECE: dict[str, tuple[str, list[bytes]]] = {
    "text_output": ("BYTES", [b"\2\0\0\0Hi"]),
    "finish_reason": ("BYTES", [b"\4\0\0\0stop"]),
    "num_input_tokens": ("UINT32", [struct.pack("<I", 3)]),
    "num_output_tokens": ("UINT32", [struct.pack("<I", 1)]),
}


def build(outputs: dict[str, tuple[str, list[bytes]]]) -> pb.ModelInferResponse:
    answer = pb.ModelInferResponse(model_name="tiny", model_version="1")
    for name, (datatype, values) in outputs.items():
        answer.outputs.add(name=name, datatype=datatype, shape=[len(values)])
        answer.raw_output_contents.append(b"".join(values))
    return answer


class RolledServer(protocol.GRPCInferenceServiceServicer):
    """Answers with vectors that are of its version: 1 in the first answers, then 2; or one after the other."""

    def __init__(self, *, goes_back: bool) -> None:
        self._number, self._goes_back = itertools.count(), goes_back

    def ModelInfer(self, request: Any, context: Any) -> pb.ModelInferResponse:  # noqa: N802 -- the protocol's name
        number, rows = next(self._number), request.inputs[0].shape[0]
        version = 1 + number % 2 if self._goes_back else 1 + (number > 0)
        answer = build({"EMBEDDING": ("FP32", [struct.pack("<2f", version, version)] * rows)})
        answer.model_version, answer.outputs[0].shape[:] = str(version), [rows, 2]
        return answer


class FalseServer(protocol.GRPCInferenceServiceServicer):
    """Answers whatever it is told to."""

    answer: pb.ModelInferResponse
    times = 1
    refusal = ""

    def ModelInfer(self, request: Any, context: Any) -> pb.ModelInferResponse:  # noqa: N802 -- the protocol's name
        return self.answer

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[pb.ModelStreamInferResponse]:  # noqa: N802
        if self.refusal:
            yield pb.ModelStreamInferResponse(error_message=self.refusal)
        for _ in range(self.times):
            yield pb.ModelStreamInferResponse(infer_response=self.answer)


@contextlib.contextmanager
def serving(servicer: protocol.GRPCInferenceServiceServicer) -> Iterator[str]:
    """Serve, and yield the address."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    protocol.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    (port,) = find_ports(1)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def ask() -> Iterator[Callable[..., list[str]]]:
    """Ask the gateway's upstream about a model of a kind, and return what it would log of an answer that is lost."""
    false = FalseServer()

    async def hear(kind: str, said: list[str]) -> None:
        served = describe(kind)
        upstream = Upstream(address, Path(), 10.0, said.append)
        try:
            if kind == GENERATION:
                share = upstream.open_share(served, "")
                assert [piece async for piece in upstream.write(served, "x", {}, share=share, headers={})]
            else:
                await upstream.ask(served, ["x"], caller="", headers={})
        finally:
            await upstream.close()

    def ask(kind: str, answer: pb.ModelInferResponse, times: int = 1, refusal: str = "") -> list[str]:
        said: list[str] = []
        false.answer, false.times, false.refusal = answer, times, refusal
        asyncio.run(hear(kind, said))
        return said

    with serving(false) as address:
        yield ask


def describe(kind: str) -> Served:
    """Return a model as the gateway has found it."""
    model = Model(name="tiny", version="1", takes=(TEXTS,), makes=(VECTORS,), max_batch_size=8, has_batch=True)
    files: Any = SimpleNamespace(texts_at_a_time=1)
    return Served(name="tiny", version="1", kind=kind, model=model, files=files)


async def embed(address: str, texts: list[str]) -> Any:
    upstream = Upstream(address, Path(), 10.0, print)
    try:
        return (await upstream.ask(describe("embedding"), texts, caller="", headers={}))["EMBEDDING"]
    finally:
        await upstream.close()


def test_a_request_is_answered_by_one_version() -> None:
    with serving(RolledServer(goes_back=False)) as address:
        assert (asyncio.run(embed(address, ["x"] * 40)) == 2).all()
    with serving(RolledServer(goes_back=True)) as address, pytest.raises(ApiError) as refusal:
        asyncio.run(embed(address, ["x"] * 4000))
    assert (refusal.value.status, refusal.value.headers) == (503, {"retry-after": "1"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_vector_that_is_no_number_is_no_answer(
    ask: Callable[[str, pb.ModelInferResponse], list[str]], value: float
) -> None:
    answer = build({"EMBEDDING": ("FP32", [struct.pack("<2f", 1.0, 0.5)])})
    answer.outputs[0].shape[:] = [1, 2]
    assert ask("embedding", answer) == []
    answer.raw_output_contents[0] = struct.pack("<2f", 1.0, value)
    with pytest.raises(ApiError) as refusal:
        ask("embedding", answer)
    assert refusal.value.status == 502


@pytest.mark.parametrize("output", PIECE)
def test_a_piece_of_a_text_that_cannot_be_one_is_no_answer(
    ask: Callable[[str, pb.ModelInferResponse], list[str]], output: str
) -> None:
    assert ask(GENERATION, build(PIECE)) == []
    datatype, values = PIECE[output]
    wrong = [{name: each for name, each in PIECE.items() if name != output}, PIECE | {output: ("FP32", [b"\0" * 4])}]
    if datatype == "BYTES":
        wrong.append(PIECE | {output: (datatype, values * 2)})
    for outputs in wrong:
        with pytest.raises(ApiError) as refusal:
            ask(GENERATION, build(outputs))
        assert refusal.value.status == 502


def test_a_text_that_ends_without_a_reason_or_goes_on_after_it_is_no_answer(ask: Callable[..., list[str]]) -> None:
    for outputs, times in ((PIECE | {"finish_reason": ("BYTES", [b"\4\0\0\0None"])}, 1), (PIECE, 2)):
        with pytest.raises(ApiError) as refusal:
            ask(GENERATION, build(outputs), times)
        assert refusal.value.status == 502
    # Of several texts one ends before the others, and its reason comes again with theirs.
    assert ask(GENERATION, build(PIECE | {"text_output": ("BYTES", [b"\0\0\0\0"])}), 2) == []


def test_the_death_of_a_process_is_no_fault_of_the_request(ask: Callable[..., list[str]]) -> None:
    for said, status in (("Stub process 'tiny_0_0' is not healthy.", 502), ("the parameter 'x' is unknown", 400)):
        with pytest.raises(ApiError) as refusal:
            ask(GENERATION, build(PIECE), refusal=said)
        assert refusal.value.status == status


def test_what_the_engine_has_no_room_for_is_refused_for_now(ask: Callable[..., list[str]]) -> None:
    said = "the engine finds no room for it: expected some within 16 tries, got none; ask again later"
    with pytest.raises(ApiError, match=said) as refusal:
        ask(GENERATION, build(PIECE), refusal=said)
    assert (refusal.value.status, refusal.value.headers["retry-after"]) == (503, "1")


def test_how_many_texts_are_written_at_a_time_is_read_where_the_backend_is_told_it(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "m" / "1" / "tokenizer.json"))

    def read(config: str) -> int:
        (tmp_path / "m" / "config.pbtxt").write_text(config)
        return read_published(tmp_path, "m", "1").texts_at_a_time

    said = 'parameters { key: "max_num_seqs" value { string_value: "%s" } }'
    assert [read(config) for config in ("", 'backend: "vllm"', said % 8)] == [64, 256, 8]
    for damaged in ("{", said % "x"):
        with pytest.raises(ValueError, match=r"config\.pbtxt"):
            read(damaged)
    (tmp_path / "m" / "1" / "model.json").write_text('{"max_num_seqs": 100}')
    assert read('backend: "vllm"') == 100


@pytest.mark.parametrize("golden", ['{"samples": [{}]}', '{"samples": 5}', '{"samples": [{"outputs": [5]}]}', "{"])
def test_a_version_whose_recorded_answers_are_damaged_cannot_be_read(tmp_path: Path, golden: str) -> None:
    """As an error that looking for versions survives: another is published, or this one again."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "m" / "1" / "tokenizer.json"))
    assert not read_published(tmp_path, "m", "1").has_unit_vectors
    (tmp_path / "m" / "1" / "golden.json").write_text(golden)
    with pytest.raises(ValueError, match="golden|Expecting"):
        read_published(tmp_path, "m", "1")
