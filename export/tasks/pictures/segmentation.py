"""image-segmentation: a map of which pixel of a picture is of what, by semantic segmentation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForSemanticSegmentation

from ...errors import ModelError
from ...signature import BATCH, STRING, TensorSignature
from ..base import TaskSource
from ..comparison import TENSOR_TOLERANCES
from ..labels import LABEL, count_labels, read_labels
from ..signals import SignalTask
from .answers import GEOMETRY, Answers
from .detection import COUNT
from .images import PictureTask
from .preparation import Preparation, find_preparation
from .recipe import Geometry

MAP, ID, SHARE = "MAP", "ID", "SHARE"

# As many labels as are listed; the map has all of them.
TOP_K = 20

# How far fp32 in another order may move the score of a pixel.
_SCORE_ERROR = 1e-4

# Of the share of a label: one pixel in 2,000, which have two labels as likely as each other.
_SHARE_TOLERANCES = {"max_abs_error": 5e-4}

# The same in another precision than fp32.
_WIDEST_SHARE = 0.05


@dataclass(frozen=True)
class MapAnswers(Answers):
    """Which pixel is of what, and the labels that cover most of the picture.

    Attributes:
        labels: Names by id.
        top_k: How many are listed at most.
    """

    labels: Sequence[str]
    top_k: int

    carried = GEOMETRY
    tolerances = _SHARE_TOLERANCES
    widest = _WIDEST_SHARE

    @property
    def outputs(self) -> tuple[TensorSignature, ...]:  # type: ignore[override]
        """See `Answers`."""
        dims = (BATCH, self.top_k)
        return (
            # Whether its bytes are the same hangs on zlib; what it shows is told by the others.
            TensorSignature(name=MAP, dtype=STRING, dims=(BATCH, 1), is_optional=True),
            TensorSignature(name=LABEL, dtype=STRING, dims=dims),
            TensorSignature(name=ID, dtype=torch.int64, dims=dims),
            TensorSignature(name=SHARE, dtype=torch.float32, dims=dims),
            TensorSignature(name=COUNT, dtype=torch.int64, dims=(BATCH, 1)),
        )

    @property
    def postprocess(self) -> Mapping[str, Any]:  # type: ignore[override]
        """See `Answers`."""
        return {"answers": "map", "labels": [*self.labels], "top_k": self.top_k}

    @property
    def description(self) -> str:
        """See `Answers`."""
        return f"a map of {count_labels(len(self.labels))}, the {self.top_k} largest listed"

    def answer(self, outputs: Sequence[Tensor], geometry: Geometry) -> Mapping[str, Any]:
        """See `Answers`. Pixels as transformers' `post_process_semantic_segmentation` gives them."""
        counts = np.bincount(find_ids(outputs[0], geometry).reshape(-1), minlength=len(self.labels))
        order = np.argsort(-counts, kind="stable")[: self.top_k]
        found = [int(index) for index in order if counts[index]]
        absent = self.top_k - len(found)
        return {
            LABEL: [self.labels[index] for index in found] + [""] * absent,
            ID: found + [-1] * absent,
            SHARE: [counts[index] / counts.sum() for index in found] + [0.0] * absent,
            COUNT: [len(found)],
        }

    def is_clear(self, outputs: Sequence[Tensor], geometry: Geometry) -> bool:
        """See `Answers`. Pixels of two labels as likely as each other must not change what is listed."""
        scores, ids = _enlarge(outputs[0], geometry).topk(min(2, len(self.labels)), dim=0)
        if len(scores) < 2:
            return True
        unclear = scores[0] - scores[1] <= 2 * _SCORE_ERROR
        counts = np.bincount(ids[0].reshape(-1).numpy(), minlength=len(self.labels))
        # What unclear pixels may be is counted at both labels.
        doubt = np.bincount(ids[:, unclear].reshape(-1).numpy(), minlength=len(self.labels))
        order = np.argsort(-counts, kind="stable")
        least, most = (counts - doubt)[order], (counts + doubt)[order]
        keeps_order = (least[:-1] > most[1:]) | (most[1:] == 0)
        is_present = (least > 0) | (most == 0)
        is_near = doubt.max() / counts.sum() < _SHARE_TOLERANCES["max_abs_error"] / 2
        return bool(is_present.all() and keeps_order[: self.top_k].all() and is_near)


class ImageSegmentation(PictureTask, SignalTask):
    """Which pixel of a picture is of what."""

    auto_class = AutoModelForSemanticSegmentation
    output = "logits"
    tolerances: ClassVar[Mapping[str, float]] = TENSOR_TOLERANCES

    def __init__(self, source: TaskSource) -> None:
        self.preparation = find_preparation(source.directory, source.options.get("preprocess"))
        _check_covers(self.preparation)
        super().__init__(source)
        labels = read_labels(source.config, must_differ=False)
        self.top_k = min(source.options.get("top_k") or TOP_K, len(labels))
        self.serve_pictures(self.preparation, MapAnswers(labels, self.top_k), source.options.get("pictures"))


def find_ids(logits: Tensor, geometry: Geometry) -> npt.NDArray[np.int64]:
    """Return the label of each pixel of the upright picture, [height, width], of logits [1, labels, rows, columns]."""
    ids: npt.NDArray[np.int64] = _enlarge(logits, geometry).argmax(dim=0).numpy()
    return ids


def _enlarge(logits: Tensor, geometry: Geometry) -> Tensor:
    width, height = int(geometry[4]), int(geometry[5])
    return torch.nn.functional.interpolate(logits, size=(height, width), mode="bilinear", align_corners=False)[0]


def _check_covers(preparation: Preparation) -> None:
    """Refuse a recipe by which the network does not see all of a picture, or more than that.

    Raises:
        ModelError: It is one.
    """
    recipe = preparation.recipe
    if recipe.mode != "exact" or recipe.crop not in (None, recipe.size):
        raise ModelError(
            f"{preparation.origin} does not show all of a picture to the network, and the map is of all of it",
            expected="one that resizes to one height and width and crops nothing",
            got=f"mode {recipe.mode}" + (f", cropped to {' x '.join(map(str, recipe.crop))}" if recipe.crop else ""),
            remedy="pass --preprocess FILE with mode exact",
        )
