"""What a model wants done to a picture before it sees it: read from the checkpoint or a file, and done here as well.

The server does it by the same recipe in code of its own (`backends/python_preprocess/pictures.py`); what is done here
is the reference, by transformers' own image processor wherever the checkpoint names one.
"""

import difflib
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from transformers import AutoImageProcessor
from transformers.image_transforms import get_size_with_aspect_ratio
from transformers.image_utils import load_image
from transformers.models.yolos.image_processing_pil_yolos import get_size_with_aspect_ratio_yolos

from ..checkpoints.storage.paths import parse_json, read_small
from ..errors import CheckpointError, ModelError, SettingsError, shorten

# What transformers calls the file that holds a recipe.
PROCESSOR_FILE = "preprocessor_config.json"

# [3, height, width], fp32.
Pixels = npt.NDArray[np.float32]

# x and y scale, x and y offset, width and height of the upright picture: a place in the picture is the place in the
# pixels times the scale, plus the offset.
Geometry = tuple[float, float, float, float, float, float]

# How far the server's pixels may be from the reference, in levels of 255 before they are normalised.
MAX_LEVELS = 1.0

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
_MODES = {"exact": 2, "shortest_edge": 1, "letterbox": 2, "edges": 2}

# Recipes have hundreds of bytes.
_MAX_RECIPE_BYTES = 1_000_000

# Beyond these, pixels are not finite in fp32, or all the same.
_LEAST_NUMBER, _MOST_NUMBER = 1e-9, 1e9

# What the server makes of a picture at most.
_MOST_PIXELS = 50_000_000

# Processors that keep the shape of pictures and cut their edges down to multiples.
_CUT = {"YolosImageProcessor": 16}

# transformers, image_processing_pil_convnext.py: from this size on the picture is not cropped.
_CONVNEXT_UNCROPPED = 384


