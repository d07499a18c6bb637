"""Pictures that every export of a model of pictures is checked on: encoded files of each kind, small to large."""

import io
from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image

# Pictures whose expected answers are kept, one of each kind; the others are only tried.
_OTHERS = 20

# EXIF's tag of the orientation, and a quarter turn.
_ORIENTATION, _TURNED = 0x0112, 6


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
