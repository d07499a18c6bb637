"""What is done to a picture before a network sees it: a recipe, and the pixels that it makes.

The server does it by the same recipe in code of its own (`backends/python_preprocess`).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from ...errors import shorten

# [3, height, width], fp32.
Pixels = npt.NDArray[np.float32]

# x and y scale, x and y offset, width and height of the upright picture: a place in the picture is the place in the
# pixels times the scale, plus the offset.
Geometry = tuple[float, float, float, float, float, float]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
_MODES = {"exact": 2, "shortest_edge": 1, "letterbox": 2, "edges": 2}

# Beyond these, pixels are not finite in fp32, or all the same.
_LEAST_NUMBER, _MOST_NUMBER = 1e-9, 1e9

# What the server makes of a picture at most.
_MOST_PIXELS = 50_000_000

# What each key may be, for refusals.
RULES = {
    "mode": f"one of {', '.join(_MODES)}",
    "size": "a height and a width, the one edge of shortest_edge, or nothing beside buckets; each from 1 to 8192",
    "filter": f"one of {', '.join(FILTERS.values())}",
    "crop": "a height and a width from 1 to 8192, with mode exact or shortest_edge",
    "rounding": "down or even",
    "fill": "a level from 0 to 255",
    "scale": "a number from 1e-9 to 1e9",
    "mean": "three numbers up to 1e9",
    "std": "three numbers from 1e-9 to 1e9, or below 0 as large",
    "channels": "rgb or bgr",
    "pad": "with mode edges alone, a height and a width that hold its longer edge",
    "multiple_of": "1, or with mode edges a number up to its shorter edge",
    "background": "a level from 0 to 255, or null",
    "buckets": f"two or more pairs of height and width, each of another shape, from 1 to 8192 and of at most "
    f"{_MOST_PIXELS:,} pixels, with mode exact or letterbox and no crop",
}


def _is_whole(value: Any) -> bool:
    # True is an int to Python.
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Tell whether it is a number that may be taken off pixels."""
    return (_is_whole(value) or isinstance(value, float)) and abs(value) <= _MOST_NUMBER


def is_divisor(value: Any) -> bool:
    """Tell whether it is a number that pixels may be divided by."""
    return is_number(value) and abs(value) >= _LEAST_NUMBER


def _is_level(level: Any) -> bool:
    return _is_whole(level) and 0 <= level <= 255


def is_size(size: Any) -> bool:
    """Tell whether it is an edge that pictures may be resized to, in pixels."""
    return _is_whole(size) and 0 < size <= 8192


