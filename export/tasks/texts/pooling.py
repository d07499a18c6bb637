"""feature-extraction: one vector a text, pooled as Sentence-Transformers recorded it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ...checkpoints import TensorSpec
from ...checkpoints.plain.sentence_modules import (
    MODULES_FILE,
    RECORD_FILE,
    SentenceModule,
    list_unnamed_modules,
    read_sentence_modules,
    tell_missing_limits,
)
from ...errors import ModelError, list_some
from ...signature import BATCH, TensorSignature
from ...weights.torch_model import find_output_width, load_model
from ..base import TaskSource, build_inputs
from ..cases import Outputs
from ..comparison import EMBEDDING_TOLERANCES, compare_embeddings
from ..foreseen import check_layers, is_sentence_model
from ..towers import find_encoder, find_text_class, find_text_tower
from .encoding import Question
from .sentence_layers import LAYERS, build_layers
from .sentence_settings import (
    check_transformer,
    check_vector_module,
    find_default_prompt,
    find_recorded_width,
    list_left_out_prompts,
    lower_texts,
    read_mode,
)
from .text import Answer, TextTask

EMBEDDING = "EMBEDDING"

# How a tower of texts pools, and what transformers calls what it makes.
_OWN = "own"
_PROJECTED = "text_embeds"

_UNRECORDED = f"default, because there is no {MODULES_FILE}"

_NAME_RERANKER = (
    f"of a CrossEncoder, copy {RECORD_FILE} from where it was trained or published, which says that it is one; of "
    "anything else, export a checkpoint made of these modules"
)


class FeatureExtraction(TextTask):
    """One vector a text."""

    tolerances = EMBEDDING_TOLERANCES
    golden_tolerances = EMBEDDING_TOLERANCES

    @classmethod
    def recognises(cls, directory: Path, config: PretrainedConfig, specs: Mapping[str, TensorSpec]) -> bool:
        """See `Task`. Sentence-Transformers records what it pools with."""
        return is_sentence_model(directory, specs)

    def __init__(self, source: TaskSource) -> None:
        lower_texts(source.directory, source.tokenizer)
        super().__init__(source)
        tower = find_text_tower(source.config)
        self.pooling = read_pooling(source.directory)
        if tower and self.pooling.is_default:
            self.pooling = PoolingSettings(mode=_OWN, normalize=False, source="as the model projects it")
        mode, normalize = source.options.get("pooling"), source.options.get("normalize")
        if mode is not None or normalize is not None:
            self.pooling = override_pooling(self.pooling, mode, normalize)
        if not self.pooling.is_default:
            check_transformer(source.directory)
        self.default_prompt = find_default_prompt(source.directory)
        self.left_out_prompts = list_left_out_prompts(source.directory)
        self.missing_limits = tell_missing_limits(source.directory)
        self.unnamed_modules = list_unnamed_modules(source.directory)
        self.recorded_width = find_recorded_width(source.directory)
        # In an encoder-decoder such as T5 the encoder alone makes features of a text.
        encoder = find_encoder(source.config)
        without = ("decoder.",) if encoder else ()
        model_class = tower or encoder or find_text_class(source.config)
        model, self.unused_tensors = load_model(source.config, source.weights, model_class, without)
        inputs = build_inputs(self.tokenizer, model)
        width = find_output_width(model, _PROJECTED if self.pooling.mode == _OWN else "last_hidden_state")
        check_layers(source.directory, width)
        layers = build_layers(self.pooling.layers)
        self.module = SentenceEmbedding(model, self.pooling, tuple(tensor.name for tensor in inputs), layers).eval()
        dims = (BATCH, layers(torch.zeros(1, width)).shape[1])
        self.signature = self.build_signature(
            inputs,
            (TensorSignature(name="sentence_embedding", dtype=torch.float32, dims=dims),),
            (TensorSignature(name=EMBEDDING, dtype=torch.float32, dims=dims),),
            has_postprocess=False,
        )

    @property
    def description(self) -> str:
        """See `Task`."""
        return f"pooling {self.pooling}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """See `Task`."""
        return (
            *super().warnings,
            *self._warn_of_guess(),
            *self._warn_of_prompt(),
            *self._warn_of_width(),
            *self._warn_of_limit(),
            *self._warn_of_modules(),
        )

    def _warn_of_guess(self) -> tuple[str, ...]:
        if not self.pooling.is_default:
            return ()
        return (
            f"the pooling is a guess ({self.pooling}): the proof shows that such vectors are served, not that the "
            "model was trained for them; say how it was with --pooling and --normalize or --no-normalize, or export "
            f"the folder that Sentence-Transformers saved, with its {MODULES_FILE}.",
        )

    def _warn_of_prompt(self) -> tuple[str, ...]:
        if self.left_out_prompts:
            return (
                f"Sentence-Transformers leaves the tokens of this model's prompts ({list_some(self.left_out_prompts)}) "
                "out of the vector (include_prompt), which what is served does not: texts that clients send with one "
                "in front get another vector.",
            )
        if not self.default_prompt:
            return ()
        return (
            f"Sentence-Transformers puts {self.default_prompt!r} in front of every text for this model, which what is "
            "served does not: have clients send it as the beginning of each text.",
        )

    def _warn_of_width(self) -> tuple[str, ...]:
        width = self.signature.outputs[0].dims[1]
        if not isinstance(width, int) or not 0 < self.recorded_width < width:
            return ()
        return (
            f"Sentence-Transformers cuts the {width} numbers of a vector of this model to the first "
            f"{self.recorded_width} (truncate_dim), which what is served does not: have clients take so many of each.",
        )

    def _warn_of_limit(self) -> tuple[str, ...]:
        return tuple(
            f"{told}, is missing: up to {self.max_length} tokens of one are, and the model may have been trained for "
            "fewer; copy the file from where it was trained or published."
            for told in self.missing_limits
        )

    def _warn_of_modules(self) -> tuple[str, ...]:
        return tuple(
            f"{name} lies beside {MODULES_FILE}, which does not name it, and is left out of what is served: if the "
            f"model was trained with it, copy {MODULES_FILE} from where that was done or published."
            for name in self.unnamed_modules
        )

    def answer(self, question: Question) -> Answer:
        """See `Task`. transformers has no code for pooling, so this is the module without any padding."""
        (row,) = self.encoder.encode(question)
        with torch.no_grad():
            vector = self.module(*(torch.tensor([row[tensor.name]]) for tensor in self.signature.inputs))[0]
        return {EMBEDDING: vector.tolist()}

    def compare(
        self, expected: Sequence[Outputs], got: Sequence[Outputs], bounds: Mapping[str, float]
    ) -> dict[str, float]:
        """See `Task`."""
        return compare_embeddings(np.stack([row[0] for row in expected]), np.stack([row[0] for row in got]))


@dataclass(frozen=True, kw_only=True)
class PoolingSettings:
    """How token vectors become one sentence vector.

    Attributes:
        mode: Of the tokens that are not padding `mean`; `cls`, the first; `last`; `max`, the largest of each number;
            `mean_sqrt_len_tokens`, their sum divided by the root of their count; `weightedmean`, in which the first
            counts once, the second twice, and so on; or `own`, the vector that the model itself makes.
        normalize: Whether the vector is scaled to length 1.
        source: Where this was read, for the summary.
        layers: What the vector goes through between pooling and that, in this order.
        is_default: Whether nothing recorded it and nobody asked for it.
    """

    mode: str
    normalize: bool
    source: str
    layers: tuple[SentenceModule, ...] = ()
    is_default: bool = False

    def __str__(self) -> str:
        counts = Counter(module.kind for module in self.layers)
        layers = "".join(f", {count} {kind}" for kind, count in counts.items())
        return f"{self.mode}{layers}{', normalised' if self.normalize else ''} ({self.source})"


class SentenceEmbedding(nn.Module):
    """Token ids in, one vector a row out.

    It pools as Sentence-Transformers' `Pooling` does; the vector of a row without tokens is zero.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pooling: PoolingSettings,
        input_names: tuple[str, ...],
        layers: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.layers = layers if layers is not None else nn.Sequential()
        self.model = model
        self.pooling = pooling
        self.input_names = input_names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the embedding, [batch, hidden], fp32.

        Args:
            inputs: Tensors in the order of `input_names`, each [batch, seq_len], int64.
        """
        named = dict(zip(self.input_names, inputs, strict=True))
        made = self.model(**named)
        if self.pooling.mode == _OWN:
            embedding = made[_PROJECTED]
        else:
            embedding = self._pool(made.last_hidden_state, named["attention_mask"])  # of [batch, seq_len, hidden]
        embedding = self.layers(embedding)
        return nn.functional.normalize(embedding, p=2.0, dim=1) if self.pooling.normalize else embedding

    def _pool(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.to(hidden_states.dtype)  # [batch, seq_len]
        if self.pooling.mode == "max":
            return _pool_max(hidden_states, mask)
        weights = _WEIGHTS[self.pooling.mode](mask)
        return (hidden_states * weights.unsqueeze(-1)).sum(dim=1)


def _weigh_positions(mask: Tensor) -> Tensor:
    weights = mask * mask.cumsum(dim=1)
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-9)


# Mode → what each token of a row counts, [batch, seq_len], of its mask. Padding may stand in front of tokens as well.
_WEIGHTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda mask: mask / mask.sum(dim=1, keepdim=True).clamp(min=1e-9),
    "cls": lambda mask: mask * (mask.cumsum(dim=1) == 1),
    "last": lambda mask: mask * (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True)),
    "mean_sqrt_len_tokens": lambda mask: mask / mask.sum(dim=1, keepdim=True).clamp(min=1e-9).sqrt(),
    "weightedmean": _weigh_positions,
}


def _pool_max(hidden_states: Tensor, mask: Tensor) -> Tensor:
    # A row without tokens has no largest number; it is given zeros.
    lowest = torch.finfo(hidden_states.dtype).min
    largest = hidden_states.masked_fill(mask.unsqueeze(-1) == 0, lowest).amax(dim=1)
    return largest * mask.amax(dim=1, keepdim=True)


def read_pooling(directory: Path) -> PoolingSettings:
    """Return how the checkpoint's sentence vectors are pooled, as Sentence-Transformers recorded it.

    Without `modules.json` it is the mean, normalised, which is what most embedding models are trained for.

    Raises:
        ModelError: A module or a pooling mode is recorded that is not exported.
    """
    modules = read_sentence_modules(directory)
    if modules is None:
        return PoolingSettings(mode="mean", normalize=True, source=_UNRECORDED, is_default=True)
    kinds = [module.kind for module in modules]
    layers = modules[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or not {*kinds[2:]} <= LAYERS.keys():
        raise ModelError(
            f"{directory / MODULES_FILE} describes a model that is not exported",
            expected=f"Transformer, Pooling, and any number of {', '.join(LAYERS)} behind them",
            got=", ".join(kinds),
            remedy=_NAME_RERANKER if kinds == ["Transformer"] else "export a checkpoint made of these modules",
        )
    for module in layers:
        check_vector_module(module)
    is_normalised = kinds[-1] == "Normalize"
    return PoolingSettings(
        mode=read_mode(directory, modules[1].folder),
        normalize=is_normalised,
        source=MODULES_FILE,
        layers=layers[:-1] if is_normalised else layers,
    )


def override_pooling(recorded: PoolingSettings, mode: str | None, normalize: bool | None) -> PoolingSettings:
    """Return the recorded settings with the user's choices in their place."""
    return replace(
        recorded,
        mode=mode or recorded.mode,
        normalize=recorded.normalize if normalize is None else normalize,
        source="as asked for",
        is_default=False,
    )
