"""The client library and runs over files, against the real server."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from harness import CHECKOUT, run
from launcher import running
from relay import BUSY, CRASHED, Relay

import client as library
from client import (
    AsyncClient,
    Client,
    ClientError,
    DeadlineError,
    ForeignError,
    ModelError,
    RefusedError,
    UnreachableError,
    UsageError,
)
from client.answers import find_texts_model
from client.batch.files import answer_file
from client.model import Model, Tensor, read_model
from client.options import Options
from client.session import Session
from client.streams import find_writer
from demo.serving import Addresses

INFER = str(CHECKOUT / "client" / "infer.py")
TEXTS = [f"text number {number}" for number in range(1000)]


@pytest.fixture(scope="module")
def vectors(server: Addresses) -> np.ndarray:
    with Client(server.grpc, protocol="grpc") as client:
        return client.embed(TEXTS)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_list_of_any_length_is_answered_in_its_order(server: Addresses, vectors: np.ndarray, protocol: str) -> None:
    assert (vectors.shape, vectors.dtype) == ((1000, 384), np.float32)
    with Client(getattr(server, protocol), protocol=protocol, in_flight=3, compression="gzip") as client:
        places = [0, 31, 32, 500, 999]
        alone = np.stack([client.embed([TEXTS[place]])[0] for place in places])
        assert np.abs(alone - vectors[places]).max() < 1e-5
        assert np.abs(client.embed(TEXTS[:100]) - vectors[:100]).max() < 1e-5
        assert client.embed([]).shape == (0, 384)
        ids = np.ones((70, 5), dtype=np.int64)
        tensors = {"input_ids": ids, "attention_mask": ids, "token_type_ids": 0 * ids}
        made = client.infer(tensors, model="sentence_embedding_model")
        assert [values.shape for values in made.values()] == [(70, 384)]


# In a process of its own, whose clients have no event loop yet.
THREADS = """
import sys, threading
from client import Client

def ask():
    together.wait()
    for protocol, url in (("http", sys.argv[1]), ("grpc", sys.argv[2])):
        with Client(url, protocol=protocol) as client:
            told.extend(client.embed(["x"]).shape for _ in range(3))
    told.append(shared.embed(["x"]).shape)

