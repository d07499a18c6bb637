"""Texts that OpenVINO GenAI drops: they are written again, and nobody is told anything twice."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import openvino_genai as genai
import pytest
from harness import load_backend

with mock.patch.dict("sys.modules", {"triton_python_backend_utils": mock.MagicMock()}):
    generation = load_backend("openvino_generate", "generation")


ENDS = frozenset({0})


class Written:
    """Stands for the text: its tokens."""

    is_stopped = False

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def add(self, token: int) -> None:
        self.tokens.append(token)

    def finish(self) -> None:
        """Say nothing."""


class Handle:
    """What the engine gives out: tokens that it has written, and what became of the rest."""

    def __init__(self, tokens: list[int], status: Any) -> None:
        reason = genai.GenerationFinishReason.STOP
        self._outputs = [{0: SimpleNamespace(generated_ids=[token], finish_reason=reason)} for token in tokens]
        self._status = status
        self.is_cancelled = False

    def can_read(self) -> bool:
        return bool(self._outputs)

    def read(self) -> Any:
        return self._outputs.pop(0)

    def get_status(self) -> Any:
        return self._status

    def cancel(self) -> None:
        self.is_cancelled = True


def test_a_text_that_is_written_again_goes_on_where_it_was_dropped() -> None:
    answer = generation.Answer(Written(), seed=7)
    for tokens, status in (
        ([5, 6], genai.GenerationStatus.IGNORED),
        ([5], genai.GenerationStatus.IGNORED),
        ([5, 6, 8, 0], genai.GenerationStatus.FINISHED),
    ):
        assert answer.reason is None
        answer.begin(Handle(tokens, status))
        answer.advance(ENDS)
        assert answer.is_dropped == (status == genai.GenerationStatus.IGNORED)
    assert (answer.written.tokens, answer.tokens, answer.reason) == ([5, 6, 8], [5, 6, 8, 0], "stop")


def test_a_text_that_is_written_otherwise_the_second_time_is_refused_for_now() -> None:
    answer = generation.Answer(Written(), seed=7)
    answer.begin(Handle([5, 6], genai.GenerationStatus.IGNORED))
    answer.advance(ENDS)
    answer.begin(Handle([5, 7], genai.GenerationStatus.RUNNING))
    with pytest.raises(
        generation.RequestError, match="expected the engine to write the same again, got .*; ask again later"
    ):
        answer.advance(ENDS)


def test_a_request_that_is_dropped_all_the_time_is_refused_for_now() -> None:
    answers = [generation.Answer(Written(), seed=seed) for seed in range(2)]
    sender, limit = mock.MagicMock(), generation.MAX_TIMES_DROPPED
    sender.is_cancelled.return_value = False
    asked = generation.Generation(
        sender=sender, ids=[1], config=None, answers=answers, parameters=None, is_streamed=False, prefix="", returned=()
    )
    kept = Handle([5], genai.GenerationStatus.RUNNING)
    answers[0].begin(kept)
    for time in range(limit + 1):
        answers[1].begin(Handle([], genai.GenerationStatus.IGNORED))
        asked.advance(ENDS, mock.MagicMock())
        assert asked.take_dropped() == (answers[1:] if time < limit else [])
        assert asked.is_over == kept.is_cancelled == (time == limit)
    errors = generation.pb_utils.TritonError
    assert errors.call_args.args == (generation.NO_ROOM, errors.UNAVAILABLE)
    assert "ask again later" in generation.NO_ROOM
