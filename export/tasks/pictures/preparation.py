"""How the pictures of a model are prepared: by a file, or as the checkpoint records it, beside a reference.

The reference is transformers' own image processor wherever one is named; a recipe that makes other pixels is refused.
"""

import difflib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from ...checkpoints.storage.paths import has_file, parse_json, read_small, refuse_spoiled_texts
from ...errors import CheckpointError, ModelError, SettingsError, shorten
from ..processor_file import PROCESSOR_FILE, tell_foreign
from .recipe import (
    FILTERS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    RECIPES,
    RULES,
    Geometry,
    Pixels,
    Recipe,
    is_divisor,
    is_number,
    is_size,
    tell_wrong,
)

# How far the server's pixels may be from the reference, in levels of 255 before they are normalised.
MAX_LEVELS = 1.0

# Recipes have hundreds of bytes.
_MAX_RECIPE_BYTES = 1_000_000

# Processors that keep the shape of pictures and cut their edges down to multiples.
_CUT = {"YolosImageProcessor": 16}

# transformers, image_processing_pil_convnext.py: from this size on the picture is not cropped.
_CONVNEXT_UNCROPPED = 384


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
        return self.reference(_decode(content))

    def find_geometry(self, content: bytes) -> Geometry:
        """Return where these pixels lie in the upright picture."""
        return self.recipe.find_geometry(_decode(content))

    def find_mask(self, content: bytes) -> npt.NDArray[np.bool_]:
        """Return which of these pixels are the picture's, [height, width]."""
        return self.recipe.find_mask(_decode(content))

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
            image = _decode(content)
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
    elif has_file(directory / PROCESSOR_FILE):
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
            "mode" not in content and content.keys() & _TORCHVISION.keys() - RULES.keys()
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


def refuse_unknown(keys: Iterable[str], known: Sequence[str]) -> None:
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
    refuse_unknown(content, tuple(RULES))
    if "mode" not in content:
        raise ValueError("no mode")
    lists = {"size", "mean", "std"} & content.keys()
    lists |= {name for name in ("crop", "pad", "buckets") if content.get(name) is not None}
    if wrong := {name: content[name] for name in sorted(lists) if not isinstance(content[name], list)}:
        raise ValueError(tell_wrong(wrong, RULES))
    return Recipe(**{key: _to_tuple(value) for key, value in content.items()})


# What each argument of torchvision's preset may be: in words, and what tells it. `antialias` is always done.
_TORCHVISION: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "crop_size": ("a whole number from 1 to 8192", is_size),
    "resize_size": ("a whole number from 1 to 8192", is_size),
    "mean": (RULES["mean"], lambda value: isinstance(value, list) and len(value) == 3 and all(map(is_number, value))),
    "std": (RULES["std"], lambda value: isinstance(value, list) and len(value) == 3 and all(map(is_divisor, value))),
    "interpolation": (
        RULES["filter"],
        lambda value: isinstance(value, str) and value.lower() in FILTERS.values(),
    ),
    "antialias": ("true, for pictures are made smaller no other way", lambda value: value is True or value is None),
}


def _read_torchvision(given: Mapping[str, Any]) -> Recipe:
    """Return the recipe of the arguments of torchvision's preset for classification."""
    refuse_unknown(given, tuple(_TORCHVISION))
    if wrong := {key: value for key, value in given.items() if not _TORCHVISION[key][1](value)}:
        raise ValueError(tell_wrong(wrong, {key: rule for key, (rule, _) in _TORCHVISION.items()}))
    size, crop = given.get("resize_size", 256), given.get("crop_size", 224)
    if crop > size:
        raise ValueError(f"crop_size {crop} beyond resize_size {size}")
    return Recipe(
        mode="shortest_edge",
        size=(size,),
        crop=(crop, crop),
        rounding="even",
        filter=given.get("interpolation", "bilinear").lower(),
        mean=tuple(given.get("mean", IMAGENET_MEAN)),
        std=tuple(given.get("std", IMAGENET_STD)),
    )


def _decode(content: bytes) -> Image.Image:
    """Return an encoded picture as transformers has it: upright, in RGB."""
    # It imports torch, and a recipe is refused before that.
    from transformers.image_utils import load_image

    picture: Image.Image = load_image(Image.open(io.BytesIO(content)))
    return picture


def _read_processor(directory: Path) -> Preparation:
    from transformers import AutoImageProcessor

    path = directory / PROCESSOR_FILE
    refuse_spoiled_texts(directory, [PROCESSOR_FILE])
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
        filter=FILTERS[int(processor.resample)],
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
