"""The gateway in front of the real tritonserver, asked by OpenAI's own client and by hand."""

import base64
import contextlib
import gzip
import http.client
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import openai
import pytest
import torch
from doors import Gateway, opened, publish_models
from harness import CHECKOUT, run
from launcher import Running, find_ports, running
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from client import Client, ClientError
from gateway.__main__ import main

TOKENS = 24
MESSAGES = [{"role": "system", "content": "Be kind. "}, {"role": "user", "content": "Grüße aus Köln"}]
LONG = "word " * 600
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(ThreadingHTTPServer):
    """Takes the server's spans, as a collector of OpenTelemetry does."""

    spans: ClassVar[list[dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["content-length"])))
            for part in content["resourceSpans"]:
                for scope in part["scopeSpans"]:
                    Collector.spans += scope["spans"]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""


@dataclass
class Doors:
    """A server with its gateway, and what transformers makes of the same models."""

    folder: Path
    server: Running
    gateway: Gateway

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.gateway.url}/v1", api_key="none", max_retries=0)

    def read_failures(self, model: str) -> dict[str, float]:
        """Return what the server has counted of requests to a model and its steps that failed."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server.metrics}/metrics", timeout=60) as answer:
            lines = re.findall(r"nv_inference_request_failure\{(.*)\} (\S+)", answer.read().decode())
        found = {labels: float(number) for labels, number in lines if f'model="{model}' in labels}
        assert found
        return found

    def write(self, ids: Any) -> str:
        """Return what transformers' own `generate` writes after ids."""
        tokenizer = AutoTokenizer.from_pretrained(self.folder / "writer")
        model = AutoModelForCausalLM.from_pretrained(self.folder / "writer").eval()
        ids = torch.tensor([ids])
        with torch.no_grad():
            made = model.generate(ids, do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)
        return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))

    def read_cancelled(self) -> float:
        """Return how many callers the writer has seen leave."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server.metrics}/metrics", timeout=60) as answer:
            (value,) = re.findall(r"modelyard_generate_cancelled_total\{.*\} (\S+)", answer.read().decode())
        return float(value)


@pytest.fixture(scope="module")
def doors(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder = tmp_path_factory.mktemp("doors")
    repository = publish_models(folder, tiny_checkpoint)
    collector = Collector(("127.0.0.1", 0), Collector.Handler)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    tracing = ["mode=opentelemetry", "rate=1", "level=TIMESTAMPS", "opentelemetry,bsp_schedule_delay=100"]
    tracing.append(f"opentelemetry,url=localhost:{collector.server_port}/v1/traces")
    options = [word for option in tracing for word in ("--trace-config", option)]
    ports = find_ports()
    # Before there is a server, and until it answers.
    with opened(f"127.0.0.1:{ports[1]}", repository, "--matryoshka", "embedder") as gateway:
        gateway.wait_for_line("not ready: no server can be reached")
        status, content, _ = gateway.ask("/health")
        assert (status, content) == (503, {"status": "not ready"})
        refusal = gateway.ask("/v1/embeddings", {"model": "embedder", "input": "x"})
        assert (refusal[0], refusal[1]["error"]["code"]) == (503, "service_unavailable")
        assert refusal[2]["retry-after"] == "1"
        with running(repository, "--", *options, ports=ports) as server:
            server.follow()
            server.wait_for_line("serving HTTP", 60)
            gateway.wait_for_line("writer, version 1, for generation")
            deadline = time.monotonic() + 30
            while len(gateway.ask("/v1/models")[1]["data"]) < 3:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert gateway.ask("/health")[:2] == (200, {"status": "ready"})
            yield Doors(folder, server, gateway)
    collector.shutdown()
    collector.server_close()


def test_another_port_of_the_server_is_named_without_an_option_that_there_is_not(doors: Doors) -> None:
    with opened(f"127.0.0.1:{doors.server.http}", doors.folder) as gateway:
        line = gateway.wait_for_line("is another port than the one meant")
    assert line.endswith("pass the gRPC port with --server (8001 unless the server was told another).")


def test_clients_of_the_server_are_told_that_it_is_the_gateway_that_they_ask(doors: Doors) -> None:
    words = [
        "--url",
        doors.gateway.url.removeprefix("http://"),
        "--protocol",
        "grpc",
        "--model",
        "writer",
        "--text",
        "x",
    ]
    done = run("client/infer.py", *words)
    assert done.code == 1 and "expected the server's gRPC port, got its gateway port; pass the gRPC port" in done.err
    words = ["--url", f"localhost:{doors.server.grpc}", "--protocol", "grpc", "--model", "writer", "--text", "x"]
    assert "; ask it with --prompt where it takes one" in run("client/infer.py", *words).err


def test_models_are_listed_as_openai_lists_them(doors: Doors) -> None:
    assert [model.id for model in doors.openai.models.list()] == ["embedder", "ranker", "writer"]
    assert doors.openai.models.retrieve("writer").owned_by == "modelyard"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt': expected one of embedder, ranker, writer"):
        doors.openai.models.retrieve("gpt")


def test_vectors_are_the_servers_in_either_encoding_with_the_tokens_that_were_read(doors: Doors) -> None:
    texts = [f"text number {number}" for number in range(70)]
    with Client(f"127.0.0.1:{doors.server.grpc}", protocol="grpc") as client:
        wanted = client.embed(texts, model="embedder")
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        got = doors.openai.embeddings.create(model="embedder", input=texts, **options)
        vectors = [entry.embedding for entry in got.data]
        if options.get("encoding_format") == "base64":
            vectors = [np.frombuffer(base64.b64decode(vector), dtype="<f4") for vector in vectors]
        assert np.abs(np.array(vectors) - wanted).max() < 1e-5
        assert [entry.index for entry in got.data] == list(range(70))
        # [CLS] text number N [SEP]
        assert got.usage.prompt_tokens == got.usage.total_tokens == 70 * 5
    (one,) = doors.openai.embeddings.create(model="embedder", input="text number 3").data
    assert np.abs(np.array(one.embedding) - wanted[3]).max() < 1e-5
    cut = np.array(doors.openai.embeddings.create(model="embedder", input=texts, dimensions=8).data[5].embedding)
    assert np.abs(cut - wanted[5, :8] / np.linalg.norm(wanted[5, :8])).max() < 1e-5
    with Client(f"127.0.0.1:{doors.server.grpc}", protocol="grpc") as client:
        beginning = client.embed([LONG], model="embedder")[0]
    got = doors.openai.embeddings.create(model="embedder", input=LONG, extra_body={"truncate_prompt_tokens": -1})
    assert np.abs(np.array(got.data[0].embedding) - beginning).max() < 1e-5
    assert got.usage.prompt_tokens == 64


def test_a_completion_is_what_transformers_writes_whole_and_streamed(doors: Doors) -> None:
    tokenizer = AutoTokenizer.from_pretrained(doors.folder / "writer")
    ids = tokenizer("Once upon")["input_ids"]
    wanted = doors.write(ids)
    asked = {"model": "writer", "prompt": "Once upon", "max_tokens": TOKENS, "temperature": 0}
    whole = doors.openai.completions.create(**asked)
    (choice,) = whole.choices
    assert (choice.text, choice.finish_reason) == (wanted, "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), TOKENS)
    events = list(doors.openai.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events[:-1]) == wanted
    assert (events[-1].choices, events[-1].usage.total_tokens) == ([], len(ids) + TOKENS)
    assert events[-2].choices[0].finish_reason == "length"
    both = doors.openai.completions.create(**asked | {"prompt": ["Once upon", "The cat"]})
    assert both.choices[0].text == wanted and [each.index for each in both.choices] == [0, 1]
    # Unless a caller says otherwise it is drawn, as OpenAI does, and ends after 16 tokens.
    drawn = [
        doors.openai.completions.create(model="writer", prompt="Once", n=3, seed=seed, extra_body={"ignore_eos": True})
        for seed in (7, 7, 8)
    ]
    texts = [[choice.text for choice in each.choices] for each in drawn]
    assert texts[0] == texts[1] != texts[2] and len(set(texts[0])) == 3
    assert drawn[0].usage.completion_tokens == 3 * 16
    stop = wanted[10:13]
    stopped = doors.openai.completions.create(**asked, stop=[stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (wanted[: wanted.index(stop)], "stop")


def test_a_chat_is_rendered_and_answered_as_transformers_does(doors: Doors) -> None:
    tokenizer = AutoTokenizer.from_pretrained(doors.folder / "writer")
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    wanted = doors.write(ids)
    asked: dict[str, Any] = {"model": "writer", "max_completion_tokens": TOKENS, "temperature": 0}
    whole = doors.openai.chat.completions.create(messages=MESSAGES, **asked)
    assert whole.choices[0].message.content == wanted
    assert whole.choices[0].message.role == "assistant"
    # The token in front is the template's alone.
    assert whole.usage.prompt_tokens == len(ids)
    events = list(
        doors.openai.chat.completions.create(
            messages=MESSAGES, **asked, n=1, stream=True, stream_options={"include_usage": True}
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events[:-1]) == wanted
    assert events[-1].usage.completion_tokens == TOKENS
    parts = [{"type": "text", "text": "Grüße "}, {"type": "text", "text": "aus Köln"}]
    spelled = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]
    assert doors.openai.chat.completions.create(messages=spelled, **asked).choices[0].message.content == wanted
    several = doors.openai.chat.completions.create(
        messages=MESSAGES, model="writer", n=2, seed=1, max_tokens=5, stream=True
    )
    texts = ["", ""]
    for event in several:
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts[0] != texts[1] and all(texts)


def test_whoever_asks_it_as_a_server_is_told_what_it_is(doors: Doors) -> None:
    asked = Client(doors.gateway.url.removeprefix("http://"), model="embedder", retry_s=0)
    with asked, pytest.raises(ClientError, match="is another port than the one meant: .* got its gateway port"):
        asked.embed(["x"])


def test_documents_are_ranked_as_the_client_ranks_them(doors: Doors) -> None:
    query, documents = "Where is the station?", ["I love it.", "How much is it?", "Bad work.", "When does it leave?"]
    with Client(f"127.0.0.1:{doors.server.grpc}", protocol="grpc") as client:
        wanted = client.rerank(query, documents, model="ranker")
    body = {"model": "ranker", "query": query, "documents": [*documents[:3], {"text": documents[3]}]}
    status, got, _ = doors.gateway.ask("/v1/rerank", {**body, "top_n": 3, "return_documents": True})
    tokenizer = AutoTokenizer.from_pretrained(doors.folder / "ranker")
    read = sum(len(tokenizer(query, document)["input_ids"]) for document in documents)
    assert status == 200 and got["usage"]["total_tokens"] == read
    assert [each["index"] for each in got["results"]] == [each.position for each in wanted[:3]]
    assert [each["relevance_score"] for each in got["results"]] == pytest.approx([each.score for each in wanted[:3]])
    assert got["results"][0]["document"] == {"text": documents[wanted[0].position]}
    _, ranked, _ = doors.gateway.ask("/rerank", {"query": query, "texts": documents, "return_text": True})
    assert [each["index"] for each in ranked] == [each.position for each in wanted]
    assert ranked[0]["text"] == documents[wanted[0].position]
    _, (label,), _ = doors.gateway.ask("/predict", {"inputs": [query, documents[0]]})
    (score,) = [each.score for each in wanted if each.position == 0]
    assert label["score"] == pytest.approx(score)
    _, batch, _ = doors.gateway.ask("/predict", {"inputs": [[query, document] for document in documents]})
    assert batch[0][0]["score"] == pytest.approx(score) and len(batch) == 4


def test_tei_is_told_vectors_and_tokens_without_naming_the_model(doors: Doors) -> None:
    wanted = doors.openai.embeddings.create(model="embedder", input=["A cat", "sleeps"]).data
    asked = {"inputs": ["A cat", "sleeps"], "normalize": True, "truncation_direction": "Right", "prompt_name": None}
    status, vectors, _ = doors.gateway.ask("/embed", asked)
    assert status == 200
    assert np.abs(np.array(vectors) - np.array([each.embedding for each in wanted])).max() < 1e-5
    status, answer, _ = doors.gateway.ask("/embed", {"inputs": "A cat", "normalize": False})
    assert status == 413 and "normalize has no effect: expected true, for the model itself makes" in json.dumps(answer)
    _, (row,), _ = doors.gateway.ask("/tokenize", {"inputs": "A cat", "model": "embedder"})
    assert [(token["text"], token["special"], token["start"], token["stop"]) for token in row] == [
        ("[CLS]", True, None, None),
        ("a", False, 0, 1),
        ("cat", False, 2, 5),
        ("[SEP]", True, None, None),
    ]
    _, (plain,), _ = doors.gateway.ask("/tokenize", {"inputs": LONG, "model": "embedder", "add_special_tokens": False})
    assert len(plain) == 600


def test_of_a_very_long_text_the_beginning_is_tokenized(doors: Doors) -> None:
    path = Path(f"/proc/{doors.gateway.process.pid}/status")
    (before,) = re.findall(r"VmHWM:\s+(\d+) kB", path.read_text())
    body = {"model": "embedder", "input": "word " * 200_000, "truncate_prompt_tokens": -1}
    status, answer, _ = doors.gateway.ask("/v1/embeddings", body)
    assert status == 200 and answer["usage"]["prompt_tokens"] == 64
    # More than the server takes.
    _, sentence = doors.gateway.refuse("/v1/embeddings", {**body, "input": "word " * 1_500_000})
    assert "there is too much text in the request" in sentence
    _, sentence = doors.gateway.refuse("/v1/embeddings", {"model": "embedder", "input": "word " * 1_500_000})
    assert "too" in sentence
    (after,) = re.findall(r"VmHWM:\s+(\d+) kB", path.read_text())
    assert int(after) - int(before) < 300_000


def test_what_a_refused_request_held_is_free_again(doors: Doors) -> None:
    path = Path(f"/proc/{doors.gateway.process.pid}/status")
    (before,) = re.findall(r"VmRSS:\s+(\d+) kB", path.read_text())
    # Of a text with one character beyond the BMP each takes four bytes.
    body = {"model": "embedder", "input": "a" * 8_000_000 + "😀"}
    for _ in range(25):
        assert "too" in doors.gateway.refuse("/v1/embeddings", body)[1]
    (after,) = re.findall(r"VmRSS:\s+(\d+) kB", path.read_text())
    assert int(after) - int(before) < 300_000


EMBED, WRITE = {"model": "embedder", "input": "x"}, {"model": "writer", "prompt": "x"}
CHAT = {"model": "writer", "messages": [{"role": "user", "content": "x"}]}


def test_a_field_that_is_null_says_nothing(doors: Doors) -> None:
    said = {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": None}], "tool_call_id": None}
    body = {"model": "writer", "messages": [said], "max_tokens": 1, "parallel_tool_calls": None}
    assert doors.gateway.ask("/v1/chat/completions", body)[0] == 200


def test_health_may_be_asked_for_its_head_alone(doors: Doors) -> None:
    with urllib.request.urlopen(urllib.request.Request(f"{doors.gateway.url}/health", method="HEAD")) as answer:
        assert (answer.status, answer.read()) == (200, b"")


def test_a_body_that_is_encoded_is_refused(doors: Doors) -> None:
    said = {"content-encoding": "gzip"}
    status, sentence = doors.gateway.refuse("/v1/embeddings", body=gzip.compress(json.dumps(EMBED).encode()), **said)
    assert (status, sentence) == (
        415,
        "the body is encoded: expected it as it is, got 'gzip'; send it without Content-Encoding.",
    )
    assert doors.gateway.ask("/v1/embeddings", EMBED, **{"content-encoding": "identity"})[0] == 200


@pytest.mark.parametrize(
    ("path", "content", "status", "sentence"),
    [
        ("/v1/embeddings", {**EMBED, "input": [1, 2]}, 400, "input holds token ids: expected texts"),
        ("/v1/embeddings", {**EMBED, "input": [[1], [2]]}, 400, "LangChain: check_embedding_ctx_length=False"),
        ("/v1/embeddings", {**EMBED, "input": []}, 400, "input is empty"),
        ("/v1/embeddings", {**EMBED, "input": [[1] * 50] * 1000}, 400, "input holds token ids: expected texts"),
        ("/v1/embeddings", {**EMBED, "input": ["x"] * 30_000}, 400, "expected at most 2048 texts, got 30000"),
        ("/v1/embeddings", {f"field {n}": n for n in range(30_000)}, 400, "the body holds too much: expected at most"),
        ("/v1/chat/completions", {**CHAT, "messages": [{}] * 30_000}, 400, "the body holds too much: expected at m"),
        ("/v1/embeddings", {**EMBED, "input": ["x"] * 2049}, 400, "expected at most 2048 texts, got 2049"),
        ("/v1/embeddings", {**EMBED, "input": ["x", LONG]}, 400, "input[1] is too long for the model: expected at"),
        ("/v1/embeddings", {**EMBED, "input": 5}, 400, "input cannot be used: expected a valid string or"),
        ("/v1/embeddings", {"model": "embedder"}, 400, "the parameter input is missing"),
        ("/v1/embeddings", {**EMBED, "dimension": 3}, 400, "the parameter 'dimension' is not known here: expected one"),
        ("/v1/embeddings", {**EMBED, "model": None}, 400, "model cannot be used: expected a valid string, got null"),
        ("/v1/embeddings", {**EMBED, "dimensions": 17}, 400, "makes vectors of 16 values: expected at most 16"),
        ("/v1/embeddings", {**EMBED, "model": "writer"}, 400, "writer is a model of generation: expected"),
        ("/v1/embeddings", {**EMBED, "model": "gpt"}, 404, "there is no model 'gpt': expected one of"),
        ("/v1/embeddings", [], 400, "the body is no JSON object"),
        ("/v1/completions", {**WRITE, "max_tokens": 0}, 400, "max_tokens cannot be used: expected greater"),
        ("/v1/completions", {**WRITE, "temperature": "hot"}, 400, "temperature cannot be used: expected a valid"),
        ("/v1/completions", {**WRITE, "temperature": float("inf")}, 400, "temperature cannot be used: expected a fin"),
        ("/v1/completions", {**WRITE, "min_p": float("nan")}, 400, "min_p cannot be used: expected a finite"),
        ("/v1/completions", {**WRITE, "seed": 2**64}, 400, "seed cannot be used: expected less than or equal"),
        ("/v1/completions", {**WRITE, "max_tokens": 10**30}, 400, "max_tokens cannot be used: expected"),
        ("/tokenize", {"model": "embedder", "inputs": "x y " * 40_000}, 413, "inputs is too long: expected at"),
        ("/tokenize", {"model": "writer", "inputs": "😀" * 100_000}, 413, "expected at most 131072 tokens, got more"),
        ("/v1/completions", {**WRITE, "temperature": 1e-5}, 400, "temperature is too small: expected 0, which takes"),
        ("/v1/completions", {**WRITE, "temperature": 0, "n": 2}, 400, "n 2 has no effect: expected a temperature"),
        ("/v1/completions", {**WRITE, "prompt": "word " * 5000}, 400, "is too long for the model's context"),
        ("/v1/completions", {**WRITE, "logprobs": 3}, 400, "logprobs cannot be used: expected null, got 3"),
        ("/v1/completions", {**WRITE, "prompt": ["a", "b"], "stream": True}, 400, "a stream has one prompt"),
        ("/v1/completions", {**WRITE, "stream_options": {}}, 400, "stream_options has no effect"),
        ("/v1/chat/completions", {**CHAT, "tools": [{}]}, 400, "tools cannot be used: expected none, got [{}]"),
        ("/v1/chat/completions", {**CHAT, "messages": []}, 400, "messages cannot be used: expected at least 1 of them"),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages.0.content.0.type cannot be used: expected 'text', got \"image_url\"",
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": "a", "mood": 1}]},
            400,
            "the parameter 'messages.0.mood' is not known here: expected none of this name there",
        ),
        ("/rerank", {"query": "a", "texts": ["b"], "raw_scores": True}, 413, "raw_scores cannot be used: expected f"),
        ("/v1/chat/completions", {**CHAT, "stream": True, "top_k": -7}, 400, "top_k cannot be used"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role"),
        ("/v1/rerank", {"model": "ranker", "query": "x", "documents": []}, 400, "documents is empty"),
        ("/v1/rerank", {"model": "embedder", "query": "x", "documents": ["y"]}, 400,
         "embedder is a model of embedding: expected one of pair classification; pass one of ranker."),
        ("/v1/rerank", {"model": "ranker", "query": "q " * 300_000, "documents": ["b"] * 2000}, 400,
         "beside each of 2000 documents: expected at most 16777216 bytes of it in all, got 1200000000; ask several"),
        ("/rerank", {"query": "q " * 300_000, "texts": ["b"] * 2000}, 413, "the query is read beside each of 2000 te"),
        ("/v1/rerank", {"model": "ranker", "query": "x", "documents": ["y", LONG]}, 400,
         "documents[1] is too long for the model: expected at most"),
        ("/predict", {"inputs": ["a"]}, 413,
         "expected one model of classification, got none; export one with --task text-classification, for none is ser"),
        ("/predict", {"inputs": [["a"], ["a", "b"]]}, 413, "inputs cannot be used: expected one text a row"),
        ("/v1/audio/speech", {}, 404, "there is no /v1/audio/speech: expected one of the paths that /docs shows"),
        ("/v1/embeddings", None, 405, "/v1/embeddings is not asked with GET"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused_as_openai_and_tei_refuse(
    doors: Doors, path: str, content: Any, status: int, sentence: str
) -> None:
    got = doors.gateway.refuse(path, content)
    assert got[0] == status and sentence in got[1], got


def test_what_has_no_effect_may_be_sent_empty_as_some_clients_do(doors: Doors) -> None:
    """Some write every field of a form, whether it says anything or not."""
    empty = {"tools": [], "logit_bias": {}, "store": False, "tool_choice": "none", "logprobs": False}
    said = {"role": "user", "content": "a cat", "tool_calls": [], "annotations": []}
    chat = {**CHAT, **empty, "messages": [said], "max_tokens": 2, "temperature": 0}
    plain = {**WRITE, "max_tokens": 2, "temperature": 0}
    for path, sent in (("/v1/chat/completions", chat), ("/v1/completions", {**plain, "best_of": 1, "logit_bias": {}})):
        status, answer, _ = doors.gateway.ask(path, sent)
        assert status == 200 and answer["usage"]["completion_tokens"] <= 2, answer


def test_a_body_is_bounded_and_may_be_anything(doors: Doors) -> None:
    for body in (b"{", b"\xff\xfe", b"", b"[" * 9999):
        assert "the body is no JSON" in doors.gateway.refuse("/v1/embeddings", body=body)[1]
    with opened(f"127.0.0.1:{doors.server.grpc}", doors.folder / "models", "--max-body", "1000") as small:
        text = json.dumps({**EMBED, "input": "x" * 2000}).encode()
        assert "the body is too large: expected at most 1000 bytes" in small.refuse("/v1/embeddings", body=text)[1]
        # Of one whose length is not told before.
        with socket.create_connection(("127.0.0.1", small.port), timeout=30) as connection:
            connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            connection.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n3e8\r\n" + b"x" * 1000 + b"\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 413")


HEAD = b"POST /embed HTTP/1.1\r\nHost: x\r\n"
CHUNKS = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("beginning", "repeated"),
    [
        (HEAD, b"X:\r\n"),
        (HEAD, b"X: " + b"y" * 10_000 + b"\r\n"),
        (HEAD + b"X: ", b"y" * 10_000),
        (b"GET /", b"y" * 10_000),
        (b"", b"\r\n"),
        (CHUNKS + b"2\r\n{}\r\n0\r\n", b"X: y\r\n"),
        (CHUNKS + b"2", b";x=y"),
    ],
)
def test_what_comes_beside_a_body_is_bounded(doors: Doors, beginning: bytes, repeated: bytes) -> None:
    path = Path(f"/proc/{doors.gateway.process.pid}/status")
    (before,) = re.findall(r"VmRSS:\s+(\d+) kB", path.read_text())
    with socket.create_connection(("127.0.0.1", doors.gateway.port), timeout=30) as connection:
        connection.sendall(beginning + repeated * (100_000 // len(repeated)))
        head, _, body = b"".join(iter(lambda: connection.recv(1 << 16), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ") and b"connection: close" in head
        assert json.loads(body)["error"]["message"].startswith("the head is too large: expected at most 32768 bytes")
    # And where it does not end.
    with socket.create_connection(("127.0.0.1", doors.gateway.port), timeout=30) as connection:
        connection.sendall(beginning)
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                connection.sendall(repeated * (1_000_000 // len(repeated)))
    (after,) = re.findall(r"VmRSS:\s+(\d+) kB", path.read_text())
    assert int(after) - int(before) < 50_000


def test_what_is_no_http_is_refused_and_told_nobody_else(doors: Doors) -> None:
    before = len(doors.gateway.lines)
    for sent in (b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", HEAD + b"Content-Length: x\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", doors.gateway.port), timeout=30) as connection:
            connection.sendall(sent)
            head, _, body = b"".join(iter(lambda: connection.recv(1 << 16), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert "the request cannot be read: expected HTTP/1.1" in json.loads(body)["error"]["message"]
    assert len(doors.gateway.lines) == before


def test_what_one_caller_holds_leaves_room_for_others(doors: Doors) -> None:
    """Bodies that do not come to their end."""
    length = 8 << 20
    body = json.dumps({**EMBED, "input": "x" * (length - 200)}).encode().ljust(length)
    with contextlib.ExitStack() as stack:
        others = [
            stack.enter_context(socket.create_connection(("127.0.0.1", doors.gateway.port), timeout=30))
            for _ in range(8)
        ]
        for connection in others:
            connection.sendall(HEAD + f"Content-Length: {length}\r\n\r\n".encode() + body[:-1])
        refused = select.select(others, [], [], 30)[0]
        assert refused and b" 429 " in refused[0].recv(100)
        assert doors.gateway.ask("/v1/embeddings", EMBED)[0] == 200
        # As much as anyone may send, of somebody else.
        source = ("127.0.0.2", 0)
        address = ("127.0.0.1", doors.gateway.port)
        with socket.create_connection(address, timeout=30, source_address=source) as connection:
            connection.sendall(HEAD + f"Content-Length: {length}\r\nConnection: close\r\n\r\n".encode() + body)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert b"the parameter inputs is missing" in answer


def leave(gateway: Gateway, *, is_streamed: bool) -> None:
    """Ask for the longest text there can be, and hang up while it is written."""
    body = json.dumps({**CHAT, "ignore_eos": True, "stream": is_streamed}).encode()
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        if is_streamed:
            assert b"200 OK" in connection.recv(1000)
        else:
            time.sleep(0.2)


def test_who_leaves_frees_the_place_in_the_server(doors: Doors) -> None:
    gateway = doors.gateway
    left = 'modelyard_gateway_requests_total{route="/v1/chat/completions",status="499"}'
    for is_streamed in (True, False):
        before, cancelled = gateway.read_metric(left), doors.read_cancelled()
        deadline, next_s = time.monotonic() + 60, 0.0
        while gateway.read_metric(left) == before or doors.read_cancelled() == cancelled:
            now = time.monotonic()
            assert now < deadline
            # A machine may write the whole text in the time in which another one has not begun.
            if now >= next_s:
                leave(gateway, is_streamed=is_streamed)
                next_s = now + 5
            time.sleep(0.05)


def test_a_word_need_not_wait_for_all_texts_of_another_caller(doors: Doors) -> None:
    gateway = doors.gateway
    # More than the server queues, of each of them.
    many = {"model": "writer", "prompt": ["Hello"] * 128, "n": 16, "max_tokens": 1000, "ignore_eos": True}
    word = json.dumps({"model": "writer", "prompt": "Hello", "max_tokens": 2}).encode()
    body = json.dumps(many).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with contextlib.ExitStack() as greedy:
        for _ in range(2):
            connection = greedy.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=30))
            connection.sendall(head + body)
        deadline = time.monotonic() + 60
        while gateway.read_metric("modelyard_gateway_in_flight") < 3:
            assert time.monotonic() < deadline
        for _ in range(3):
            neighbour = http.client.HTTPConnection("127.0.0.1", gateway.port, 60, source_address=("127.0.0.2", 0))
            with contextlib.closing(neighbour):
                neighbour.request("POST", "/v1/completions", word)
                assert neighbour.getresponse().status == 200
    # More than one caller has written at a time.
    status, content, _ = gateway.ask("/v1/completions", many | {"prompt": ["Hello"] * 10, "max_tokens": 4})
    assert (status, len(content["choices"])) == (200, 160)
    assert content["usage"]["completion_tokens"] == 160 * 4


def test_who_leaves_cancels_nothing_in_the_server_where_all_is_answered_at_once(doors: Doors) -> None:
    """tritonserver 2.51 dies of one cancel in some thousands."""
    gateway = doors.gateway
    body = json.dumps({**EMBED, "input": ["word " * 60] * 200}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    left, deadline = 'modelyard_gateway_requests_total{route="/v1/embeddings",status="499"}', time.monotonic() + 60
    before, failures = gateway.read_metric(left), doors.read_failures("embedder")
    while gateway.read_metric(left) < before + 20:
        assert time.monotonic() < deadline
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as connection:
                connection.sendall(head + body)
        time.sleep(0.1)
    assert gateway.ask("/v1/embeddings", EMBED)[0] == 200
    assert doors.read_failures("embedder") == failures


def test_a_wish_for_another_protocol_is_passed_over(doors: Doors) -> None:
    """As Java's own client and `curl --http2` send it with a first request."""
    body = json.dumps(EMBED).encode()
    wish = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\n{wish}Content-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", doors.gateway.port), timeout=30) as connection:
        # In one piece, and in two.
        for sent in ((head + body,), (head, body)):
            for part in sent:
                connection.sendall(part)
            answer = b""
            while b'"usage"' not in answer and b" 400 " not in answer:
                answer += connection.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200 OK"), answer


