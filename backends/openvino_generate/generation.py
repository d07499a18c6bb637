"""One request from its prompt to its last response."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino_genai as genai
import triton_python_backend_utils as pb_utils
from generation_metrics import Metrics
from generation_parameters import Parameters, RequestError
from written_text import WrittenText

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

# How often it is looked whether a caller is still there. Asking takes a message to tritonserver and back.
LOOK_INTERVAL_S = 0.2

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
        told_at: When the caller was last told of anything, on the monotonic clock; 0 before.
        is_written: Whether all of it was written.
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
    told_at: float = 0.0
    is_written: bool = False
    is_over: bool = False

    def __post_init__(self) -> None:
        self._came = self._looked = time.monotonic()
        self._has_begun = False

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the engine has to read before the first is written: each answer's prompt is its own."""
        return len(self.ids) * len(self.answers)

    @property
    def is_due(self) -> bool:
        """Whether there is anything to tell."""
        if self.is_over:
            return False
        return self.is_written or (self.is_streamed and any(answer.written.is_ahead for answer in self.answers))

    @property
    def age_s(self) -> float:
        """How long ago it came, in seconds."""
        return time.monotonic() - self._came

    def look(self, metrics: Metrics) -> None:
        """Leave where the caller has, which is looked at now and then."""
        now = time.monotonic()
        if now - self._looked >= LOOK_INTERVAL_S:
            self._looked = now
            if self.sender.is_cancelled():
                metrics.count("cancelled", 1)
                self.fail("the caller has left", pb_utils.TritonError.CANCELLED)

    def advance(self, ends: frozenset[int], metrics: Metrics) -> None:
        """Take in what is new, or leave where the caller has."""
        if not self.is_over:
            self.look(metrics)
        if self.is_over:
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
            metrics.count("first_token_seconds", self.age_s)
        self.is_written = all(answer.reason for answer in self.answers)

    def tell(self) -> None:
        """Send what the caller was not yet told of."""
        self.told_at, self.is_over = time.monotonic(), self.is_written
        self._respond([self.prefix + answer.written.take() for answer in self.answers])

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


def to_strings(texts: list[str]) -> "np.ndarray[Any, np.dtype[np.object_]]":
    """Return texts as a tensor of Triton's, [texts]."""
    return np.array([text.encode() for text in texts], dtype=np.object_)


def refuse(sender: Any, message: str, code: Any) -> None:
    """End a request with an error."""
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)), flags=FINAL)
