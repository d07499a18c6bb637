"""question-answering: the part of a context that answers a question."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForQuestionAnswering, PreTrainedModel
from transformers.pipelines.document_question_answering import select_starts_ends

from ...errors import ModelError
from ...signature import BATCH, SEQ_LEN, STRING, WINDOWS, TensorSignature
from ...weights.torch_model import load_model
from ..base import TaskSource, build_inputs
from ..cases import Outputs
from ..comparison import MAX_LOGIT_ERROR, compare_logits
from ..labels import SCORE
from .encoding import Question, QuestionEncoder
from .text import Answer, TextTask
from .tokens import END, START

ANSWER = "ANSWER"

# The defaults of transformers' question-answering pipeline (4.57, question_answering.py), the last one there was.
_MAX_WINDOW = 384
_MAX_STRIDE = 128
_MAX_ANSWER_TOKENS = 15


class QuestionAnswering(TextTask):
    """Spans of the context, best first. A context beyond one window is read in several that overlap."""

    takes_pairs = True

    def __init__(self, source: TaskSource) -> None:
        # There the context comes before the question.
        if source.tokenizer and source.tokenizer.padding_side != "right":
            raise ModelError(
                "the tokenizer pads on the left, for which no question answering is exported",
                expected="padding_side right",
                got=source.tokenizer.padding_side,
                remedy="set padding_side in tokenizer_config.json if the model was trained so",
            )
        super().__init__(source)
        model, self.unused_tensors = load_model(source.config, source.weights, AutoModelForQuestionAnswering)
        self.top_k = source.options.get("top_k") or 1
        self.max_length = min(source.max_length, _MAX_WINDOW)
        self.stride = min(self.max_length // 2, _MAX_STRIDE)
        inputs = build_inputs(self.tokenizer, model, (BATCH, WINDOWS, SEQ_LEN))
        self.module = SpanModule(model, tuple(tensor.name for tensor in inputs)).eval()
        answers = [(ANSWER, STRING), (SCORE, torch.float32), (START, torch.int64), (END, torch.int64)]
        places = (BATCH, WINDOWS, SEQ_LEN, 2)
        self.signature = self.build_signature(
            inputs,
            (TensorSignature(name="span_logits", dtype=torch.float32, dims=places),),
            tuple(TensorSignature(name=n, dtype=d, dims=(BATCH, self.top_k)) for n, d in answers),  # type: ignore[arg-type]
            carried=(TensorSignature(name="answer_spans", dtype=torch.int64, dims=places),),
        )

    @property
    def encoder(self) -> QuestionEncoder:
        """See `Task`."""
        return QuestionEncoder(self.tokenizer, self.max_length, self.stride)

    @property
    def description(self) -> str:
        """See `Task`."""
        return f"spans of at most {_MAX_ANSWER_TOKENS} tokens, best {self.top_k}, windows overlap by {self.stride}"

    @property
    def postprocess(self) -> Mapping[str, Any]:
        """See `TextTask`."""
        return {
            "answers": "spans",
            "top_k": self.top_k,
            "max_answer_tokens": _MAX_ANSWER_TOKENS,
            "has_cls_token": self.tokenizer.cls_token_id is not None,
        }

    def build_questions(self, texts: Sequence[str]) -> list[Question]:
        """See `Task`. Questions are short, because a question is never truncated; the last context needs windows."""
        contexts = [*texts[1:], " ".join([*texts] * 4)]
        return [self._ask(text[:20], context) for text, context in zip(texts, contexts, strict=True)]

    def _ask(self, text: str, context: str) -> Question:
        """Return a question about `context`, cut until a quarter of a window is left for that, as a server asks."""
        question = Question(text=text, pair=context)
        room, least = self.encoder.find_room(question), max(1, self.max_length // 4)
        if room >= least:
            return question
        if len(text) > 1:
            return self._ask(text[: len(text) // 2], context)
        raise ModelError(
            "the model reads too few tokens at a time for a question and its context",
            expected=f"room for {least} tokens of the context beside a question of one letter",
            got=f"{max(room, 0)} of {self.max_length} tokens",
            remedy="see model_max_length in tokenizer_config.json and max_position_embeddings in config.json",
        )

    def compare(
        self, expected: Sequence[Outputs], got: Sequence[Outputs], bounds: Mapping[str, float]
    ) -> dict[str, float]:
        """See `Task`. The choices are the two ends, the labels the tokens."""
        wanted, had = ([np.moveaxis(row[0], -1, -2) for row in rows] for rows in (expected, got))
        return compare_logits(wanted, had, bounds.get("max_abs_error", MAX_LOGIT_ERROR))

    def answer(self, question: Question) -> Answer:
        """See `Task`. On transformers' own selection of spans, which outlived the pipeline it was written for."""
        made = self.tokenizer(
            question.text,
            question.pair,
            truncation="only_second",
            max_length=self.max_length,
            stride=self.encoder.find_stride(question),
            return_overflowing_tokens=True,
        )
        context = question.pair or ""
        found: dict[str, tuple[float, int, int]] = {}
        for index, row in enumerate(self.encoder.encode(question)):
            logits = self._run(row)
            encoding = made[index]
            outside = [
                int(sequence != 1 and token_id != self.tokenizer.cls_token_id)
                for sequence, token_id in zip(encoding.sequence_ids, encoding.ids, strict=True)
            ]
            starts, ends, scores, _ = select_starts_ends(
                logits[None, :, 0],
                logits[None, :, 1],
                np.array(outside),
                np.array([encoding.attention_mask]),
                # Some of them coincide when they are widened to whole words.
                top_k=self.top_k * 2 + 10,
                max_answer_len=_MAX_ANSWER_TOKENS,
            )
            for start, end, score in zip(starts, ends, scores, strict=True):
                place = _widen(encoding, int(start), int(end))
                key = context[slice(*place)].lower()
                total, first, last = found.get(key, (0.0, *place))
                found[key] = (total + float(score), first, last)
        best = sorted(found.values(), key=lambda item: -item[0])[: self.top_k]
        best += [(0.0, -1, -1)] * (self.top_k - len(best))
        return {
            ANSWER: [context[first:last] if first >= 0 else "" for _, first, last in best],
            SCORE: [score for score, _, _ in best],
            START: [first for _, first, _ in best],
            END: [last for _, _, last in best],
        }

    def _run(self, row: Mapping[str, list[int]]) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            output = self.module(*(torch.tensor([[row[tensor.name]]]) for tensor in self.signature.inputs))
        logits: np.ndarray[Any, Any] = output[0, 0].numpy()
        return logits


class SpanModule(nn.Module):
    """A model with two ends to find; the windows of a row are sequences of their own."""

    def __init__(self, model: PreTrainedModel, input_names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.input_names = input_names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the logits of a token being the first and the last one, [batch, windows, seq_len, 2], fp32.

        Args:
            inputs: Tensors in the order of `input_names`, each [batch, windows, seq_len], int64.
        """
        batch, windows, seq_len = inputs[0].shape
        named = {
            name: values.reshape(batch * windows, seq_len)
            for name, values in zip(self.input_names, inputs, strict=True)
        }
        ends = self.model(**named)
        logits = torch.stack([ends.start_logits, ends.end_logits], dim=-1)
        return logits.reshape(batch, windows, seq_len, 2)


def _widen(encoding: Any, start: int, end: int) -> tuple[int, int]:
    """Return the characters of the words in which the tokens `start` and `end` lie."""
    first, last = encoding.token_to_word(start), encoding.token_to_word(end)
    if first is None or last is None:
        return encoding.offsets[start][0], encoding.offsets[end][1]
    return encoding.word_to_chars(first, 1)[0], encoding.word_to_chars(last, 1)[1]