def test_connections_that_ask_nothing_make_room_for_callers(doors: Doors) -> None:
    """As many as there may be, and more: with nothing, half a head, half a body, and after an answer."""
    few, beginnings = 300, (b"", b"POST /embed HTTP/1.1\r\nHo", b"POST /embed HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
    said = f"127.0.0.1:{doors.server.grpc}", doors.folder / "models"
    with opened(*said, under=["prlimit", f"--nofile={few}:{few}"]) as gateway, contextlib.ExitStack() as stack:
        deadline = time.monotonic() + 60
        while gateway.ask("/health")[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for beginning in (*beginnings, b"GET /health HTTP/1.1\r\n\r\n"):
            for _ in range(few):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=30))
                with contextlib.suppress(ConnectionResetError):
                    connection.sendall(beginning)
            status, answer, _ = gateway.ask("/v1/embeddings", EMBED)
            assert status == 200, answer
        assert len(list(Path(f"/proc/{gateway.process.pid}/fd").iterdir())) < few


def test_the_limit_on_open_files_is_raised_as_far_as_it_may_be(doors: Doors) -> None:
    with opened(f"127.0.0.1:{doors.server.grpc}", doors.folder, under=["prlimit", "--nofile=100:1000"]) as gateway:
        assert resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE) == (1000, 1000)


