"""The engine of one version, and the thread that runs it.

Every step of it writes a token of every request that has a place, and between two steps requests join and leave.
"""

import collections
import itertools
import json
import math
import queue
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# OpenVINO sends statistics of use unless the package that sends them is missing; to it, it now is.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import numpy as np  # noqa: E402
import openvino as ov  # noqa: E402
import openvino_genai as genai  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402
from generation import Answer, Generation  # noqa: E402
from generation_metrics import Metrics  # noqa: E402
from generation_parameters import Parameters, RequestError  # noqa: E402
from shared_limit import LEAST_BLOCKS, SharedLimit, spare  # noqa: E402

# How the model was proven, by OpenVINO's names; a version of an older modelyard has no such file. Left to itself
# OpenVINO computes in bfloat16 where the CPU can, and keeps keys and values in 8 bits.
PROPERTIES_FILE = "properties.json"
FP32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}

# What a pool of keys and values is counted in on CPUs (openvino-genai 2026.4).
BLOCK_TOKENS = 32

# A prompt as long as the context that costs no more is taken in by a step of its own, all others waiting. Two cores of
# 2025 compute some 3e11 in a second.
MAX_WHOLE_OPERATIONS = 6e11

# Streams that are told of a step at most, and how long the others wait. A response costs 0.4 ms of the cores that the
# step wants: sixteen streams, each told of every token, would be written at 0.85 of the engine's speed.
PIECES_PER_STEP = 4
PIECE_INTERVAL_S = 0.1

# How long a request waits for memory that another version holds, and how often it is looked for. A rollout takes
# seconds; versions that somebody keeps side by side have to do with what there is.
MEMORY_PATIENCE_S = 60.0
MEMORY_INTERVAL_S = 0.05

# Precision → bytes of a value, and of what belongs to all values of a token in one head: bytes have a scale and a zero.
VALUE_BYTES = {"f32": (4, 0), "u8": (1, 8)}


