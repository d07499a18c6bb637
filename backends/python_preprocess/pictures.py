"""From encoded pictures to pixels: decoding, resizing, cropping and scaling, without a word about Triton.

Every step is Pillow's, which transformers' own image processors are written on, so that pixels are theirs to the bit.
"""

import ctypes
import io
import json
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile
from sent_file import FileError, SentFile

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]

# What is decoded; Pillow knows many more, and the readers of some are hardly ever fed anything hostile.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF")

# How files of some of them begin. Of one that begins so and is not read, the head is what is wrong.
_BEGINNINGS = {b"\xff\xd8\xff": "JPEG", b"\x89PNG": "PNG", b"GIF8": "GIF", b"II*\0": "TIFF", b"MM\0*": "TIFF"}

# Of 32 bits a channel, whole numbers and fractions: neither says how bright the brightest is.
_UNBOUNDED_MODES = ("I", "F")

# A file, and what it unfolds to: 3 bytes a pixel while it is decoded, in as many threads as there are. Both are looked
# at before anything is decoded.
MAX_PICTURE_BYTES = 32 << 20
MAX_PIXELS = 50_000_000

# As many as a JPEG can have on one side. A line of 50 million takes a gigabyte of what belongs to its rows.
MAX_EDGE = 65_535

# Pixels of a picture whose memory is given back at once: glibc would keep several hundred MB for the next of its size.
_LARGE_PIXELS = 8_000_000
_give_back = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)

# More threads than this hold more decoded pictures at once than they gain time.
_MAX_THREADS = 8

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}
TENSORS = ("pixel_values", "pixel_mask", "geometry")

# Ours is the only limit, and it is looked at first; Pillow's own would warn below it.
Image.MAX_IMAGE_PIXELS = None

# What Pillow finds odd in a client's file does not belong in the operator's log at each picture: the file is decoded or
# refused in a sentence to its sender. Once for all threads, since a filter belongs to the process.
warnings.filterwarnings("ignore", module=r"PIL\.")


@dataclass(frozen=True)
class MadePicture:
    """What a picture became.

    Attributes:
        pixels: [3, height, width], fp32.
        geometry: [6], fp32: x and y scale, x and y offset, width and height of the upright picture; a place in the
            picture is the place in the pixels times the scale, plus the offset, both counted from the upper left corner
            in widths of a pixel.
        pixel_mask: [height, width], whether a pixel is the picture's; the others are padding.
        sent: What it was made of.
    """

    pixels: Float32Array
    geometry: Float32Array
    pixel_mask: npt.NDArray[np.bool_]
    sent: SentFile


@dataclass(frozen=True)
class Plan:
    """How one picture becomes pixels.

    Attributes:
        size: Width and height that it is resized to.
        box: Left, top, right and bottom of what is then kept; what lies outside of the picture is filled.
    """

    size: tuple[int, int]
    box: tuple[int, int, int, int]