together, told, shared = threading.Barrier(8), [], Client(sys.argv[1])
threads = [threading.Thread(target=ask) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.exit(told != [(1, 384)] * 56)
"""


def test_threads_that_ask_for_the_first_time_at_once_are_all_answered(server: Addresses) -> None:
    done = run("-c", THREADS, server.http, server.grpc)
    assert done.code == 0, done.err


def test_more_text_than_one_request_may_hold_is_sent_in_several(server: Addresses) -> None:
    with Client(server.grpc, protocol="grpc") as client:
        assert client.embed(["word " * 10_000] * 22).shape == (22, 384)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_with_asyncio_many_tasks_share_one_client(server: Addresses, vectors: np.ndarray, protocol: str) -> None:
    async def ask() -> list[np.ndarray]:
        async with AsyncClient(getattr(server, protocol), protocol=protocol) as client:
            return await asyncio.gather(*(client.embed([text]) for text in TEXTS[:40]))

    assert np.abs(np.concatenate(asyncio.run(ask())) - vectors[:40]).max() < 1e-5


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_what_cannot_be_answered_is_an_error_of_its_own_kind(server: Addresses, protocol: str) -> None:
    url = getattr(server, protocol)
    other = {"http": server.grpc, "grpc": server.http}[protocol]
    with Client(url, protocol=protocol) as client, socket.create_server(("127.0.0.1", 0)) as silent:
        cases = [
            (ModelError, "is of another task: expected a model that answers with LABEL, SCORE, got EMBEDDING",
             lambda: client.classify(["x"])),
            (ModelError, "unknown model: 'nope' is not found", lambda: client.embed(["x"], model="nope")),
            (ModelError, "takes no texts", lambda: client.embed(["x"], model="sentence_embedding_model")),
            (RefusedError, r"TEXT row 8 is not UTF-8.*\(in a request of rows 32 to 40\)",
             lambda: client.embed([b"x"] * 40 + [b"\xff"])),
            *(
                (UsageError, f"model is a path: expected the name of a model, .*, got '{path}'; correct it",
                 lambda path=path: client.embed(["x"], model=path))
                for path in ("x/../sentence_embedding", "..")
            ),
            (UsageError, "the texts are one text: expected a list of them, got str", lambda: client.embed("x")),
            (UsageError, "text 1 has no UTF-8", lambda: client.embed(["x", "\ud800"])),
            (UsageError, "has no input X: expected some of TEXT", lambda: client.infer({"X": np.zeros(3)})),
            (UsageError, "takes single texts: expected no pairs, got 1", lambda: client.ask(["x"], ["y"])),
            (ForeignError, "is another port than the one meant", lambda: Client(other, protocol=protocol).embed(["x"])),
            (UnreachableError, "got 'Connection refused'; start it with `python -m server`, or correct url",
             lambda: Client("localhost:9", protocol=protocol, retry_s=0.2).embed(["x"])),
            (DeadlineError, "expected one within 0.5 s, got none; raise timeout_s",
             lambda: Client(f"127.0.0.1:{silent.getsockname()[1]}", protocol=protocol, timeout_s=0.5).embed(["x"])),
            *(
                (UsageError, f"no address of a server: expected HOST:PORT.*, got {re.escape(repr(wrong))}",
                 partial(Client, wrong))
                for wrong in (
                    *("", "localhost:abc", "localhost:99999", "localhost:", ":8000", "[::1]:x", "[::1", "::1", "a b:1"),
                    *("8000", "http://8000"),
                    *("localhost:1:2", "u:p@localhost:1", "ftp://localhost:1", "a..b:80", f"{'a' * 64}.b:80"),
                )
            ),
            (RefusedError, r"Not Found; leave out /v2 of url if no proxy serves under it\.",
             lambda: Client(f"{server.http}/v2").embed(["x"])),
            (UsageError, "the compression is not known", lambda: Client(url, protocol=protocol, compression="zip")),
        ]  # fmt: skip
        for kind, sentence, ask in cases:
            with pytest.raises(ClientError, match=sentence) as raised:
                ask()
            assert type(raised.value) is kind
    assert all(issubclass(kind, ClientError) for name, kind in vars(library).items() if name.endswith("Error"))


class Described(Session):
    """A server that is known to have these models, and is asked nothing else."""

    def __init__(self, *models: Model) -> None:
        super().__init__(Options("localhost:9"))
        self.known = {model.name: model for model in models}

    async def find_model(self, name: str | None = None) -> Model:
        return self.known[name or ""]

    async def list_models(self) -> list[str]:
        return sorted(self.known)


def describe(name: str, *takes: tuple[str, str, tuple[int, ...]]) -> Model:
    tensors = tuple(Tensor(name=name, datatype=datatype, shape=shape) for name, datatype, shape in takes)
    return Model(name=name, version="1", takes=tensors, makes=(), max_batch_size=8, has_batch=True)


IDS = (("input_ids", "INT64", (-1, -1)), ("attention_mask", "INT64", (-1, -1)))


@pytest.mark.parametrize("find", [find_writer, find_texts_model])
def test_a_graph_that_stands_alone_is_said_to_take_tensors_and_a_step_to_have_its_ensemble(
    find: Callable[[Session, str | None], Awaitable[object]],
) -> None:
    ensemble = describe("pair", ("TEXT", "BYTES", (-1, 1)))
    steps = [
        describe("pair_model", *IDS),
        describe("pair_postprocess", ("logits", "FP32", (-1, 3)), ("TEXT", "BYTES", (-1, 1))),
    ]
    server = Described(ensemble, *steps, describe("alone", *IDS), describe("lone_model", *IDS))
    tensors = "got input_ids, attention_mask; it takes tensors: send them with tritonclient, or have `python -m server"
    for name, remedy in (
        ("alone", tensors),
        ("lone_model", tensors),
        ("pair_model", "; ask the ensemble it belongs to."),
        ("pair_postprocess", "; ask the ensemble it belongs to."),
    ):
        with pytest.raises(ModelError, match=remedy):
            asyncio.run(find(server, name))


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_model_of_texts_may_take_more_that_nobody_has_to_send(is_wrapped: bool) -> None:
    """As a model that somebody wrote by hand may; gRPC wraps its configuration."""
    text = {"name": "TEXT", "datatype": "BYTES", "shape": ["-1", "1"]}
    times = {"name": "TIMES", "datatype": "INT32", "shape": ["-1", "1"]}
    config = {"max_batch_size": 8, "input": [{"name": "TEXT"}, {"name": "TIMES", "optional": True}]}
    metadata = {"versions": ["1"], "inputs": [text, times], "outputs": []}
    found = read_model("greet", metadata, {"config": config} if is_wrapped else config)
    assert (found.texts, found.inputs) == (("TEXT",), ("TEXT", "TIMES"))
    config["input"][1].pop("optional")
    assert read_model("greet", metadata, config).texts == ()


def test_a_model_that_writes_nothing_is_asked_with_what_it_takes() -> None:
    server = Described(
        describe("texts", ("TEXT", "BYTES", (-1, 1))), describe("sounds", ("AUDIO", "BYTES", (-1, 1, 1)))
    )
    for name, remedy in (("texts", "; ask with texts."), ("sounds", "; ask it with `infer --audio`, or `audio`.")):
        with pytest.raises(ModelError, match=f"{name} generates no text: expected an input text_input, got .*{remedy}"):
            asyncio.run(find_writer(server, name))


def test_what_is_refused_for_now_is_asked_again_and_what_is_refused_for_good_is_not(server: Addresses) -> None:
    relay = Relay(server.http, [BUSY] * 3 + [b""])
    with Client(relay.url, model="sentence_embedding", in_flight=1) as client:
        assert client.embed(["x"]).shape == (1, 384)
        # Three times 503, one hung up connection (and the look at what else may listen), then the server.
        assert relay.seen >= 5
        seen = relay.seen
        with pytest.raises(RefusedError, match="not UTF-8"):
            client.embed([b"\xff"])
        assert relay.seen == seen, "it kept its connection, and asked once"
    relay.listener.close()
    busy = Relay(server.http, [BUSY] * 1000)
    with (
        Client(busy.url, retry_s=0) as client,
        pytest.raises(library.UnavailableError, match="HTTP 503 without a word"),
    ):
        client.embed(["x"])
    busy.listener.close()


def test_what_a_killed_process_held_is_asked_again(two_versions: Path) -> None:
    with running(two_versions) as server:
        server.read_until("serving HTTP")
        server.follow()
        with Client(f"127.0.0.1:{server.http}") as client:
            expected = client.embed(["x"])
            for stub in server.find_stubs("tickets_model"):
                os.kill(stub.pid, signal.SIGKILL)
            assert np.array_equal(client.embed(["x"]), expected)


def test_what_kills_whatever_computes_it_is_not_asked_for_ever(server: Addresses) -> None:
    deadly = Relay(server.http, [CRASHED] * 1000)
    patient = Client(deadly.url, model="embedder", retry_s=60)
    with patient as client, pytest.raises(library.CrashError, match="'embedder_model_0_0' is not healthy"):
        client.infer({"TEXT": np.array([["x"]], dtype=object)})
    deadly.listener.close()
    # Two questions about the model, side by side.
    assert 4 <= deadly.seen <= 8


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = [json.dumps({"id": number, "text": text}) for number, text in enumerate(TEXTS[:300])]
    path.write_text("\n".join([*rows, json.dumps("the last")]) + "\n")
    return path


def test_a_file_is_taken_up_again_where_a_kill_left_it(
    server: Addresses, vectors: np.ndarray, lines: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    code = (
        "import sys; from pathlib import Path; from client import Client, answer_file\n"
        "answer_file(Client(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), chunk_lines=32)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, server.http, str(lines), str(target)], cwd=CHECKOUT)
    deadline = time.monotonic() + 60
    while not (target.is_file() and target.read_bytes().count(b"\n") >= 32) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    whole = target.read_bytes().count(b"\n")
    assert 32 <= whole < 301
    with target.open("ab") as broken:
        broken.write(b'{"id": 7, "te')
    done = run(INFER, "--url", server.grpc, "--protocol", "grpc", "--file", str(lines), "--output", str(target))
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{target}: 301 lines, {301 - whole} asked now in ")
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["text"] for row in rows] == [*TEXTS[:300], "the last"]
    assert [row["id"] for row in rows[:-1]] == list(range(300))
    assert np.abs(np.array([row["EMBEDDING"] for row in rows[:-1]]) - vectors[:300]).max() < 1e-5
    again = run(INFER, "--url", server.http, "--file", str(lines), "--output", str(target))
    assert again.out.startswith(f"{target}: 301 lines, 0 asked now in ")


def test_a_file_run_is_refused_in_one_sentence(server: Addresses, tmp_path: Path) -> None:
    source, target, bad = tmp_path / "in.txt", tmp_path / "out.jsonl", tmp_path / "bad.jsonl"
    source.write_text("one\ntwo\nthree\n")
    told: list[int] = []
    with Client(server.http) as client:
        assert answer_file(client, source, target, chunk_lines=2, on_progress=told.append) == 3
        assert told == [0, 2, 3]
        source.write_text("one\ntwo\nfour\n")
        bad.write_text('"good"\n{"no": "text"}\n')
        cases = {
            f"{target} belongs to another file: expected answers to the first 3 lines of {source}": (source, target),
            f"line 2 of {bad} holds no text: expected a string, or": (bad, tmp_path / "b"),
            f"{tmp_path}/nowhere cannot be used: ": (tmp_path / "nowhere", tmp_path / "c"),
            "/dev/full cannot be appended to: ": (source, Path("/dev/full")),
        }
        for sentence, (file, output) in cases.items():
            with pytest.raises(UsageError, match=re.escape(sentence)):
                answer_file(client, file, output)
        with pytest.raises(UsageError, match="n asks for several answers: expected 1"):
            next(client.generate("Once", n=2, temperature=1))
    for parameters in ("{max_tokens: 3}", "[1]"):
        done = run(INFER, "--url", server.http, "--prompt", "Once", "--parameters", parameters)
        assert done.code == 1 and done.err.startswith("error: --parameters is not a JSON object: expected such as")
    done = run(INFER, "--url", server.http, "--file", "-", "--output", str(target))
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: --output needs --file; a file can be taken up again, a stream cannot.\n"


def test_what_a_server_says_is_no_order_to_a_terminal() -> None:
    said = ClientError("a refused", got="'\x1b[31mred\x07'\nä")
    assert str(said) == "a refused: got '\\u001b[31mred\\u0007'\nä."
    code = "from client.command.ending import answer; answer('\\x1b]0;x\\x07\\u202eä')"
    main, terminal = os.openpty()
    subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, stdout=terminal, check=True)
    os.close(terminal)
    assert os.read(main, 100).decode() == "\\u001b]0;x\\u0007\\u202eä\r\n"
    os.close(main)
    # What a program reads is what was answered.
    assert run("-c", code).out == "\x1b]0;x\x07\u202eä\n"