# What each key may be, for refusals.
_RULES = {
    "mode": f"one of {', '.join(_MODES)}",
    "size": "a height and a width, the one edge of shortest_edge, or nothing beside buckets; each from 1 to 8192",
    "filter": f"one of {', '.join(_FILTERS.values())}",
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


def _is_number(value: Any) -> bool:
    return (_is_whole(value) or isinstance(value, float)) and abs(value) <= _MOST_NUMBER


def _is_divisor(value: Any) -> bool:
    return _is_number(value) and abs(value) >= _LEAST_NUMBER


def _is_level(level: Any) -> bool:
    return _is_whole(level) and 0 <= level <= 255


def _is_size(size: Any) -> bool:
    return _is_whole(size) and 0 < size <= 8192


def _are_sizes(sizes: Sequence[Any]) -> bool:
    return all(map(_is_size, sizes))


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
            raise ValueError(_tell_wrong({"mode": self.mode}, _RULES))
        has_size = (
            len(self.size) == (0 if self.buckets else _MODES[self.mode])
            and _are_sizes(self.size)
            and (self.mode != "edges" or self.size[0] <= self.size[1])
        )
        checks = {
            "size": has_size,
            "filter": self.filter in _FILTERS.values(),
            "crop": self.crop is None
            or (self.mode in ("exact", "shortest_edge") and len(self.crop) == 2 and _are_sizes(self.crop)),
            "rounding": self.rounding in ("down", "even"),
            "fill": _is_level(self.fill),
            "background": self.background is None or _is_level(self.background),
            "scale": _is_divisor(self.scale) and self.scale > 0,
            "mean": len(self.mean) == 3 and all(map(_is_number, self.mean)),
            "std": len(self.std) == 3 and all(map(_is_divisor, self.std)),
            "channels": self.channels in ("rgb", "bgr"),
            # These two are held against the size.
            "pad": self.pad is None or not has_size or self._is_padded_well(self.pad),
            "multiple_of": not has_size or self._is_cut_well(),
            "buckets": self.buckets is None or self._has_good_buckets(self.buckets),
        }
        if wrong := {name: getattr(self, name) for name, is_right in checks.items() if not is_right}:
            raise ValueError(_tell_wrong(wrong, _RULES))
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
        rounding = get_size_with_aspect_ratio
        if self.multiple_of > 1:
            rounding = partial(get_size_with_aspect_ratio_yolos, mod_size=self.multiple_of)
        height, width = rounding((image.height, image.width), *self.size)
        return height, width

    def _find_middle(self, rest: int) -> int:
        if self.mode == "letterbox":
            return -(-rest // 2)
        return rest // 2 if self.rounding == "down" else round(rest / 2)


def _tell_wrong(values: Mapping[str, Any], rules: Mapping[str, str]) -> str:
    """Return what these keys have in place of what they may have."""
    return "; ".join(
        f"{name} {shorten(json.dumps(value), 60)} in place of {rules[name]}" for name, value in values.items()
    )


def _refuse_unknown(keys: Iterable[str], known: Sequence[str]) -> None:
    """Refuse the keys that are not known, each with the one that was probably meant.

    Raises:
        ValueError: There are some.
    """
    told = []
    for key in sorted(set(keys) - set(known)):
        near = difflib.get_close_matches(key.lower(), known, n=1)
        told.append(f"the unknown key {shorten(key, 60)}" + (f", to which {near[0]} is the nearest" if near else ""))
    if told:
        raise ValueError("; ".join(told))


# How Python tells a value of a wrong type, which nobody reads who wrote a file of settings.
_INTERNALS = (
    "NoneType",
    "__",
    "object",
    "invalid literal",
    "could not convert",
    "argument",
    "'<",
    "codec",
    "class ",
    "sys.",
)


def tell_foreign(exc: Exception) -> str:
    """Return what another library says of settings: its sentence, where it has one that is not about its own code."""
    said = str(exc).splitlines()[0].rstrip(".") if str(exc) else ""
    is_sentence = isinstance(exc, (OSError, ValueError, ImportError)) and " " in said
    return said if is_sentence and not any(part in said for part in _INTERNALS) else "settings that it cannot use"


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
        mean=_IMAGENET_MEAN,
        std=_IMAGENET_STD,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A recipe, and whose it is.

    Attributes:
        recipe: What the server goes by.
        origin: Where it was found, in words.
        reference: The truth: what the graph is given of an upright picture in RGB.
    """

    recipe: Recipe
    origin: str
    reference: Callable[[Image.Image], Pixels]

    def read(self, content: bytes) -> Pixels:
        """Return what the graph is given of an encoded picture."""
        return self.reference(load_image(Image.open(io.BytesIO(content))))

    def find_geometry(self, content: bytes) -> Geometry:
        """Return where these pixels lie in the upright picture."""
        return self.recipe.find_geometry(load_image(Image.open(io.BytesIO(content))))

    def find_mask(self, content: bytes) -> npt.NDArray[np.bool_]:
        """Return which of these pixels are the picture's, [height, width]."""
        return self.recipe.find_mask(load_image(Image.open(io.BytesIO(content))))

    def require_one_size(self) -> None:
        """Refuse a recipe that gives pictures of every shape to a graph that takes one.

        Raises:
            ModelError: It does.
        """
        if self.recipe.keeps_shape:
            raise ModelError(
                f"{self.origin} keeps the shape of pictures, and the graph takes one",
                expected="a recipe of one size",
                got=self.recipe.described_sizes,
                remedy='pass --preprocess FILE, such as {"mode": "exact", "size": [512, 864]} with the mean and '
                "deviation of the processor",
            )

    def check(self, contents: Sequence[bytes]) -> None:
        """Refuse a recipe that does not say what the reference does, tried on these pictures.

        Raises:
            ModelError: They differ by more than a level of 255.
        """
        spread = self.recipe.scale / min(map(abs, self.recipe.std))
        for content in contents:
            image = load_image(Image.open(io.BytesIO(content)))
            have = self.recipe.prepare(image)
            try:
                want = self.reference(image)
            # Whatever transformers' processors meet in settings that they did not write.
            except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError) as exc:
                raise ModelError(
                    f"{self.origin} makes nothing of a picture of {image.width} x {image.height}",
                    expected=f"{list(have.shape)}",
                    got=tell_foreign(exc),
                    remedy=f"correct {PROCESSOR_FILE}, or pass a recipe with --preprocess",
                ) from exc
            worst = np.abs(want - have).max() / spread if want.shape == have.shape else np.inf
            if not worst <= MAX_LEVELS + 1e-3:
                raise ModelError(
                    f"what {self.origin} does to a picture of {image.width} x {image.height} is not done by the server",
                    expected=f"{list(have.shape)} within {MAX_LEVELS:g} level of 255",
                    got=f"{list(want.shape)}" if want.shape != have.shape else f"{worst:.0f} levels",
                    remedy="pass a recipe with --preprocess",
                )


def find_preparation(
    directory: Path, chosen: str | None, tensors_task: str | None = None, *, may_keep_shape: bool = False
) -> Preparation:
    """Return what is done to pictures: what `--preprocess` asks for, else what the checkpoint records.

    Args:
        directory: The checkpoint's folder.
        chosen: A name in `RECIPES`, or a file: a recipe of ours, the arguments of torchvision's preset, or a
            `preprocessor_config.json`.
        tensors_task: What the checkpoint can be served as without a recipe, if anything.
        may_keep_shape: Whether the graph takes pictures of every shape.

    Raises:
        SettingsError: The file cannot be used.
        ModelError: There is no recipe, or none that the server can follow.
    """
    if chosen is not None:
        preparation = read_preparation(chosen)
        if preparation.recipe.buckets:
            raise ModelError(
                f"{chosen} makes pictures of several sizes",
                expected="one, which the checkpoint's configuration was trained to",
                got=" and ".join(f"{height} x {width}" for height, width in preparation.recipe.buckets),
                remedy="give it a size in place of buckets, or build the network with --factory",
            )
    elif (directory / PROCESSOR_FILE).is_file():
        preparation = _read_processor(directory)
    else:
        raise ModelError(
            f"nothing says what is done to pictures before the model of {directory} sees them",
            expected=f"a {PROCESSOR_FILE} beside the weights",
            got="none",
            remedy=f"pass --preprocess {' or '.join((*RECIPES, 'FILE'))}"
            + (f", or --task {tensors_task}" if tensors_task else ""),
        )
    if not may_keep_shape:
        preparation.require_one_size()
    return preparation


def read_preparation(chosen: str) -> Preparation:
    """Return what `--preprocess` asks for, as `find_preparation` takes it.

    Raises:
        SettingsError: The file cannot be used.
        ModelError: The server cannot follow it.
    """
    if chosen in RECIPES:
        return _stand_alone(RECIPES[chosen], f"the recipe {chosen}")
    path = Path(chosen)
    try:
        content = _read_object(path)
        if path.name == PROCESSOR_FILE:
            return _read_processor(path.parent)
        is_torchvision = not content.keys() - _TORCHVISION.keys() or (
            "mode" not in content and content.keys() & _TORCHVISION.keys() - _RULES.keys()
        )
        return _stand_alone(_read_torchvision(content) if is_torchvision else _read_recipe(content), chosen)
    except ValueError as exc:
        raise SettingsError(
            f"{chosen} is not a recipe for pictures",
            expected=f"one of {', '.join(RECIPES)}, a {PROCESSOR_FILE}, or JSON with "
            + ", ".join(Recipe.__dataclass_fields__),
            got=str(exc).rstrip("."),
            remedy="correct --preprocess",
        ) from exc


def _read_object(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ValueError: It cannot be read, or holds another thing; says in words what.
    """
    try:
        # A number of any length is one that can be compared.
        content = parse_json(read_small(path, max_bytes=_MAX_RECIPE_BYTES), parse_int=_parse_whole)
    except CheckpointError as exc:
        raise ValueError(f"a path that is not read ({str(exc).rstrip('.')})") from exc
    except UnicodeDecodeError as exc:
        raise ValueError("bytes that are not UTF-8") from exc
    except json.JSONDecodeError as exc:
        raise ValueError(f"text that is not JSON from line {exc.lineno}, column {exc.colno} on") from exc
    if not isinstance(content, dict):
        raise ValueError(f"{shorten(json.dumps(content), 60)} in place of an object")
    return content


def _parse_whole(digits: str) -> int | float:
    return int(digits) if len(digits) < 20 else float(digits)


def _stand_alone(recipe: Recipe, origin: str) -> Preparation:
    return Preparation(recipe=recipe, origin=origin, reference=recipe.prepare)


def _read_recipe(content: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a file with its keys."""
    _refuse_unknown(content, tuple(_RULES))
    if "mode" not in content:
        raise ValueError("no mode")
    lists = {"size", "mean", "std"} & content.keys()
    lists |= {name for name in ("crop", "pad", "buckets") if content.get(name) is not None}
    if wrong := {name: content[name] for name in sorted(lists) if not isinstance(content[name], list)}:
        raise ValueError(_tell_wrong(wrong, _RULES))
    return Recipe(**{key: _to_tuple(value) for key, value in content.items()})


# What each argument of torchvision's preset may be: in words, and what tells it. `antialias` is always done.
_TORCHVISION: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "crop_size": ("a whole number from 1 to 8192", _is_size),
    "resize_size": ("a whole number from 1 to 8192", _is_size),
    "mean": (_RULES["mean"], lambda value: isinstance(value, list) and len(value) == 3 and all(map(_is_number, value))),
    "std": (_RULES["std"], lambda value: isinstance(value, list) and len(value) == 3 and all(map(_is_divisor, value))),
    "interpolation": (
        _RULES["filter"],
        lambda value: isinstance(value, str) and value.lower() in _FILTERS.values(),
    ),
    "antialias": ("true, for pictures are made smaller no other way", lambda value: value is True or value is None),
}


def _read_torchvision(given: Mapping[str, Any]) -> Recipe:
    """Return the recipe of the arguments of torchvision's preset for classification."""
    _refuse_unknown(given, tuple(_TORCHVISION))
    if wrong := {key: value for key, value in given.items() if not _TORCHVISION[key][1](value)}:
        raise ValueError(_tell_wrong(wrong, {key: rule for key, (rule, _) in _TORCHVISION.items()}))
    size, crop = given.get("resize_size", 256), given.get("crop_size", 224)
    if crop > size:
        raise ValueError(f"crop_size {crop} beyond resize_size {size}")
    return Recipe(
        mode="shortest_edge",
        size=(size,),
        crop=(crop, crop),
        rounding="even",
        filter=given.get("interpolation", "bilinear").lower(),
        mean=tuple(given.get("mean", _IMAGENET_MEAN)),
        std=tuple(given.get("std", _IMAGENET_STD)),
    )


def _read_processor(directory: Path) -> Preparation:
    path = directory / PROCESSOR_FILE
    try:
        # Pillow's, which is what the server resizes with.
        processor: Any = AutoImageProcessor.from_pretrained(directory, backend="pil", trust_remote_code=False)
        recipe = _read_attributes(processor)
    # Whatever transformers makes of a file that it did not write.
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, ImportError) as exc:
        raise ModelError(
            f"{path} asks for something that is not done in the server",
            expected="an image processor of transformers that resizes to one size",
            got=tell_foreign(exc),
            remedy=f"correct {PROCESSOR_FILE}, or pass a recipe with --preprocess",
        ) from exc

    def prepare(image: Image.Image) -> Pixels:
        # Alone: of several, transformers pads all to the largest, and an answer would depend on the neighbours.
        pixels: Pixels = processor(images=image, return_tensors="np")["pixel_values"][0]
        return pixels.astype(np.float32)

    origin = str(processor.to_dict()["image_processor_type"])
    return Preparation(recipe=_find_background(recipe, prepare), origin=origin, reference=prepare)


