"""Files that are no pictures, or no whole ones, or far larger than they look; the same ones for the same seed."""

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image

_KINDS = {
    "JPEG": {},
    "PNG": {},
    "WEBP": {},
    "GIF": {},
    "TIFF": {"compression": "tiff_lzw"},
}


def list_hostile(count: int, seed: int = 0) -> Iterator[tuple[str, bytes, bool]]:
    """Yield what each file is, the file, and whether it must be refused; of others a part may still be a picture."""
    dice = random.Random(seed)
    picture = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (60, 80, 3), dtype=np.uint8))
    whole = {kind: _encode(picture, kind, **options) for kind, options in _KINDS.items()}
    sorts = (*_MADE, *_SPOILED)
    for number in range(count):
        sort = sorts[number % len(sorts)]
        if sort in _MADE:
            yield sort, _MADE[sort](), True
            continue
        kind = dice.choice(list(whole))
        yield f"{sort} {kind}", _SPOILED[sort](whole[kind], dice), sort == "half a"


def _encode(picture: Image.Image, kind: str, **options: str) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, pixels: bytes, more: bytes = b"") -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + more + _chunk(b"IDAT", zlib.compress(pixels, 9)) + _chunk(b"IEND", b"")


# Whatever these are sent for, none is a picture that may be answered.
_MADE: dict[str, Callable[[], bytes]] = {
    "nothing": bytes,
    "one byte": lambda: b"\0",
    "a page": lambda: b"%PDF-1.7 and more of it",
    "a drawing": lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "a beginning": lambda: b"\xff\xd8\xff",
    "a program": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n(x) run",
    "no pixels": lambda: _png(0, 5, b""),
    "more pixels than are taken": lambda: _png(7100, 7100, bytes(100)),
    "four billion pixels": lambda: _png(65535, 65535, bytes(100)),
    "one line of two billion": lambda: _png(2**31 - 1, 1, bytes(100)),
    "fewer pixels than it says": lambda: _png(600, 600, bytes(100)),
    "a note that unfolds to 100 MB": lambda: _png(
        10, 10, bytes(310), _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(100 << 20), 9))
    ),
    "another kind": lambda: _encode(Image.new("RGB", (9, 9)), "BMP"),
    "fractions": lambda: _encode(Image.new("F", (9, 9)), "TIFF"),
}


def _cut(content: bytes, dice: random.Random) -> bytes:
    return content[: dice.randrange(10, len(content) // 2)]


def _flip(content: bytes, dice: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.choice((1, 4, 30, 200))):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def _spoil_head(content: bytes, dice: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.choice((1, 3, 8))):
        changed[dice.randrange(60)] = dice.randrange(256)
    return bytes(changed)


def _append(content: bytes, dice: random.Random) -> bytes:
    return content + dice.randbytes(1000)


_SPOILED: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "half a": _cut,
    "flipped bytes in a": _flip,
    "a head spoiled of a": _spoil_head,
    "bytes behind a": _append,
}


def build_odd_tiff(tag: int) -> bytes:
    """Return a red TIFF of 20 x 10 whose entry of that tag says that it has 5,000 values, which lie behind the end."""
    content = _encode(Image.new("RGB", (20, 10), "red"), "TIFF")
    (start,) = struct.unpack("<I", content[4:8])
    (entries,) = struct.unpack("<H", content[start : start + 2])
    places = range(start + 2, start + 2 + 12 * entries, 12)
    (place,) = (at for at in places if content[at : at + 2] == struct.pack("<H", tag))
    return content[: place + 4] + struct.pack("<I", 5000) + content[place + 8 :]