class PictureReader:
    """A `picture.json`, and the tensors that are wanted of it.

    Args:
        path: The `picture.json`.
        tensor_names: Names of the tensors to make, the pixels first.
        max_threads: Pictures that are decoded at once, at most.

    Raises:
        ValueError: The file asks for something that is not there, or a tensor is wanted that is not made of pictures.
    """

    def __init__(self, path: Path, tensor_names: Sequence[str], *, max_threads: int = _MAX_THREADS) -> None:
        recipe = {"buckets": None, "multiple_of": 1, "background": None} | json.loads(path.read_text(encoding="utf-8"))
        if recipe["mode"] not in MODES or recipe["filter"] not in FILTERS or recipe["channels"] not in CHANNELS:
            raise ValueError(
                f"{path} asks for {recipe['mode']}, {recipe['filter']} and {recipe['channels']}: expected one of "
                f"{', '.join(MODES)}; one of {', '.join(FILTERS)}; one of {', '.join(CHANNELS)}"
            )
        self._tensor_names = list(tensor_names)
        if unknown := sorted(set(tensor_names[1:]) - set(TENSORS[1:])):
            raise ValueError(f"no picture makes {', '.join(unknown)}: expected {', '.join(TENSORS)}")
        self._plan = MODES[recipe["mode"]]
        self._recipe = recipe
        # Width and height of pictures that between them become everything that there is.
        self.samples = [(width, height) for height, width in recipe["buckets"] or [(64, 64)]]
        self._filter = FILTERS[recipe["filter"]]
        self._order = CHANNELS[recipe["channels"]]
        # In the order of transformers' own arithmetic, so that the last bit is the same.
        levels = (np.arange(256, dtype=np.float64) * recipe["scale"]).astype(np.float32)
        mean, std = np.array([recipe["mean"], recipe["std"]], dtype=np.float32)
        self._table = ((levels[:, None] - mean) / std).T.copy()  # [3, 256]
        threads = min(len(os.sched_getaffinity(0)), max_threads, _MAX_THREADS)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="pictures")

    def encode(self, rows: "Sequence[SentFile]") -> "list[MadePicture | FileError]":
        """Return what each picture became, or why it became nothing; all at once, in several threads."""
        made = list(self._pool.map(self._try, rows))
        if any(isinstance(row, MadePicture) and row.geometry[4] * row.geometry[5] > _LARGE_PIXELS for row in made):
            _give_back(0)
        return made

    def stack(self, rows: "Sequence[MadePicture]") -> "dict[str, Float32Array]":
        """Return the wanted tensors of one request: pixels [rows, 3, height, width], pixel_mask, geometry.

        Raises:
            FileError: A picture went into another bucket than the first, and a tensor has one height and one width.
        """
        for row in rows:
            if row.pixels.shape != rows[0].pixels.shape:
                (_, height, width), (_, first_height, first_width) = row.pixels.shape, rows[0].pixels.shape
                raise row.sent.refuse(
                    f"is of another shape than row {rows[0].sent.row}: expected one that becomes {first_height} x "
                    f"{first_width}, got one that becomes {height} x {width}; send it in a request of its own"
                )
        pixels, *others = self._tensor_names
        made = {pixels: np.stack([row.pixels for row in rows])}
        return made | {name: np.stack([getattr(row, name) for row in rows]) for name in others}

    def _try(self, sent: SentFile) -> "MadePicture | FileError":
        try:
            return self._make(sent)
        except FileError as exc:
            return exc

    def _make(self, sent: SentFile) -> MadePicture:
        image = decode_picture(sent, background=self._recipe["background"])
        recipe = choose_bucket(image.size, self._recipe)
        plan = self._plan(image.size, recipe)
        if plan.size[0] * plan.size[1] > MAX_PIXELS:
            raise sent.refuse(
                f"is too long and narrow: expected at most {MAX_PIXELS} pixels once it is resized, got "
                f"{plan.size[0]} x {plan.size[1]} of {image.width} x {image.height}; cut it"
            )
        if not all(plan.size):
            raise sent.refuse(
                f"is too long and narrow: expected {recipe['multiple_of']} pixels on each edge once it is "
                f"resized, got fewer of {image.width} x {image.height}; cut it"
            )
        small = image if plan.size == image.size else image.resize(plan.size, self._filter)
        left, top = plan.box[:2]
        if plan.box != (0, 0, *plan.size):
            small = crop(small, plan.box, recipe["fill"])
        # One look-up a value in place of three passes of arithmetic.
        levels = np.asarray(small)
        height, width = recipe.get("pad") or levels.shape[:2]
        # What is not the picture's stays 0.
        pixels = np.zeros((3, height, width), dtype=np.float32)
        inside = (slice(levels.shape[0]), slice(levels.shape[1]))
        for channel, source in enumerate(self._order):
            np.take(self._table[channel], levels[:, :, source], out=pixels[channel][inside], mode="clip")
        mask = np.zeros((height, width), dtype=bool)
        mask[inside] = True
        scale_x, scale_y = image.width / plan.size[0], image.height / plan.size[1]
        geometry = (scale_x, scale_y, left * scale_x, top * scale_y, image.width, image.height)
        return MadePicture(pixels, np.array(geometry, dtype=np.float32), mask, sent)