def test_the_servers_spans_belong_to_the_callers_trace(doors: Doors) -> None:
    for path, content in (("/v1/embeddings", EMBED), ("/v1/completions", WRITE)):
        Collector.spans.clear()
        deadline = time.monotonic() + 60
        # Spans are sent in heaps, and one that cannot be sent at once is not sent again.
        while not any(span.get("parentSpanId") == PARENT.split("-")[2] for span in Collector.spans):
            assert time.monotonic() < deadline
            assert doors.gateway.ask(path, content, traceparent=PARENT)[0] == 200
            time.sleep(0.5)
        assert PARENT.split("-")[1] in {span["traceId"] for span in Collector.spans}


def test_a_trace_that_no_header_of_grpc_can_carry_is_left_out(doors: Doors) -> None:
    for state in ("a=b\tc", "\xff\xfe=\xe9"):
        assert doors.gateway.ask("/v1/embeddings", EMBED, traceparent=PARENT, tracestate=state)[0] == 200


def test_the_operations_are_described_and_counted(doors: Doors) -> None:
    assert "swagger" in doors.gateway.ask("/docs")[1]
    schema = doors.gateway.ask("/openapi.json")[1]
    assert {"/v1/embeddings", "/v1/chat/completions", "/embed", "/v1/models/{name}"} <= schema["paths"].keys()
    text = json.dumps(schema)
    assert set(re.findall(r'"#/components/schemas/(\w+)"', text)) <= schema["components"]["schemas"].keys()
    counted = 'modelyard_gateway_tokens_total{kind="prompt",model="embedder"}'
    before = doors.gateway.read_metric(counted)
    doors.openai.embeddings.create(model="embedder", input="x")
    assert doors.gateway.read_metric(counted) == before + 3
    assert doors.gateway.read_metric("modelyard_gateway_ready") == 1


