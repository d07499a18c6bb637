"""Text from a decoder, through the real tritonserver: it is what transformers writes, whoever else is asking."""

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpc
from followed import wait_for
from harness import CHECKOUT, run
from launcher import Running, running
from trainers.writers import save_trained_writer, save_writer, save_writer_of_bytes, train_bpe, train_megatron_writer
from transformers import AutoModelForCausalLM, AutoTokenizer

from client import Client, ModelError, RefusedError
from client.options import Options
from client.ports import find_wrong_port
from export.__main__ import main
from export.consolidation.consolidate import consolidate
from export.repository.config_file import parse_config, render_config
from export.tasks.texts.text import read_verification_texts

TOKENS = 48

# `make streams` asks as many prompts as are said there, over 16 streams.
PROMPTS = int(os.environ.get("MODELYARD_STREAMS", "6"))
STREAMS = 16
ADDED = ("[ORDER]", "Grüße")


@dataclass
class Heard:
    """What one stream brought."""

    pieces: list[str] = field(default_factory=list)
    reason: str = ""
    tokens: int = 0
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass
class Writers:
    """Decoders that are served, and what transformers makes of them."""

    folder: Path
    server: Running

    def write(self, model: str, prompt: str, tokens: int = TOKENS) -> str:
        """Return what transformers' own `generate` writes."""
        tokenizer, reference = self.load(model)
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            made = reference.generate(**ids, do_sample=False, max_new_tokens=tokens, pad_token_id=0)
        return str(tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))

    def load(self, model: str) -> tuple[Any, Any]:
        folder = self.folder / model
        return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()

    def post(self, model: str, ending: str = "generate", **asked: Any) -> dict[str, Any]:
        """Ask over HTTP; return the answer, or the status and the sentence of a refusal."""
        url = f"http://127.0.0.1:{self.server.http}/v2/models/{model}/{ending}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, json.dumps(asked).encode()), timeout=60) as answer:
                content: dict[str, Any] = json.load(answer)
                return content
        except urllib.error.HTTPError as exc:
            return {"status": exc.code, "error": json.load(exc)["error"]}

    def listen(self, model: str, **asked: Any) -> Heard:
        """Ask for server-sent events."""
        url = f"http://127.0.0.1:{self.server.http}/v2/models/{model}/generate_stream"
        body = json.dumps({"stream": True, "return_finish_reason": True, "return_num_output_tokens": True, **asked})
        heard = Heard()
        with urllib.request.urlopen(urllib.request.Request(url, body.encode()), timeout=60) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    heard.error = event.get("error", "")
                    heard.pieces.append(event.get("text_output", ""))
                    heard.reason, heard.tokens = (
                        event.get("finish_reason", ""),
                        heard.tokens + event.get("num_output_tokens", 0),
                    )
        return heard

    def stream(self, model: str, prompt: str, leave_after: int = 0, **parameters: Any) -> Heard:
        """Ask over a stream of gRPC, and cancel it after some pieces."""
        inputs = build_inputs(prompt, parameters, is_streamed=True)
        heard: queue.Queue[Any] = queue.Queue()
        result = Heard()
        with grpc.InferenceServerClient(f"127.0.0.1:{self.server.grpc}") as client:
            client.start_stream(lambda result, error: heard.put((result, error)))
            client.async_stream_infer(model, inputs)
            while not result.reason:
                answer, error = heard.get(timeout=60)
                if error is not None:
                    result.error = str(error)
                    break
                result.pieces.append(answer.as_numpy("text_output")[0].decode())
                result.tokens += int(answer.as_numpy("num_output_tokens")[0])
                reason = answer.as_numpy("finish_reason")[0].decode()
                result.reason = "" if reason == "None" else reason
                if leave_after and result.tokens >= leave_after:
                    client.stop_stream(cancel_requests=True)
                    break
        return result

    @contextlib.contextmanager
    def leaving(self, model: str, **parameters: Any) -> Iterator[None]:
        """Ask for a whole answer over a stream of gRPC, and cancel it after the block."""
        with grpc.InferenceServerClient(f"127.0.0.1:{self.server.grpc}") as client:
            client.start_stream(lambda result, error: None)
            client.async_stream_infer(model, build_inputs("A cat", parameters, is_streamed=False))
            yield
            client.stop_stream(cancel_requests=True)

    def read_metrics(self, model: str) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server.metrics}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        found = {}
        for line in lines:
            if line.startswith("modelyard_generate_") and f'model="{model}"' in line:
                found[line.split("{")[0].removeprefix("modelyard_generate_")] = float(line.split()[-1])
        return found

    def wait_for(self, model: str, what: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        deadline = time.monotonic() + 60
        while not what(found := self.read_metrics(model)):
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        return found


def build_inputs(prompt: str, parameters: dict[str, Any], *, is_streamed: bool) -> list[grpc.InferInput]:
    values = {
        "text_input": np.array([prompt.encode()], dtype=object),
        "stream": np.array([is_streamed]),
        "sampling_parameters": np.array([json.dumps(parameters).encode()], dtype=object),
        "return_finish_reason": np.array([True]),
        "return_num_output_tokens": np.array([True]),
    }
    inputs = []
    for name, value in values.items():
        inputs.append(grpc.InferInput(name, [1], "BOOL" if value.dtype == bool else "BYTES"))
        inputs[-1].set_data_from_numpy(value)
    return inputs


def set_parameters(repository: Path, model: str, **parameters: str) -> None:
    path = repository / model / "config.pbtxt"
    config = parse_config(path.read_text())
    for name, value in parameters.items():
        config.parameters[name].string_value = value
    path.write_text(render_config(config))


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writers]:
    folder = tmp_path_factory.mktemp("writers")
    trained = train_megatron_writer(folder / "megatron")
    # What is compared with: the same weights in transformers' own file, and the tokenizer before it was two files.
    consolidate(trained, folder / "gpt2")
    train_bpe().save_pretrained(folder / "gpt2")
    checkpoints = {
        "gpt2": trained,
        "llama": save_writer("llama", folder / "llama"),
        "opt": save_writer("opt", folder / "opt", ADDED),
        "bytes": save_writer_of_bytes(folder / "bytes"),
    }
    # Taken for a request that says nothing of them, as transformers takes them.
    settings = folder / "llama" / "generation_config.json"
    said = {"repetition_penalty": 1.2, "min_new_tokens": 12}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | said))
    for model, checkpoint in checkpoints.items():
        assert main(["run", str(checkpoint), "--name", model, "--repository", str(folder / "models")]) == 0
    # Prompts in pieces as well as whole, which is chosen for small models.
    set_parameters(folder / "models", "opt", dynamic_split_fuse="true", max_num_batched_tokens="16")
    # As many at a time as one request may ask for.
    set_parameters(folder / "models", "llama", max_num_seqs=str(STREAMS))
    small = ["--name", "small", "--repository", str(folder / "models"), "--precision", "int8"]
    assert main(["run", str(save_trained_writer(folder / "small")), *small]) == 0
    with running(folder / "models") as server:
        # Every model has then answered a recorded prompt with the recorded text.
        server.read_until("serving")
        server.follow()
        yield Writers(folder, server)


