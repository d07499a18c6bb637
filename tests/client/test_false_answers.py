"""Answers that are none: of another program, of a model that breaks its word, and without end."""

import asyncio
import gzip
import json
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest
from harness import CHECKOUT, run
from stranger import answering, dripping

from client import (
    Client,
    DeadlineError,
    ForeignError,
    GarbledError,
    RefusedError,
    UnavailableError,
    UnreachableError,
    UsageError,
    http_answer,
)
from client.answers import check_answers
from client.display import to_json
from client.faults import FloodError
from client.http_answer import MOST_BYTES, PACKED, check_unpacked
from client.model import Model, Tensor
from client.options import Options
from client.outputs import Answered
from client.pieces import ask_texts
from client.ports import find_wrong_port
from client.session import Session
from client.streams import PROMPT, listen, write

INFER = str(CHECKOUT / "client" / "infer.py")


@pytest.mark.parametrize("answer", ["", "{}", "[]", '{"versions": []}', '{"model_stats": [{}]}', '{"model_stats": 5}'])
@pytest.mark.parametrize("model", [None, "tiny"])
def test_a_program_that_answers_in_the_place_of_a_server_is_no_server(model: str | None, answer: str) -> None:
    sentence = (
        "what answers at .* over http is no server that can be read: expected KServe's protocol, got 'another answer "
        "than KServe's'; look at what listens there, or correct url and protocol"
    )
    with (
        answering(answer) as address,
        Client(address, model=model) as client,
        pytest.raises(ForeignError, match=sentence),
    ):
        client.embed(["x"])


@pytest.mark.parametrize(
    ("beginning", "drop", "last"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", b" ", b"nv_"),
        (b"HTTP/1.1 200 OK\r\nX", b"a", b"\r\n\r\nnv_"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\nnv_"),
    ],
)
def test_a_program_that_drips_is_looked_at_no_longer_than_for_an_answer(
    beginning: bytes, drop: bytes, last: bytes
) -> None:
    with dripping(beginning, drop, 5, last) as address:
        assert find_wrong_port(Options(address, protocol="grpc", timeout_s=0.5)) is None


def test_a_program_that_floods_is_read_no_further_than_the_largest_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_answer, "MOST_BYTES", 1 << 24)
    for status, kind in (("200 OK", ForeignError), ("500 Internal", GarbledError)):
        with (
            dripping(f"HTTP/1.1 {status}\r\n\r\n".encode(), b" " * (1 << 20), pause_s=0) as address,
            Client(address, model="tiny", timeout_s=30) as client,
            pytest.raises(kind, match="an answer of more than 16 MB"),
        ):
            client.embed(["x"])


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_an_answer_that_leads_elsewhere_is_told_and_not_followed(status: int) -> None:
    answer = f"HTTP/1.1 {status} Elsewhere\r\nLocation: https://elsewhere.invalid/v2\r\nContent-Length: 0\r\n\r\n"
    with (
        dripping(answer.encode(), b"") as address,
        Client(address, model="tiny", timeout_s=5, headers={"X-Token": "secret"}) as client,
        pytest.raises(ForeignError, match=f"got 'HTTP {status} to https://elsewhere.invalid/v2'; .*"),
    ):
        client.embed(["x"])


def make_other(shape: tuple[int, ...], made: tuple[int, ...]) -> Model:
    """Return a model without a batch, as somebody may write it by hand."""
    text = Tensor(name="TEXT", datatype="BYTES", shape=shape)
    return Model(
        name="m",
        version="1",
        takes=(text,),
        makes=(Tensor(name="Y", datatype="FP32", shape=made),),
        max_batch_size=1,
        has_batch=False,
    )


class Answering:
    """Answers each text of a model without a batch alone, in the place of a session."""

    options = Options("localhost:1")

    def __init__(self, *answers: np.ndarray) -> None:
        self.answers, self.asked = list(answers), []

    async def infer(self, model: Model, inputs: dict, names: tuple, **_: object) -> Answered:
        self.asked.append(inputs["TEXT"])
        return Answered("", {"Y": self.answers[len(self.asked) - 1]})


