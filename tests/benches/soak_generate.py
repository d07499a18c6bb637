"""Requests of every kind to a model that writes text: garbage, callers that leave, long and short answers, all at once.

    python -m benches.soak_generate [--requests 10000] [--seed 0]

A small model is published and served. Sixteen callers send requests with random prompts, lengths and parameters, over
gRPC, server-sent events and plain HTTP; some leave half-way, and some send what is no request. Two neighbours ask the
same all the time, and must hear the same all the time. When all is over nothing may be left: no request that runs or
waits, no keys and values, and no more memory than before.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import queue
import random
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
from benches.soak import Memory, describe, say
from harness import run
from launcher import Running, running
from trainers.writers import save_writer

from export.tasks.texts.text import read_verification_texts

NAME = "writer"
CALLERS = 16

# A request without an answer for this long hangs.
TIMEOUT_S = 120.0
SETTLING_S = 60.0

# Memory is compared with that of a server that has seen this share of the requests.
WARM = 0.3
GROWTH = 0.1

# What never becomes an answer.
GARBAGE: tuple[Any, ...] = (
    b"",
    b"{",
    b"[]",
    b'{"text_input": 7}',
    b'{"text_input": "\xff\xfe"}',
    b'{"text_input": "a", "stream": "perhaps"}',
    {"text_input": ""},
    {"text_input": "word " * 20_000},
    {"text_input": "a", "max_tokens": -3},
    {"text_input": "a", "max_tokens": 1e300},
    {"text_input": "a", "temperature": "nan"},
    {"text_input": "a", "top_p": 0},
    {"text_input": "a", "bogus": True},
    {"text_input": "a", "n": 3},
    {"text_input": "a", "sampling_parameters": "[" * 5000},
    {"text_input": "a", "sampling_parameters": '{"stop": [1, 2]}'},
    {"text_input": "a", "sampling_parameters": '{"seed": 1}', "seed": 2},
    {"prompt": "a"},
)


class Soak:
    """Callers of one server, and what came of what they asked."""

    def __init__(self, server: Running, seed: int) -> None:
        self.server = server
        self.random = random.Random(seed)
        self.texts = read_verification_texts()
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    def build_request(self) -> dict[str, Any]:
        """Return a prompt with parameters that go together."""
        draw = self.random
        text = "".join(draw.choices(self.texts, k=draw.choice((1, 1, 1, 4))))
        asked: dict[str, Any] = {"text_input": text[: draw.randint(1, 400)], "max_tokens": draw.choice((1, 5, 20, 80))}
        if draw.random() < 0.5:
            asked |= {"temperature": draw.uniform(0.1, 2), "top_p": draw.uniform(0.1, 1), "top_k": draw.randint(1, 50)}
            asked |= {"seed": draw.randint(0, 1 << 40)} if draw.random() < 0.5 else {}
        asked |= {"stop": draw.choice("aeiou ")} if draw.random() < 0.2 else {}
        asked |= {"ignore_eos": True} if draw.random() < 0.3 else {}
        asked |= {"repetition_penalty": draw.uniform(0.8, 1.5)} if draw.random() < 0.2 else {}
        return asked

    def choose(self) -> Callable[[], str]:
        """Return the next request, to be sent by any thread."""
        asked, leaves_after = self.build_request(), self.random.randint(1, 10)
        kind = self.random.choices(("whole", "events", "grpc", "left", "left_grpc", "garbage"), (3, 3, 3, 2, 2, 2))[0]
        if kind == "garbage":
            body, ending = self.random.choice(GARBAGE), self.random.choice(("generate", "generate_stream"))
            return lambda: self.post(body, ending)
        if kind.startswith("left"):
            asked |= {"max_tokens": 2000, "ignore_eos": True}
            asked.pop("stop", None)
        if kind.endswith("grpc"):
            return lambda: self.stream(asked, leaves_after if kind == "left_grpc" else 0)
        if kind == "whole":
            return lambda: self.post(asked, "generate")
        return lambda: self.post(asked | {"stream": True}, "generate_stream", leaves_after if kind == "left" else 0)

    def post(self, body: Any, ending: str, leaves_after: int = 0) -> str:
        """Ask over HTTP; return what became of it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.http, timeout=TIMEOUT_S)
        try:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", f"/v2/models/{NAME}/{ending}", content)
            answer = connection.getresponse()
            for count, line in enumerate(answer, start=1):
                if leaves_after and count >= 2 * leaves_after:
                    return "left"
                if b'"error"' in line:
                    return judge(line.decode(errors="replace"))
            return "answered" if answer.status == 200 else f"WRONG status {answer.status} without a sentence"
        finally:
            connection.close()

    def stream(self, asked: dict[str, Any], leaves_after: int = 0) -> str:
        """Ask over gRPC; return what became of it."""
        heard: queue.Queue[Any] = queue.Queue()
        asked = dict(asked)
        values = {
            "text_input": np.array([asked.pop("text_input").encode()], dtype=object),
            "stream": np.array([True]),
            "sampling_parameters": np.array([json.dumps(asked).encode()], dtype=object),
            "return_finish_reason": np.array([True]),
        }
        inputs = []
        for name, value in values.items():
            inputs.append(tritonclient.grpc.InferInput(name, [1], "BOOL" if value.dtype == bool else "BYTES"))
            inputs[-1].set_data_from_numpy(value)
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{self.server.grpc}") as client:
            client.start_stream(lambda result, error: heard.put((result, error)))
            client.async_stream_infer(NAME, inputs)
            for count in itertools.count(1):
                result, error = heard.get(timeout=TIMEOUT_S)
                if error is not None:
                    return judge(str(error))
                if result.as_numpy("finish_reason")[0] != b"None":
                    return "answered"
                if count == leaves_after:
                    client.stop_stream(cancel_requests=True)
                    return "left"
        raise AssertionError("Bug: the count has no end")

    def send(self, ask: Callable[[], str]) -> None:
        """Send a request, and count what became of it."""
        try:
            outcome = ask()
        except Exception as exc:  # Whatever it is, it is counted.
            outcome = f"WRONG {type(exc).__name__} {exc}"[:150]
        self.outcomes[outcome] += 1

    def ask_neighbour(self, prompt: str) -> str:
        """Return the text after a prompt, the likeliest token every time."""
        body = {"text_input": prompt, "max_tokens": 40, "exclude_input_in_output": True}
        url = f"http://127.0.0.1:{self.server.http}/v2/models/{NAME}/generate"
        request = urllib.request.Request(url, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return str(json.load(answer)["text_output"])

    def be_neighbour(self, prompt: str, wanted: str, ended: threading.Event) -> None:
        """Ask the same until all is over."""
        while not ended.is_set():
            try:
                got = self.ask_neighbour(prompt)
            except OSError as exc:
                self.wrong.append(f"{exc}")
                continue
            self.outcomes["neighbour heard the same"] += got == wanted
            if got != wanted:
                self.wrong.append(f"{prompt!r}: {got!r}, not {wanted!r}")

    def read_gauges(self) -> dict[str, float]:
        """Return what runs, waits and is taken."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server.metrics}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        names = ("running", "waiting", "cache_usage_percent")
        return {
            name: float(line.split()[-1])
            for line in lines
            for name in names
            if line.startswith(f"modelyard_generate_{name}{{")
        }

    def settle(self) -> dict[str, float]:
        """Wait until nothing is left, or for long enough; return what is."""
        deadline = time.monotonic() + SETTLING_S
        while any((found := self.read_gauges()).values()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found


def judge(text: str) -> str:
    """Return what became of a request that is refused: in a sentence, or not."""
    if "queue is full" in text:
        return "refused for now"
    return f"WRONG {text[:150]}" if "Traceback" in text or len(text) < 20 else "refused"


def soak(server: Running, requests: int, seed: int) -> bool:
    """Send so many requests; tell what became of them, and whether all is as it was."""
    found, memory = Soak(server, seed), Memory(server)
    prompts = ("The cat sat on", "Une lettre est arrivée")
    wanted = [found.ask_neighbour(prompt) for prompt in prompts]
    ended = threading.Event()
    neighbours = [
        threading.Thread(target=found.be_neighbour, args=(prompt, text, ended))
        for prompt, text in zip(prompts, wanted, strict=True)
    ]
    for thread in neighbours:
        thread.start()
    shares = (int(requests * WARM), requests - int(requests * WARM))
    start, looks, left = time.monotonic(), [], {}
    for share in shares:
        with ThreadPoolExecutor(CALLERS) as pool:
            for _ in range(share):
                pool.submit(found.send, found.choose())
        if share == shares[-1]:
            ended.set()
            for thread in neighbours:
                thread.join()
            left = found.settle()
        looks.append(memory.look())
        say(f"  {time.monotonic() - start:6.0f} s  {describe(looks[-1])}")
    for outcome, count in found.outcomes.most_common():
        say(f"  {count:>8}  {outcome}")
    growth = sum(looks[-1].values()) / sum(looks[0].values()) - 1
    say(f"left: {left}; memory {100 * growth:+.1f} % since {shares[0]} requests; neighbours: {len(found.wrong)} wrong")
    for line in found.wrong[:5]:
        say(f"  {line}")
    is_sound = not any(outcome.startswith("WRONG") for outcome in found.outcomes)
    return is_sound and not any(left.values()) and growth < GROWTH and not found.wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="modelyard-soak-") as folder:
        repository = Path(folder, "models")
        done = run("-m", "export", "run", save_writer("gpt2", Path(folder, "gpt2")), "--name", NAME,
                   "--repository", repository)  # fmt: skip
        if done.code:
            raise SystemExit(done.err)
        with running(repository) as server:
            server.read_until("serving")
            server.follow()
            is_sound = soak(server, options.requests, options.seed)
            deaths = {
                name: value
                for name, value in server.read_metrics().items()
                if value and re.search("deaths|restarts|given_up", name)
            }
    say(f"deaths and restarts: {deaths or 'none'}")
    return 0 if is_sound and not deaths else 1


if __name__ == "__main__":
    sys.exit(main())
