"""Answers drawn onto the picture that they are about: the one thing for which the client needs Pillow."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..display import decode
from ..errors import ClientError

Arrays = Mapping[str, npt.NDArray[Any]]

# Told apart by those who see few colours as well (Okabe and Ito, Color Universal Design).
_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")


def import_drawing() -> Callable[[Path, Arrays, Path], None]:
    """Return what draws the answers of one picture: its file, output name → values without the batch, the new file.

    Raises:
        ClientError: Pillow is not installed; what is returned raises it for answers of which nothing can be drawn, and
            for a file that cannot be written.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as exc:
        raise ClientError(
            "--output cannot draw", expected="Pillow", got="none for this Python", remedy="pip install pillow"
        ) from exc

    def draw(source: Path, answers: Arrays, path: Path) -> None:
        draw_answers = next((_DRAWN[name] for name in _DRAWN if name in answers), None)
        if draw_answers is None:
            raise ClientError(
                f"--output {path} cannot be drawn",
                expected=f"answers with {', '.join(_DRAWN)}",
                got=", ".join(answers),
                remedy="leave --output out, or ask with --json",
            )
        image: Any = ImageOps.exif_transpose(Image.open(source)).convert("RGB")
        draw_answers(image, answers)
        try:
            image.save(path)
        except (OSError, ValueError) as exc:
            raise ClientError(
                f"{path} cannot be written", expected="a name such as annotated.png", got=f"'{exc}'"
            ) from exc

    return draw


def _draw_labels(image: Any, answers: Arrays) -> None:
    """Write the labels into the upper left corner."""
    canvas, font, size = _prepare(image)
    values = zip(answers["LABEL"], answers["SCORE"], strict=True)
    text = "\n".join(f"{score:.3f} {decode(label)}" for label, score in values)
    place = (size // 2, size // 2)
    canvas.rectangle(canvas.multiline_textbbox(place, text, font=font), fill="black")
    canvas.multiline_text(place, text, fill="white", font=font)


def _draw_boxes(image: Any, answers: Arrays) -> None:
    """Draw each box in the colour of its label, the likeliest on top, and write into it what it is."""
    canvas, font, size = _prepare(image)
    count = int(answers["COUNT"][0])
    labels = [decode(label) for label in answers["LABEL"][:count]]
    colours = {label: _COLOURS[index % len(_COLOURS)] for index, label in enumerate(dict.fromkeys(labels))}
    for label, score, box in reversed([*zip(labels, answers["SCORE"], answers["BOX"].tolist(), strict=False)]):
        # Networks answer with boxes that reach beyond the picture, or lie there.
        if box[2] <= 0 or box[3] <= 0 or box[0] >= image.width or box[1] >= image.height:
            continue
        colour = colours[label]
        left, top = max(box[0], 0), max(box[1], 0)
        right, bottom = max(left, min(box[2], image.width - 1)), max(top, min(box[3], image.height - 1))
        canvas.rectangle((left, top, right, bottom), outline=colour, width=max(2, size // 8))
        text = f"{label} {score:.2f}"
        place = _move_inside(image, (left, top), canvas.textbbox((left, top), text, font=font))
        canvas.rectangle(canvas.textbbox(place, text, font=font), fill=colour)
        canvas.text(place, text, fill="black", font=font)


def _draw_keypoints(image: Any, answers: Arrays) -> None:
    """Mark each place in the picture, one colour after another, and write beside it what it is."""
    canvas, font, size = _prepare(image)
    radius = max(2, size // 6)
    for index, (label, (x, y)) in enumerate(zip(answers["LABEL"], answers["KEYPOINT"].tolist(), strict=True)):
        if not (0 <= x <= image.width and 0 <= y <= image.height):
            continue
        colour = _COLOURS[index % len(_COLOURS)]
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        text, how = decode(label), {"font": font, "anchor": "lm", "stroke_width": 1}
        place = (x + 2 * radius, y)
        if canvas.textbbox(place, text, **how)[2] > image.width:
            # Left of the place, so that it stays to be seen.
            place, how["anchor"] = (x - 2 * radius, y), "rm"
        place = _move_inside(image, place, canvas.textbbox(place, text, **how))
        canvas.text(place, text, fill=colour, stroke_fill="black", **how)


def _draw_map(image: Any, answers: Arrays) -> None:
    """Lay the map over the picture in its own colours, and list the labels in theirs."""
    from PIL import Image

    shown: Any = Image.open(io.BytesIO(answers["MAP"][0]))
    if shown.mode != "P":
        # Of 16 bits: more labels than a palette has colours, of which a few are in one picture.
        shown = Image.fromarray(np.asarray(shown).astype(np.uint8), "P")
    palette = shown.getpalette() or [level for grey in range(256) for level in (grey, grey, grey)]
    shown.putpalette(palette)
    image.paste(Image.blend(image, shown.convert("RGB"), 0.6))
    canvas, font, size = _prepare(image)
    top = size // 2
    count = int(answers["COUNT"][0])
    for label, number, share in zip(answers["LABEL"][:count], answers["ID"], answers["SHARE"], strict=False):
        text, place = f"{share:.0%} {decode(label)}", (2 * size, top)
        canvas.rectangle(canvas.textbbox(place, text, font=font), fill="black")
        canvas.text(place, text, fill="white", font=font)
        first = 3 * (int(number) % 256)
        canvas.rectangle((size // 2, top, size * 3 // 2, top + size), fill=tuple(palette[first : first + 3]))
        top += size * 3 // 2
        if top > image.height - size:
            break


# What is drawn of answers that have several: the first of these.
_DRAWN: dict[str, Callable[[Any, Arrays], None]] = {
    "MAP": _draw_map,
    "BOX": _draw_boxes,
    "KEYPOINT": _draw_keypoints,
    "LABEL": _draw_labels,
}


def _move_inside(image: Any, place: tuple[float, float], box: Sequence[float]) -> tuple[float, float]:
    """Return where a text is to stand that covers `box` at `place`: all of it in the picture, or at least its start."""
    right, down = min(0, image.width - box[2]), min(0, image.height - box[3])
    return place[0] + max(right, -box[0]), place[1] + max(down, -box[1])


def _prepare(image: Any) -> tuple[Any, Any, int]:
    """Return what draws on a picture, and a font with its size in pixels."""
    from PIL import ImageDraw, ImageFont

    size = max(12, min(image.size) // 24)
    return ImageDraw.Draw(image), ImageFont.load_default(size), size
