"""text-generation-logits and text2text-generation: the scores of the next token, for whatever writes the text."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache, PreTrainedModel

from ...errors import ModelError
from ...signature import BATCH, DECODER_LEN, PAST_LEN, SEQ_LEN, ModelSignature, TensorSignature
from ...weights.torch_model import load_model
from ..base import TaskSource
from ..cases import Outputs, Row
from ..comparison import LOGIT_TOLERANCES, TENSOR_TOLERANCES, compare_logits, compare_tensors
from ..tensors import InputRules, SizeRange, TensorTask, ValueRule
from .encoding import Question, QuestionEncoder
from .text import read_verification_texts

# Where nothing says how long a text may be.
_DEFAULT_LENGTH = 512

# Real texts that are tried.
_TEXTS = 16


class GenerationTask(TensorTask):
    """Logits of a vocabulary at every token, which must prefer the same token."""

    tokenizer_use: ClassVar[Literal["none", "optional", "required"]] = "optional"
    tolerances: ClassVar[Mapping[str, float]] = TENSOR_TOLERANCES | {
        "min_label_agreement": LOGIT_TOLERANCES["min_label_agreement"]
    }

    def compare(
        self, expected: Sequence[Outputs], got: Sequence[Outputs], bounds: Mapping[str, float]
    ) -> dict[str, float]:
        """See `Task`."""
        wanted, had = ([row[0] for row in rows] for rows in (expected, got))
        max_error = bounds.get("max_relative_error", TENSOR_TOLERANCES["max_relative_error"])
        agreement = compare_logits(wanted, had, max_error)
        return compare_tensors(expected, got) | {"min_label_agreement": agreement["min_label_agreement"]}


class TextGenerationLogits(GenerationTask):
    """A decoder: the whole text in, the logits at each of its tokens out."""

    def __init__(self, source: TaskSource) -> None:
        self.model, self.unused_tensors = load_model(source.config, source.weights, AutoModelForCausalLM)
        self.vocabulary = self.model.config.get_text_config().vocab_size
        self.longest = source.max_length or _DEFAULT_LENGTH
        self._build(source)

    def _build(self, source: TaskSource) -> None:
        self.module = DecoderModule(self.model).eval()
        dims = (BATCH, SEQ_LEN)
        self.signature = ModelSignature(
            inputs=(
                TensorSignature(name="input_ids", dtype=torch.int64, dims=dims),
                TensorSignature(name="attention_mask", dtype=torch.int64, dims=dims),
            ),
            outputs=(TensorSignature(name="logits", dtype=torch.float32, dims=(*dims, self.vocabulary)),),
        )
        self.tensors = InputRules(
            rules={"input_ids": _ids(self.vocabulary), "attention_mask": ValueRule(kind="mask")},
            sizes={SEQ_LEN: SizeRange(largest=self.longest)},
            padded=(SEQ_LEN,),
            samples=_read_samples(source, self.longest),
        )

    @property
    def description(self) -> str:
        """See `Task`."""
        return f"logits of {self.vocabulary} tokens, for texts of up to {self.longest}"


class TextGenerationLogitsWithPast(TextGenerationLogits):
    """A decoder with its cache: new tokens in, with the keys and values of those before; all of them out.

    The first step has an empty past, every further one a single token.
    """

    def _build(self, source: TaskSource) -> None:
        shapes = find_cache_shapes(self.model)
        self.module = CachedDecoderModule(self.model, len(shapes)).eval()
        total = f"{PAST_LEN}+{SEQ_LEN}"
        past, present = [], []
        for index, (heads, size) in enumerate(shapes):
            for part in ("key", "value"):
                dims = (BATCH, heads, PAST_LEN, size)
                past.append(TensorSignature(name=f"past_{part}_{index}", dtype=torch.float32, dims=dims))
                dims_after = (BATCH, heads, total, size)
                present.append(TensorSignature(name=f"present_{part}_{index}", dtype=torch.float32, dims=dims_after))
        logits_dims = (BATCH, SEQ_LEN, self.vocabulary)
        self.signature = ModelSignature(
            inputs=(
                TensorSignature(name="input_ids", dtype=torch.int64, dims=(BATCH, SEQ_LEN)),
                TensorSignature(name="attention_mask", dtype=torch.int64, dims=(BATCH, total)),
                *past,
            ),
            outputs=(TensorSignature(name="logits", dtype=torch.float32, dims=logits_dims), *present),
        )
        self.tensors = InputRules(
            rules={
                "input_ids": _ids(self.vocabulary),
                "attention_mask": ValueRule(kind="mask", hidden=PAST_LEN),
                **{tensor.name: ValueRule() for tensor in past},
            },
            # Both together must fit the model's positions.
            sizes={
                SEQ_LEN: SizeRange(largest=max(1, self.longest // 2)),
                PAST_LEN: SizeRange(smallest=0, largest=self.longest // 2),
            },
        )

    @property
    def description(self) -> str:
        """See `Task`."""
        layers = (len(self.signature.outputs) - 1) // 2
        return f"logits of {self.vocabulary} tokens, with keys and values of {layers} layers"


class Text2TextGeneration(GenerationTask):
    """An encoder and a decoder: a text and the beginning of another in, the logits at each token of that one out."""

    def __init__(self, source: TaskSource) -> None:
        model, self.unused_tensors = load_model(source.config, source.weights, AutoModelForSeq2SeqLM)
        self.module = Seq2SeqModule(model).eval()
        # Marian may write another language's tokens than it reads (transformers, modeling_marian.py).
        has_two = not getattr(model.config, "share_encoder_decoder_embeddings", True)
        self.vocabulary = model.config.decoder_vocab_size if has_two else model.config.vocab_size
        longest = source.max_length or _DEFAULT_LENGTH
        dims, decoder_dims = (BATCH, SEQ_LEN), (BATCH, DECODER_LEN)
        self.signature = ModelSignature(
            inputs=(
                TensorSignature(name="input_ids", dtype=torch.int64, dims=dims),
                TensorSignature(name="attention_mask", dtype=torch.int64, dims=dims),
                TensorSignature(name="decoder_input_ids", dtype=torch.int64, dims=decoder_dims),
            ),
            outputs=(TensorSignature(name="logits", dtype=torch.float32, dims=(*decoder_dims, self.vocabulary)),),
        )
        self.tensors = InputRules(
            rules={
                "input_ids": _ids(model.config.vocab_size),
                "attention_mask": ValueRule(kind="mask"),
                "decoder_input_ids": _ids(self.vocabulary),
            },
            sizes={SEQ_LEN: SizeRange(largest=longest), DECODER_LEN: SizeRange(largest=longest)},
            padded=(SEQ_LEN,),
            counts_from_left=True,
        )

    @property
    def description(self) -> str:
        """See `Task`."""
        return f"logits of {self.vocabulary} tokens, encoder and decoder in one graph"


class DecoderModule(nn.Module):
    """A causal language model. Positions are counted from the mask, so that padding may stand on either side."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits, [batch, seq_len, vocabulary], fp32; both inputs [batch, seq_len], int64."""
        positions = {"position_ids": count_positions(attention_mask)} if self.takes_positions else {}
        logits: Tensor = self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions
        ).logits
        return logits


