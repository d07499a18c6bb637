"""What a checkpoint is served as: the module around the model, its signature, and the names clients see."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from export.errors import ModelError
from export.signature import BATCH, SEQ_LEN, ModelSignature, TensorSignature
from export.vocabulary import read_json


@dataclass(frozen=True, kw_only=True)
class PoolingSettings:
    """How token vectors become one sentence vector.

    Attributes:
        mode: `mean` over the tokens that are not padding, or `cls`, the first token.
        normalize: Whether the vector is scaled to length 1.
        source: Where this was read, for the summary.
    """

    mode: str
    normalize: bool
    source: str

    def __str__(self) -> str:
        return f"{self.mode}{', normalised' if self.normalize else ''} ({self.source})"


class SentenceEmbedding(nn.Module):
    """Token ids in, one vector a row out.

    Mean pooling divides by the number of real tokens, as Sentence-Transformers' `Pooling` does; the clamps keep a row
    without tokens finite.
    """

    def __init__(self, model: PreTrainedModel, pooling: PoolingSettings, input_names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.input_names = input_names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the embedding, [batch, hidden], fp32.

        Args:
            inputs: In the order of `input_names`, each [batch, seq_len], int64.
        """
        named = dict(zip(self.input_names, inputs, strict=True))
        hidden_states = self.model(**named).last_hidden_state  # [batch, seq_len, hidden]
        if self.pooling.mode == "cls":
            embedding = hidden_states[:, 0]
        else:
            mask = named["attention_mask"].unsqueeze(-1).to(hidden_states.dtype)  # [batch, seq_len, 1]
            embedding = (hidden_states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)
        return nn.functional.normalize(embedding, p=2.0, dim=1) if self.pooling.normalize else embedding


def read_pooling(directory: Path) -> PoolingSettings:
    """Return how the checkpoint's sentence vectors are pooled, as Sentence-Transformers recorded it.

    Without `modules.json` it is the mean, normalised, which is what most embedding models are trained for.

    Raises:
        ModelError: A module or a pooling mode is recorded that is not exported.
    """
    modules: Any = read_json(directory / "modules.json")
    if modules is None:
        return PoolingSettings(mode="mean", normalize=True, source="default, for there is no modules.json")
    kinds = [str(module["type"]).rsplit(".", 1)[-1] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ModelError(
            f"{directory / 'modules.json'} describes a model that is not exported",
            expected="Transformer, Pooling and at most Normalize",
            got=", ".join(kinds),
            remedy="export a checkpoint made of these modules",
        )
    settings: Any = read_json(directory / modules[1]["path"] / "config.json") or {}
    modes = [
        key.removeprefix("pooling_mode_") for key, on in settings.items() if key.startswith("pooling_mode_") and on
    ]
    known = {"mean_tokens": "mean", "cls_token": "cls"}
    if len(modes) != 1 or modes[0] not in known:
        raise ModelError(
            f"the pooling of {directory} is not exported",
            expected="one of " + ", ".join(known),
            got=", ".join(modes) or "none",
            remedy="export a checkpoint that is pooled one of these ways",
        )
    return PoolingSettings(mode=known[modes[0]], normalize="Normalize" in kinds, source="modules.json")


def build_signature(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, config: PretrainedConfig, max_length: int
) -> ModelSignature:
    """Return the tensors of a sentence-embedding model: what its tokenizer makes and its `forward` takes.

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
    inputs = tuple(TensorSignature(name=name, dtype=torch.int64, dims=(BATCH, SEQ_LEN)) for name in names)
    output = TensorSignature(name="sentence_embedding", dtype=torch.float32, dims=(BATCH, config.hidden_size))
    return ModelSignature(inputs=inputs, outputs=(output,), max_length=max_length)