@pytest.mark.parametrize("model", ["gpt2", "llama", "opt", "bytes"])
def test_what_comes_is_what_transformers_writes_while_others_ask_and_leave(writers: Writers, model: str) -> None:
    texts = [*(f"{token} of {token}" for token in ADDED), *read_verification_texts()]
    prompts = [texts[index % len(texts)][: 8 + 9 * index] for index in range(PROMPTS)]
    wanted = [writers.write(model, prompt) for prompt in prompts]
    assert len(set(wanted)) == len(wanted), "texts that do not depend on their prompts prove nothing"
    before = writers.read_metrics(model)
    greedy = {"max_tokens": TOKENS, "temperature": 0}
    long = {"max_tokens": 4000, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(STREAMS) as pool:
        asked, left = [], {}
        for index, prompt in enumerate(prompts):
            if index % 3 == 0:
                left[index] = pool.submit(writers.stream, model, prompt, leave_after=TOKENS // 2, **long)
            asked.append(
                pool.submit(writers.listen, model, text_input=prompt, **greedy)
                if index % 4 == 3
                else pool.submit(writers.stream, model, prompt, **greedy)
            )
        heard = [future.result() for future in asked]
        gone = {index: future.result() for index, future in left.items()}
    assert [each.error for each in (*heard, *gone.values())] == [""] * (len(heard) + len(gone))
    assert [each.text for each in heard] == wanted
    assert all(each.tokens == TOKENS or each.reason == "stop" for each in heard)
    # Of sixteen streams four are told of a step.
    assert max(len(each.pieces) for each in heard) > TOKENS / 6, "nothing was streamed"
    for index, each in gone.items():
        # They go on where the model ends its text.
        length = min(len(each.text), len(wanted[index]))
        assert TOKENS // 2 <= each.tokens < TOKENS and each.text[:length] == wanted[index][:length]
    after = writers.wait_for(model, lambda found: found["cancelled_total"] >= before["cancelled_total"] + len(gone))
    assert after["cancelled_total"] == before["cancelled_total"] + len(gone)
    idle = writers.wait_for(model, lambda found: not any(map(found.get, ("running", "waiting", "cache_usage_percent"))))
    # Whoever left was not written to the end.
    written = idle["generation_tokens_total"] - before["generation_tokens_total"]
    assert written < sum(each.tokens for each in heard) + 4000 * len(gone)


def test_a_stream_is_told_of_each_token_and_one_of_many_of_several_together(writers: Writers) -> None:
    asked = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}
    alone = writers.stream("gpt2", "The cat sat on", **asked)
    # Tokens that end in the middle of a character wait for the next: here every fifth.
    assert alone.tokens == 400 and len(alone.pieces) > 0.7 * 400
    # How many fewer depends on how many write at once, and on how long a step takes.
    pieces, deadline = STREAMS * len(alone.pieces), time.monotonic() + 120
    while pieces >= STREAMS * len(alone.pieces):
        assert time.monotonic() < deadline
        with ThreadPoolExecutor(STREAMS) as pool:
            many = list(pool.map(lambda _: writers.stream("gpt2", "The cat sat on", **asked), range(STREAMS)))
        assert {(each.text, each.tokens) for each in many} == {(alone.text, 400)}
        pieces = sum(len(each.pieces) for each in many)


def test_who_waits_is_written_next_where_all_who_are_written_leave_at_once(writers: Writers) -> None:
    wanted = writers.write("llama", "The cat sat on")
    drawn = {"n": STREAMS, "temperature": 1, "max_tokens": 4000, "ignore_eos": True}
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            with writers.leaving("llama", **drawn):
                writers.wait_for("llama", lambda found: found["running"] == STREAMS)
                waiting = pool.submit(writers.stream, "llama", "The cat sat on", max_tokens=TOKENS, temperature=0)
                time.sleep(0.3)
            heard = waiting.result()
        assert (heard.error, heard.text) == ("", wanted)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_client_library_hears_the_pieces_and_cancels_what_it_leaves(writers: Writers, protocol: str) -> None:
    before = writers.read_metrics("gpt2")
    with Client(f"127.0.0.1:{getattr(writers.server, protocol)}", protocol=protocol, model="gpt2") as client:
        pieces = list(client.generate("The cat sat on", max_tokens=TOKENS, temperature=0))
        assert "".join(pieces) == writers.write("gpt2", "The cat sat on") and len(pieces) > TOKENS / 3
        deadline = time.monotonic() + 60
        # So short a text may be whole before tritonserver tells that its caller has left.
        while writers.read_metrics("gpt2")["cancelled_total"] == before["cancelled_total"]:
            assert time.monotonic() < deadline
            left = client.generate("The cat sat on", max_tokens=4000, ignore_eos=True)
            next(left)
            left.close()
            time.sleep(0.5)
        with pytest.raises(RefusedError, match="the parameter 'bogus' is unknown: expected one of max_tokens"):
            next(client.generate("x", bogus=1))
        with pytest.raises(ModelError, match="gpt2 answers in pieces: expected .*; ask it with `generate` where"):
            client.infer({"text_input": np.array([b"The cat"], dtype=object)})


def test_whoever_is_refused_ends_nothing_but_his_stream(writers: Writers) -> None:
    before = writers.server.tritonserver
    address = f"127.0.0.1:{writers.server.grpc}"

    def ask(count: int) -> None:
        with Client(address, protocol="grpc", model="gpt2") as client:
            for _ in range(count):
                with pytest.raises(RefusedError, match="the parameter 'bogus' is unknown"):
                    next(client.generate("x", bogus=1))

    # tritonserver 2.51 died of one in some 600, while the client asked it for a status of each error.
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, [200] * 4))
    assert writers.server.tritonserver == before


