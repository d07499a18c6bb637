"""A module of the user's own that clients send pictures to: `--factory` with `--preprocess`.

What is answered stands in the file that describes the module's inputs, under `answers`:

    {"answers": "labels", "labels": "names.txt", "function": "softmax", "top_k": 5}
    {"answers": "keypoints", "labels": ["nose", "left eye"]}
    {"answers": "boxes", "labels": ["person", "car"], "format": "cxcywh", "unit": "pixels", "function": "sigmoid"}

and without it the module's outputs are the answers. `labels` is a list, or a file beside that one with a name a line.

A recipe with `buckets` wants an input whose height and width have names, such as `["batch", 3, "height", "width"]`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import ModelError, SettingsError
from ...signature import BATCH, STRING, ModelSignature, TensorSignature
from ..comparison import TENSOR_TOLERANCES
from ..labels import FUNCTIONS, LABEL, SCORE
from ..own_module import FactoryTask, InputSpec
from ..tensors import SizeRange
from .answers import GEOMETRY, TOP_K, Answers, LabelAnswers
from .detection import WIDEST_PLACE
from .images import PictureTask
from .own_boxes import make_boxes
from .preparation import Preparation
from .recipe import Geometry, Recipe

KEYPOINT = "KEYPOINT"

# Of a place in the picture, in widths of a pixel: the sub-pixel part divides by the curve of a heatmap, whose error in
# fp32 it multiplies.
_KEYPOINT_TOLERANCES = {"max_abs_error": 0.05}


# Batch, keypoints, height and width.
_HEATMAP_RANK = 4


class PlainAnswers(Answers):
    """The module's own outputs."""

    tolerances = TENSOR_TOLERANCES

    def __init__(self, outputs: tuple[TensorSignature, ...]) -> None:
        self.outputs = outputs

    @property
    def description(self) -> str:
        """See `Answers`."""
        return ", ".join(tensor.name for tensor in self.outputs)

    def answer(self, outputs: Sequence[torch.Tensor], geometry: Geometry) -> Mapping[str, Any]:
        """See `Answers`."""
        return {tensor.name: value.tolist() for tensor, value in zip(self.outputs, outputs, strict=True)}


@dataclass(frozen=True)
class KeypointAnswers(Answers):
    """Where the largest value of each heatmap lies in the picture, and that value.

    Attributes:
        labels: Names of the heatmaps.
        stride: Pixels of what the graph is given from one place of a heatmap to the next, down and to the right.
    """

    labels: Sequence[str]
    stride: tuple[float, float]

    carried = GEOMETRY
    tolerances = _KEYPOINT_TOLERANCES
    widest = WIDEST_PLACE

    @property
    def outputs(self) -> tuple[TensorSignature, ...]:  # type: ignore[override]
        """See `Answers`."""
        count = len(self.labels)
        return (
            TensorSignature(name=LABEL, dtype=STRING, dims=(BATCH, count)),
            TensorSignature(name=SCORE, dtype=torch.float32, dims=(BATCH, count)),
            TensorSignature(name=KEYPOINT, dtype=torch.float32, dims=(BATCH, count, 2)),
        )

    @property
    def postprocess(self) -> Mapping[str, Any]:  # type: ignore[override]
        """See `Answers`."""
        return {"answers": "keypoints", "labels": [*self.labels], "stride": [*self.stride]}

    @property
    def description(self) -> str:
        """See `Answers`."""
        return f"{len(self.labels)} keypoints"

    def answer(self, outputs: Sequence[torch.Tensor], geometry: Geometry) -> Mapping[str, Any]:
        """See `Answers`. One heatmap after another, by the definition."""
        points, scores = [], []
        for heatmap in outputs[0][0].double():
            row, column = divmod(int(heatmap.argmax()), heatmap.shape[1])
            y = (row + 0.5 + _refine(heatmap[:, column], row)) * self.stride[0]
            x = (column + 0.5 + _refine(heatmap[row], column)) * self.stride[1]
            points.append([x * geometry[0] + geometry[2], y * geometry[1] + geometry[3]])
            scores.append(float(heatmap[row, column]))
        return {LABEL: [*self.labels], SCORE: scores, KEYPOINT: points}

    def is_clear(self, outputs: Sequence[torch.Tensor], geometry: Geometry) -> bool:
        """See `Answers`. Two places as high as each other to the last digits are both right."""
        (heatmaps,) = outputs
        random = torch.Generator().manual_seed(0)
        noise = torch.randn(heatmaps.shape, generator=random) * 2e-5 * heatmaps.abs().max()
        moved = self.answer([heatmaps + noise], geometry)[KEYPOINT]
        shift = torch.tensor(moved) - torch.tensor(self.answer(outputs, geometry)[KEYPOINT])
        return bool(shift.abs().max() < _KEYPOINT_TOLERANCES["max_abs_error"])


