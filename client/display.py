"""How the command line shows answers: a table for people, one JSON object for programs."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .model import Model


def count(number: int, noun: str) -> str:
    """Return a number of things, in words such as `1 text` and `2 texts`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def decode(text: bytes) -> str:
    """Return a text for showing, whatever its bytes are."""
    return text.decode("utf-8", errors="replace")


def to_json(model: Model, texts: list[str], pairs: list[str], answers: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """Return the answers with the texts that they belong to, as JSON knows values."""
    plain = {name: to_plain(array) for name, array in answers.items()}
    rows = [
        {"text": text}
        | ({"pair": pairs[index]} if pairs else {})
        | {name: values[index] for name, values in plain.items()}
        for index, text in enumerate(texts)
    ]
    return {"model": model.name, "version": model.version, "results": rows}


def to_plain(values: npt.NDArray[Any]) -> list[Any]:
    """Return an array as nested lists of numbers and texts; None for what is no number, or an infinite one."""
    return [to_plain(value) if isinstance(value, np.ndarray) else _to_value(value) for value in values]


def _to_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return decode(value)
    plain = value.item()
    # JSON has no infinity, and nothing for what is no number.
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def to_table(texts: list[str], answers: dict[str, npt.NDArray[Any]]) -> list[str]:
    """Return lines for a terminal: vectors by their similarity, everything else by text."""
    if list(answers) == ["EMBEDDING"]:
        return _to_similarity_table(texts, answers["EMBEDDING"])
    if not {*_HEADINGS}.intersection(answers):
        return _to_output_table(texts, answers)
    return _to_answer_table(texts, answers)


def _to_output_table(texts: list[str], answers: dict[str, npt.NDArray[Any]]) -> list[str]:
    """Return one line an output of a model that is of no task of ours: its name and its values."""
    rows = []
    for index, text in enumerate(texts):
        rows.append(f"{index + 1:>4}  {_shorten(text)}")
        rows += [f"      {name}: {_shorten(str(to_plain(array)[index]))}" for name, array in answers.items()]
    return rows


def _to_answer_table(texts: list[str], answers: dict[str, npt.NDArray[Any]]) -> list[str]:
    """Return one line an answer: the text, then what was found in it, best first or in the order of the text."""
    headings = [name for name in _HEADINGS if name in answers]
    rows = ["".join(f"{name:>9}" if name not in (*_WORDS, *_PLACES) else f"  {name:<24}" for name in headings).rstrip()]
    for index, text in enumerate(texts):
        rows.append(f"\n{index + 1:>4}  {_shorten(text)}")
        columns = [_to_column(answers[name][index], name) for name in headings]
        found = [line for line in zip(*columns, strict=True) if not _is_absent(headings, line)]
        lines = ("".join(_format(name, value) for name, value in zip(headings, line, strict=True)) for line in found)
        rows += [line.rstrip() for line in lines]
        if not found:
            rows.append("           nothing found")
    return rows


def _to_column(values: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """Return what stands in the lines under a heading: one value each, or those of a place in a picture."""
    return values.reshape(-1, values.shape[-1]) if name in _PLACES else values.reshape(-1)


_NUMBERS = ("SCORE", "SHARE", "REWARD")
_WORDS = ("LABEL", "ANSWER", "TOKEN")
# Edges of whole pixels; a keypoint is told apart by less than one.
_PLACES = {"BOX": ".0f", "KEYPOINT": ".1f"}
_HEADINGS = (*_NUMBERS, "START", "END", "ID", *_WORDS, *_PLACES)

# Similarities in a block, 32 MiB; the next block is made before it goes.
_MOST_COSINES = 1 << 23


def _is_absent(headings: list[str], line: tuple[Any, ...]) -> bool:
    """Tell whether an answer only fills up a row that has fewer than another."""
    values = dict(zip(headings, line, strict=True))
    # A box of a label without a name is a box.
    is_blank = any(values.get(name) == b"" for name in ("TOKEN", "LABEL" if "BOX" in values else "TOKEN"))
    return -1 in (values.get("START"), values.get("ID")) or (is_blank and values["SCORE"] == 0)


def _format(name: str, value: Any) -> str:
    if name in _WORDS:
        return f"  {_shorten(decode(value)):<24}"
    if name in _PLACES:
        return "  " + " ".join(format(place, _PLACES[name]) for place in value)
    return f"{value:9.4f}" if name in _NUMBERS else f"{value:>9}"


def _to_similarity_table(texts: list[str], embeddings: npt.NDArray[np.float32]) -> list[str]:
    """Return the cosine of every pair while that fits a terminal, else each text's nearest other one."""
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    title = f"{embeddings.shape[1]} values each; cosine similarities:"
    if len(texts) <= 8:
        rows = [f"{title}\n", "    " + "".join(f"{index + 1:>7}" for index in range(len(texts))) + "  text"]
        cosines = unit @ unit.T
        for index, text in enumerate(texts):
            rows.append(
                f"{index + 1:>4}" + "".join(f"{value:7.3f}" for value in cosines[index]) + f"  {_shorten(text)}"
            )
        return rows
    rows = [f"{title}\n", f"{'':>4}{'nearest':>9}{'cosine':>8}  text"]
    size = max(1, _MOST_COSINES // len(texts))
    for start in range(0, len(texts), size):
        cosines = unit[start : start + size] @ unit.T
        np.fill_diagonal(cosines[:, start : start + size], -np.inf)
        for index, (row, text) in enumerate(zip(cosines, texts[start:], strict=False), start=start + 1):
            nearest = int(row.argmax())
            rows.append(f"{index:>4}{nearest + 1:>9}{row[nearest]:8.3f}  {_shorten(text)}")
    return rows


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"
