"""What callers of the published ensemble see, over every protocol, from the real tritonserver."""

import asyncio
import json
import random
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from harness import Published
from launcher import read_golden_texts
from relay import BUSY, Relay
from tritonclient.utils import InferenceServerException

from client.bench import read_corpus
from client.command.connection import Connection
from demo.serving import Addresses
from server.following.health import check_answer

MODEL = "sentence_embedding"
PROTOCOLS = ("http", "grpc")


def open_client(server: Addresses, protocol: str) -> tuple[Any, Any]:
    library = tritonclient.http if protocol == "http" else tritonclient.grpc
    return library, library.InferenceServerClient(getattr(server, protocol))


def build_text(library: Any, texts: list[str | bytes]) -> Any:
    tensor = library.InferInput("TEXT", [len(texts), 1], "BYTES")
    tensor.set_data_from_numpy(np.array(texts, dtype=np.object_).reshape(-1, 1))
    return tensor


def ask(server: Addresses, protocol: str, texts: list[str | bytes]) -> np.ndarray:
    library, client = open_client(server, protocol)
    with client:
        return client.infer(MODEL, [build_text(library, texts)]).as_numpy("EMBEDDING")


def post(server: Addresses, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"http://{server.http}/v2/models/{MODEL}/infer", data=body, headers=headers or {})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as exc:
        return exc.code, json.load(exc)


def read_statistics(server: Addresses, model: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{server.http}/v2/models/{model}/stats") as response:
        return dict(json.load(response)["model_stats"][0])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_answers_are_the_checkpoints_own(server: Addresses, published: Published, protocol: str) -> None:
    golden, tolerance = read_golden_texts(published.repository, MODEL)
    texts, expected = zip(*golden, strict=True)
    assert any("[ENT_START]" in text for text in texts)
    assert np.abs(ask(server, protocol, [*texts]) - np.array(expected)).max() <= tolerance


def test_the_asyncio_clients_work_over_both_protocols(server: Addresses) -> None:
    async def ask_all() -> list[np.ndarray]:
        answers = []
        for library, url in ((tritonclient.http.aio, server.http), (tritonclient.grpc.aio, server.grpc)):
            async with library.InferenceServerClient(url) as client:
                inputs = [build_text(library, ["Hello"])]
                results = await asyncio.gather(*(client.infer(MODEL, inputs) for _ in range(4)))
                answers += [result.as_numpy("EMBEDDING") for result in results]
        return answers

    answers = asyncio.run(ask_all())
    assert len(answers) == 8
    assert all(np.abs(answer - answers[0]).max() < 1e-6 for answer in answers)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a\x00b",
        "今日はとても良い天気ですね。",
        "مرحبا",
        "👩‍👩‍👧‍👦",
        "word " * 20_000,
        "x" * 8_000,
        "é " * 349_000,
    ],
    ids=["empty", "blank", "NUL", "Japanese", "Arabic", "emoji", "100 kB", "one long word", "1 MiB"],
)
def test_unusual_texts_are_answered(server: Addresses, protocol: str, text: str) -> None:
    alone = ask(server, protocol, [text])
    beside = ask(server, protocol, ["a neighbour", text])
    assert alone.shape == (1, 384)
    assert np.linalg.norm(alone) == pytest.approx(1.0, abs=1e-5)
    assert np.abs(alone[0] - beside[1]).max() < 1e-5


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (b"ab\xffcd", "TEXT row 1 is not UTF-8: expected valid bytes, got 0xff at byte 2"),
        (b"x " * 524_288, "there is too much text in the request: expected at most 1048576 bytes in all its rows, got"),
        (b"x" * 200_000, "expected at most 131072 characters of what cannot be cut before it is read, got 200000"),
    ],
    ids=["invalid UTF-8", "over 1 MiB", "one endless word"],
)
def test_a_bad_text_fails_its_own_request_while_its_batch_mates_are_answered(
    server: Addresses, protocol: str, bad: bytes, sentence: str
) -> None:
    good = ask(server, protocol, ["a good text"])
    refusals: list[str] = []
    wrong: list[object] = []

    def send(index: int) -> None:
        for _ in range(10):
            try:
                answer = ask(server, protocol, ["fine", bad] if index % 4 == 0 else ["a good text"])
                if index % 4 == 0 or np.abs(answer - good).max() > 1e-5:
                    wrong.append(answer)
            except InferenceServerException as exc:
                if index % 4 == 0:
                    refusals.append(str(exc))
                else:
                    wrong.append(exc)

    threads = [threading.Thread(target=send, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(refusals) == 30
    assert all(sentence in refusal for refusal in refusals)


def test_a_text_that_cannot_be_cut_does_not_hold_up_the_others(server: Addresses) -> None:
    # A third of a second of one core, where the neighbour's takes milliseconds; on a busy machine it may have bad luck.
    enormous = ["안녕" * 21_000] * 8
    parts = []
    for _ in range(5):
        seconds: dict[str, float] = {}

        def send(name: str, texts: list[str]) -> None:
            start = time.monotonic()
            ask(server, "http", texts)
            seconds[name] = time.monotonic() - start  # noqa: B023

        thread = threading.Thread(target=send, args=("enormous", enormous))
        thread.start()
        time.sleep(0.1)
        send("neighbour", ["Hello"])
        thread.join()
        parts.append(seconds["neighbour"] / seconds["enormous"])
    assert min(parts) < 0.2, parts


def test_a_full_queue_says_nothing_of_the_answer(server: Addresses, published: Published) -> None:
    asked = (published.repository, MODEL, "1")
    relay = Relay(server.http, [BUSY] * 3)
    assert check_answer(f"http://{relay.url}", *asked) < 1e-5
    relay.listener.close()
    relay = Relay(server.http, [BUSY] * 1000)
    with pytest.raises(OSError, match="HTTP 503"):
        check_answer(f"http://{relay.url}", *asked, patience_s=0.5)
    assert relay.seen > 1
    relay.listener.close()


def test_texts_of_mixed_lengths_are_tokenised_one_by_one_and_everyone_gets_their_own_answer(server: Addresses) -> None:
    texts = random.Random(1).sample(read_corpus(), 160)
    alone = ask(server, "grpc", texts[:32])
    before = read_statistics(server, f"{MODEL}_preprocess")
    wrong: list[str] = []

    def send(worker: int) -> None:
        library, client = open_client(server, PROTOCOLS[worker % 2])
        for index in range(worker * 2, worker * 2 + 20):
            row = index % 32
            got = client.infer(MODEL, [build_text(library, [texts[row]])]).as_numpy("EMBEDDING")[0]
            if np.abs(got - alone[row]).max() > 1e-5:
                wrong.append(texts[row])
        client.close()

    threads = [threading.Thread(target=send, args=(worker,)) for worker in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    after = read_statistics(server, f"{MODEL}_preprocess")
    inferences = after["inference_count"] - before["inference_count"]
    executions = after["execution_count"] - before["execution_count"]
    assert inferences == 16 * 20
    # Of texts that are joined there, one that lies about its length has all refused.
    assert executions == inferences


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (
            {"shape": [1], "data": ["x"]},
            "unexpected shape for input 'TEXT' for model 'sentence_embedding'. Expected [-1,1]",
        ),
        ({"shape": [1, 2], "data": ["x", "y"]}, "unexpected shape for input 'TEXT'"),
        ({"shape": [0, 1], "data": []}, "expected 1 string elements"),
        ({"shape": [33, 1], "data": ["x"] * 33}, "batch-size must be <= 32"),
        ({"shape": [1, 1], "data": [5], "datatype": "INT64"}, "expects 'BYTES'"),
        ({"shape": [1, 1], "data": ["x"], "name": "WORDS"}, "WORDS"),
    ],
    ids=["shape [1]", "two columns", "no rows", "too many rows", "another dtype", "another name"],
)
def test_a_wrong_tensor_is_refused_clearly(server: Addresses, tensor: dict[str, Any], sentence: str) -> None:
    body = {"inputs": [{"name": "TEXT", "datatype": "BYTES"} | tensor]}
    code, answer = post(server, json.dumps(body).encode())
    assert code == 400
    assert sentence in answer["error"]


def test_invalid_utf8_in_a_binary_body_is_refused(server: Addresses) -> None:
    payload = (4).to_bytes(4, "little") + b"ab\xff\xfe"
    parameters = {"binary_data_size": len(payload)}
    tensor = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "parameters": parameters}
    header = json.dumps({"inputs": [tensor]}).encode()
    code, answer = post(server, header + payload, {"Inference-Header-Content-Length": str(len(header))})
    assert code == 400
    assert "TEXT row 0 is not UTF-8: expected valid bytes, got 0xff at byte 2" in answer["error"]