def _refine(values: torch.Tensor, place: int) -> float:
    """Return how far the top of the parabola through three values lies from the middle one, at most half a step."""
    if not 0 < place < len(values) - 1:
        return 0.0
    left, middle, right = values[place - 1 : place + 2].tolist()
    curve = 2 * middle - left - right
    return max(-0.5, min(0.5, 0.5 * (right - left) / curve)) if curve > 0 else 0.0


class FactoryPictures(PictureTask, FactoryTask):
    """A module of the user's own that is given pictures."""

    @property
    def tolerances(self) -> Mapping[str, float]:  # type: ignore[override]
        """See `Task`. Of labels those of every task that answers with labels."""
        return self.answers.graph_tolerances

    def __init__(
        self, module: nn.Module, spec: InputSpec, *, preparation: Preparation, pictures: Sequence[Path] | None = None
    ) -> None:
        preparation.require_one_size()
        recipe = preparation.recipe
        wanted = _sign_pixels(spec, recipe)
        if spec.inputs != (wanted,):
            raise ModelError(
                f"pictures by {preparation.origin} are not what the module takes",
                expected=f"one input of float32 and shape {list(wanted.dims)}",
                got=", ".join(f"{tensor.name} {tensor.dtype} {list(tensor.dims)}" for tensor in spec.inputs),
                remedy="correct the inputs or --preprocess",
            )
        FactoryTask.__init__(self, module, _limit_sizes(spec, recipe))
        if not self.signature.is_batched:
            raise ModelError("the module cannot be asked in batches", expected="rows of their own", got=self.notes[0])
        self.serve_pictures(
            preparation, _build_answers(spec, self.signature, recipe, self._find_strides(recipe)), pictures
        )

    def _find_strides(self, recipe: Recipe) -> set[tuple[float, float]]:
        """Return how far apart places of the first output lie in the pixels, at every size; nothing without any."""
        strides = set()
        for height, width in recipe.sizes:
            with torch.no_grad():
                made = self.module(torch.zeros(1, 3, height, width))[0]
            if made.dim() == _HEATMAP_RANK and made.numel():
                strides.add((height / made.shape[2], width / made.shape[3]))
        return strides


def _sign_pixels(spec: InputSpec, recipe: Recipe) -> TensorSignature:
    """Return the one input that takes pictures by a recipe, with the file's own names of what varies."""
    given = spec.inputs[0].dims[2:]
    dims = []
    for axis, (name, sizes) in enumerate(zip(("height", "width"), zip(*recipe.sizes, strict=True), strict=True)):
        if len({*sizes}) == 1:
            dims.append(sizes[0])
        else:
            is_named = len(given) == 2 and isinstance(given[axis], str) and given[0] != given[1]
            dims.append(given[axis] if is_named else name)
    return TensorSignature(name=spec.inputs[0].name, dtype=torch.float32, dims=(BATCH, 3, *dims))


def _limit_sizes(spec: InputSpec, recipe: Recipe) -> InputSpec:
    """Return the description of a module with the sizes that its recipe makes.

    Raises:
        SettingsError: The file says others.
    """
    if spec.tensors.sizes and any(limits != SizeRange() for limits in spec.tensors.sizes.values()):
        raise SettingsError(
            "the sizes under dims have no effect on a module that is given pictures",
            expected="those of the recipe's buckets",
            got=", ".join(
                f"{symbol} from {limits.smallest} to {limits.largest}" for symbol, limits in spec.tensors.sizes.items()
            ),
            remedy="take dims out of the file",
        )
    limited = {
        symbol: SizeRange(smallest=min(sizes), largest=max(sizes), multiple_of=math.gcd(*sizes))
        for symbol, sizes in zip(spec.inputs[0].dims[2:], zip(*recipe.sizes, strict=True), strict=True)
        if isinstance(symbol, str)
    }
    return replace(spec, tensors=replace(spec.tensors, sizes=limited))


