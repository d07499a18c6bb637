"""text-classification, text-pair-classification and reward: a label, or a score, for a text or a pair of texts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    TextClassificationPipeline,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...checkpoints import TensorSpec
from ...checkpoints.plain.sentence_modules import RECORD_FILE
from ...checkpoints.plain.value_model import VALUE_HEAD, VALUE_MODEL_PREFIXES
from ...errors import ModelError, VocabularyError
from ...signature import BATCH, STRING, TensorSignature
from ...weights.torch_model import find_output_width, load_model
from ...weights.transforms import SelectPrefix
from ..base import HeadModule, RunGraph, TaskSource, build_inputs
from ..cases import Outputs
from ..foreseen import is_cross_encoder
from ..labels import LABEL, SCORE, choose_function, count_labels, measure_function, read_labels
from .encoding import Question
from .last_end import LastEndModule, check_end, reads_last_end
from .sentence_settings import read_settings
from .text import Answer, TextTask, replace_model

REWARD = "REWARD"


class TextClassification(TextTask):
    """Labels and their scores, best first."""

    def __init__(self, source: TaskSource) -> None:
        super().__init__(source)
        set_pad_token(self.tokenizer, source.config)
        model, self.unused_tensors = load_model(source.config, source.weights, AutoModelForSequenceClassification)
        check_padding(model, self.tokenizer)
        self.model = model
        self.labels = read_labels(source.config)
        self.function = choose_function(source.config, read_settings(source.directory / RECORD_FILE))
        self.top_k = min(source.options.get("top_k") or len(self.labels), len(self.labels))
        inputs = build_inputs(self.tokenizer, model)
        self.module = _build_module(model, self.tokenizer, inputs).eval()
        dims = (BATCH, self.top_k)
        self.signature = self.build_signature(
            inputs,
            (TensorSignature(name="logits", dtype=torch.float32, dims=(BATCH, len(self.labels))),),
            (
                TensorSignature(name=LABEL, dtype=STRING, dims=dims),
                TensorSignature(name=SCORE, dtype=torch.float32, dims=dims),
            ),
        )
        tokenizer: Any = self.tokenizer
        self._pipeline = TextClassificationPipeline(model=model, tokenizer=tokenizer, device=torch.device("cpu"))

    @property
    def description(self) -> str:
        """See `Task`."""
        return f"{count_labels(len(self.labels))}, {self.function}, best {self.top_k}"

    @property
    def postprocess(self) -> Mapping[str, Any]:
        """See `TextTask`."""
        return {"answers": "labels", "labels": self.labels, "function": self.function, "top_k": self.top_k}

    def answer(self, question: Question) -> Answer:
        """See `Task`."""
        asked = {"text": question.text} | ({"text_pair": question.pair} if question.pair is not None else {})
        # A batch of one, so that truncation to the first or second text is transformers' own.
        found: Any = self._pipeline(
            [asked], top_k=self.top_k, function_to_apply=self.function, truncation=True, max_length=self.max_length
        )
        return {LABEL: [item["label"] for item in found[0]], SCORE: [item["score"] for item in found[0]]}

    @contextmanager
    def answered_by(self, run: RunGraph) -> Iterator[None]:
        """See `Task`."""
        with super().answered_by(run), replace_model(self.model, self.module, self.signature):
            yield

    def measure_scores(self, expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
        """See `Task`."""
        return measure_function(self.function, expected, got)


class TextPairClassification(TextClassification):
    """The same for a pair of texts: entailment, duplicates, and the score of a cross-encoder."""

    takes_pairs = True

    @classmethod
    def recognises(cls, directory: Path, config: PretrainedConfig, specs: Mapping[str, TensorSpec]) -> bool:
        """See `Task`. Sentence-Transformers records which models score pairs."""
        return is_cross_encoder(directory, vars(config))


class Reward(TextTask):
    """How good a text is, as a reward model scores it: one number without bounds."""

    @classmethod
    def recognises(cls, directory: Path, config: PretrainedConfig, specs: Mapping[str, TensorSpec]) -> bool:
        """See `Task`. DeepSpeed-Chat's models have a head of that name."""
        return VALUE_HEAD in specs

    def __init__(self, source: TaskSource) -> None:
        super().__init__(source)
        set_pad_token(self.tokenizer, source.config)
        has_value_head = VALUE_HEAD in source.weights.specs()
        if has_value_head:
            model, self.unused_tensors, head = _load_value_model(source)
        else:
            model, self.unused_tensors = load_model(source.config, source.weights, AutoModelForSequenceClassification)
            _check_one_label(source.config)
            check_padding(model, self.tokenizer)
        inputs = build_inputs(self.tokenizer, model)
        if has_value_head:
            self.module = ValueModule(model, head, tuple(tensor.name for tensor in inputs)).eval()
        else:
            self.module = _build_module(model, self.tokenizer, inputs).eval()
        dims = (BATCH, 1)
        self.signature = self.build_signature(
            inputs,
            (TensorSignature(name="reward_logits", dtype=torch.float32, dims=dims),),
            (TensorSignature(name=REWARD, dtype=torch.float32, dims=dims),),
            has_postprocess=False,
        )

    @property
    def description(self) -> str:
        """See `Task`."""
        kind = "value head at the last token" if isinstance(self.module, ValueModule) else "one label, no function"
        return f"a reward, {kind}"

    def answer(self, question: Question) -> Answer:
        """See `Task`. The module without any padding: transformers' pipeline would squeeze it through a sigmoid."""
        (row,) = self.encoder.encode(question)
        with torch.no_grad():
            output = self.module(*(torch.tensor([row[tensor.name]]) for tensor in self.signature.inputs))
        return {REWARD: output[0].tolist()}


