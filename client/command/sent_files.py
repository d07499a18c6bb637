"""Pictures and sounds on the command line: which files are meant, and what the server says about each."""

import base64
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..display import count, to_plain, to_table
from ..errors import ClientError, RefusedError
from ..model import Model
from ..pieces import join_rows
from .connection import Connection
from .drawing import import_drawing
from .ending import answer


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is sent as whole files.

    Attributes:
        option: The option that names the files; JSON calls each by it as well.
        input: What a model calls its input.
        noun: What one of them is.
        suffixes: Those of a folder that are sent.
    """

    option: str
    input: str
    noun: str
    suffixes: tuple[str, ...]


IMAGES = Kind(
    option="image",
    input="IMAGE",
    noun="picture",
    suffixes=(".jpg", ".jpeg", ".png", ".webp", ".gif", ".tif", ".tiff"),
)
SOUNDS = Kind(option="audio", input="AUDIO", noun="sound", suffixes=(".wav", ".flac"))


@dataclass(frozen=True, kw_only=True)
class FileAnswer:
    """What became of one file.

    Attributes:
        path: Its file.
        answers: Output name → its values, without the batch.
        refusal: Why there are none.
    """

    path: Path
    answers: Mapping[str, npt.NDArray[Any]]
    refusal: str = ""


def ask_files(arguments: Namespace, kind: Kind, connect: Callable[[], Connection]) -> int:
    """Ask about every file of a kind, print the answers, and return 0 where none was refused."""
    if arguments.text or arguments.pair or arguments.file or arguments.column or (arguments.image and arguments.audio):
        raise ClientError(
            f"--{kind.option} goes alone",
            expected="no texts and no other files beside it",
            got="--text, --pair, --file or another",
        )
    if arguments.output and kind is not IMAGES:
        raise ClientError(
            f"--output draws nothing of a {kind.noun}",
            expected="--image",
            got=f"--{kind.option}",
            remedy="leave it out",
        )
    paths = _collect_files(getattr(arguments, kind.option), kind)
    if arguments.output and len(paths) != 1:
        raise ClientError(
            "--output takes one picture",
            expected="one --image",
            got=str(len(paths)),
            remedy="draw one picture at a time, or leave --output out",
        )
    draw = import_drawing() if arguments.output else None
    connection = connect()
    model = connection.find_model(arguments.model)
    if model.inputs != (kind.input,):
        raise ClientError(
            f"{model.name} takes no {kind.noun}s",
            expected=f"the input {kind.input}",
            got=", ".join(model.inputs),
            remedy="choose with --model",
        )
    start = time.perf_counter()
    found: list[FileAnswer] = []
    for first in range(0, len(paths), model.max_batch_size):
        found += _ask_batch(connection, model, kind, paths[first : first + model.max_batch_size])
        if len(paths) > model.max_batch_size:
            print(f"{len(found)} of {len(paths)} {kind.noun}s", file=sys.stderr)  # noqa: T201
    seconds = time.perf_counter() - start
    refused = [each for each in found if each.refusal]
    if arguments.json:
        answer(json.dumps(_to_file_json(model, kind, found), ensure_ascii=False))
    elif answered := [each for each in found if not each.refusal]:
        head = f"{model.name}, version {model.version}, at {connection.url} over {connection.protocol}"
        among = f"{len(answered)} of " if refused else ""
        answer(f"{head}: {among}{count(len(paths), kind.noun)} in {seconds * 1000:.1f} ms\n")
        columns = {name: join_rows([each.answers[name][None] for each in answered]) for name in model.outputs}
        answer("\n".join(to_table([str(each.path) for each in answered], columns)))
    for each in refused:
        print(f"error: {each.path}: {each.refusal}", file=sys.stderr)  # noqa: T201
    if draw and not refused:
        draw(found[0].path, found[0].answers, arguments.output)
    return 1 if refused else 0


def _ask_batch(connection: Connection, model: Model, kind: Kind, paths: list[Path]) -> list[FileAnswer]:
    """Return what became of files that are asked about in one request; one by one where one of them is refused."""
    contents = np.empty((len(paths), 1), dtype=np.object_)
    for row, path in enumerate(paths):
        try:
            contents[row, 0] = path.read_bytes()
        except OSError as exc:
            raise ClientError(
                f"{path} cannot be read",
                expected=f"a {kind.noun}",
                got=f"'{exc.strerror}'",
                remedy=f"correct --{kind.option}",
            ) from exc
    try:
        answers = connection.infer_tensors(model, {kind.input: contents})
    except RefusedError as exc:
        if not exc.is_content:
            raise
        if len(paths) > 1:
            return [answer for path in paths for answer in _ask_batch(connection, model, kind, [path])]
        return [FileAnswer(path=paths[0], answers={}, refusal=str(exc))]
    return [
        FileAnswer(path=path, answers={name: values[row] for name, values in answers.items()})
        for row, path in enumerate(paths)
    ]


def _collect_files(given: list[str], kind: Kind) -> list[Path]:
    """Return the files that are named, lie in a folder that is named, or match a pattern, in order."""
    found: list[Path] = []
    for text in given:
        try:
            found += _find_files(text, kind)
        except OSError as exc:
            raise ClientError(
                f"{text} cannot be looked at",
                expected="a file, folder or pattern that this user may look at",
                got=f"'{exc.strerror}'",
                remedy=f"correct --{kind.option}",
            ) from exc
    if not found:
        raise ClientError(
            f"there is no {kind.noun} to send",
            expected="files of " + ", ".join(kind.suffixes),
            got=f"none in {', '.join(given)}",
            remedy=f"correct --{kind.option}",
        )
    return found


def _find_files(text: str, kind: Kind) -> list[Path]:
    path = Path(text)
    if path.is_dir():
        return sorted(entry for entry in path.iterdir() if entry.suffix.lower() in kind.suffixes)
    if path.exists() or not set("*?[") & set(text):
        return [path]
    root = Path(path.anchor)
    return sorted(entry for entry in root.glob(str(path.relative_to(root))) if entry.is_file())


def _to_file_json(model: Model, kind: Kind, found: list[FileAnswer]) -> dict[str, Any]:
    rows = [
        {kind.option: str(each.path)}
        | ({"error": each.refusal} if each.refusal else {})
        | {name: _to_json_value(name, values) for name, values in each.answers.items()}
        for each in found
    ]
    return {"model": model.name, "version": model.version, "results": rows}


def _to_json_value(name: str, values: npt.NDArray[Any]) -> list[Any]:
    """Return an answer as JSON knows values; a map is a file, which is no text."""
    return [base64.b64encode(value).decode() for value in values] if name == "MAP" else to_plain(values)
