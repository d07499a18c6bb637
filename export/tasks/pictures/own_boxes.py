"""Boxes of a network of the user's own that sees each object at several places, as YOLO and SSD do.

Neighbours of one label are suppressed as `torchvision.ops.batched_nms` does it. The module's file says of them under
`answers`:

    {"answers": "boxes", "labels": ["person", "car"], "format": "cxcywh", "unit": "pixels", "function": "sigmoid",
     "threshold": 0.25, "iou_threshold": 0.45, "top_k": 100, "multi_label": false, "ignored": []}
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...signature import TensorSignature
from ..labels import FUNCTIONS, count_labels
from .detection import APART, BestBoxes
from .preparation import refuse_unknown
from .recipe import Geometry, Recipe, tell_wrong

# How far fp32 in another order may move the part that two boxes have in common.
_OVERLAP_ERROR = 1e-4

_BOXES, _LOGITS = "boxes", "logits"


class _Candidate(NamedTuple):
    """A box that may be answered.

    Attributes:
        score: Of its label.
        label: Its id.
        box: Left, top, right and bottom, [4], in the unit of the graph.
        lead: By how much its label is likelier than the next one of the place, where only one is chosen.
    """

    score: float
    label: int
    box: Tensor
    lead: float


@dataclass(frozen=True, kw_only=True)
class SuppressedBoxes(BestBoxes):
    """The likeliest boxes, best first, without those that have too much in common with a likelier one of their label.

    Attributes:
        names: Of the graph's two outputs, in their order.
        labels: Names by id.
        ignored: Those of them that are no objects: they take part in a softmax, and are never answered.
        format: What the four numbers of a box are, `xyxy` (left, top, right, bottom) or `cxcywh` (centre and size).
        unit: How many pixels of what the graph is given the width and the height of a 1 are.
        function: What makes scores of logits, `softmax`, `sigmoid` or `none`.
        threshold: What a box must score more than.
        iou_threshold: Beyond which part of what two boxes cover together the less likely of them is suppressed.
        top_k: How many are answered at most.
        multi_label: Whether a place has as many boxes as labels that score enough, in place of one of its likeliest.
    """

    names: Sequence[str]
    labels: Sequence[str]
    ignored: Sequence[str]
    format: str
    unit: tuple[float, float]
    function: str
    threshold: float
    iou_threshold: float
    top_k: int
    multi_label: bool

    @property
    def postprocess(self) -> Mapping[str, Any]:  # type: ignore[override]
        """See `Answers`."""
        return {
            "answers": "suppressed_boxes",
            "labels": [*self.labels],
            "ignored": [*self.ignored],
            "format": self.format,
            "unit": [*self.unit],
            "function": self.function,
            "threshold": self.threshold,
            "iou_threshold": self.iou_threshold,
            "top_k": self.top_k,
            "multi_label": self.multi_label,
        }

    @property
    def description(self) -> str:
        """See `Answers`."""
        return (
            f"boxes of {count_labels(len(self.labels) - len(self.ignored))}, {self.function}, that score above "
            f"{self.threshold:g}, neighbours suppressed above an IoU of {self.iou_threshold:g}, best {self.top_k}"
        )

    def answer(self, outputs: Sequence[Tensor], geometry: Geometry) -> Mapping[str, Any]:
        """See `Answers`. One box after another, by the definition."""
        kept: list[_Candidate] = []
        for candidate in self._list_candidates(outputs, self.threshold):
            if len(kept) == self.top_k:
                break
            rivals = [other.box for other in kept if other.label == candidate.label]
            if not rivals or bool((_measure_overlap(candidate.box, torch.stack(rivals)) <= self.iou_threshold).all()):
                kept.append(candidate)
        unit, scale, offset = (torch.tensor(pair * 2).double() for pair in (self.unit, geometry[:2], geometry[2:4]))
        places = [(one.box * unit * scale + offset).tolist() for one in kept]
        return self.fill_up([(self.labels[one.label], one.score, box) for one, box in zip(kept, places, strict=True)])

    def is_clear(self, outputs: Sequence[Tensor], geometry: Geometry) -> bool:
        """See `Answers`. Each box that could be among the best surely is answered or surely is not, and in its place.

        Likelier ones come first, so that those that surely are suppressed do not suppress others.
        """
        candidates = self._list_candidates(outputs, self.threshold - APART)
        if not candidates:
            return True
        scores, labels = (torch.tensor([one[part] for one in candidates]).double() for part in range(2))
        boxes = torch.stack([one.box for one in candidates])
        may_suppress = torch.ones(len(candidates), dtype=torch.bool)
        kept: list[float] = []
        for place, (score, label, box, lead) in enumerate(candidates):
            if len(kept) >= self.top_k and kept[self.top_k - 1] > score + APART:
                break
            overlaps = _measure_overlap(box, boxes)
            may = may_suppress & (labels == label) & (overlaps > self.iou_threshold - _OVERLAP_ERROR)
            may &= scores >= score - APART
            may[place] = False
            # What is surely likelier and can still suppress is surely answered.
            does = may & (scores > score + APART) & (overlaps > self.iou_threshold + _OVERLAP_ERROR)
            if lead <= APART or (not does.any() and (may.any() or score <= self.threshold + APART)):
                return False
            if does.any():
                may_suppress[place] = False
            else:
                kept.append(score)
        return all(first - second > APART for first, second in pairwise(kept))

    def _list_candidates(self, outputs: Sequence[Tensor], threshold: float) -> list[_Candidate]:
        """Return what scores above a threshold, best first, of equals that of the first place."""
        given = dict(zip(self.names, outputs, strict=True))
        ids = [index for index, label in enumerate(self.labels) if label not in self.ignored]
        scores = FUNCTIONS[self.function](given[_LOGITS][0])[:, ids]
        leads = torch.full_like(scores, torch.inf)
        if not self.multi_label:
            best, *others = scores.topk(min(2, len(ids))).values.T
            leads = (best - others[0] if others else leads[:, 0])[:, None].expand_as(scores)
            is_best = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.argmax(dim=1, keepdim=True), True)
            scores = scores.where(is_best, -torch.inf)
        places, labels = torch.nonzero(scores > threshold, as_tuple=True)
        chosen = scores[places, labels]
        corners = _find_corners(given[_BOXES][0, places].double(), self.format)
        return [
            _Candidate(float(chosen[index]), ids[labels[index]], corners[index], float(leads[places[index], 0]))
            for index in chosen.argsort(descending=True, stable=True).tolist()
        ]


def _find_corners(boxes: Tensor, kind: str) -> Tensor:
    """Return left, top, right and bottom of boxes, [boxes, 4]."""
    if kind == "xyxy":
        return boxes
    middles, sizes = boxes[:, :2], boxes[:, 2:]
    return torch.cat([middles - sizes / 2, middles + sizes / 2], dim=1)


def _measure_overlap(box: Tensor, boxes: Tensor) -> Tensor:
    """Return which part of what it and another box cover together is in both, [boxes]; 0 where they cover nothing."""
    shared = _measure_area(torch.cat([torch.max(box[:2], boxes[:, :2]), torch.min(box[2:], boxes[:, 2:])], dim=1))
    together = _measure_area(box[None]) + _measure_area(boxes) - shared
    return torch.where(together > 0, shared / together, 0.0)


def _measure_area(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(dim=1)


def _is_part(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


# What each key may be: in words, and what tells it; and what it is where it is left out.
_RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "format": ("xyxy or cxcywh", lambda value: value in ("xyxy", "cxcywh")),
    "unit": ("pixels or parts", lambda value: value in ("pixels", "parts")),
    "function": (f"one of {', '.join(FUNCTIONS)}", lambda value: isinstance(value, str) and value in FUNCTIONS),
    "threshold": ("a number from 0 to below 1", lambda value: _is_part(value) and value < 1),
    "iou_threshold": ("a number from 0 to 1", _is_part),
    "top_k": ("a whole number from 1 to 1000", lambda value: type(value) is int and 1 <= value <= 1000),
    "multi_label": ("true or false", lambda value: isinstance(value, bool)),
    "ignored": (
        "some of the labels, in a list",
        lambda value: isinstance(value, list) and all(isinstance(label, str) for label in value),
    ),
}
_DEFAULTS: Mapping[str, Any] = {
    "threshold": 0.5,
    "iou_threshold": 0.5,
    "top_k": 100,
    "multi_label": False,
    "ignored": [],
}


def make_boxes(
    labels: Sequence[str], signatures: Sequence[TensorSignature], recipe: Recipe, asked: Mapping[str, Any]
) -> SuppressedBoxes:
    """Return what the module's file asks for.

    Args:
        labels: Names by id.
        signatures: The graph's outputs.
        recipe: What makes its input of pictures.
        asked: What else the file says.

    Raises:
        ValueError: It cannot be used, or not with these outputs.
    """
    refuse_unknown(asked, tuple(_RULES))
    if missing := [key for key in _RULES if key not in {**_DEFAULTS, **asked}]:
        raise ValueError("; ".join(f"no {key}, which is {_RULES[key][0]}" for key in missing))
    given = {**_DEFAULTS, **asked}
    wrong = {key: value for key, value in given.items() if not _RULES[key][1](value)}
    if not wrong and (set(labels) <= set(given["ignored"]) or not set(given["ignored"]) <= set(labels)):
        wrong = {"ignored": given["ignored"]}
    if wrong:
        raise ValueError(tell_wrong(wrong, {key: rule for key, (rule, _) in _RULES.items()}))
    places = _count_places(signatures, len(labels))
    if given["unit"] == "parts" and len(recipe.sizes) > 1:
        raise ValueError(
            f"parts of {recipe.described_sizes} pixels, of which the step behind the graph is not told which it was; "
            f"answer in pixels of it"
        )
    height, width = recipe.height_and_width
    most = given["top_k"] if places is None else places * (len(labels) if given["multi_label"] else 1)
    return SuppressedBoxes(
        names=[tensor.name for tensor in signatures],
        labels=labels,
        ignored=given["ignored"],
        format=given["format"],
        unit=(float(width), float(height)) if given["unit"] == "parts" else (1.0, 1.0),
        function=given["function"],
        threshold=float(given["threshold"]),
        iou_threshold=float(given["iou_threshold"]),
        top_k=min(given["top_k"], most),
        multi_label=given["multi_label"],
    )


def _count_places(signatures: Sequence[TensorSignature], labels: int) -> int | None:
    """Return at how many places the graph sees something; None where that hangs on the picture's size.

    Raises:
        ValueError: Its outputs are others than boxes and logits of as many places.
    """
    dims = {tensor.name: tensor.dims for tensor in signatures}
    told = " and ".join(f"{tensor.name} {[*tensor.dims]}" for tensor in signatures)
    if set(dims) != {_BOXES, _LOGITS} or {len(shape) for shape in dims.values()} != {3}:
        raise ValueError(told)
    (_, boxes, numbers), (_, places, values) = dims[_BOXES], dims[_LOGITS]
    # Axes that hang on the picture's size have names of their own.
    fits = boxes == places or not isinstance(boxes, int)
    if numbers != 4 or values != labels or not fits or isinstance(boxes, int) != isinstance(places, int) or not boxes:
        raise ValueError(f"{told} for {labels} labels")
    return boxes if isinstance(boxes, int) else None
