"""Boxes of networks that see each object at several places, without a word about Triton: the likeliest of each."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scores import ABSENT, FUNCTIONS, Array


def suppress_neighbours(tensors: Mapping[str, Array], settings: Mapping[str, Any]) -> dict[str, Array]:
    """Return LABEL and SCORE, [rows, k], BOX, [rows, k, 4], best first, and COUNT, [rows, 1]: how many there are.

    A box is left, top, right and bottom in the picture. What does not score above the threshold is absent, and what
    has too much in common with a likelier box of its label. Of equal scores the first place comes first.
    """
    names, ignored = settings["labels"], settings["ignored"]
    ids = np.array([index for index, name in enumerate(names) if name not in ignored])
    scores = FUNCTIONS[settings["function"]](tensors["logits"])[..., ids]
    units, geometry = np.tile(settings["unit"], 2), tensors["geometry"].astype(np.float64)
    count, top_k = len(scores), settings["top_k"]
    made: dict[str, Array] = {
        "LABEL": np.full((count, top_k), ABSENT[0], dtype=np.object_),
        "SCORE": np.zeros((count, top_k), dtype=np.float32),
        "BOX": np.full((count, top_k, 4), -1, dtype=np.float32),
        "COUNT": np.zeros((count, 1), dtype=np.int64),
    }
    for row, given in enumerate(tensors["boxes"]):
        places, labels = find_candidates(scores[row], settings["threshold"], settings["multi_label"])
        boxes = find_corners(given[places].astype(np.float64), settings["format"])
        kept = suppress(boxes, labels, settings["iou_threshold"], top_k)
        found = len(kept)
        made["LABEL"][row, :found] = [names[ids[label]] for label in labels[kept]]
        made["SCORE"][row, :found] = scores[row, places[kept], labels[kept]]
        made["BOX"][row, :found] = boxes[kept] * units * np.tile(geometry[row, 0:2], 2) + np.tile(geometry[row, 2:4], 2)
        made["COUNT"][row] = found
    return made


def find_candidates(scores: Array, threshold: float, multi_label: bool) -> tuple[Array, Array]:
    """Return place and label of what scores above the threshold, best first.

    Args:
        scores: [places, labels].
        threshold: What is not above it is no candidate.
        multi_label: Whether a place may be several, or its likeliest label alone.
    """
    if multi_label:
        places, labels = np.nonzero(scores > threshold)
    else:
        best = scores.argmax(axis=1)
        places = np.flatnonzero(scores[np.arange(len(scores)), best] > threshold)
        labels = best[places]
    order = np.argsort(-scores[places, labels], kind="stable")
    return places[order], labels[order]


def find_corners(boxes: Array, kind: str) -> Array:
    """Return left, top, right and bottom of boxes, [boxes, 4]."""
    if kind == "xyxy":
        return boxes
    middles, sizes = np.split(boxes, 2, axis=1)
    return np.concatenate([middles - sizes / 2, middles + sizes / 2], axis=1)


def suppress(boxes: Array, labels: Array, iou_threshold: float, most: int) -> list[int]:
    """Return which boxes are kept, best first: as `torchvision.ops.batched_nms`, which goes on beyond the most.

    Each box that is kept is compared at once with all of its label that are left: a network that sees something
    everywhere costs `most` such turns, and no pair of places that is not needed.

    Args:
        boxes: Left, top, right and bottom, [boxes, 4], best first.
        labels: Of each; boxes of different ones do not suppress one another.
        iou_threshold: Beyond which part of what two boxes cover together the second is suppressed.
        most: Boxes that are kept.
    """
    areas = measure(boxes[:, :2], boxes[:, 2:])
    kept: list[int] = []
    is_left = np.ones(len(boxes), dtype=bool)
    left = {label: np.flatnonzero(labels == label) for label in np.unique(labels)}
    for best, label in enumerate(labels):
        if len(kept) == most:
            break
        if not is_left[best]:
            continue
        kept.append(best)
        rivals = left[label]
        shared = measure(
            np.maximum(boxes[best, :2], boxes[rivals, :2]),
            np.minimum(boxes[best, 2:], boxes[rivals, 2:]),
        )
        # No quotient: boxes without an area have nothing in common.
        overlaps = shared > iou_threshold * (areas[best] + areas[rivals] - shared)
        is_left[rivals[overlaps]] = False
        left[label] = rivals[~overlaps]
    return kept


def measure(upper_left: Array, lower_right: Array) -> Array:
    """Return the areas of boxes, [boxes]; 0 of those whose corners lie the wrong way round."""
    area: Array = np.maximum(lower_right - upper_left, 0).prod(axis=1)
    return area