def test_a_whole_answer_is_what_was_asked_for(writers: Writers) -> None:
    prompt = "The cat sat on"
    wanted = writers.write("gpt2", prompt)
    alone = {"text_input": prompt, "max_tokens": TOKENS, "exclude_input_in_output": True}
    assert writers.post("gpt2", **alone)["text_output"] == wanted
    # As vLLM's backend does, the prompt stands first unless it is left out.
    given = writers.post("gpt2", text_input=prompt, sampling_parameters='{"max_tokens": "5"}')
    assert given["text_output"] == prompt + writers.write("gpt2", prompt, 5)
    counted = {"return_num_input_tokens": True, "return_num_output_tokens": True, "return_finish_reason": True}
    full = writers.post("gpt2", **alone, **counted)
    tokens = len(writers.load("gpt2")[0](prompt)["input_ids"])
    assert (full["num_input_tokens"], full["num_output_tokens"], full["finish_reason"]) == (tokens, TOKENS, "length")
    # A stop string is found over tokens, and nothing of it is sent before it is whole.
    middle = len(wanted) // 2
    stop = wanted[middle : middle + 5]
    cut = wanted[: wanted.index(stop)]
    stopped = writers.listen("gpt2", text_input=prompt, max_tokens=TOKENS, stop=stop)
    assert (stopped.text, stopped.reason) == (cut, "stop")
    drawn = [writers.post("gpt2", **alone, temperature=0.9, seed=seed)["text_output"] for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]
    several = writers.post("gpt2", **alone, temperature=0.9, n=3, seed=7)["text_output"]
    assert len(several) == 3 and several[0] == drawn[0]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"max_token": 3}, "the parameter 'max_token' is unknown: expected one of max_tokens, min_tokens"),
        ({"max_tokens": 0}, "max_tokens cannot be used: expected a whole number from 1 to"),
        ({"temperature": "warm"}, "temperature cannot be used: expected a number from 0 to 100, got 'warm'"),
        ({"n": 2}, "n 2 has no effect: expected a temperature above 0 beside it"),
        ({"sampling_parameters": "[]"}, "sampling_parameters is not a JSON object: expected an object"),
        ({"sampling_parameters": '{"top_k": 3}', "top_k": 4}, "top_k is given twice"),
        (
            {"text_input": "word " * 5000},
            "text_input is too long for the model's context: expected at most 4095 tokens",
        ),
        ({"text_input": "word " * 100_000}, "expected at most 4095 tokens, got more than 9"),
        ({"text_input": ""}, "text_input has no tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(
    writers: Writers, asked: dict[str, Any], sentence: str
) -> None:
    refusal = writers.post("gpt2", **({"text_input": "A cat"} | asked))
    assert refusal["status"] == 400 and sentence in refusal["error"], refusal