def decode_picture(sent: SentFile, *, background: "int | None" = None) -> Image.Image:
    """Return the upright picture in RGB, of 8 bits a channel.

    Alpha is dropped, as transformers does. Of 16 bits a channel the upper 8 are kept: Pillow would cut off whatever is
    brighter than 255 of 65535.

    Args:
        sent: The file.
        background: Level of what takes the place of a colour that the file calls transparent; None where it stays.

    Raises:
        FileError: It is too large, of another kind, or damaged.
    """
    if len(sent.content) > MAX_PICTURE_BYTES:
        raise sent.refuse(
            f"is too large: expected at most {MAX_PICTURE_BYTES} bytes, got {len(sent.content)}; send a smaller picture"
        )
    try:
        image: Image.Image = Image.open(io.BytesIO(sent.content), formats=FORMATS)
    except UnidentifiedImageError:
        raise refuse_unread(sent) from None
    # Whatever Pillow's readers meet in bytes that are anybody's: ValueError, struct.error, KeyError, RuntimeError, ...
    except Exception as exc:
        raise sent.refuse(f"is damaged: expected a whole picture, got '{_name(exc)}' in its head") from exc
    width, height = image.size
    if width * height > MAX_PIXELS or not width * height:
        raise sent.refuse(
            f"has too {'many' if width * height else 'few'} pixels: expected 1 to {MAX_PIXELS}, got {width} x {height}"
            f"; send another"
        )
    if max(width, height) > MAX_EDGE:
        raise sent.refuse(
            f"has too long an edge: expected at most {MAX_EDGE} pixels, got {width} x {height}; cut it into several"
        )
    if image.mode in _UNBOUNDED_MODES:
        raise sent.refuse(
            f"has 32 bits a channel: expected a {image.format} of 8 or 16, got one that does not say how bright the "
            f"brightest pixel is; save it with 8"
        )
    try:
        if isinstance(image, TiffImageFile):
            check_strips(image)
        image.load()
        upright = orient(image)
        coloured = upright if upright.mode == "RGB" else reduce_bits(upright).convert("RGB")
        return coloured if background is None else fill_clear(coloured, background)
    # As above.
    except Exception as exc:
        raise sent.refuse(f"is damaged: expected a whole {image.format}, got '{_name(exc)}'; send it again") from exc


