"""token-classification: labels for tokens, words or entities, with their places in the text."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForTokenClassification, TokenClassificationPipeline

from ...signature import ANSWERS, BATCH, SEQ_LEN, STRING, TensorSignature
from ...weights.torch_model import load_model
from ..base import HeadModule, RunGraph, TaskSource, build_inputs
from ..cases import Outputs
from ..labels import LABEL, SCORE, count_labels, measure_function, read_labels
from .encoding import Question
from .text import Answer, TextTask, replace_model

START = "START"
END = "END"

# What transformers' pipeline calls aggregation strategies.
DEFAULT_AGGREGATION = "simple"

# The label of everything that is not an entity; no answer holds it.
_IGNORED_LABELS = ["O"]


class TokenClassification(TextTask):
    """Entities of a text: label, score, first character and the one behind the last."""

    def __init__(self, source: TaskSource) -> None:
        super().__init__(source)
        model, self.unused_tensors = load_model(source.config, source.weights, AutoModelForTokenClassification)
        self.labels = read_labels(source.config)
        self.aggregation = source.options.get("aggregation") or DEFAULT_AGGREGATION
        tokenizer: Any = self.tokenizer
        unknown: int | None = tokenizer.unk_token_id
        inputs = build_inputs(self.tokenizer, model)
        self.module = HeadModule(model, tuple(tensor.name for tensor in inputs)).eval()
        answers = [(LABEL, STRING), (SCORE, torch.float32), (START, torch.int64), (END, torch.int64)]
        self.signature = self.build_signature(
            inputs,
            (TensorSignature(name="logits", dtype=torch.float32, dims=(BATCH, SEQ_LEN, len(self.labels))),),
            tuple(TensorSignature(name=n, dtype=d, dims=(BATCH, ANSWERS)) for n, d in answers),  # type: ignore[arg-type]
            carried=(
                TensorSignature(name="token_spans", dtype=torch.int64, dims=(BATCH, SEQ_LEN, 2)),
                TensorSignature(name="continues_word", dtype=torch.int64, dims=(BATCH, SEQ_LEN)),
            ),
            unknown_id=-1 if unknown is None else unknown,
        )
        self._pipeline = TokenClassificationPipeline(
            model=model,
            tokenizer=tokenizer,
            device=torch.device("cpu"),
            aggregation_strategy=self.aggregation,
        )

    @property
    def description(self) -> str:
        """See `Task`."""
        return f"{count_labels(len(self.labels))}, aggregation {self.aggregation}"

    @property
    def postprocess(self) -> Mapping[str, Any]:
        """See `TextTask`."""
        return {
            "answers": "entities",
            "labels": self.labels,
            "aggregation": self.aggregation,
            "ignored": _IGNORED_LABELS,
        }

    @contextmanager
    def answered_by(self, run: RunGraph) -> Iterator[None]:
        """See `Task`."""
        with super().answered_by(run), replace_model(self._pipeline.model, self.module, self.signature):
            yield

    def measure_scores(self, expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
        """See `Task`. Those of each token, of which an entity's are made."""
        return measure_function("softmax", expected, got)

    def answer(self, question: Question) -> Answer:
        """See `Task`. A text without entities is answered with one that has no label, score 0 and no place."""
        found: Any = self._pipeline(question.text)
        key = "entity" if self.aggregation == "none" else "entity_group"
        return {
            LABEL: [item[key] for item in found] or [""],
            SCORE: [float(item["score"]) for item in found] or [0.0],
            START: [int(item["start"]) for item in found] or [-1],
            END: [int(item["end"]) for item in found] or [-1],
        }