def _build_answers(
    spec: InputSpec, signature: ModelSignature, recipe: Recipe, strides: set[tuple[float, float]]
) -> Answers:
    """Return what the module's file asks for under `answers`.

    Args:
        spec: What the file says.
        signature: The graph's.
        recipe: What makes its input of pictures.
        strides: How far apart places of heatmaps lie in the pixels; several, where it depends on the picture's size.

    Raises:
        SettingsError: It cannot be used, or not with these outputs.
    """
    if spec.answers is None:
        return PlainAnswers(signature.outputs)
    given = dict(spec.answers)
    kind = _KINDS.get(given.pop("answers", ""))
    try:
        if kind is None:
            raise ValueError(f"answers {spec.answers.get('answers')!r}")
        labels = _read_labels(given.pop("labels", None), spec.folder)
        return kind.make(_Asked(labels, signature.outputs, recipe, strides, given))
    except (OSError, ValueError, TypeError) as exc:
        takes = " or ".join(f"{name} of {one.takes}" for name, one in _KINDS.items() if kind in (None, one))
        raise SettingsError(
            "what the module's file says under answers cannot be used",
            expected=f"{takes}, with a label for each of its values",
            got=str(exc).rstrip("."),
            remedy="correct the file of --inputs",
        ) from exc


def _read_labels(given: Any, folder: Path) -> list[str]:
    if isinstance(given, str):
        given = (folder / given).read_text(encoding="utf-8").splitlines()
    if not isinstance(given, list) or not given or not all(isinstance(label, str) for label in given):
        raise ValueError(f"labels {given!r}")
    return given


@dataclass(frozen=True)
class _Asked:
    """What answers are made of.

    Attributes:
        labels: Names by id.
        outputs: The graph's.
        recipe: What makes its input of pictures.
        strides: How far apart places of heatmaps lie in the pixels; several, where it depends on the picture's size.
        given: What else the file says.
    """

    labels: list[str]
    outputs: tuple[TensorSignature, ...]
    recipe: Recipe
    strides: set[tuple[float, float]]
    given: Mapping[str, Any]

    def require_output(self, name: str, rank: int) -> None:
        """Refuse a graph whose output is not the one of that name, with a label for each place on its second axis."""
        (output,) = self.outputs
        if output.name != name or len(output.dims) != rank or output.dims[1] != len(self.labels):
            raise ValueError(f"{len(self.labels)} labels for {output.name} {list(output.dims)}")


def _make_labels(asked: _Asked) -> Answers:
    asked.require_output("logits", 2)
    given = dict(asked.given)
    function, top_k = given.pop("function", "softmax"), given.pop("top_k", TOP_K)
    if function not in FUNCTIONS or type(top_k) is not int or top_k < 1 or given:
        raise ValueError(f"function {function!r}, top_k {top_k!r}{''.join(f', {key}' for key in given)}")
    return LabelAnswers(asked.labels, function, min(top_k, len(asked.labels)))


def _make_keypoints(asked: _Asked) -> Answers:
    asked.require_output("heatmaps", _HEATMAP_RANK)
    if asked.given:
        raise ValueError(", ".join(asked.given))
    if len(asked.strides) != 1:
        raise ValueError(f"heatmaps with a place for every {' or '.join(map(str, sorted(asked.strides)))} pixels")
    (stride,) = asked.strides
    return KeypointAnswers(asked.labels, stride)


def _make_boxes(asked: _Asked) -> Answers:
    return make_boxes(asked.labels, asked.outputs, asked.recipe, asked.given)


@dataclass(frozen=True)
class _Kind:
    """A kind of answers.

    Attributes:
        takes: Which outputs it is made of, in words.
        make: Makes it.
    """

    takes: str
    make: Callable[[_Asked], Answers]


_KINDS = {
    "labels": _Kind("the one output logits", _make_labels),
    "keypoints": _Kind("the one output heatmaps", _make_keypoints),
    "boxes": _Kind("the outputs boxes [batch, places, 4] and logits [batch, places, labels]", _make_boxes),
}
