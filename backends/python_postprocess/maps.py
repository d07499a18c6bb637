"""From scores on a coarse grid to a map of which pixel of the picture is of what, without a word about Triton."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Array = npt.NDArray[Any]

# Pixels that are made at once, and how long an edge of them is where the picture is not narrower: so little memory is
# needed for the largest picture, and in most of these one or two labels are possible.
_TILE_PIXELS, _TILE_EDGE = 4096, 64

# A palette has no more.
_MOST_COLOURS = 256


def draw_maps(tensors: Mapping[str, Array], settings: Mapping[str, Any]) -> dict[str, Array]:
    """Return MAP, [rows, 1], and the labels that cover most: LABEL, ID and SHARE, [rows, k], and COUNT, [rows, 1].

    A map is a PNG of the upright picture's size, whose values are ids of labels: with a palette, or of 16 bits where
    there are more than 256 labels.
    """
    names = np.array([*settings["labels"], ""], dtype=np.object_)
    count, top_k = len(names) - 1, settings["top_k"]
    maps, listed, shares = [], [], []
    for logits, (width, height) in zip(tensors["logits"], tensors["geometry"][:, 4:6].astype(int), strict=True):
        ids = find_ids(logits, height, width)
        pixels = np.bincount(ids.reshape(-1), minlength=count)
        order = np.argsort(-pixels, kind="stable")[:top_k]
        listed.append(np.where(pixels[order] > 0, order, -1))
        shares.append(pixels[order] / ids.size)
        maps.append(encode(ids, count))
    found = np.array(listed, dtype=np.int64)
    return {
        "MAP": np.array(maps, dtype=np.object_)[:, None],
        # What is absent has the last of the names.
        "LABEL": names[found],
        "ID": found,
        "SHARE": np.array(shares, dtype=np.float32),
        "COUNT": (found >= 0).sum(axis=1, keepdims=True).astype(np.int64),
    }


def find_ids(logits: Array, height: int, width: int) -> Array:
    """Return the likeliest label of each pixel, [height, width], uint8 or uint16.

    Scores are interpolated between the places of the grid as torch's `interpolate` does, bilinear and without aligned
    corners: between four places a score is at most the largest of the four. So a label that is nowhere near a tile as
    likely as another one is everywhere there needs no interpolation.

    Args:
        logits: [labels, rows, columns].
        height: Of the picture.
        width: Of the picture.
    """
    ids = np.empty((height, width), dtype=np.uint8 if len(logits) <= _MOST_COLOURS else np.uint16)
    down, right = Axis(logits.shape[1], height), Axis(logits.shape[2], width)
    tall = max(_TILE_EDGE, _TILE_PIXELS // width)
    wide = max(_TILE_EDGE, _TILE_PIXELS // height)
    for top in range(0, height, tall):
        rows = slice(top, min(top + tall, height))
        for left in range(0, width, wide):
            columns = slice(left, min(left + wide, width))
            ids[rows, columns] = _find_tile(logits, down, rows, right, columns)
    return ids


class Axis:
    """Between which two places of a grid each pixel lies, along one axis.

    Args:
        places: Of the grid.
        pixels: Of the picture.
    """

    def __init__(self, places: int, pixels: int) -> None:
        middles = (np.arange(pixels, dtype=np.float32) + np.float32(0.5)) * np.float32(places / pixels)
        at = np.maximum(middles - np.float32(0.5), 0)
        self.before = np.minimum(at.astype(np.int64), places - 1)
        self.after = np.minimum(self.before + 1, places - 1)
        self.weights = (at - self.before).astype(np.float32)


def _find_tile(logits: Array, down: Axis, rows: slice, right: Axis, columns: slice) -> Array:
    first_row, first_column = down.before[rows][0], right.before[columns][0]
    grid = logits[:, first_row : down.after[rows][-1] + 1, first_column : right.after[columns][-1] + 1]
    least, most = grid.min(axis=(1, 2)), grid.max(axis=(1, 2))
    possible = np.flatnonzero(most >= least.max())
    if len(possible) == 1:
        return possible
    grid = grid[possible]
    weights = down.weights[rows][:, None]
    lines = grid[:, down.before[rows] - first_row] * (1 - weights) + grid[:, down.after[rows] - first_row] * weights
    weights = right.weights[columns]
    scores = (
        lines[..., right.before[columns] - first_column] * (1 - weights)
        + lines[..., right.after[columns] - first_column] * weights
    )
    return np.asarray(possible[scores.argmax(axis=0)])


def encode(ids: Array, count: int) -> bytes:
    """Return a map as PNG."""
    image = Image.fromarray(ids)
    if count <= _MOST_COLOURS:
        image.putpalette(build_palette())
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def build_palette() -> list[int]:
    """Return the colours in which segmentations are shown since PASCAL VOC (its development kit, VOClabelcolormap).

    The bits of an id go in turns to red, green and blue, from the highest of each downwards.
    """
    ids = np.arange(_MOST_COLOURS)
    bits = ids[:, None] >> np.arange(8) & 1  # [ids, bits]
    colours = np.zeros((_MOST_COLOURS, 3), dtype=np.int64)
    for bit in range(8):
        colours[:, bit % 3] |= bits[:, bit] << 7 - bit // 3
    flat: list[int] = colours.reshape(-1).tolist()
    return flat
