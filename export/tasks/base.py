"""What every task has: the module around the model, its signature, the reference answers, and how far is too far."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from export.checkpoints import StateDict
from export.comparison import ANSWER_TOLERANCES, LOGIT_TOLERANCES, compare_logits
from export.encoding import Question, QuestionEncoder
from export.errors import ModelError
from export.request import TaskOptions
from export.signature import BATCH, SEQ_LEN, TEXT, TEXT_PAIR, ModelSignature, TensorSignature

# The graph's outputs for one row, each without batch and padding.
Outputs = tuple[npt.NDArray[Any], ...]

# Output name → the values that one question is answered with, as the ensemble gives them.
Answer = Mapping[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class TaskSource:
    """What a task is built from.

    Attributes:
        directory: The checkpoint's folder.
        config: Of the checkpoint, already as large as the vocabulary.
        weights: In fp32.
        tokenizer: With the added tokens.
        max_length: The longest sequence that the model was made for, in tokens.
        options: Of the user.
    """

    directory: Path
    config: PretrainedConfig
    weights: StateDict
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    options: TaskOptions


class Task(ABC):
    """One way of serving a checkpoint, built and ready to be exported.

    Attributes:
        module: Token tensors in the order of the signature in, the graph's outputs out. The source of truth.
        signature: Of the module, and of the ensemble around it.
        left_out: Names of the tensors that the checkpoint holds and the module has no place for.
        tolerances: Error → bound, which every case of the verification must keep.
        golden_tolerances: The same for what the ensemble answers.
    """

    name: ClassVar[str]
    takes_pairs: ClassVar[bool] = False
    tolerances: ClassVar[Mapping[str, float]] = LOGIT_TOLERANCES
    golden_tolerances: ClassVar[Mapping[str, float]] = ANSWER_TOLERANCES

    module: nn.Module
    signature: ModelSignature
    left_out: list[str]

    def __init__(self, source: TaskSource) -> None:
        self.tokenizer = source.tokenizer
        # What transformers' own pipelines truncate to.
        self.tokenizer.model_max_length = source.max_length

    @property
    @abstractmethod
    def description(self) -> str:
        """How answers are made, for the summary."""

    @property
    def settings(self) -> Mapping[str, Any] | None:
        """What the postprocess step must know, or None where there is no such step."""
        return None

    @property
    def encoder(self) -> QuestionEncoder:
        """Makes token ids of questions, as the checkpoint's own tokenizer does."""
        return QuestionEncoder(self.tokenizer, self.signature.max_length)

    def build_questions(self, texts: Sequence[str]) -> list[Question]:
        """Return a question for each of `texts`, such as this task is asked."""
        if not self.takes_pairs:
            return [Question(text=text) for text in texts]
        return [Question(text=text, pair=pair) for text, pair in zip(texts, [*texts[1:], texts[0]], strict=True)]

    @abstractmethod
    def answer(self, question: Question) -> Answer:
        """Return what the checkpoint answers, by transformers' own code wherever it has any for this task."""

    def compare(self, expected: Sequence[Outputs], got: Sequence[Outputs]) -> dict[str, float]:
        """Return the worst errors between the module's outputs and the graph's, with the tolerances' keys.

        Args:
            expected: The outputs of each row, without batch and padding.
            got: The same shapes.
        """
        return compare_logits([outputs[0] for outputs in expected], [outputs[0] for outputs in got])


class HeadModule(nn.Module):
    """A model with a head: token tensors in, its logits out."""

    def __init__(self, model: PreTrainedModel, input_names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.input_names = input_names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the logits, [batch, labels] or [batch, seq_len, labels], fp32.

        Args:
            inputs: In the order of `input_names`, each [batch, seq_len], int64.
        """
        logits: Tensor = self.model(**dict(zip(self.input_names, inputs, strict=True))).logits
        return logits


def build_inputs(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, dims: tuple[str | int, ...] = (BATCH, SEQ_LEN)
) -> tuple[TensorSignature, ...]:
    """Return the tensors that the tokenizer makes and the model's `forward` takes.

    Raises:
        ModelError: The model takes no `input_ids` and `attention_mask`.
    """
    accepted = inspect.signature(model.forward).parameters.keys()
    # A tokenizer may name no mask of its own, but whatever is batched needs one.
    made = {*tokenizer.model_input_names, "attention_mask"}
    names = tuple(name for name in ("input_ids", "attention_mask", "token_type_ids") if name in accepted & made)
    if names[:2] != ("input_ids", "attention_mask"):
        raise ModelError(
            f"{type(model).__name__} is no text encoder",
            expected="input_ids and attention_mask",
            got=", ".join(tokenizer.model_input_names),
            remedy="pass a text model",
        )
    return tuple(TensorSignature(name=name, dtype=torch.int64, dims=dims) for name in names)


def name_texts(takes_pairs: bool) -> tuple[str, ...]:
    """Return the names of the ensemble's inputs."""
    return (TEXT, TEXT_PAIR) if takes_pairs else (TEXT,)
