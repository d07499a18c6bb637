"""Pictures that an export of a model of pictures is checked on: drawn ones of each kind, or the user's own."""

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from ...errors import SettingsError

# Pictures whose expected answers are kept, one of each kind; the others are only tried.
_OTHERS = 20

# Of what is taken from a folder of the user's own.
_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".tif", ".tiff"}

# EXIF's tag of the orientation, and a quarter turn.
_ORIENTATION, _TURNED = 0x0112, 6


def list_pictures(given: Sequence[Path]) -> list[Path]:
    """Return files as they are, and the files in folders that are called as pictures are, by name."""
    found: list[Path] = []
    for path in given:
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        found += [file for file in inside if path == file or file.suffix.lower() in _SUFFIXES]
    return found


def read_pictures(given: Sequence[Path], most: int) -> list[bytes]:
    """Return encoded pictures of the user's own, of more than `most` so many that lie evenly among them.

    Raises:
        SettingsError: There are none, or one of them is not a picture.
    """
    paths = _list_or_refuse(given)
    step = max(1.0, len(paths) / most)
    return [_read(paths[int(index * step)]) for index in range(min(most, len(paths)))]


def describe_pictures(given: Sequence[Path] | None, count: int) -> str:
    """Return what is told of the pictures that a model is tried on; nothing of drawn ones."""
    return "" if given is None else f", tried on {count} of {len(list_pictures(given))} given"


def _list_or_refuse(given: Sequence[Path]) -> list[Path]:
    try:
        paths = list_pictures(given)
    except OSError as exc:
        raise SettingsError(
            "--pictures cannot be read", expected="files and folders", got=f"'{exc}'", remedy="correct it"
        ) from exc
    if not paths:
        raise SettingsError(
            f"{', '.join(map(str, given))} holds no pictures",
            expected=f"files called {', '.join(sorted(_SUFFIXES))}",
            got="none",
            remedy="correct --pictures",
        )
    return paths


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            image.load()
    # Whatever Pillow makes of a file that is not one of its own.
    except Exception as exc:
        raise SettingsError(
            f"{path} cannot be read", expected="a whole picture", got=f"'{exc}'", remedy="leave it out of --pictures"
        ) from exc
    return content


@cache
def build_pictures() -> Sequence[bytes]:
    """Return encoded pictures of every format and kind of colour, one turned, larger and smaller than models take."""
    turned = Image.Exif()
    turned[_ORIENTATION] = _TURNED
    return (
        _encode(draw_picture(0, 320, 240), "JPEG", quality=90),
        _encode(draw_picture(1, 181, 260), "PNG"),
        _encode(draw_picture(2, 300, 200), "JPEG", quality=80, exif=turned),
        _encode(draw_picture(3, 61, 40), "PNG"),
        _encode(draw_picture(4, 160, 120).convert("L"), "PNG"),
        _encode(draw_picture(5, 150, 150).quantize(64), "GIF"),
        _encode(draw_picture(6, 200, 133), "WEBP", lossless=True),
        _encode(draw_picture(7, 240, 180).convert("CMYK"), "JPEG"),
        _encode(_with_alpha(draw_picture(8, 90, 120)), "PNG"),
        _encode(draw_picture(9, 130, 97), "TIFF", compression="tiff_lzw"),
        _encode(draw_picture(10, 400, 60), "JPEG"),
        _encode(draw_picture(11, 7, 5), "PNG"),
        *(_encode(draw_picture(seed, 100 + 9 * seed, 340 - 7 * seed), "JPEG") for seed in range(12, 12 + _OTHERS)),
    )


def count_golden() -> int:
    """Return how many of them, from the first, are asked of a running server."""
    return len(build_pictures()) - _OTHERS


def draw_picture(seed: int, width: int, height: int) -> Image.Image:
    """Return a picture in RGB: a few smooth waves, and rectangles with sharp edges, whose like photographs have."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    levels = np.zeros((height, width, 3))
    for _ in range(4):
        frequency_x, frequency_y, phase = random.uniform(1, 9), random.uniform(1, 9), random.uniform(0, 6.3, 3)
        levels += 0.25 * np.sin(frequency_x * x[..., None] + frequency_y * y[..., None] + phase)
    for _ in range(6):
        top, left = int(random.integers(0, height)), int(random.integers(0, width))
        tall, wide = 1 + int(random.integers(0, height)) // 2, 1 + int(random.integers(0, width)) // 2
        levels[top : top + tall, left : left + wide] = random.uniform(-1, 1, 3)
    return Image.fromarray(np.clip(127.5 + 127.5 * levels, 0, 255).astype(np.uint8))


def _with_alpha(image: Image.Image) -> Image.Image:
    alpha = Image.linear_gradient("L").resize(image.size)
    image.putalpha(alpha)
    return image


def _encode(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
