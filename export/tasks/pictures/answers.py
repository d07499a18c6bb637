"""What clients are told of a picture, made of the graph's outputs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import ModelError
from ...signature import BATCH, STRING, ModelSignature, TensorSignature
from ..cases import Outputs
from ..comparison import (
    ANSWER_TOLERANCES,
    LOGIT_TOLERANCES,
    MAX_LOGIT_ERROR,
    TENSOR_TOLERANCES,
    compare_logits,
    compare_tensors,
)
from ..labels import FUNCTIONS, LABEL, SCORE, count_labels, measure_function
from .recipe import Geometry

LABELS_FILE = "labels.txt"

# As many as transformers' `ImageClassificationPipeline` answers with.
TOP_K = 5

# Where the pixels lie in the picture, for answers that are places in it.
GEOMETRY = (TensorSignature(name="geometry", dtype=torch.float32, dims=(BATCH, 6)),)


class Answers(ABC):
    """What clients are told of a picture, made of the graph's outputs.

    Attributes:
        outputs: What clients get.
        carried: Tensors of the preprocess step that the postprocess step takes.
        postprocess: What `postprocess.json` tells that step; None where the outputs are the answers.
        tolerances: Error → bound for what the ensemble answers.
        graph_tolerances: Error → bound for the graph's outputs in fp32, with the keys of `compare`.
        widest: See `Task.widest_answer`.
    """

    outputs: tuple[TensorSignature, ...]
    carried: tuple[TensorSignature, ...] = ()
    postprocess: Mapping[str, Any] | None = None
    tolerances: Mapping[str, float] = ANSWER_TOLERANCES
    graph_tolerances: Mapping[str, float] = TENSOR_TOLERANCES
    widest: float = math.inf

    @property
    @abstractmethod
    def description(self) -> str:
        """How answers are made, for the summary."""

    @property
    def model_files(self) -> Mapping[str, bytes]:
        """What lies beside the graph, by file name."""
        return {}

    def sign(self, signature: ModelSignature) -> ModelSignature:
        """Return the graph's signature with what is known of its outputs."""
        return signature

    @abstractmethod
    def answer(self, outputs: Sequence[torch.Tensor], geometry: Geometry) -> Mapping[str, Any]:
        """Return the answer for one picture.

        Args:
            outputs: The graph's, a batch of 1 each.
            geometry: Where the pixels lie in the picture.
        """

    def is_clear(self, outputs: Sequence[torch.Tensor], geometry: Geometry) -> bool:
        """Tell whether outputs that differ in their last digits get the same answer."""
        return True

    def is_telling(self, answer: Mapping[str, Any]) -> bool:
        """Tell whether an answer says something of the picture, in place of that nothing is seen in it."""
        return True

    def compare(
        self, expected: Sequence[Outputs], got: Sequence[Outputs], bounds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the worst errors of the graph's outputs, see `Task.compare`."""
        return compare_tensors(expected, got)

    def measure_scores(self, expected: Sequence[Outputs], got: Sequence[Outputs]) -> float | None:
        """See `Task.measure_scores`."""
        return None


@dataclass(frozen=True)
class LabelAnswers(Answers):
    """The likeliest labels and their scores, best first.

    Attributes:
        labels: Names by id, which need not differ: ImageNet has two cranes.
        function: What makes scores of logits, `softmax`, `sigmoid` or `none`.
        top_k: How many are answered.
    """

    labels: Sequence[str]
    function: str
    top_k: int

    graph_tolerances = LOGIT_TOLERANCES

    @property
    def outputs(self) -> tuple[TensorSignature, ...]:  # type: ignore[override]
        """See `Answers`."""
        dims = (BATCH, self.top_k)
        return (
            TensorSignature(name=LABEL, dtype=STRING, dims=dims),
            TensorSignature(name=SCORE, dtype=torch.float32, dims=dims),
        )

    @property
    def postprocess(self) -> Mapping[str, Any]:  # type: ignore[override]
        """See `Answers`."""
        return {"answers": "labels", "labels": [*self.labels], "function": self.function, "top_k": self.top_k}

    @property
    def description(self) -> str:
        """See `Answers`."""
        return f"{count_labels(len(self.labels))}, {self.function}, best {self.top_k}"

    @property
    def model_files(self) -> Mapping[str, bytes]:
        """See `Answers`. A name a line, as Triton's classification extension reads them."""
        return {LABELS_FILE: "".join(f"{' '.join(label.split())}\n" for label in self.labels).encode()}

    def sign(self, signature: ModelSignature) -> ModelSignature:
        """See `Answers`."""
        (logits,) = signature.outputs
        return replace(signature, outputs=(replace(logits, label_file=LABELS_FILE),))

    def answer(self, outputs: Sequence[torch.Tensor], geometry: Geometry) -> Mapping[str, Any]:
        """See `Answers`.

        Raises:
            ModelError: It scores more than has a name, or less.
        """
        (scores,) = FUNCTIONS[self.function](outputs[0])
        if len(scores) != len(self.labels):
            raise ModelError(
                "the model does not score each label once",
                expected=f"{len(self.labels)} scores, as id2label in config.json has labels",
                got=str(len(scores)),
                remedy="name as many in id2label as the model's last layer has rows",
            )
        order = scores.argsort(descending=True, stable=True)[: self.top_k]
        return {LABEL: [self.labels[index] for index in order], SCORE: scores[order].tolist()}

    def compare(
        self, expected: Sequence[Outputs], got: Sequence[Outputs], bounds: Mapping[str, float]
    ) -> dict[str, float]:
        """See `Answers`."""
        wanted, had = [outputs[0] for outputs in expected], [outputs[0] for outputs in got]
        return compare_logits(wanted, had, bounds.get("max_abs_error", MAX_LOGIT_ERROR))

    def measure_scores(self, expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
        """See `Answers`."""
        return measure_function(self.function, expected, got)