def check_strips(image: TiffImageFile) -> None:
    """See that the data of a TIFF covers it: what is missing would be black without a word.

    Raises:
        ValueError: It does not. Others, where its head is damaged.
    """
    # Of TIFF 6.0: width and height; those of tiles, or the rows of a strip; where each begins; bytes of each. Pillow's
    # size is the upright picture's.
    tags = image.tag_v2
    width, height = tags[256], tags[257]
    is_tiled = 322 in tags
    across, down = (tags[322], tags[323]) if is_tiled else (width, min(tags.get(278, height), height))
    planes = tags.get(277, 1) if tags.get(284, 1) == 2 else 1
    wanted = -(-width // across) * -(-height // down) * planes
    found = len(tags[324 if is_tiled else 273])
    if found < wanted:
        raise ValueError(f"{found} of the {wanted} parts that make {width} x {height} pixels")
    bits = tags.get(258, (1,))
    least = height * -(-width * sum(bits) // 8)
    told = sum(tags.get(325 if is_tiled else 279, ())) or least
    if tags.get(259, 1) == 1 and told < least:
        raise ValueError(f"{told} of the {least} bytes that make {width} x {height} pixels")


def refuse_unread(sent: SentFile) -> FileError:
    """Return the error for a file that no reader takes for one of its own."""
    if not sent.content:
        return sent.refuse(f"is empty: expected a file of {', '.join(FORMATS)}, got no bytes")
    begins = sent.content[:8]
    for beginning, name in _BEGINNINGS.items():
        if sent.content.startswith(beginning):
            return sent.refuse(
                f"is damaged: expected a {name} of at least 1 x 1 pixels with a whole head, got one that begins with "
                f"{begins!r} and tells no such size; save it again"
            )
    return sent.refuse(
        f"is not a picture: expected a file of {', '.join(FORMATS)}, got one that begins with {begins!r}"
    )


def orient(image: Image.Image) -> Image.Image:
    """Return the picture as its EXIF orientation wants to be seen."""
    try:
        return ImageOps.exif_transpose(image)
    # Damaged notes beside good pixels say nothing of how they are to be seen.
    except Exception:
        return image


def reduce_bits(image: Image.Image) -> Image.Image:
    """Return a picture of 16 bits a channel in 8, any other as it is."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image


def fill_clear(image: Image.Image, level: int) -> Image.Image:
    """Return the picture with `level` in each channel where it has the one colour that its file calls transparent."""
    if image.info.get("transparency") is not None:
        image.paste((level,) * 3, mask=ImageOps.invert(image.convert("RGBA").getchannel("A")))
    return image


def crop(image: Image.Image, box: "tuple[int, int, int, int]", fill: int) -> Image.Image:
    """Return what lies in `box`, and `fill` in each channel for what lies outside of the picture."""
    left, top, right, bottom = box
    if left >= 0 and top >= 0 and right <= image.width and bottom <= image.height:
        return image.crop(box)
    filled = Image.new("RGB", (right - left, bottom - top), (fill,) * 3)
    filled.paste(image, (-left, -top))
    return filled


def choose_bucket(size: "tuple[int, int]", recipe: "dict[str, Any]") -> "dict[str, Any]":
    """Return the recipe with the height and width whose shape is most like that of a picture of `size`, width first."""
    if not recipe["buckets"]:
        return recipe

    def differ(bucket: "Sequence[int]") -> Fraction:
        # How many times wider or narrower: of logarithms the rounding would decide between 3:4 and 4:3.
        one, other = bucket[0] * size[0], bucket[1] * size[1]
        return Fraction(max(one, other), min(one, other))

    return recipe | {"size": min(recipe["buckets"], key=differ)}


def plan_exact(size: "tuple[int, int]", recipe: "dict[str, Any]") -> Plan:
    """Return the plan that gives a picture the recipe's size, whatever shape it has."""
    height, width = recipe["size"]
    return Plan((width, height), place((width, height), recipe))


def plan_shortest_edge(size: "tuple[int, int]", recipe: "dict[str, Any]") -> Plan:
    """Return the plan that makes the shorter edge as long as the recipe says, and keeps the shape."""
    (edge,) = recipe["size"]
    short, long = sorted(size)
    longer = int(edge * long / short)
    resized = (edge, longer) if size[0] <= size[1] else (longer, edge)
    return Plan(resized, place(resized, recipe))


def plan_letterbox(size: "tuple[int, int]", recipe: "dict[str, Any]") -> Plan:
    """Return the plan that fits a picture into the recipe's size, in the middle, and keeps the shape."""
    height, width = recipe["size"]
    scale = min(width / size[0], height / size[1])
    resized = (max(1, min(width, round(size[0] * scale))), max(1, min(height, round(size[1] * scale))))
    left, top = -((width - resized[0]) // 2), -((height - resized[1]) // 2)
    return Plan(resized, (left, top, left + width, top + height))


def plan_edges(size: "tuple[int, int]", recipe: "dict[str, Any]") -> Plan:
    """Return the plan that makes the shorter edge as long as the recipe says, unless the longer one were too long.

    Rounded as transformers does (image_transforms.py, `get_size_with_aspect_ratio`), and where edges are cut down to
    multiples as YOLOS does (image_processing_pil_yolos.py), which rounds a standing picture of the right edge as well.
    """
    step = recipe["multiple_of"]
    edge, longest = recipe["size"]
    short, long = sorted(size)
    exact: float = edge
    if long / short * edge > longest:
        exact = longest * float(short) / float(long)
        edge = round(exact)
    if short != edge or (step > 1 and size[0] < size[1]):
        longer = int(exact * long / short)
        size = (edge, longer) if size[0] < size[1] else (longer, edge)
    width, height = (max(1, length) // step * step for length in size)
    return Plan((width, height), (0, 0, width, height))


def place(size: "tuple[int, int]", recipe: "dict[str, Any]") -> "tuple[int, int, int, int]":
    """Return the box that is cut out of the middle of a picture of `size`, or all of it.

    Where the middle lies between two pixels, transformers takes the upper left one and torchvision the even one.
    """
    if recipe["crop"] is None:
        return (0, 0, *size)
    height, width = recipe["crop"]
    middle = ROUNDINGS[recipe["rounding"]]
    left, top = middle(size[0] - width), middle(size[1] - height)
    return (left, top, left + width, top + height)


# How half of an odd rest is rounded.
ROUNDINGS: "dict[str, Callable[[int], int]]" = {"down": lambda rest: rest // 2, "even": lambda rest: round(rest / 2)}
MODES = {
    "exact": plan_exact,
    "shortest_edge": plan_shortest_edge,
    "letterbox": plan_letterbox,
    "edges": plan_edges,
}
CHANNELS = {"rgb": (0, 1, 2), "bgr": (2, 1, 0)}


def _name(exc: Exception) -> str:
    lines = str(exc).splitlines()
    return (lines[0] if lines else type(exc).__name__).rstrip(".")[:120]