def add_key(path: Path, name: str, *limits: str) -> str:
    done = run("-m", "gateway", "--keys", str(path), "--add-key", name, *limits)
    assert done.code == 0, done.err
    return done.out.strip()


def test_keys_open_are_limited_and_are_read_again(doors: Doors, tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    alice = add_key(path, "alice")
    bob = add_key(path, "bob", "--requests-per-minute", "2")
    carol = add_key(path, "carol", "--tokens-per-minute", "5")
    assert path.stat().st_mode & 0o777 == 0o600
    assert not {alice, bob, carol} & set(path.read_text().split('"'))
    with opened(f"127.0.0.1:{doors.server.grpc}", doors.folder / "models", "--keys", str(path)) as gateway:
        gateway.wait_for_line("embedder, version 1")
        gateway.wait_for_line("ready")
        assert [gateway.ask(open_path)[0] for open_path in ("/health", "/docs", "/openapi.json")] == [200] * 3
        for path_asked in ("/v1/embeddings", "/v1/models", "/metrics", "/nowhere"):
            assert gateway.refuse(path_asked, key="")[0] == 401
        assert gateway.refuse("/v1/embeddings", EMBED, key="sk-wrong")[1].startswith("the key is nobody's")
        asked = Client(gateway.url.removeprefix("http://"), model="embedder", retry_s=0)
        with (
            asked,
            pytest.raises(ClientError, match="is no server that can be read: expected KServe's protocol, got '"),
        ):
            asked.embed(["x"])
        client = OpenAI(base_url=f"{gateway.url}/v1", api_key=alice, max_retries=0)
        assert all(client.embeddings.create(**EMBED).data for _ in range(5))
        answers = [gateway.ask("/v1/embeddings", EMBED, key=bob) for _ in range(3)]
        assert [status for status, _, _ in answers] == [200, 200, 429]
        assert answers[0][2]["x-ratelimit-remaining-requests"] == "1"
        assert answers[2][2]["x-ratelimit-remaining-requests"] == "0"
        assert 1 <= int(answers[2][2]["retry-after"]) <= 30
        assert "the key bob has used up its limit: expected at most 2 requests per minute" in str(answers[2][1])
        with pytest.raises(openai.RateLimitError):
            OpenAI(base_url=f"{gateway.url}/v1", api_key=bob, max_retries=0).embeddings.create(**EMBED)
        # [CLS] x [SEP] twice is one more than there is; the answer is given, and then there is a debt.
        assert [gateway.ask("/v1/embeddings", EMBED, key=carol)[0] for _ in range(3)] == [200, 200, 429]
        dave = add_key(path, "dave")
        # It looks at the file when somebody asks, once a second.
        deadline = time.monotonic() + 30
        while gateway.ask("/v1/embeddings", EMBED, key=dave)[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        gateway.wait_for_line("read 4 keys again")
        # Who had used it up has not got it back.
        assert gateway.ask("/v1/embeddings", EMBED, key=bob)[0] == 429
        path.write_text('{"name": "eve", "sha256": "5"}\n')
        deadline = time.monotonic() + 30
        while not any("the keys stay as they were" in line for line in gateway.lines):
            assert time.monotonic() < deadline
            assert gateway.ask("/v1/embeddings", EMBED, key=dave)[0] == 200
            time.sleep(0.1)


@pytest.mark.rarer
def test_what_it_cannot_answer_in_time_before_it_stops_is_refused_for_now(doors: Doors) -> None:
    """Where the server stands still meanwhile, for as long as it waits."""
    with opened(f"127.0.0.1:{doors.server.grpc}", doors.folder / "models") as gateway:
        deadline = time.monotonic() + 60
        while gateway.ask("/health")[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        told: list[tuple[int, str]] = []
        stream = socket.create_connection(("127.0.0.1", gateway.port), timeout=30)
        body = json.dumps({**WRITE, "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        stream.sendall(head.encode() + body)
        begun = stream.recv(100)
        caller = threading.Thread(target=lambda: told.append(gateway.refuse("/v1/embeddings", EMBED)))
        # The launcher as well, which would start another.
        processes = (doors.server.process.pid, doors.server.tritonserver)
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        try:
            caller.start()
            while gateway.read_metric("modelyard_gateway_in_flight") < 3:
                time.sleep(0.05)
            gateway.process.terminate()
            assert gateway.process.wait(timeout=60) == 0
        finally:
            for process in reversed(processes):
                os.kill(process, signal.SIGCONT)
        caller.join()
        with stream:
            events = begun + b"".join(iter(lambda: stream.recv(1 << 16), b""))
    assert events.endswith(b"\n\n\r\n0\r\n\r\n") and b"[DONE]" not in events
    assert b'"message":"the gateway is being stopped: expected time for' in events.split(b"data: ")[-1]
    assert told == [(503, "the gateway is being stopped: expected time for an answer, got none; ask again later.")]
    assert "Traceback" not in "".join(gateway.lines)


def test_it_answers_what_is_in_flight_before_it_stops(doors: Doors) -> None:
    with opened(f"127.0.0.1:{doors.server.grpc}", doors.folder / "models") as gateway:
        gateway.wait_for_line("writer, version 1")
        gateway.wait_for_line("ready")
        client = OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        body = {"ignore_eos": True}
        stream = client.completions.create(model="writer", prompt="x", max_tokens=300, stream=True, extra_body=body)
        next(iter(stream))
        gateway.process.send_signal(signal.SIGTERM)
        assert [event.choices[0].finish_reason for event in stream][-1] == "length"
        assert gateway.process.wait(timeout=30) == 0


@pytest.mark.skipif("MODELYARD_DOORS" not in os.environ, reason="asks with LangChain and LlamaIndex: `make test-doors`")
def test_other_clients_are_answered_as_well(doors: Doors) -> None:
    program = str(Path(__file__).with_name("other_clients.py"))
    command = [os.environ["MODELYARD_DOORS"], program, f"{doors.gateway.url}/v1"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    heard = json.loads(done.stdout)
    texts = ["A cat sleeps.", "A kitten naps."]
    wanted = [entry.embedding for entry in doors.openai.embeddings.create(model="embedder", input=texts).data]
    for name in ("langchain", "llama_index"):
        documents, queries = heard[name]
        assert np.abs(np.array(documents) - wanted).max() < 1e-5
        assert np.abs(np.array(queries) - wanted).max() < 1e-5
    assert heard["chat"][0] == heard["chat"][1] and heard["tokens"] == 8


def test_the_recipes_of_the_page_run(doors: Doors, capsys: pytest.CaptureFixture[str]) -> None:
    page = (
        (CHECKOUT / "docs" / "gateway.md")
        .read_text(encoding="utf-8")
        .replace("localhost:8080", f"127.0.0.1:{doors.gateway.port}")
    )
    for recipe in re.findall(r"^\$ (curl .*)$", page, re.MULTILINE):
        done = subprocess.run(["bash", "-c", recipe], capture_output=True, text=True, check=True)
        assert "error" not in json.loads(done.stdout), done.stdout
    (code,) = re.findall(r"^```text\n(from openai .*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(code, {})
    vectors, text = capsys.readouterr().out.split("\n", 1)
    assert vectors == "2 13" and text.strip()


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--repository", "nowhere"], 1, "error: nowhere is no folder: expected the repository that is served"),
        # Of a name that is too long nobody is told that there is none, as of one below a folder that is closed.
        (["--repository", "x" * 300], 1, f"error: {'x' * 300} is no folder: expected the repository that is served"),
        (["--keys", "x" * 300, "--add-key", "a"], 1, f"error: {'x' * 300} cannot be written: expected a file of this"),
        (["--keys", "nowhere"], 1, "error: nowhere cannot be read: expected a file with one key a line"),
        (["--host", "192.0.2.1"], 1, "192.0.2.1:8080 cannot be listened on"),
        (["--host", "ü..ü"], 1, "ü..ü:8080 cannot be listened on"),
        (["--port", "99999"], 1, "127.0.0.1:99999 cannot be listened on"),
        (["--timeout", "0"], 1, "--timeout is no time to wait"),
        (
            ["--add-key", "", "--keys", "keys"],
            1,
            "a key cannot be named so: expected characters that can be shown, got",
        ),
        (["--add-key", "a\nb", "--keys", "keys"], 1, "a key cannot be named so"),
        (["--add-key", "x"], 2, "--add-key needs --keys"),
        (["--tokens-per-minute", "5"], 2, "belong to --add-key"),
    ],
)
def test_what_it_cannot_start_with_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    code: int,
    sentence: str,
) -> None:
    try:
        found = main(["--repository", str(tmp_path), *options])
    except SystemExit as exc:
        found = exc.code  # type: ignore[assignment]
    assert found == code
    assert sentence in capsys.readouterr().err


def test_it_listens_where_nobody_else_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = find_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        assert main(["--repository", str(tmp_path), "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port} cannot be listened on" in said and "'Address already in use'" in said
