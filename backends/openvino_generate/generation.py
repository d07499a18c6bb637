"""One request from its prompt to its last response."""

import time
from dataclasses import dataclass, field
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

# How often a request is taken up again whose texts the engine has dropped: each time everyone whom it was writing for
# has left at once, or none of what was to be written found room.
MAX_TIMES_DROPPED = 16

NO_ROOM = (
    f"the engine finds no room for it: expected some for keys and values within {MAX_TIMES_DROPPED} tries, got none; "
    "ask again later"
)
ANOTHER_TEXT = (
    "the text was interrupted: expected the engine to write the same again, got another text; ask again later"
)

# What a request may ask for beside the text, as `return_*`.
RETURNED = ("finish_reason", "num_input_tokens", "num_output_tokens")


@dataclass
class Answer:
    """One of the answers of a request, as it is written.

    Attributes:
        written: Its text.
        seed: What is drawn with.
        handle: What the engine gives out.
        tokens: That were written.
        told: How many of these the caller was told of.
        reason: Why it ended, "stop" or "length"; None before.
        is_dropped: Whether the engine has dropped it.
    """

    written: WrittenText
    seed: int
    handle: Any = None
    tokens: list[int] = field(default_factory=list)
    told: int = 0
    reason: str | None = None
    is_dropped: bool = False

    def begin(self, handle: Any) -> None:
        """Have it written by the engine, which begins with the first token."""
        self.handle, self.is_dropped, self._heard = handle, False, 0

    def advance(self, ends: frozenset[int]) -> None:
        """Take in what the engine has written.

        Raises:
            RequestError: Taken up again, it is not what it was before.
        """
        if self.reason is not None:
            return
        is_length = False
        while self.handle.can_read():
            for output in self.handle.read().values():
                for token in output.generated_ids:
                    self._hear(token, ends)
                is_length = output.finish_reason == genai.GenerationFinishReason.LENGTH
        status = self.handle.get_status()
        if self.written.is_stopped:
            self.handle.stop()
            self.reason = "stop"
        elif status == genai.GenerationStatus.IGNORED:
            self.is_dropped = True
        elif status != genai.GenerationStatus.RUNNING:
            self.written.finish()
            self.reason = "length" if is_length and not self.written.is_stopped else "stop"

    def _hear(self, token: int, ends: frozenset[int]) -> None:
        if self._heard == len(self.tokens):
            self.tokens.append(token)
            if token not in ends:
                self.written.add(token)
        elif self.tokens[self._heard] != token:
            raise RequestError(ANOTHER_TEXT)
        self._heard += 1


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
        times_dropped: How often the engine has dropped some of it.
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
    times_dropped: int = 0

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
        before = sum(len(answer.tokens) for answer in self.answers)
        try:
            for answer in self.answers:
                answer.advance(ends)
        except RequestError as exc:
            self.fail(str(exc), pb_utils.TritonError.UNAVAILABLE)
            return
        written = sum(len(answer.tokens) for answer in self.answers) - before
        metrics.count("generation_tokens", written)
        if written and not self._has_begun:
            self._has_begun = True
            metrics.count("first_tokens", 1)
            metrics.count("first_token_seconds", self.age_s)
        self.is_written = all(answer.reason for answer in self.answers)

    def take_dropped(self) -> list[Answer]:
        """Return what the engine has dropped and is to write again; of one that it drops all the time, nothing."""
        dropped = [answer for answer in self.answers if answer.is_dropped]
        if dropped and not self.is_over:
            self.times_dropped += 1
            if self.times_dropped > MAX_TIMES_DROPPED:
                self.fail(NO_ROOM, pb_utils.TritonError.UNAVAILABLE)
        return [] if self.is_over else dropped

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
            new = [len(answer.tokens) - answer.told for answer in self.answers]
            tensors.append(pb_utils.Tensor("num_output_tokens", np.array(new, dtype=np.uint32)))
        for answer in self.answers:
            answer.told = len(answer.tokens)
        self.sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if self.is_over else 0)


def to_strings(texts: list[str]) -> "np.ndarray[Any, np.dtype[np.object_]]":
    """Return texts as a tensor of Triton's, [texts]."""
    return np.array([text.encode() for text in texts], dtype=np.object_)


def refuse(sender: Any, message: str, code: Any) -> None:
    """End a request with an error."""
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)), flags=FINAL)