class ValueModule(nn.Module):
    """A model without a head, and a linear value head on its last token that is not padding."""

    def __init__(self, model: PreTrainedModel, head: Tensor, input_names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Parameter(head, requires_grad=False)
        self.input_names = input_names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the value at the last token, [batch, 1], fp32; inputs as `HeadModule` takes them."""
        named = dict(zip(self.input_names, inputs, strict=True))
        values = self.model(**named).last_hidden_state @ self.head.T  # [batch, seq_len, 1]
        mask = named["attention_mask"].to(values.dtype)
        is_last = mask * (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))
        rewards: Tensor = (values * is_last.unsqueeze(-1)).sum(dim=1)
        return rewards


def _build_module(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: tuple[TensorSignature, ...]
) -> nn.Module:
    names = tuple(tensor.name for tensor in inputs)
    if not reads_last_end(model):
        return HeadModule(model, names)
    check_end(model, tokenizer)
    return LastEndModule(model, names)


def set_pad_token(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Let a decoder's head find the last token of a padded row, which it does by the padding's id."""
    wanted = getattr(config, "pad_token_id", None)
    if tokenizer.pad_token_id is None:
        named = (token for token, number in tokenizer.get_vocab().items() if number == wanted)
        tokenizer.pad_token = next(named, tokenizer.eos_token)
    if wanted is None:
        config.pad_token_id = tokenizer.pad_token_id


def check_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a head that finds the last token by another padding than the tokenizer's.

    Raises:
        VocabularyError: Its scores would depend on how far a text is padded.
    """
    wanted, got = getattr(model.config, "pad_token_id", None), tokenizer.pad_token_id
    # Encoder-decoders look for the end of the text instead.
    if wanted is None or got is None or wanted == got or model.config.is_encoder_decoder:
        return
    text = next(token for token in range(3) if token not in (wanted, got))
    ids = torch.tensor([[text, text, got]])
    with torch.no_grad():
        scores = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        model.config.pad_token_id = got
        others = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        model.config.pad_token_id = wanted
    if not torch.equal(scores, others):
        raise VocabularyError(
            "the classifier finds the last token of a text by another padding than its tokenizer's",
            expected=f"pad_token_id {wanted}, as config.json says",
            got=f"{got}, {tokenizer.pad_token!r}",
            remedy="write the one that it was trained with into both: pad_token_id of config.json and pad_token of "
            "tokenizer_config.json",
        )


def _check_one_label(config: PretrainedConfig) -> None:
    if config.num_labels != 1:
        raise ModelError(
            "the checkpoint is not a reward model",
            expected=f"one label, or the tensor {VALUE_HEAD}",
            got=f"{config.num_labels} labels",
            remedy="pass --task text-classification",
        )


def _load_value_model(source: TaskSource) -> tuple[PreTrainedModel, list[str], Tensor]:
    weights = source.weights
    for prefix in VALUE_MODEL_PREFIXES:
        if any(name.startswith(prefix) for name in weights.specs()):
            weights = SelectPrefix(source=weights, prefix=prefix)
    model, unused = load_model(source.config, weights, AutoModel)
    head = source.weights.read(VALUE_HEAD)
    # DeepSpeed-Chat builds it for OPT's `word_embed_proj_dim`, which is what OPT-350m ends in.
    wanted = (1, find_output_width(model))
    if tuple(head.shape) != wanted:
        raise ModelError(
            f"{VALUE_HEAD} does not fit the model",
            expected=str(list(wanted)),
            got=str(list(head.shape)),
            remedy="use the config.json that the checkpoint was trained with",
        )
    return model, [name for name in unused if name != VALUE_HEAD], head