def _are_sizes(sizes: Sequence[Any]) -> bool:
    return all(map(is_size, sizes))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What becomes of a picture, in this order; `picture.json` holds these keys.

    Attributes:
        mode: `exact` resizes to `size` whatever the shape, `shortest_edge` makes the shorter edge that long and keeps
            the shape, `letterbox` fits the picture into `size`, in the middle, and fills the rest, `edges` makes the
            shorter edge as long as the first of `size` unless the longer one were then beyond the second.
        size: Height and width, or the one edge, or the shorter and the longer one; nothing where there are buckets.
        filter: Pillow's name of it.
        crop: Height and width that are cut out of the middle, or None.
        rounding: Which of the two pixels in the middle: `down` as transformers, `even` as torchvision.
        fill: Level from 0 to 255 of what lies outside of the picture.
        scale: What a level is multiplied by.
        mean: What is then taken off, by channel.
        std: What it is then divided by, by channel.
        channels: Their order in the tensor, `rgb` or `bgr`.
        pad: With `edges`, height and width of the tensor: the picture lies in its upper left, the rest is 0. Without,
            the tensor is as large as the picture has become.
        multiple_of: With `edges`, both edges are cut down to multiples of it.
        background: Level of what takes the place of the one colour that a file calls transparent, as a GIF may; None
            where that colour stays.
        buckets: With `exact` and `letterbox`, several heights and widths: a picture gets the one whose shape is most
            like its own, of two the first.
    """

    mode: str
    size: tuple[int, ...] = ()
    filter: str = "bilinear"
    crop: tuple[int, int] | None = None
    rounding: str = "down"
    fill: int = 0
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    channels: str = "rgb"
    pad: tuple[int, int] | None = None
    multiple_of: int = 1
    background: int | None = None
    buckets: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        if self.mode not in tuple(_MODES):
            # The others hang on it.
            raise ValueError(tell_wrong({"mode": self.mode}, RULES))
        has_size = (
            len(self.size) == (0 if self.buckets else _MODES[self.mode])
            and _are_sizes(self.size)
            and (self.mode != "edges" or self.size[0] <= self.size[1])
        )
        checks = {
            "size": has_size,
            "filter": self.filter in FILTERS.values(),
            "crop": self.crop is None
            or (self.mode in ("exact", "shortest_edge") and len(self.crop) == 2 and _are_sizes(self.crop)),
            "rounding": self.rounding in ("down", "even"),
            "fill": _is_level(self.fill),
            "background": self.background is None or _is_level(self.background),
            "scale": is_divisor(self.scale) and self.scale > 0,
            "mean": len(self.mean) == 3 and all(map(is_number, self.mean)),
            "std": len(self.std) == 3 and all(map(is_divisor, self.std)),
            "channels": self.channels in ("rgb", "bgr"),
            # These two are held against the size.
            "pad": self.pad is None or not has_size or self._is_padded_well(self.pad),
            "multiple_of": not has_size or self._is_cut_well(),
            "buckets": self.buckets is None or self._has_good_buckets(self.buckets),
        }
        if wrong := {name: getattr(self, name) for name, is_right in checks.items() if not is_right}:
            raise ValueError(tell_wrong(wrong, RULES))
        if self.mode == "shortest_edge" and self.crop is None:
            raise ValueError("pictures of every shape, since nothing crops them")

    def _is_padded_well(self, pad: Sequence[int]) -> bool:
        """Tell whether there is room for every picture, lying and standing."""
        return self.mode == "edges" and len(pad) == 2 and _are_sizes(pad) and self.size[1] <= min(pad)

    def _is_cut_well(self) -> bool:
        """Tell whether edges are cut in a mode that makes them, and whether something is left of them."""
        if not _is_whole(self.multiple_of) or self.mode != "edges":
            return _is_whole(self.multiple_of) and self.multiple_of == 1
        return 1 <= self.multiple_of <= self.size[0]

    def _has_good_buckets(self, buckets: Sequence[Sequence[int]]) -> bool:
        """Tell whether there are several sizes, each of another shape, in a mode that makes pictures of one size."""
        return (
            self.mode in ("exact", "letterbox")
            and self.crop is None
            and all(isinstance(bucket, tuple) for bucket in buckets)
            and all(len(bucket) == 2 and _are_sizes(bucket) and math.prod(bucket) <= _MOST_PIXELS for bucket in buckets)
            and len({Fraction(*bucket) for bucket in buckets}) == len(buckets) > 1
        )

    @property
    def keeps_shape(self) -> bool:
        """Whether what the graph is given is of the picture's own shape."""
        return self.mode == "edges" and self.pad is None

    @property
    def described_sizes(self) -> str:
        """How large the graph's input is, in words."""
        if self.keeps_shape:
            return f"{self.size[0]} on the shorter edge and at most {self.size[1]} on the longer"
        return " or ".join(f"{height} x {width}" for height, width in self.sizes)

    @property
    def height_and_width(self) -> tuple[int, int]:
        """The size of what the graph is given; of several the largest."""
        height, width = max(self.sizes, key=math.prod)
        return height, width

    @property
    def sizes(self) -> Sequence[tuple[int, int]]:
        """Every height and width that the graph may be given; of those of any shape two that none is beyond."""
        if self.keeps_shape:
            return [(self.size[0], self.size[1]), (self.size[1], self.size[0])]
        if self.buckets:
            return self.buckets
        height, width = self.pad or self.crop or self.size
        return [(height, width)]

    def choose(self, image: Image.Image) -> tuple[int, int]:
        """Return height and width of what the graph is given of a picture."""
        if self.keeps_shape:
            return self._find_size(image)
        shape = Fraction(image.height, image.width)

        def differ(size: tuple[int, int]) -> Fraction:
            ratio = Fraction(*size) / shape
            return max(ratio, 1 / ratio)

        return min(self.sizes, key=differ)

    def to_json(self) -> bytes:
        """Return the content of `picture.json`."""
        return (json.dumps(asdict(self)) + "\n").encode()

    def prepare(self, image: Image.Image) -> Pixels:
        """Return what the graph is given of an upright picture in RGB."""
        height, width = self._find_size(image)
        shown = image if self.background is None else _fill_clear(image, self.background)
        levels = np.asarray(shown.resize((width, height), Image.Resampling[self.filter.upper()]))
        want_height, want_width = (height, width) if self.pad else self.choose(image)
        top, left = (self._find_middle(rest) for rest in (height - want_height, width - want_width))
        canvas = np.full((want_height, want_width, 3), self.fill, dtype=np.uint8)
        inside = levels[max(top, 0) : top + want_height, max(left, 0) : left + want_width]
        down, right = max(-top, 0), max(-left, 0)
        canvas[down : down + inside.shape[0], right : right + inside.shape[1]] = inside
        scaled = (canvas.astype(np.float64) * self.scale).astype(np.float32)
        if self.channels == "bgr":
            scaled = scaled[:, :, ::-1]
        normal = (scaled - np.array(self.mean, dtype=np.float32)) / np.array(self.std, dtype=np.float32)
        if self.pad:
            # The padding is of the normalised picture, as transformers pads.
            normal = np.pad(normal, ((0, self.pad[0] - height), (0, self.pad[1] - width), (0, 0)))
        return np.ascontiguousarray(normal.transpose(2, 0, 1))

    def find_mask(self, image: Image.Image) -> npt.NDArray[np.bool_]:
        """Return which pixels of the graph's input are the picture's and which are padding, [height, width]."""
        mask = np.zeros(self.choose(image), dtype=bool)
        height, width = self._find_size(image) if self.pad else mask.shape
        mask[:height, :width] = True
        return mask

    def find_geometry(self, image: Image.Image) -> Geometry:
        """Return where the pixels lie in an upright picture."""
        height, width = self._find_size(image)
        want_height, want_width = (height, width) if self.pad else self.choose(image)
        top, left = (self._find_middle(rest) for rest in (height - want_height, width - want_width))
        x, y = image.width / width, image.height / height
        return (x, y, left * x, top * y, float(image.width), float(image.height))

    def _find_size(self, image: Image.Image) -> tuple[int, int]:
        if self.mode == "exact":
            return self.choose(image) if self.buckets else (self.size[0], self.size[1])
        if self.mode == "shortest_edge":
            long = int(self.size[0] * max(image.size) / min(image.size))
            return (long, self.size[0]) if image.height >= image.width else (self.size[0], long)
        if self.mode == "edges":
            height, width = self._find_edges(image)
            return max(1, height), max(1, width)
        most_height, most_width = self.choose(image)
        scale = min(most_width / image.width, most_height / image.height)
        height, width = (
            max(1, min(most, round(edge * scale)))
            for edge, most in ((image.height, most_height), (image.width, most_width))
        )
        return height, width

    def _find_edges(self, image: Image.Image) -> tuple[int, int]:
        """Return height and width by transformers' rounding; of YOLOS, which alone cuts them, by its own."""
        # They import torch, and a recipe is refused before that.
        from transformers.image_transforms import get_size_with_aspect_ratio
        from transformers.models.yolos.image_processing_pil_yolos import get_size_with_aspect_ratio_yolos

        rounding = get_size_with_aspect_ratio
        if self.multiple_of > 1:
            rounding = partial(get_size_with_aspect_ratio_yolos, mod_size=self.multiple_of)
        height, width = rounding((image.height, image.width), *self.size)
        return height, width

    def _find_middle(self, rest: int) -> int:
        if self.mode == "letterbox":
            return -(-rest // 2)
        return rest // 2 if self.rounding == "down" else round(rest / 2)


def tell_wrong(values: Mapping[str, Any], rules: Mapping[str, str]) -> str:
    """Return what these keys have in place of what they may have."""
    return "; ".join(
        f"{name} {shorten(json.dumps(value), 60)} in place of {rules[name]}" for name, value in values.items()
    )


def _fill_clear(image: Image.Image, level: int) -> Image.Image:
    """Return the picture on a background of that level, which shows where its one transparent colour is."""
    if image.info.get("transparency") is None:
        return image
    background = Image.new("RGBA", image.size, (level, level, level, 255))
    return Image.alpha_composite(background, image.convert("RGBA")).convert("RGB")


# Recipes with a name, for `--preprocess`.
RECIPES: Mapping[str, Recipe] = {
    # torchvision's `IMAGENET1K_V1` of most classifiers (torchvision, transforms/_presets.py, ImageClassification).
    "imagenet": Recipe(
        mode="shortest_edge",
        size=(256,),
        crop=(224, 224),
        rounding="even",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
}
