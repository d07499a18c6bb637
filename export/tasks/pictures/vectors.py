"""image-embedding: one vector a picture, of a model of pictures or of the tower of pictures beside one of texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import ModelError
from ...signature import BATCH, ModelSignature, TensorSignature
from ...weights.several_models import compares_pictures, is_of_several, refuse_for_signals
from ...weights.torch_model import load_model
from ..base import TaskSource
from ..cases import Outputs
from ..comparison import EMBEDDING_TOLERANCES, compare_embeddings
from ..tensors import InputRules, ValueRule
from ..towers import find_class
from .answers import Answers
from .images import PictureTask
from .preparation import find_preparation
from .recipe import Geometry

EMBEDDING = "EMBEDDING"
_PIXELS = "pixel_values"

# [batch, vectors, hidden]; a pooled grid of one place is [batch, hidden, 1, 1].
_RANK_OF_SEVERAL = 3


@dataclass(frozen=True)
class VectorAnswers(Answers):
    """The graph's own vector.

    Attributes:
        hidden: How many values it has.
        is_normalized: Whether its length is 1.
    """

    hidden: int
    is_normalized: bool

    @property
    def outputs(self) -> tuple[TensorSignature, ...]:  # type: ignore[override]
        """See `Answers`."""
        return (TensorSignature(name=EMBEDDING, dtype=torch.float32, dims=(BATCH, self.hidden)),)

    @property
    def tolerances(self) -> Mapping[str, float]:  # type: ignore[override]
        """See `Answers`."""
        return EMBEDDING_TOLERANCES

    @property
    def description(self) -> str:
        """See `Answers`."""
        return f"a vector of {self.hidden} values{', normalised' if self.is_normalized else ''}"

    def answer(self, outputs: Sequence[Tensor], geometry: Geometry) -> Mapping[str, Any]:
        """See `Answers`."""
        return {EMBEDDING: outputs[0][0].tolist()}


class ImageEmbedding(PictureTask):
    """A vector for a picture: what CLIP and SigLIP compare with texts, else the model's pooled output."""

    tolerances: ClassVar[Mapping[str, float]] = EMBEDDING_TOLERANCES

    def __init__(self, source: TaskSource) -> None:
        if is_of_several(source.config) and not compares_pictures(source.config):
            refuse_for_signals(source.config)
        self.preparation = preparation = find_preparation(
            source.directory, source.options.get("preprocess"), "image-feature-extraction"
        )
        model, self.unused_tensors = load_model(source.config, source.weights, find_class(source.config))
        is_normalized = bool(source.options.get("normalize"))
        self.module = VectorModule(model, is_normalized=is_normalized).eval()
        dims = (BATCH, 3, *preparation.recipe.height_and_width)
        inputs = (TensorSignature(name=_PIXELS, dtype=torch.float32, dims=dims),)
        self.tensors = InputRules(rules={_PIXELS: ValueRule()}, sizes={})
        outputs = self.infer_outputs(inputs, ["embedding"])
        self.signature = ModelSignature(inputs=inputs, outputs=outputs)
        hidden = outputs[0].dims[1]
        assert isinstance(hidden, int), "Bug: vectors of a model have one size"
        self.serve_pictures(preparation, VectorAnswers(hidden, is_normalized), source.options.get("pictures"))

    def compare(
        self, expected: Sequence[Outputs], got: Sequence[Outputs], bounds: Mapping[str, float]
    ) -> dict[str, float]:
        """See `Task`."""
        return compare_embeddings(*(np.stack([outputs[0] for outputs in rows]) for rows in (expected, got)))


class VectorModule(nn.Module):
    """A model without a head: pixels in, its vector out."""

    def __init__(self, model: PreTrainedModel, *, is_normalized: bool) -> None:
        super().__init__()
        self.model = model
        self.is_normalized = is_normalized

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the vectors, [batch, hidden], fp32.

        Raises:
            ModelError: The model has no vector for a picture.
        """
        # Beside a tower of texts: the vector that both are compared by.
        run: Any = getattr(self.model, "get_image_features", self.model)
        made = run(pixel_values=pixels)
        vectors = getattr(made, "image_embeds", None)
        if vectors is None:
            vectors = getattr(made, "pooler_output", None)
        if vectors is None or vectors.dim() == _RANK_OF_SEVERAL:
            raise ModelError(
                f"{type(self.model).__name__} makes no one vector of a picture",
                expected="a pooled output",
                got="hidden states alone" if vectors is None else f"{vectors.shape[1]} vectors",
                remedy="pass --task image-feature-extraction",
            )
        flat: Tensor = vectors.flatten(1)
        return nn.functional.normalize(flat, dim=1) if self.is_normalized else flat