@pytest.mark.parametrize("split", ["true", "false"])
def test_the_pool_is_shared_by_preemption_and_its_queue_is_bounded(
    writers: Writers, tmp_path: Path, split: str
) -> None:
    repository = tmp_path / "models"
    shutil.copytree(writers.folder / "models", repository)
    for other in ("llama", "opt", "small"):
        shutil.rmtree(repository / other)
    # 32 blocks of 32 tokens, where eight answers of 150 tokens need some 50.
    limits = {"kv_cache_mb": "1", "max_num_seqs": "8", "max_queue_size": "0"}
    set_parameters(repository, "gpt2", **limits, dynamic_split_fuse=split)
    prompts = [text[:40] for text in read_verification_texts()[:8]]
    with running(repository) as server:
        server.read_until("serving")
        server.follow()
        small = Writers(writers.folder, server)
        greedy = {"max_tokens": 150, "temperature": 0, "ignore_eos": True}
        refused: list[str] = []
        deadline = time.monotonic() + 120
        # On a busy machine they come one after another, and meet no full queue: once more then.
        while not refused and time.monotonic() < deadline:
            with ThreadPoolExecutor(24) as pool:
                streams = [pool.submit(small.stream, "gpt2", prompts[index % 8], **greedy) for index in range(12)]
                whole = {"exclude_input_in_output": True, **greedy}
                wholes = [pool.submit(small.post, "gpt2", text_input=prompts[n % 8], **whole) for n in range(12)]
                heard = [future.result() for future in streams]
                got = [future.result() for future in wholes]
            refused = [each.error for each in heard if each.error]
            # tritonserver 2.51 answers 400 to whatever a backend refuses of `generate`.
            refused += [each["error"] for each in got if "error" in each]
    assert 1 <= len(refused) <= 16
    assert all("the queue is full: expected less than 8 requests at work" in error for error in refused)
    alone = [writers.stream("gpt2", prompt, **greedy).text for prompt in prompts]
    written = [(index, each.text) for index, each in enumerate(heard) if not each.error]
    written += [(index, each["text_output"]) for index, each in enumerate(got) if "error" not in each]
    assert written == [(index, alone[index % 8]) for index, _ in written]


