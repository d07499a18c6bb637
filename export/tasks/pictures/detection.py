"""object-detection: boxes around what is seen in a picture, of networks that need no suppression of neighbours."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForObjectDetection, PreTrainedModel

from ...errors import ModelError
from ...signature import BATCH, STRING, ModelSignature, TensorSignature
from ...weights.torch_model import load_model
from ..base import TaskSource
from ..comparison import TENSOR_TOLERANCES
from ..labels import LABEL, SCORE, count_labels, read_labels
from ..tensors import InputRules, SizeRange, ValueRule
from .answers import GEOMETRY, Answers
from .images import PIXEL_MASK, PictureTask
from .preparation import find_preparation
from .recipe import Geometry, Recipe

BOX, COUNT = "BOX", "COUNT"
_PIXELS = "pixel_values"

# As transformers' `post_process_object_detection`.
THRESHOLD = 0.5

# As many as DETR has queries.
_MOST_BOXES = 100

# Of a place in the picture, in widths of a pixel.
BOX_TOLERANCES = {"max_abs_error": 0.05}

# The same in another precision than fp32: a box that lies further off is another one, or stands in another's place.
WIDEST_PLACE = 5.0

# Two scores that differ by no more may change places. Logits of whole models were seen to be off by 1e-5 of the largest
# at most, see `TENSOR_TOLERANCES`, and a score moves by at most a quarter of what its logit does.
APART = 2e-5

# Those whose scores are a softmax over labels and `no object`, and whose boxes are centre and size in parts of the
# picture. Others score each label by itself and may answer with one box several times.
_MODEL_TYPES = ("detr", "table-transformer", "yolos")


class BestBoxes(Answers):
    """Boxes with labels and scores, best first, and how many there are.

    Attributes:
        top_k: How many are answered at most.
    """

    top_k: int

    carried = GEOMETRY
    tolerances = BOX_TOLERANCES
    widest = WIDEST_PLACE

    @property
    def outputs(self) -> tuple[TensorSignature, ...]:  # type: ignore[override]
        """See `Answers`."""
        return (
            TensorSignature(name=LABEL, dtype=STRING, dims=(BATCH, self.top_k)),
            TensorSignature(name=SCORE, dtype=torch.float32, dims=(BATCH, self.top_k)),
            TensorSignature(name=BOX, dtype=torch.float32, dims=(BATCH, self.top_k, 4)),
            TensorSignature(name=COUNT, dtype=torch.int64, dims=(BATCH, 1)),
        )

    def is_telling(self, answer: Mapping[str, Any]) -> bool:
        """See `Answers`."""
        return bool(answer[COUNT][0])

    def fill_up(self, found: Sequence[tuple[str, float, list[float]]]) -> Mapping[str, Any]:
        """Return label, score and box of each as the outputs, with what is absent behind them."""
        absent = [("", 0.0, [-1.0] * 4)] * (self.top_k - len(found))
        labels, best, boxes = zip(*found, *absent, strict=True)
        return {LABEL: [*labels], SCORE: [*best], BOX: [*boxes], COUNT: [len(found)]}


@dataclass(frozen=True)
class BoxAnswers(BestBoxes):
    """The likeliest boxes, best first.

    Attributes:
        labels: Names by id, without `no object`.
        top_k: How many are answered at most.
        threshold: What a box must score more than.
    """

    labels: Sequence[str]
    top_k: int
    threshold: float

    @property
    def postprocess(self) -> Mapping[str, Any]:  # type: ignore[override]
        """See `Answers`."""
        return {"answers": "boxes", "labels": [*self.labels], "top_k": self.top_k, "threshold": self.threshold}

    @property
    def description(self) -> str:
        """See `Answers`."""
        return f"boxes of {count_labels(len(self.labels))} that score above {self.threshold:g}, best {self.top_k}"

    def answer(self, outputs: Sequence[Tensor], geometry: Geometry) -> Mapping[str, Any]:
        """See `Answers`. One box after another, as transformers defines them."""
        (logits,), (places,) = outputs
        scores, ids = logits.softmax(dim=1)[:, :-1].max(dim=1)
        width, height = geometry[4:]
        found: list[tuple[str, float, list[float]]] = []
        for index in scores.argsort(descending=True, stable=True)[: self.top_k].tolist():
            if scores[index] > self.threshold:
                x, y, wide, tall = places[index].tolist()
                box = [(x - wide / 2) * width, (y - tall / 2) * height, (x + wide / 2) * width, (y + tall / 2) * height]
                found.append((self.labels[int(ids[index])], float(scores[index]), box))
        return self.fill_up(found)

    def is_clear(self, outputs: Sequence[Tensor], geometry: Geometry) -> bool:
        """See `Answers`. As likely as each other are boxes that may change places, unless they are the same box."""
        (logits,), (places,) = outputs
        probabilities = logits.softmax(dim=1)[:, :-1]
        scores, ids = probabilities.max(dim=1)
        order = scores.argsort(descending=True, stable=True)
        # With the first that is not answered, which may change places with the last that is.
        order = order[scores[order] > self.threshold - APART][: self.top_k + 1]
        best, answered = scores[order], order[: self.top_k]
        if ((scores[answered] - self.threshold).abs() <= APART).any():
            return False
        likeliest = probabilities[answered].topk(min(2, len(self.labels))).values
        if ((likeliest[:, 0] - likeliest[:, 1:].squeeze(1)) <= APART).any():
            return False
        boxes = places[order] * torch.tensor(geometry[4:] * 2)
        may_change = (best[:, None] - best).abs() <= APART
        differ = (boxes[:, None] - boxes).abs().amax(dim=2) > BOX_TOLERANCES["max_abs_error"] / 2
        return not (may_change & (differ | (ids[order][:, None] != ids[order]))).any()


class ObjectDetection(PictureTask):
    """Boxes around what is seen in a picture."""

    tolerances: ClassVar[Mapping[str, float]] = TENSOR_TOLERANCES

    def __init__(self, source: TaskSource) -> None:
        if source.config.model_type not in _MODEL_TYPES:
            raise ModelError(
                f"boxes of {source.config.model_type} are not made in the server",
                expected=" or ".join(_MODEL_TYPES),
                got=source.config.model_type,
                remedy="build the network with --factory, and let the file of --inputs answer with boxes",
            )
        threshold = source.options.get("threshold")
        if threshold is not None and not 0 <= threshold < 1:
            raise ModelError(
                "--threshold is not a score",
                expected="a number from 0 to below 1",
                got=f"{threshold:g}",
                remedy="correct --threshold",
            )
        self.preparation = preparation = find_preparation(
            source.directory, source.options.get("preprocess"), may_keep_shape=True
        )
        model, self.unused_tensors = _load(source)
        size, sizes = _limit_sizes(preparation.recipe)
        inputs = [TensorSignature(name=_PIXELS, dtype=torch.float32, dims=(BATCH, 3, *size))]
        rules = {_PIXELS: ValueRule()}
        if preparation.recipe.pad and PIXEL_MASK in inspect.signature(model.forward).parameters:
            inputs.append(TensorSignature(name=PIXEL_MASK, dtype=torch.bool, dims=(BATCH, *size)))
            rules[PIXEL_MASK] = ValueRule(kind="ones")
        self.module = DetectionModule(model, [tensor.name for tensor in inputs]).eval()
        self.tensors = InputRules(rules=rules, sizes=sizes)
        outputs = self.infer_outputs(tuple(inputs), ["logits", "pred_boxes"])
        smallest = {symbol: limits.smallest for symbol, limits in sizes.items()}
        self.signature = ModelSignature(inputs=tuple(inputs), outputs=outputs, smallest=smallest)
        queries = outputs[0].dims[1]
        assert isinstance(queries, int), "Bug: a detector has a number of queries of its own"
        self.top_k = min(source.options.get("top_k") or _MOST_BOXES, queries)
        labels = read_labels(source.config, must_differ=False)
        self.serve_pictures(
            preparation, BoxAnswers(labels, self.top_k, THRESHOLD if threshold is None else float(threshold))
        )

    def build_example(self) -> tuple[Tensor, ...]:
        """See `Task`. Of pictures that keep their shape one that lies, as large as they become.

        In a much smaller one the last layer sees 1 place, which the exporter takes for a constant.
        """
        recipe = self.preparation.recipe
        if not recipe.keeps_shape:
            return super().build_example()
        step = recipe.multiple_of
        height, more = (edge // step * step for edge in (recipe.size[0], recipe.size[0] // 2 + step))
        return (torch.randn(2, 3, height, height + more, generator=torch.Generator().manual_seed(0)),)


def _limit_sizes(recipe: Recipe) -> tuple[tuple[int | str, int | str], Mapping[str, SizeRange]]:
    """Return height and width of the graph's pixels, and how large they may be where they have names."""
    if not recipe.keeps_shape:
        return recipe.height_and_width, {}
    limits = SizeRange(smallest=recipe.multiple_of, largest=recipe.size[1], multiple_of=recipe.multiple_of)
    return ("height", "width"), {"height": limits, "width": limits}


class DetectionModule(nn.Module):
    """A detector: pixels, and where they are the picture's, in; labels' logits and boxes out."""

    def __init__(self, model: PreTrainedModel, input_names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.input_names = [*input_names]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, [batch, queries, labels + 1], and boxes, [batch, queries, 4]: centre and size, in parts."""
        made = self.model(**dict(zip(self.input_names, inputs, strict=True)))
        return made.logits, made.pred_boxes


def _load(source: TaskSource) -> tuple[PreTrainedModel, list[str]]:
    try:
        return load_model(source.config, source.weights, AutoModelForObjectDetection)
    except ImportError as exc:
        raise ModelError(
            f"the backbone of {source.directory} is not one of transformers",
            expected="timm, which its config.json names",
            got="none for this Python",
            remedy="pip install timm",
        ) from exc