def _find_background(recipe: Recipe, prepare: Callable[[Image.Image], Pixels]) -> Recipe:
    """Return the recipe with white behind a transparent colour, where a processor that is tried on one puts it.

    Those that convert to RGB do; what they are given is RGB already, but remembers the colour.
    """
    black, clear = Image.new("RGB", (64, 64)), Image.new("RGB", (64, 64))
    clear.info["transparency"] = (0, 0, 0)
    try:
        is_shown = np.array_equal(prepare(black), prepare(clear))
    # `Preparation.check` tells it.
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError):
        return recipe
    return recipe if is_shown else replace(recipe, background=255)


def _read_attributes(processor: Any) -> Recipe:
    """Return the recipe of an image processor; `Preparation.check` finds out whether that is all it does."""
    size = {name: value for name, value in dict(processor.size).items() if value}
    if not processor.do_resize:
        raise ValueError("do_resize false")
    crop: tuple[int, int] | None = None
    pad: tuple[int, int] | None = None
    if "shortest_edge" in size and hasattr(processor, "crop_pct"):
        mode, edges, crop = _read_crop_pct(int(size["shortest_edge"]), processor.crop_pct)
    elif set(size) == {"shortest_edge"}:
        mode, edges = "shortest_edge", (int(size["shortest_edge"]),)
    elif set(size) == {"height", "width"}:
        mode, edges = "exact", (int(size["height"]), int(size["width"]))
    elif set(size) == {"shortest_edge", "longest_edge"}:
        mode, edges = "edges", (int(size["shortest_edge"]), int(size["longest_edge"]))
        room = getattr(processor, "do_pad", False) and getattr(processor, "pad_size", None)
        pad = (int(room["height"]), int(room["width"])) if room else None
    else:
        raise ValueError(f"size {size}")
    if getattr(processor, "do_center_crop", False):
        crop = (int(processor.crop_size["height"]), int(processor.crop_size["width"]))
    normalizes = processor.do_normalize
    return Recipe(
        mode=mode,
        size=edges,
        filter=_FILTERS[int(processor.resample)],
        crop=crop,
        pad=pad,
        multiple_of=_CUT.get(str(processor.to_dict()["image_processor_type"]), 1) if mode == "edges" else 1,
        channels="bgr" if getattr(processor, "do_flip_channel_order", False) else "rgb",
        scale=float(processor.rescale_factor) if processor.do_rescale else 1.0,
        mean=tuple(processor.image_mean) if normalizes else (0.0, 0.0, 0.0),
        std=tuple(processor.image_std) if normalizes else (1.0, 1.0, 1.0),
    )


def _read_crop_pct(edge: int, share: float) -> tuple[str, tuple[int, ...], tuple[int, int] | None]:
    """Return mode, size and crop as ConvNeXt's processor means them."""
    if edge >= _CONVNEXT_UNCROPPED:
        return "exact", (edge, edge), None
    return "shortest_edge", (int(edge / share),), (edge, edge)


def _to_tuple(value: Any) -> Any:
    return tuple(map(_to_tuple, value)) if isinstance(value, list) else value