def test_an_id_outside_the_vocabulary_fails_its_own_request_alone(server: Addresses) -> None:
    """The model step is asked directly, as only someone who leaves out the tokenizer can."""
    library, client = open_client(server, "grpc")
    outcomes: dict[bool, list[str]] = {True: [], False: []}

    def send(is_bad: bool) -> None:
        ids = np.array([[101, 30524 if is_bad else 2023, 102]], dtype=np.int64)
        inputs = []
        for name, values in (("input_ids", ids), ("attention_mask", np.ones_like(ids)), ("token_type_ids", 0 * ids)):
            tensor = library.InferInput(name, [1, 3], "INT64")
            tensor.set_data_from_numpy(values)
            inputs.append(tensor)
        for _ in range(20):
            try:
                client.infer(f"{MODEL}_model", inputs)
                outcomes[is_bad].append("answered")
            except InferenceServerException as exc:
                outcomes[is_bad].append(exc.message())

    threads = [threading.Thread(target=send, args=(index % 4 == 0,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(outcomes[False]) == {"answered"}
    assert len(outcomes[True]) == 40
    assert all("30524" in message for message in outcomes[True])


def test_only_the_outputs_asked_for_are_returned(server: Addresses) -> None:
    library, client = open_client(server, "http")
    output = library.InferRequestedOutput("input_ids")
    result = client.infer(f"{MODEL}_preprocess", [build_text(library, ["Hello there"])], outputs=[output])
    assert result.as_numpy("input_ids").tolist() == [[101, 7592, 2045, 102]]
    assert result.as_numpy("attention_mask") is None


def test_rows_of_one_request_are_padded_to_its_longest_and_no_further(server: Addresses) -> None:
    library, client = open_client(server, "http")
    result = client.infer(f"{MODEL}_preprocess", [build_text(library, ["Hello", "Hello there you"])])
    assert result.as_numpy("input_ids").tolist() == [[101, 7592, 102, 0, 0], [101, 7592, 2045, 2017, 102]]
    assert result.as_numpy("attention_mask").tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert result.as_numpy("token_type_ids").tolist() == [[0] * 5] * 2
    longest = client.infer(f"{MODEL}_preprocess", [build_text(library, ["word " * 500])])
    assert longest.as_numpy("input_ids").shape == (1, 256)


def test_the_client_splits_more_texts_than_one_request_may_hold(server: Addresses) -> None:
    for protocol in PROTOCOLS:
        asked = Connection(getattr(server, protocol), protocol, 30.0)
        answers = asked.infer(asked.find_model(None), [b"one", b"two", b"three"] * 30)
        assert answers["EMBEDDING"].shape == (90, 384)