@pytest.mark.parametrize("shape", [(1,), (-1,), (1, 1), (-1, 1)])
@pytest.mark.parametrize(
    ("made", "answer", "row"),
    [((-1, 2), [[1, 2]], [1, 2]), ((4,), [1, 2, 3, 4], [1, 2, 3, 4]), ((2, 2), [[1, 2], [3, 4]], [[1, 2], [3, 4]])],
)
def test_what_a_model_without_a_batch_answers_to_a_text_stays_with_it(
    shape: tuple[int, ...], made: tuple[int, ...], answer: list, row: list
) -> None:
    session = Answering(np.array(answer), np.array(answer) + 10)
    got = asyncio.run(ask_texts(session, make_other(shape, made), [b"a", b"b"]))["Y"]
    assert got.tolist() == [row, (np.array(row) + 10).tolist()]
    assert [text.shape for text in session.asked] == [(1,) * len(shape)] * 2


@pytest.mark.parametrize("rows", [0, 2])
def test_rows_of_which_nobody_can_tell_whose_they_are_are_refused(rows: int) -> None:
    session = Answering(np.zeros((rows, 2)), np.zeros((rows, 2)))
    with pytest.raises(
        GarbledError, match=f"Y of m cannot be told apart by text: expected one row for a text, got {rows};"
    ):
        asyncio.run(ask_texts(session, make_other((-1, 1), (-1, 2)), [b"a", b"b"]))


class Rolled:
    """Answers each text with the version that it is asked of: one of these after another, the last for all others."""

    options = Options("localhost:1")

    def __init__(self, *versions: str) -> None:
        self.versions, self.asked = list(versions), 0

    async def infer(self, model: Model, inputs: dict, names: tuple, **_: object) -> Answered:
        version = self.versions[min(self.asked, len(self.versions) - 1)]
        self.asked += 1
        return Answered(version, {"Y": np.array([[float(version or 0)]] * len(inputs["TEXT"]), dtype=np.float32)})


@pytest.mark.parametrize(
    ("versions", "asked", "answer"),
    [
        ("1", 5, 1),
        # A server that does not say its version has one.
        ([""], 5, 0),
        # Rolled between two pieces: those of the old version are asked again, after those of the new one in vain.
        ("11112", 10, 2),
        ("12222", 6, 2),
        # Behind a balancer, of whose servers every other one is rolled.
        ("12121121", 8, 1),
    ],
)
def test_a_list_is_answered_by_one_version(versions: str | list[str], asked: int, answer: float) -> None:
    model, session = make_other((-1, 1), (-1, 1)), Rolled(*versions)
    model = replace(model, max_batch_size=2, has_batch=True)
    got = asyncio.run(ask_texts(session, model, [b"a"] * 10))["Y"]
    assert (got.tolist(), session.asked) == ([[answer]] * 10, asked)


def test_a_server_that_goes_back_and_forth_between_versions_is_told_of() -> None:
    model, session = replace(make_other((-1, 1), (-1, 1)), has_batch=True), Rolled(*"12" * 1000)
    with pytest.raises(UnavailableError, match="m answers in one version and in another by turns.* got 1, 2;"):
        asyncio.run(ask_texts(session, model, [b"a"] * 1000))


@pytest.mark.parametrize(
    "name", ["Transfer-Encoding", "content-length", "Inference-Header-Content-Length", "trace-bin"]
)
def test_a_header_that_says_how_a_request_is_written_is_refused(name: str) -> None:
    protocol = "grpc" if name.endswith("bin") else "http"
    with pytest.raises(UsageError, match=f"the header {name} cannot be sent"):
        Options("localhost:1", protocol=protocol, headers={name: "x"})


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e10])
def test_a_time_that_no_library_waits_is_refused(seconds: float) -> None:
    with pytest.raises(
        UsageError, match="timeout_s is no time to wait: expected more than 0 and at most 1000000 seconds"
    ):
        Options("localhost:8001", protocol="grpc", timeout_s=seconds)


def test_a_name_that_no_machine_has_is_no_server_of_either_protocol() -> None:
    for protocol in ("http", "grpc"):
        with (
            Client("nobody.invalid:8001", protocol=protocol, model="tiny", retry_s=0) as client,
            pytest.raises(UnreachableError, match="no server can be reached at nobody.invalid:8001"),
        ):
            client.embed(["x"])


def test_what_is_no_number_is_json_all_the_same() -> None:
    values = np.array([[np.nan, np.inf, -np.inf, 0.5]], dtype=np.float32)
    model = Model(name="m", version="1", takes=(), makes=(), max_batch_size=1, has_batch=True)
    shown = json.dumps(to_json(model, ["x"], [], {"SCORE": values}), allow_nan=False)
    assert json.loads(shown)["results"][0]["SCORE"] == [None, None, None, 0.5]


