"""Triton Python-based backend `openvino_generate`: `text_input` to `text_output`, decoupled, batched continuously.

A model of this backend has no code of its own. Its version folder holds the model as OpenVINO has it, `tokenizer.json`
and `generation.json`; its tensors and parameters are those of Triton's vLLM backend.

One thread runs the engine: every step of it writes a token of every request that has a place, and between two steps
requests join and leave.
"""

import json
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import openvino as ov
import openvino_genai as genai
import triton_python_backend_utils as pb_utils
from generation_parameters import MAX_TEXT_BYTES, Parameters, RequestError, read_parameters
from tokenizers import Tokenizer
from written_text import WrittenText

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

# As it was proven: left to itself OpenVINO computes in bfloat16 where the CPU can, and keeps keys and values in 8 bits.
PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}

# What a pool of keys and values is counted in on CPUs (openvino-genai 2026.4), and the size of one value.
BLOCK_TOKENS = 32
VALUE_BYTES = 4

# How often it is looked whether a caller is still there. Asking takes a message to tritonserver and back.
LOOK_INTERVAL_S = 0.2


class TritonPythonModel:
    """The one instance of one version; Triton calls `initialize` once, then `execute` with every request."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the version and start the thread of the engine.

        Args:
            args: Triton's arguments, with the path of the model and its configuration as JSON.
        """
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"], args["model_version"])
        settings = {name: value["string_value"] for name, value in config["parameters"].items()}
        said = json.loads((folder / "generation.json").read_text(encoding="utf-8"))
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._ends = frozenset(said["ends"])
        self._defaults = said["defaults"]
        seats = int(settings["max_num_seqs"])
        blocks = count_blocks(
            folder / config["default_model_filename"], int(settings["kv_cache_mb"]), said["context"], seats
        )
        # A request alone must find room for all of its tokens; one block is the engine's.
        self._room = min(said["context"], (blocks - 1) * BLOCK_TOKENS)
        self._context = said["context"]
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks, scheduler.max_num_seqs = blocks, seats
        scheduler.max_num_batched_tokens = int(settings["max_num_batched_tokens"])
        scheduler.dynamic_split_fuse = True
        self._limit = seats + int(settings["max_queue_size"])
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", dict(PROPERTIES))
        self._metrics = Metrics({"model": args["model_name"], "version": args["model_version"]})
        self._waiting: queue.SimpleQueue[Generation | None] = queue.SimpleQueue()
        self._active: list[Generation] = []
        # Read by Triton's thread, written by both.
        self._lock = threading.Lock()
        self._in_flight = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Take in requests; they are answered through their senders.

        Args:
            requests: Of one caller each.
        """
        for request in requests:
            sender = request.get_response_sender()
            if not self._take_place():
                message = (
                    f"the queue is full: expected less than {self._limit} requests at work, got more; ask again later"
                )
                refuse(sender, message, pb_utils.TritonError.UNAVAILABLE)
                continue
            try:
                self._waiting.put(self._read(request, sender))
            except RequestError as exc:
                self._give_place()
                refuse(sender, str(exc), pb_utils.TritonError.INVALID_ARG)

    def finalize(self) -> None:
        """Stop the engine."""
        self._waiting.put(None)
        self._thread.join()

    def _take_place(self) -> bool:
        with self._lock:
            is_free = self._in_flight < self._limit
            self._in_flight += is_free
        return is_free

    def _give_place(self) -> None:
        with self._lock:
            self._in_flight -= 1

    def _read(self, request: Any, sender: Any) -> "Generation":
        """Return what a request asks for.

        Raises:
            RequestError: It cannot be answered.
        """
        given = read_input(request, "sampling_parameters")
        parameters = read_parameters(
            None if given is None else decode("sampling_parameters", given),
            json.loads(request.parameters() or "{}"),
            self._defaults,
        )
        prompt = decode("text_input", read_input(request, "text_input"))
        ids = self._tokenizer.encode(prompt, add_special_tokens=parameters.add_special_tokens).ids
        if not ids:
            raise RequestError("text_input has no tokens: expected at least 1, got an empty text")
        room = self._room - len(ids)
        if room < 1:
            limit = "model's context" if self._room == self._context else "pool of keys and values"
            raise RequestError(
                f"text_input is too long for the {limit}: expected at most {self._room - 1} tokens, got {len(ids)}; "
                "cut the text"
            )
        is_streamed = bool(read_input(request, "stream"))
        excludes = read_input(request, "exclude_input_in_output")
        if is_streamed and excludes is not None and not excludes:
            raise RequestError("exclude_input_in_output is false: expected true beside stream, which sends what is new")
        return Generation(
            sender=sender,
            ids=ids,
            config=self._configure(parameters, min(parameters.max_tokens, room)),
            answers=[Answer(WrittenText(self._decode, parameters.stop)) for _ in range(parameters.n)],
            parameters=parameters,
            is_streamed=is_streamed,
            # As the vLLM backend does: a whole answer begins with the prompt unless it is told not to.
            prefix=prompt if not is_streamed and not excludes else "",
            returned=frozenset(name for name in RETURNED if read_input(request, f"return_{name}")),
        )

    def _configure(self, parameters: Parameters, max_tokens: int) -> Any:
        config = genai.GenerationConfig(max_new_tokens=max_tokens)
        config.min_new_tokens = min(parameters.min_tokens, max_tokens)
        config.ignore_eos = parameters.ignore_eos
        if self._ends and not parameters.ignore_eos:
            config.eos_token_id, config.stop_token_ids = min(self._ends), set(self._ends)
        config.repetition_penalty = parameters.repetition_penalty
        config.presence_penalty = parameters.presence_penalty
        config.frequency_penalty = parameters.frequency_penalty
        config.do_sample = parameters.temperature > 0
        if config.do_sample:
            config.temperature, config.top_p = parameters.temperature, parameters.top_p
            config.min_p = parameters.min_p
            if parameters.top_k > 0:
                config.top_k = parameters.top_k
        try:
            config.validate()
        except RuntimeError as exc:
            raise RequestError(f"these parameters do not go together: {' '.join(str(exc).split())[:200]}") from exc
        return config

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def _run(self) -> None:
        """Run the engine until there is nothing to do and Triton says so."""
        number = 0
        while True:
            while not self._active or not self._waiting.empty():
                generation = self._waiting.get()
                if generation is None:
                    return
                number = self._join(generation, number)
            try:
                self._pipeline.step()
            # The engine fails on a step as a whole: nobody in it has an answer, and those who come next may.
            except Exception as exc:
                for generation in self._active:
                    generation.fail(
                        f"the engine fails: {' '.join(str(exc).split())[:200]}", pb_utils.TritonError.INTERNAL
                    )
            self._active = [generation for generation in self._active if not self._advance(generation)]
            self._metrics.show(self._pipeline.get_metrics(), self._in_flight)

    def _join(self, generation: "Generation", number: int) -> int:
        """Hand a request to the engine, one writing for each of its answers; return the last number given away."""
        self._active.append(generation)
        ids = ov.Tensor(np.array([generation.ids], dtype=np.int64))
        seed = generation.parameters.seed
        for index, answer in enumerate(generation.answers):
            # Left alone, the engine draws the same for everyone.
            generation.config.rng_seed = secrets.randbits(63) if seed is None else seed + index
            try:
                answer.handle = self._pipeline.add_request(number + index, ids, generation.config)
            except Exception as exc:
                generation.fail(
                    f"the engine refuses it: {' '.join(str(exc).split())[:200]}", pb_utils.TritonError.INTERNAL
                )
                break
        self._metrics.count("prompt_tokens", len(generation.ids))
        return number + len(generation.answers)

    def _advance(self, generation: "Generation") -> bool:
        """Send what is new of a request; tell whether it is over."""
        generation.advance(self._ends, self._metrics)
        if generation.is_over:
            self._give_place()
        return generation.is_over


# What a request may ask for beside the text, as `return_*`.
RETURNED = ("finish_reason", "num_input_tokens", "num_output_tokens")


@dataclass
class Answer:
    """One of the answers of a request, as it is written.

    Attributes:
        written: Its text.
        handle: What the engine gives out.
        tokens: How many were written.
        told: How many of these the caller was told of.
        reason: Why it ended, "stop" or "length"; None before.
    """

    written: WrittenText
    handle: Any = None
    tokens: int = 0
    told: int = 0
    reason: str | None = None

    def advance(self, ends: frozenset[int]) -> None:
        """Take in what the engine has written.

        Raises:
            RequestError: The engine has dropped it.
        """
        if self.reason is not None:
            return
        is_length = False
        while self.handle.can_read():
            for output in self.handle.read().values():
                for token in output.generated_ids:
                    self.tokens += 1
                    if token not in ends:
                        self.written.add(token)
                is_length = output.finish_reason == genai.GenerationFinishReason.LENGTH
        status = self.handle.get_status()
        if self.written.is_stopped:
            self.handle.stop()
            self.reason = "stop"
        elif status == genai.GenerationStatus.IGNORED:
            raise RequestError("the pool of keys and values has no room for it: expected a shorter text_input")
        elif status != genai.GenerationStatus.RUNNING:
            self.written.finish()
            self.reason = "length" if is_length and not self.written.is_stopped else "stop"


@dataclass
class Generation:
    """One request from its prompt to its last response.

    Attributes:
        sender: How it is answered.
        ids: The prompt.
        config: What the engine is told.
        answers: What is written, `n` of them.
        parameters: What was asked for.
        is_streamed: Whether what is new is sent as it comes.
        prefix: What stands before a whole answer.
        returned: What is sent beside the text.
        is_over: Whether the last response was sent.
    """

    sender: Any
    ids: list[int]
    config: Any
    answers: list[Answer]
    parameters: Parameters
    is_streamed: bool
    prefix: str
    returned: frozenset[str]
    is_over: bool = False

    def __post_init__(self) -> None:
        self._came = self._looked = time.monotonic()
        self._has_begun = False

    def advance(self, ends: frozenset[int], metrics: "Metrics") -> None:
        """Send what is new, or leave where the caller has."""
        now = time.monotonic()
        if self.is_over:
            return
        if now - self._looked >= LOOK_INTERVAL_S:
            self._looked = now
            if self.sender.is_cancelled():
                metrics.count("cancelled", 1)
                self.fail("the caller has left", pb_utils.TritonError.CANCELLED)
                return
        before = sum(answer.tokens for answer in self.answers)
        try:
            for answer in self.answers:
                answer.advance(ends)
        except RequestError as exc:
            self.fail(str(exc), pb_utils.TritonError.UNAVAILABLE)
            return
        written = sum(answer.tokens for answer in self.answers) - before
        metrics.count("generation_tokens", written)
        if written and not self._has_begun:
            self._has_begun = True
            metrics.count("first_tokens", 1)
            metrics.count("first_token_seconds", now - self._came)
        self.is_over = all(answer.reason for answer in self.answers)
        pieces = [answer.written.take() for answer in self.answers] if self.is_streamed or self.is_over else []
        if self.is_over or any(pieces):
            self._respond([self.prefix + piece for piece in pieces])

    def fail(self, message: str, code: Any) -> None:
        """Give up: the engine frees its place, and the caller is told why."""
        for answer in self.answers:
            if answer.handle is not None:
                answer.handle.cancel()
        if not self.is_over:
            refuse(self.sender, message, code)
        self.is_over = True

    def _respond(self, pieces: list[str]) -> None:
        tensors = [pb_utils.Tensor("text_output", to_strings(pieces))]
        if "finish_reason" in self.returned:
            # As vLLM's backend writes it while there is none.
            tensors.append(
                pb_utils.Tensor("finish_reason", to_strings([str(answer.reason) for answer in self.answers]))
            )
        if "num_input_tokens" in self.returned:
            tensors.append(pb_utils.Tensor("num_input_tokens", np.array([len(self.ids)], dtype=np.uint32)))
        if "num_output_tokens" in self.returned:
            new = [answer.tokens - answer.told for answer in self.answers]
            tensors.append(pb_utils.Tensor("num_output_tokens", np.array(new, dtype=np.uint32)))
        for answer in self.answers:
            answer.told = answer.tokens
        self.sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if self.is_over else 0)


class Metrics:
    """What Prometheus is told of one version, beside what Triton counts itself."""

    COUNTERS: ClassVar[Mapping[str, str]] = {
        "prompt_tokens": "tokens of prompts that joined",
        "generation_tokens": "tokens that were written",
        "cancelled": "requests whose caller left",
        "first_tokens": "requests whose first token was written",
        "first_token_seconds": "seconds from a request to its first token, of all of them",
    }
    GAUGES: ClassVar[Mapping[str, str]] = {
        "running": "requests that a token is written of in every step",
        "waiting": "requests that have no place yet",
        "cache_usage_percent": "part of the pool of keys and values that is taken",
    }

    def __init__(self, labels: dict[str, str]) -> None:
        kinds = pb_utils.MetricFamily
        # A family lives as long as this object.
        self._families = []
        self._metrics = {}
        for kind, described in ((kinds.COUNTER, self.COUNTERS), (kinds.GAUGE, self.GAUGES)):
            for name, text in described.items():
                end = "_total" if kind == kinds.COUNTER else ""
                family = kinds(name=f"modelyard_generate_{name}{end}", description=text, kind=kind)
                self._families.append(family)
                self._metrics[name] = family.Metric(labels=labels)
        self._pending = dict.fromkeys(self.COUNTERS, 0.0)
        self._shown_at = 0.0

    def count(self, name: str, value: float) -> None:
        """Add to a counter."""
        self._pending[name] += value

    def show(self, state: Any, in_flight: int) -> None:
        """Tell Triton, which takes a message for each number: a few times a second, and when all is done."""
        now = time.monotonic()
        if now - self._shown_at < LOOK_INTERVAL_S and in_flight:
            return
        self._shown_at = now
        for name, value in self._pending.items():
            if value:
                self._metrics[name].increment(value)
        self._pending = dict.fromkeys(self.COUNTERS, 0.0)
        running = state.scheduled_requests if in_flight else 0
        self._metrics["running"].set(running)
        self._metrics["waiting"].set(max(0, in_flight - running))
        self._metrics["cache_usage_percent"].set(state.cache_usage if in_flight else 0.0)


def count_blocks(path: Path, megabytes: int, context: int, seats: int) -> int:
    """Return how many blocks of keys and values a pool of that size holds, and no more than all seats can take.

    Raises:
        ValueError: Not even two.
    """
    # An .xml with the weights beside it, which are not read for this.
    states = [node for node in ov.Core().read_model(str(path)).get_ops() if node.get_type_name() == "ReadValue"]
    shapes = [node.get_output_partial_shape(0) for node in states]
    token_bytes = VALUE_BYTES * sum(shape[1].get_length() * shape[3].get_length() for shape in shapes)
    blocks: int = megabytes * (1 << 20) // (token_bytes * BLOCK_TOKENS)
    if blocks < 2:
        raise ValueError(
            f"kv_cache_mb is too small: expected at least {2 * token_bytes * BLOCK_TOKENS / (1 << 20):.1f}, "
            f"got {megabytes}"
        )
    return min(blocks, seats * (context // BLOCK_TOKENS + 2))


def read_input(request: Any, name: str) -> Any:
    """Return the one value of an input; None where it was not sent.

    Raises:
        RequestError: It has none, or several.
    """
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    values = tensor.as_numpy().reshape(-1)
    if len(values) != 1:
        raise RequestError(f"{name} is not one value: expected shape [1], got {len(values)} values")
    return values[0]


def decode(name: str, value: Any) -> str:
    """Return a text.

    Raises:
        RequestError: It is not UTF-8, or too long to be read.
    """
    if len(value) > MAX_TEXT_BYTES:
        raise RequestError(
            f"{name} is too long: expected at most {MAX_TEXT_BYTES} bytes, got {len(value)}; cut the text"
        )
    try:
        text: str = value.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise RequestError(f"{name} is not text: expected UTF-8, got {exc.reason} at byte {exc.start}") from None
    return text


def to_strings(texts: list[str]) -> "np.ndarray[Any, np.dtype[np.object_]]":
    """Return texts as a tensor of Triton's, [texts]."""
    return np.array([text.encode() for text in texts], dtype=np.object_)


def refuse(sender: Any, message: str, code: Any) -> None:
    """End a request with an error."""
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)), flags=FINAL)
