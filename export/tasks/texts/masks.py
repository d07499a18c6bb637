"""fill-mask: the likeliest tokens in place of each mask."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, FillMaskPipeline, PreTrainedModel

from ...errors import ModelError
from ...signature import ANSWERS, BATCH, SEQ_LEN, STRING, TensorSignature
from ...weights.torch_model import load_model
from ..base import RunGraph, TaskSource, build_inputs
from ..cases import Outputs
from ..comparison import MAX_LOGIT_ERROR, compare_rankings, measure_apart
from ..labels import SCORE
from .encoding import Question
from .text import Answer, TextTask, replace_model

TOKEN = "TOKEN"

_DEFAULT_TOP_K = 5


class FillMask(TextTask):
    """Tokens and their probabilities, best first, for every mask in the text."""

    def __init__(self, source: TaskSource) -> None:
        super().__init__(source)
        if self.tokenizer.mask_token_id is None:
            raise ModelError(
                "the tokenizer has no mask to be filled",
                expected="a mask_token in tokenizer_config.json",
                got="none",
                remedy="pass another --task",
            )
        model, self.unused_tensors = load_model(source.config, source.weights, AutoModelForMaskedLM)
        self.top_k = min(source.options.get("top_k") or _DEFAULT_TOP_K, source.config.vocab_size - 1)
        inputs = build_inputs(self.tokenizer, model)
        # One more than is answered, so that the comparison sees whether the last one is tied with the next.
        ranks = self.top_k + 1
        names = tuple(tensor.name for tensor in inputs)
        self.module = MaskModule(model, names, self.tokenizer.mask_token_id, ranks).eval()
        dims = (BATCH, ANSWERS, self.top_k)
        self.signature = self.build_signature(
            inputs,
            (
                TensorSignature(name="top_log_probabilities", dtype=torch.float32, dims=(BATCH, SEQ_LEN, ranks)),
                TensorSignature(name="top_token_ids", dtype=torch.int64, dims=(BATCH, SEQ_LEN, ranks)),
            ),
            (
                TensorSignature(name=TOKEN, dtype=STRING, dims=dims),
                TensorSignature(name=SCORE, dtype=torch.float32, dims=dims),
            ),
        )
        tokenizer: Any = self.tokenizer
        cpu = torch.device("cpu")
        self._pipeline = FillMaskPipeline(model=model, tokenizer=tokenizer, device=cpu, top_k=self.top_k)

    @property
    def description(self) -> str:
        """See `Task`."""
        return f"best {self.top_k} tokens for each {self.tokenizer.mask_token}"

    @property
    def postprocess(self) -> Mapping[str, Any]:
        """See `TextTask`. The text of every token, as transformers decodes it alone."""
        rows = self._pipeline.model.config.vocab_size
        return {
            "answers": "masks",
            "mask": self.tokenizer.mask_token,
            "top_k": self.top_k,
            "tokens": [self.tokenizer.decode([token_id]) for token_id in range(rows)],
        }

    def build_questions(self, texts: Sequence[str]) -> list[Question]:
        """See `Task`. Each text with one word masked, and one text with two."""
        mask = self.tokenizer.mask_token
        masked = []
        for text in texts:
            masked.append(Question(text=self._mask(text)))
        return [*masked, Question(text=f"{mask} and {mask}")]

    def _mask(self, text: str) -> str:
        """Return a text with one word masked, as far to its end as it is read."""
        words = text.split(" ")
        place = len(words) // 8
        while True:
            masked = " ".join([*words[:place], self.tokenizer.mask_token, *words[place + 1 :]])
            ids = self.tokenizer(masked, truncation=True, max_length=self.max_length)["input_ids"]
            if not place or self.tokenizer.mask_token_id in ids:
                return masked
            place //= 2

    @contextmanager
    def answered_by(self, run: RunGraph) -> Iterator[None]:
        """See `Task`."""
        model = self._pipeline.model
        with (
            super().answered_by(run),
            replace_model(
                model, self.module, self.signature, lambda made: _spread(made[0], made[1], model.config.vocab_size)
            ),
        ):
            yield

    def measure_scores(self, expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
        """See `Task`. Rank by rank: which tokens they are of is compared by itself."""
        return measure_apart(*([np.exp(_rank(row)[0]) for row in rows] for rows in (expected, got)))

    def answer(self, question: Question) -> Answer:
        """See `Task`."""
        options = {"truncation": True, "max_length": self.max_length}
        found: Any = self._pipeline(question.text, tokenizer_kwargs=options)
        # The pipeline leaves out the outer list where there is one mask.
        masks = [found] if isinstance(found[0], dict) else found
        return {
            TOKEN: [item["token_str"] for mask in masks for item in mask],
            SCORE: [item["score"] for mask in masks for item in mask],
        }

    def compare(
        self, expected: Sequence[Outputs], got: Sequence[Outputs], bounds: Mapping[str, float]
    ) -> dict[str, float]:
        """See `Task`. Where there is no mask nothing is ranked, and nothing is compared."""
        wanted = [_rank(row) for row in expected]
        return compare_rankings(wanted, [_rank(row) for row in got], bounds.get("max_abs_error", MAX_LOGIT_ERROR))


class MaskModule(nn.Module):
    """A masked language model: the likeliest tokens at every mask.

    They are ranked inside the graph: the scores of a whole vocabulary at every token are a thousand times the text.
    """

    def __init__(self, model: PreTrainedModel, input_names: tuple[str, ...], mask_id: int, ranks: int) -> None:
        super().__init__()
        self.model = model
        self.input_names = input_names
        self.mask_id = mask_id
        self.ranks = ranks

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and ids, both [batch, seq_len, ranks], the ids -1 where there is no mask.

        Args:
            inputs: Tensors in the order of `input_names`, each [batch, seq_len], int64.
        """
        named = dict(zip(self.input_names, inputs, strict=True))
        logits = self.model(**named).logits  # [batch, seq_len, vocabulary]
        best, ids = torch.topk(logits, self.ranks, dim=-1)
        log_probabilities = best - torch.logsumexp(logits, dim=-1, keepdim=True)
        is_mask = (named["input_ids"] == self.mask_id).unsqueeze(-1)
        return log_probabilities, torch.where(is_mask, ids, torch.full_like(ids, -1))


def _spread(best: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """Return log-probabilities of a whole vocabulary, of those of the best: what they leave is shared by the others."""
    left = (1 - best.exp().sum(dim=-1, keepdim=True)).clamp(min=1e-30) / max(1, vocabulary - best.shape[-1])
    whole = left.log().expand(*best.shape[:-1], vocabulary).clone()
    return whole.scatter(-1, ids.clamp(min=0), best)


def _rank(row: Outputs) -> tuple[Any, Any]:
    scores, ids = row
    is_mask = ids[:, 0] >= 0
    return scores[is_mask], ids[is_mask]