def pack(count: int, header: int) -> bytes:
    """Return so many megabytes of zeros, packed as one."""
    packer = zlib.compressobj(level=1, wbits=header)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(count)) + packer.flush()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_an_answer_that_unpacks_to_more_than_the_largest_message_is_not_unpacked(encoding: str) -> None:
    body = pack((MOST_BYTES >> 20) + 1, PACKED[encoding])
    beginning = f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with (
        dripping(beginning + body, b"") as address,
        Client(address, model="tiny", timeout_s=30) as client,
        pytest.raises(ForeignError, match="an answer that unpacks to more than 1024 MB"),
    ):
        client.embed(["x"])


@pytest.mark.parametrize("count", [0, 1, 1 << 20, (1 << 20) + 1, 1 << 22])
def test_what_an_answer_unpacks_to_is_counted_over_all_its_members(count: int) -> None:
    members = 2 * gzip.compress(np.random.default_rng(0).bytes(count))
    check_unpacked(members + bytes(8), PACKED["gzip"], 2 * count)
    with pytest.raises(FloodError):
        check_unpacked(members + gzip.compress(b"x"), PACKED["gzip"], 2 * count)


def test_a_refusal_without_a_body_is_told_with_its_status() -> None:
    with (
        dripping(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b"") as address,
        pytest.raises(GarbledError, match="the server refused the request: HTTP 404 without a word"),
    ):
        ask_for_y(address)


def test_an_answer_that_breaks_off_is_told_in_a_sentence_alone() -> None:
    beginning = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"
    with dripping(beginning, b" ", 0.1) as address:
        done = run(INFER, "--url", address, "--model", "tiny", "--text", "x", "--timeout", "5")
    assert done.code == 1
    assert re.fullmatch(
        r"error: the answer of .* broke off: expected a whole one, got half of one; ask again\.\n", done.err
    )


def ask_for_y(address: str) -> None:
    """Ask whoever is there for the output Y of one text."""
    taken = Tensor(name="TEXT", datatype="BYTES", shape=(-1, 1))
    made = Tensor(name="Y", datatype="FP32", shape=(-1, 1))
    model = Model(name="tiny", version="1", takes=(taken,), makes=(made,), max_batch_size=8, has_batch=True)

    async def ask() -> None:
        session = Session(Options(address, timeout_s=5))
        try:
            await session.infer(model, {"TEXT": np.array([[b"x"]], dtype=np.object_)})
        finally:
            await session.close()

    asyncio.run(ask())


@pytest.mark.parametrize(
    "answer",
    [
        "[]",
        '{"outputs": [{"name": "Y", "datatype": "FP32", "shape": [1, 1], "parameters": {"binary_data_size": "x"}}]}',
        '{"outputs": [{"name": "Y", "datatype": "FP32", "shape": [1, 1], "data": [1%s]}]}' % ("0" * 400),
    ],
)
def test_an_answer_that_cannot_be_one_is_told_of_the_model(answer: str) -> None:
    with answering(answer) as address, pytest.raises(GarbledError, match="the answer of tiny cannot be read"):
        ask_for_y(address)


@pytest.mark.parametrize(
    ("more", "data", "got"),
    [
        ("", "[null]", "Y holds None, which is no FP32"),
        ("", "[true]", "Y holds True, which is no FP32"),
        ("", '["1"]', "Y holds '1', which is no FP32"),
        ("", "[1e300]", "Y holds 1e[+]300, which is no FP32"),
        ("", "[[[null]]]", "Y holds None, which is no FP32"),
        ('"model_name": "other", ', "[1]", "the answer of 'other'"),
        ('"error": "broken", ', "[1]", "an error, 'broken', beside the outputs"),
    ],
)
def test_what_would_become_numbers_that_no_model_said_is_refused(more: str, data: str, got: str) -> None:
    answer = f'{{{more}"outputs": [{{"name": "Y", "datatype": "FP32", "shape": [1, 1], "data": {data}}}]}}'
    with answering(answer) as address, pytest.raises(GarbledError, match=f"tiny cannot be read: .*, got '{got}'"):
        ask_for_y(address)


def test_a_shape_of_which_numpy_would_find_the_size_itself_is_refused() -> None:
    answer = '{"outputs": [{"name": "Y", "datatype": "FP32", "shape": [-1, 1], "data": [1]}]}'
    with answering(answer) as address, pytest.raises(GarbledError, match=r"got 'Y of the shape \[-1, 1\]'"):
        ask_for_y(address)


