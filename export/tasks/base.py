"""What every task has: the module around the model, its signature, what it is tried on, and how far is too far."""

import contextlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..artefacts import Artefacts
from ..checkpoints import StateDict, TensorSpec
from ..errors import ModelError
from ..signature import BATCH, SEQ_LEN, ModelSignature, TensorSignature
from .cases import Array, Case, Outputs

# Names of a graph's outputs and its inputs to those outputs, in that order.
RunGraph = Callable[[Sequence[str], Mapping[str, Array]], Sequence[Array]]


@dataclass(frozen=True, kw_only=True)
class TaskSource:
    """What a task is built from.

    Attributes:
        directory: The checkpoint's folder.
        config: The checkpoint's configuration, already as large as the vocabulary.
        weights: The checkpoint's tensors, in fp32.
        tokenizer: The tokenizer with the added tokens; None for a model that reads no text, or a folder without one.
        max_length: The longest sequence that the model was made for, in tokens; 0 where nothing says.
        options: Option of a task → the user's choice, or None.
        added_tokens: Tokens that the export adds, to be tried one by one.
        warnings: What is odd about the checkpoint itself, each a sentence with what to do.
    """

    directory: Path
    config: PretrainedConfig
    weights: StateDict
    tokenizer: PreTrainedTokenizerBase | None
    max_length: int
    options: Mapping[str, Any]
    added_tokens: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Task(ABC):
    """One way of serving a checkpoint, built and ready to be exported.

    Attributes:
        name: Its name in the table of tasks.
        module: Tensors in the order of the signature in, the graph's outputs out. The source of truth.
        signature: Tensors of the module, and the contract around it.
        unused_tensors: Names of the tensors that the checkpoint holds and the module has no place for.
        tolerances: Error → bound, which every case of the verification must keep in fp32.
        tokenizer_use: Whether it can make use of a tokenizer, or cannot be served without one.
        form: What an engine is given of it: an ONNX graph of the module, or the decoder.
        is_ensemble: Whether steps stand around the graph, so that its signature has a contract.
        has_lean: Whether `backends/python_lean` can do what these steps do.
        has_lengths: Whether its first step can pad texts to a few lengths.
        cache_shapes: The heads of each layer's keys and values, and the size of one, where an engine keeps them.
        context: How many tokens prompt and answer may have together, where an engine writes the answer; else 0.
        source_warnings: What is odd about the checkpoint itself, whatever it is served as.
        widest_answer: How far a recorded answer of another precision may be missed, in its own unit, and still tell
            something.
    """

    tolerances: ClassVar[Mapping[str, float]]
    tokenizer_use: ClassVar[Literal["none", "optional", "required"]] = "none"
    form: ClassVar[Literal["graph", "decoder"]] = "graph"
    is_ensemble: ClassVar[bool] = False
    has_lean: ClassVar[bool] = False
    has_lengths: ClassVar[bool] = False

    name: str
    module: nn.Module
    signature: ModelSignature
    unused_tensors: list[str]
    cache_shapes: Sequence[tuple[int, int]] = ()
    context: int = 0
    source_warnings: tuple[str, ...] = ()
    widest_answer: float = math.inf

    @classmethod
    def recognises(cls, directory: Path, config: PretrainedConfig, specs: Mapping[str, TensorSpec]) -> bool:
        """Tell whether a checkpoint is for this task by more than the name of its architecture.

        Args:
            directory: Folder of the checkpoint.
            config: Its configuration.
            specs: Name → dtype and shape of its tensors.
        """
        return False

    @property
    @abstractmethod
    def description(self) -> str:
        """How answers are made, for the summary."""

    @property
    @abstractmethod
    def padding_values(self) -> Mapping[str, int]:
        """Input name → what stands in its padding, 0 where it is not named."""

    @property
    def tested_sizes(self) -> str:
        """Largest sizes that are tried, for the summary; empty where the model takes no larger ones."""
        return ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was taken for granted and changes the answers if it is wrong, each a sentence with what to do."""
        return self.source_warnings

    @property
    def step_files(self) -> Mapping[str, Mapping[str, bytes]]:
        """Step of the ensemble → what its version folder holds, by file name; no two steps hold files of one name."""
        return {}

    @abstractmethod
    def build_cases(self) -> Iterator[Case]:
        """Yield what the graph is tried on."""

    @abstractmethod
    def build_golden(self) -> Mapping[str, Any]:
        """Return inputs and the checkpoint's own answers, as a `golden.json` holds them."""

    @abstractmethod
    def compare(
        self, expected: Sequence[Outputs], got: Sequence[Outputs], bounds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the worst errors between the module's outputs and the graph's, with the tolerances' keys.

        Args:
            expected: The outputs of each row, without batch and padding.
            got: The same shapes.
            bounds: Error → what it may be.
        """

    def measure_scores(self, expected: Sequence[Outputs], got: Sequence[Outputs]) -> float | None:
        """Return how far the scores lie apart that are made of these outputs, each by itself.

        None where the outputs are the answers, or where these are more than scores.
        """
        return None

    @contextlib.contextmanager
    def answered_by(self, run: RunGraph) -> Iterator[None]:
        """Have answers made of what a graph returns, in place of the module, while the context lasts."""
        module = self.module
        self.module = GraphModule(self.signature, run)
        try:
            yield
        finally:
            self.module = module

    def check_files(self, files: Artefacts) -> int:
        """Check what was written beside the graph, and return how many texts were tokenized for that.

        Raises:
            VerificationError: The server's tokenizer makes other ids than transformers'.
        """
        return 0

    @abstractmethod
    def build_example(self) -> tuple[Tensor, ...]:
        """Return the inputs that are traced: a batch of 2, the other sizes distinct and none of them 1."""


class GraphModule(nn.Module):
    """A graph where its module would be: tensors in, the graph's outputs out."""

    def __init__(self, signature: ModelSignature, run: RunGraph) -> None:
        super().__init__()
        self.signature = signature
        self.run = run

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the outputs, one tensor or several, as the module does."""
        feeds = {
            tensor.name: np.ascontiguousarray(values.numpy())
            for tensor, values in zip(self.signature.inputs, inputs, strict=True)
        }
        made = self.run([tensor.name for tensor in self.signature.outputs], feeds)
        outputs = tuple(torch.from_numpy(np.array(array)) for array in made)
        return outputs if len(outputs) > 1 else outputs[0]


class HeadModule(nn.Module):
    """A model with a head: tensors in, its logits out."""

    def __init__(self, model: PreTrainedModel, input_names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.input_names = input_names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the logits, [batch, labels] or [batch, seq_len, labels], fp32.

        Args:
            inputs: The tensors, in the order of `input_names`.
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
        # Which of the two lacks them.
        lacking = tokenizer.model_input_names if {"input_ids", "attention_mask"} <= accepted else [*accepted][:3]
        raise ModelError(
            f"{type(model).__name__} is not a text encoder",
            expected="input_ids and attention_mask",
            got=", ".join(lacking),
            remedy="pass a text model, or --factory with a module that takes the texts as tensors",
        )
    return tuple(TensorSignature(name=name, dtype=torch.int64, dims=dims) for name in names)