def test_the_recipes_of_the_page_run(writers: Writers) -> None:
    page = (CHECKOUT / "docs" / "generation.md").read_text(encoding="utf-8")
    recipes = [
        line.removeprefix("$ ") for line in page.splitlines() if line.startswith(("$ curl", "$ modelyard infer"))
    ]
    wanted = writers.write("gpt2", "Once upon a time", 20)
    prints = []
    for recipe in recipes:
        code = recipe.replace("localhost:8000", f"localhost:{writers.server.http}").replace("writer", "gpt2")
        code = code.replace(
            "modelyard infer", f"{sys.executable} client/infer.py --url localhost:{writers.server.http}"
        )
        done = subprocess.run(["bash", "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        prints.append(done.stdout)
    whole, events, stopped, printed = prints
    assert json.loads(whole)["text_output"] == wanted
    lines = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line]
    assert "".join(line["text_output"] for line in lines) == wanted and len(lines) > 5
    assert not {".", "!"} & set(json.loads(stopped)["text_output"])
    assert printed == wanted.split(".")[0] + "\n"


def test_the_metrics_port_is_known_where_a_backend_has_metrics_of_its_own(writers: Writers) -> None:
    found = find_wrong_port(Options(f"127.0.0.1:{writers.server.metrics}"))
    assert found is not None and found.got == "its metrics port"


def test_the_check_through_the_server_is_repeated_over_every_transport(writers: Writers, tmp_path: Path) -> None:
    golden = writers.folder / "models" / "llama" / "1" / "golden.json"
    urls = ["--url", f"localhost:{writers.server.http}", "--grpc-url", f"localhost:{writers.server.grpc}"]
    done = run("-m", "client.parity", "--golden", str(golden), *urls, "--json")
    assert done.code == 0, done.err + done.out
    results = json.loads(done.out)
    assert [each["transport"] for each in results] == ["HTTP", "HTTP events", "gRPC stream"]
    assert all(each["texts"] >= 6 and each["passed"] for each in results)
    content = json.loads(golden.read_text())
    content["samples"][-1]["outputs"][0]["data"] = ["another text"]
    (tmp_path / "golden.json").write_text(json.dumps(content))
    done = run("-m", "client.parity", "--golden", str(tmp_path / "golden.json"), "--model", "llama", *urls, "--json")
    assert done.code == 1
    assert [each["different"] for each in json.loads(done.out)] == [1, 1, 1]
    assert writers.server.check().code == 0


@pytest.mark.rarer
def test_a_publication_in_the_place_of_another_is_loaded_once_that_is_gone(writers: Writers) -> None:
    models, others = writers.folder / "models", writers.folder / "others"
    checkpoint = writers.folder / "other opt"
    shutil.copytree(writers.folder / "opt", checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.save_pretrained(checkpoint)
    assert main(["run", str(checkpoint), "--name", "opt", "--repository", str(others)]) == 0
    for number in range(4):
        before = len(writers.server.lines)
        (models / "opt").rename(writers.folder / "aside")
        (others / "opt").rename(models / "opt")
        (writers.folder / "aside").rename(others / "opt")
        writers.server.wait_for_line("opt: version 1 is served", 60)
        # tritonserver had died of it within seconds.
        time.sleep(3)
        assert not [line for line in writers.server.lines[before:] if "signal" in line or "chunk" in line], number
    assert writers.post("gpt2", text_input="Once upon a time", max_tokens=4).get("text_output")


def test_weights_that_are_written_over_as_the_model_reads_them_answer_nobody(writers: Writers) -> None:
    weights = writers.folder / "models" / "opt" / "1" / "openvino_model.bin"
    content = weights.read_bytes()

    def write(model: str = "opt") -> object:
        return writers.post(model, text_input="Once upon a time", max_tokens=12).get("text_output")

    wanted = write()
    assert wanted
    # In the place of the old ones these are read by nobody.
    put = weights.with_name("put")
    put.write_bytes(content[::-1])
    put.replace(weights)
    told = wait_for(writers.server, lambda models: models["opt"]["state"] == "failed")["opt"]
    assert "version 1 of opt is served as before" in told["reason"]
    assert write() == wanted
    put.write_bytes(content)
    put.replace(weights)
    wait_for(writers.server, lambda models: models["opt"]["state"] == "served")
    # Loaded anew, so that the model reads from this file.
    writers.server.find_stubs("opt")[0].kill()
    writers.server.wait_for_line("opt: answers again", 60)
    with weights.open("r+b") as file:
        file.write(content[::-1])
    told = wait_for(writers.server, lambda models: "it is not served" in models["opt"]["reason"])["opt"]
    assert f"{weights} has changed since it was published" in told["reason"]
    assert write() is None and write("gpt2")
    with weights.open("r+b") as file:
        file.write(content)
    wait_for(writers.server, lambda models: models["opt"]["state"] == "served")
    assert write() == wanted
    # The right file is there again before anybody has looked, and what is read has no name any more.
    time.sleep(1)
    put.write_bytes(content)
    with weights.open("r+b") as file:
        file.write(content[::-1])
    put.replace(weights)
    writers.server.wait_for_line(f"{weights} was written into while it was being read", 60)
    wait_for(writers.server, lambda models: models["opt"]["state"] == "served" and write() == wanted)
    assert writers.server.check().code == 0