@pytest.mark.parametrize("rows", [-5, -1])
def test_a_model_that_takes_fewer_rows_than_none_is_refused(rows: int) -> None:
    described = {"versions": ["1"], "inputs": [], "outputs": [], "max_batch_size": rows}
    sentence = f"is no server that can be read: .*, got 'max_batch_size {rows} of tiny'"
    with (
        answering(json.dumps(described)) as address,
        Client(address, model="tiny") as client,
        pytest.raises(ForeignError, match=sentence),
    ):
        client.embed(["x"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_vector_or_a_score_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(GarbledError, match=f"EMBEDDING of tiny cannot be read: expected finite numbers, got {value}"):
        check_answers("tiny", {"EMBEDDING": np.array([[1.0, value]], dtype=np.float32)})
    with pytest.raises(GarbledError, match="SCORE of tiny cannot be read"):
        check_answers("tiny", {"LABEL": np.array([[b"a"]], object), "SCORE": np.array([[value]])})


@pytest.mark.parametrize(
    ("outputs", "got"),
    [
        ('{"name": "Y", "datatype": "FP32", "shape": [3, 1], "data": [1, 2, 3]}', r"Y \[3, 1\]"),
        ("", "Y missing"),
        ('{"name": "Z", "datatype": "FP32", "shape": [1, 1], "data": [1]}', "Y missing"),
    ],
)
def test_what_a_model_leaves_out_or_adds_is_told_of_the_model(outputs: str, got: str) -> None:
    sentence = rf"the answer of tiny is not whole: expected Y \[1, \.\.\.\], got {got}; mend the model"
    with answering(f'{{"outputs": [{outputs}]}}') as address, pytest.raises(GarbledError, match=sentence):
        ask_for_y(address)


@pytest.mark.parametrize("encoding", ["deflate", "gzip"])
def test_what_cannot_be_unpacked_is_told_of_the_model(encoding: str) -> None:
    beginning = f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\nContent-Length: 12\r\n\r\n"
    for body in (b"no such thing", gzip.compress(b"{}" * 100)):
        with dripping(beginning.encode() + body[:12], b"", 0.1) as address, pytest.raises(GarbledError):
            ask_for_y(address)


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "got"),
    [
        ("INT32", "[1, 1]", "[1]", r"INT32 \[1, 1\]"),
        ("FP32", "[1, 2]", "[1, 2]", r"FP32 \[1, 2\]"),
        ("FP32", "[1]", "[1]", r"FP32 \[1\]"),
        ("BYTES", "[1, 1]", '["1"]', r"BYTES \[1, 1\]"),
    ],
)
def test_values_of_another_type_or_shape_than_the_models_are_refused(
    datatype: str, shape: str, data: str, got: str
) -> None:
    output = f'{{"name": "Y", "datatype": "{datatype}", "shape": {shape}, "data": {data}}}'
    sentence = rf"Y of tiny is not what the model says that it makes: expected FP32 \[-1, 1\], got {got}"
    with answering(f'{{"outputs": [{output}]}}') as address, pytest.raises(GarbledError, match=sentence):
        ask_for_y(address)


def test_a_stream_of_comments_alone_is_waited_for_no_longer_than_for_a_piece() -> None:
    with dripping(b"HTTP/1.1 200 OK\r\n\r\n", b": heard\n\n", 30) as address, pytest.raises(DeadlineError):
        write_text(address)


@pytest.mark.parametrize(("text", "is_one"), [(r'"\u00e9"', True), (r'"\ud800"', False), ("1", False), ("null", False)])
def test_strings_inside_of_json_are_those_that_come_as_bytes(text: str, is_one: bool) -> None:
    metadata = {
        "name": "tiny",
        "versions": ["1"],
        "inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [-1, 1]}],
        "outputs": [
            {"name": name, "datatype": kind, "shape": [-1, 1]} for name, kind in (("LABEL", "BYTES"), ("SCORE", "FP32"))
        ],
        "max_batch_size": 8,
    }
    label = f'{{"name": "LABEL", "datatype": "BYTES", "shape": [1, 1], "data": [{text}]}}'
    score = '{"name": "SCORE", "datatype": "FP32", "shape": [1, 1], "data": [0.5]}'
    known = json.dumps(metadata)
    with (
        answering(known, known, f'{{"outputs": [{label}, {score}]}}') as address,
        Client(address, model="tiny") as client,
    ):
        if is_one:
            assert client.classify(["x"]) == [[(json.loads(text), 0.5)]]
            return
        with pytest.raises(GarbledError, match="the answer of tiny cannot be read"):
            client.classify(["x"])