class CachedDecoderModule(nn.Module):
    """The same with the keys and values of the tokens before, which it returns with the new ones behind them."""

    def __init__(self, model: PreTrainedModel, layers: int) -> None:
        super().__init__()
        self.model = model
        self.layers = layers
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the logits, [batch, seq_len, vocabulary], then key and value of each layer, past and new, fp32.

        Args:
            inputs: input_ids, [batch, seq_len], int64; attention_mask, [batch, past_len+seq_len], int64; then key and
                value of each layer, [batch, heads, past_len, head size], fp32.
        """
        input_ids, attention_mask, *past = inputs
        cache = DynamicCache([(past[2 * index], past[2 * index + 1]) for index in range(self.layers)])
        past_len = past[0].shape[2]
        positions = {"position_ids": count_positions(attention_mask)[:, past_len:]} if self.takes_positions else {}
        output = self.model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **positions
        )
        present = [part for layer in output.past_key_values.layers for part in (layer.keys, layer.values)]
        return (output.logits, *present)


class Seq2SeqModule(nn.Module):
    """An encoder-decoder, the whole of it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        """Return the logits, [batch, decoder_len, vocabulary], fp32.

        Args:
            input_ids: [batch, seq_len], int64.
            attention_mask: [batch, seq_len], int64.
            decoder_input_ids: [batch, decoder_len], int64.
        """
        logits: Tensor = self.model(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids, use_cache=False
        ).logits
        return logits


def count_positions(attention_mask: Tensor) -> Tensor:
    """Return the position of each token among those that are not padding, [batch, seq_len], int64.

    As `generate` counts them (transformers, generation/utils.py).
    """
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def _ids(vocabulary: int) -> ValueRule:
    return ValueRule(kind="integers", low=0, high=vocabulary)


def find_cache_shapes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Return the number of heads and the size of one, of each layer's keys.

    Raises:
        ModelError: The model keeps something else than keys and values of every token.
    """
    with torch.no_grad():
        output = model(input_ids=torch.ones(1, 3, dtype=torch.int64), use_cache=True)
    # A state-space model has something else under another name.
    cache: Any = getattr(output, "past_key_values", None)
    layers = getattr(cache, "layers", [])
    shapes = [(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in layers if hasattr(layer, "keys")]
    if len(shapes) != len(layers) or not shapes or any(key != value or key[2] != 3 for key, value in shapes):
        raise ModelError(
            f"the cache of {type(model).__name__} is not exported",
            expected="keys and values of every token in every layer",
            got="none" if cache is None else type(cache).__name__,
            remedy="pass --task text-generation-logits",
        )
    return [(key[1], key[3]) for key, _ in shapes]


def _read_samples(source: TaskSource, longest: int) -> list[Row]:
    """Return real texts as the tokenizer reads them, where there is one."""
    if source.tokenizer is None:
        return []
    encoder = QuestionEncoder(source.tokenizer, longest)
    rows = [row for text in read_verification_texts()[:_TEXTS] for row in encoder.encode(Question(text=text))]
    return [
        {name: np.array(row[name], dtype=np.int64) for name in ("input_ids", "attention_mask")}
        for row in rows
        if row["input_ids"]
    ]