class Engine:
    """Writes texts of all requests at once.

    Args:
        folder: The version, with the model, its configuration and its tokenizer.
        file: Name of the model's file there.
        settings: The parameters of the model's configuration.
        context: How many tokens prompt and answer may have together.
        ends: Tokens that end a text.
        metrics: Told of what is written.

    Attributes:
        room: Tokens for which there is room, of one request alone: within the context and the pool.
        limit: Requests that may be at work, those that wait among them.
    """

    def __init__(
        self,
        folder: Path,
        file: str,
        settings: Mapping[str, str],
        *,
        context: int,
        ends: frozenset[int],
        metrics: Metrics,
    ) -> None:
        seats = int(settings["max_num_seqs"])
        properties = read_properties(folder)
        model = ov.Core().read_model(str(folder / file))
        self._block_bytes = measure_block(model, VALUE_BYTES[properties["KV_CACHE_PRECISION"]])
        limit = int(settings["kv_cache_mb"]) * (1 << 20)
        blocks = count_blocks(limit, self._block_bytes, most=seats * (context // BLOCK_TOKENS + 2))
        # A version that is tried under another name lies where the others do, once links are followed.
        self._shared_limit = SharedLimit(folder.resolve().parent, limit)
        self._blocks = blocks
        # A request alone must find room for all of its tokens; one block is the engine's.
        self.room = min(context, (blocks - 1) * BLOCK_TOKENS)
        self.limit = seats + int(settings["max_queue_size"])
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks, scheduler.max_num_seqs = blocks, seats
        step_tokens = int(settings["max_num_batched_tokens"])
        self._takes_whole = not splits_prompts(settings, 2 * count_weights(model) * context)
        self._step_tokens = max(step_tokens, context) if self._takes_whole else step_tokens
        scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = self._step_tokens, not self._takes_whole
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self._ends = ends
        self._metrics = metrics
        self._waiting: queue.SimpleQueue[Generation | None] = queue.SimpleQueue()
        # Those for which there was no memory beside another version, first come first.
        self._held: collections.deque[Generation] = collections.deque()
        self._active: list[Generation] = []
        self._numbers = itertools.count()
        self._is_stopped = False
        # Read by Triton's thread, written by both.
        self._lock = threading.Lock()
        self._in_flight = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take_place(self) -> bool:
        """Take a place for a request, if there is one; tell whether there was."""
        with self._lock:
            is_free = self._in_flight < self.limit
            self._in_flight += is_free
        return is_free

    def give_place(self) -> None:
        """Give back a place that was taken and not added to."""
        with self._lock:
            self._in_flight -= 1

    def configure(self, parameters: Parameters, max_tokens: int) -> Any:
        """Return what the engine is told of a request.

        Raises:
            RequestError: Its parameters do not go together.
        """
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

    def add(self, generation: Generation) -> None:
        """Have a request answered whose place was taken."""
        self._waiting.put(generation)

    def stop(self) -> None:
        """End when all is answered that was added."""
        self._waiting.put(None)
        self._thread.join()
        self._shared_limit.close()

    def _run(self) -> None:
        """Run the engine until there is nothing to do and Triton says so."""
        owed_s = 0.0
        while self._take_in():
            self._metrics.show_begin(self._in_flight)
            start = time.monotonic()
            # New prompts have half of the time at most, however many come.
            has_joined = not (self._active and owed_s > 0) and self._let_in()
            if not self._active:
                # Those that wait are to be seen.
                self._metrics.show(self._pipeline.get_metrics(), self._in_flight)
                time.sleep(MEMORY_INTERVAL_S)
                continue
            try:
                self._pipeline.step()
            # The engine fails on a step as a whole: nobody in it has an answer, and those who come next may.
            except Exception as exc:
                for generation in self._active:
                    generation.fail(
                        f"the engine fails: {' '.join(str(exc).split())[:200]}", pb_utils.TritonError.INTERNAL
                    )
            if self._takes_whole:
                took_s = time.monotonic() - start
                owed_s = took_s if has_joined else owed_s - took_s
            self._advance()
            self._metrics.show(self._pipeline.get_metrics(), self._in_flight)

    def _take_in(self) -> bool:
        """Take in what was added, and wait for it where there is nothing else to do; tell whether there is anything."""
        while not self._is_stopped and not (self._waiting.empty() and (self._active or self._held)):
            generation = self._waiting.get()
            if generation is None:
                self._is_stopped = True
            else:
                self._held.append(generation)
        return bool(self._active or self._held)

    def _let_in(self) -> bool:
        """Hand to the engine, in their order, those for which there is memory; tell whether there were any.

        Prompts that are taken in whole are no more at once than fit one step.
        """
        taken, room = 0, self._step_tokens if self._takes_whole else math.inf
        while self._held and (not taken or taken + self._held[0].prompt_tokens <= room):
            generation = self._held[0]
            generation.look(self._metrics)
            if not generation.is_over:
                if self._shared_limit.claim(self._count_bytes([*self._active, generation])):
                    taken += generation.prompt_tokens
                    self._join(self._held.popleft())
                    continue
                if generation.age_s < MEMORY_PATIENCE_S:
                    break
                generation.fail(
                    f"another version of the model holds the memory for keys and values: expected room within "
                    f"{MEMORY_PATIENCE_S:g} s, got none; ask again later, with fewer max_tokens, or unload the other",
                    pb_utils.TritonError.UNAVAILABLE,
                )
            self._held.popleft()
            self.give_place()
        return taken > 0

    def _count_bytes(self, generations: Iterable[Generation]) -> int:
        """Return what the engine may come to hold of these requests, and holds since a fuller time."""
        longest: int = sum(
            len(each.answers) * ((len(each.ids) + each.config.max_new_tokens) // BLOCK_TOKENS + 1)
            for each in generations
        )
        # Pages of the pool become the engine's as blocks are first used, and the same ones are used again.
        held: int = math.ceil(self._pipeline.get_metrics().max_cache_usage / 100 * self._blocks)
        # One block is the engine's.
        return max(min(self._blocks, longest + 1), held) * self._block_bytes

    def _join(self, generation: Generation) -> None:
        """Hand a request to the engine."""
        self._active.append(generation)
        self._write(generation, generation.answers)
        self._metrics.count("prompt_tokens", len(generation.ids))

    def _write(self, generation: Generation, answers: Iterable[Answer]) -> None:
        """Have the engine write answers of a request, each from its first token on."""
        ids = ov.Tensor(np.array([generation.ids], dtype=np.int64))
        for answer in answers:
            generation.config.rng_seed = answer.seed
            try:
                answer.begin(self._pipeline.add_request(next(self._numbers), ids, generation.config))
            except Exception as exc:
                generation.fail(
                    f"the engine refuses it: {' '.join(str(exc).split())[:200]}", pb_utils.TritonError.INTERNAL
                )
                break

    def _advance(self) -> None:
        """Take in what was written, send of it what is due, and forget the requests that are over."""
        for generation in self._active:
            generation.advance(self._ends, self._metrics)
            # It drops all whom it has not begun with where those whom it was writing for have left together: they hold
            # their places until its next step, in which there is nothing to do then.
            self._write(generation, generation.take_dropped())
        due = sorted((each for each in self._active if each.is_due), key=lambda each: each.told_at)
        late = time.monotonic() - PIECE_INTERVAL_S
        for place, generation in enumerate(due):
            if place < PIECES_PER_STEP or generation.is_written or generation.told_at < late:
                generation.tell()
        over = sum(each.is_over for each in self._active)
        self._active = [each for each in self._active if not each.is_over]
        if over:
            self._shared_limit.claim(self._count_bytes(self._active))
        for _ in range(over):
            self.give_place()


def read_properties(folder: Path) -> dict[str, str]:
    """Return how the version in `folder` is computed."""
    path = folder / PROPERTIES_FILE
    properties: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else dict(FP32)
    return properties


def splits_prompts(settings: Mapping[str, str], operations: float) -> bool:
    """Tell whether prompts are taken in by pieces, in steps that write for the others as well.

    New prompts in a step of their own are answered sooner, for that step has nobody else's work; but one that is long
    keeps the others waiting, and takes memory.

    Args:
        settings: The parameters of the model's configuration; one of an older modelyard says nothing of it.
        operations: What a prompt as long as the context costs, in multiplications and additions.
    """
    asked = settings.get("dynamic_split_fuse", "auto")
    if asked not in ("auto", "true", "false"):
        raise ValueError(
            f"dynamic_split_fuse in config.pbtxt is not known: expected auto, true or false, got {asked}; correct it"
        )
    return operations > MAX_WHOLE_OPERATIONS if asked == "auto" else asked == "true"


def count_weights(model: ov.Model) -> int:
    """Return how many weights a token is multiplied by, about: those of matrices, of which none is read for this."""
    shapes = [node.get_output_shape(0) for node in model.get_ops() if node.get_type_name() == "Constant"]
    return sum(math.prod(shape) for shape in shapes if len(shape) > 1)


def measure_block(model: ov.Model, sizes: tuple[int, int]) -> int:
    """Return how many bytes a block of keys and values takes.

    Args:
        model: The decoder.
        sizes: See `VALUE_BYTES`.
    """
    states = [node for node in model.get_ops() if node.get_type_name() == "ReadValue"]
    shapes = [node.get_output_partial_shape(0) for node in states]
    value, head = sizes
    token: int = sum(shape[1].get_length() * (value * shape[3].get_length() + head) for shape in shapes)
    return BLOCK_TOKENS * token


def count_blocks(limit: int, block_bytes: int, *, most: int) -> int:
    """Return how many blocks a version's pool has, of the bytes that all versions have together, and at most `most`.

    Raises:
        ValueError: There are too few for two versions.
    """
    blocks = limit // block_bytes
    if blocks < 2 * LEAST_BLOCKS:
        least = -(-2 * LEAST_BLOCKS * block_bytes // (1 << 20))
        raise ValueError(f"kv_cache_mb is too small: expected at least {least}, got {limit >> 20}; raise it")
    return min(blocks - spare(blocks), most)