def write_text(address: str, *, is_streamed: bool = True) -> list[str]:
    """Return the pieces that whoever is there writes."""

    async def listen() -> list[str]:
        session = Session(Options(address, timeout_s=5))
        try:
            prompt = {"text_input": np.array([b"x"], dtype=np.object_)}
            return [piece async for piece in write(session, "tiny", prompt, is_streamed=is_streamed)]
        finally:
            await session.close()

    return asyncio.run(listen())


@pytest.mark.parametrize(
    "event",
    [
        'data: {"x": 1}',
        "data: [1]",
        'data: {"text_output": 5}',
        'data: {"text_output": ["a", "b"]}',
        'data: {"text_output": []}',
        "data: 1",
        "data: " + "x" * 100,
        "<html>",
        '{"text_output": "a"}',
    ],
)
def test_a_stream_of_something_else_is_told_of_the_model(event: str) -> None:
    with (
        answering(f"{event}\n\n") as address,
        pytest.raises(GarbledError, match="the answer of tiny cannot be read"),
    ):
        write_text(address)


@pytest.mark.parametrize("answer", ["", "\n", ": nothing\n\n"])
def test_a_stream_without_any_event_is_no_empty_text(answer: str) -> None:
    with answering(answer) as address, pytest.raises(GarbledError, match="tiny answers nothing"):
        write_text(address)


@pytest.mark.parametrize(
    "stream",
    [
        'data: {"text_output": "a"}\n\ndata: {"text_output": "b"}\n\n',
        'data:{"text_output":"a"}\r\n\r\ndata:{"text_output":"b"}\r\n\r\n',
        ': heard\n\nevent: piece\nid: 1\ndata: {"text_output":\ndata: "a"}\n\n:\nretry: 10\ndata: {"text_output": "b"}',
    ],
)
def test_a_stream_is_read_as_server_sent_events_are(stream: str) -> None:
    with answering(stream) as address:
        assert write_text(address) == ["a", "b"]


@pytest.mark.parametrize("drop", [b"x" * (1 << 20), b"x" * (1 << 20) + b"\ndata:"])
def test_an_event_without_end_is_read_no_further_than_a_whole_answer(drop: bytes) -> None:
    with (
        dripping(b"HTTP/1.1 200 OK\r\n\r\ndata: ", drop, pause_s=0) as address,
        pytest.raises(GarbledError, match="the answer of tiny cannot be read"),
    ):
        write_text(address)


def test_a_refusal_without_end_is_read_no_further_than_anybody_would() -> None:
    with (
        dripping(b"HTTP/1.1 500 Internal\r\n\r\n", b"no " * (1 << 16), pause_s=0) as address,
        pytest.raises(RefusedError, match="the server refused the request: no no no"),
    ):
        write_text(address)


@pytest.mark.parametrize(
    ("labels", "scores"),
    [
        (np.array([[b"a", b"b"]], object), np.ones((1, 3))),
        (np.array([b"a"], object), np.ones(1)),
        (np.ones((1, 2)), np.ones((1, 2))),
        (np.array([[b"a"]], object), np.array([[b"x"]], object)),
    ],
)
def test_answers_that_do_not_belong_together_are_refused(labels: np.ndarray, scores: np.ndarray) -> None:
    with pytest.raises(GarbledError, match="the answers of tiny cannot be read: expected rows of LABEL, SCORE, as"):
        check_answers("tiny", {"LABEL": labels, "SCORE": scores})
    check_answers("tiny", {"Y": labels, "SCORE": scores})


def test_a_prompt_that_is_too_long_for_what_stands_in_front_is_told_with_what_to_do() -> None:
    async def hear(address: str) -> None:
        session = Session(Options(address, retry_s=0))
        try:
            async for _ in listen(session, "tiny", {PROMPT: np.array(["漢字".encode()], dtype=np.object_)}):
                pass
        finally:
            await session.close()

    page = b"<html><head><title>413 Request Entity Too Large</title></head></html>"
    answer = b"HTTP/1.1 413 Request Entity Too Large\r\nContent-Length: %d\r\n\r\n%b" % (len(page), page)
    # Of its letters each takes three bytes, not six.
    sentence = (
        "the server refused the request: what stands in front of it takes no JSON of 40 bytes over HTTP; ask over"
    )
    with dripping(answer, b"") as address, pytest.raises(RefusedError, match=sentence):
        asyncio.run(hear(address))
