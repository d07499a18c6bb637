"""What each task's tensors mean: rows of values that a caller can read. Names are those of docs/contracts.md."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import GarbledError, ModelError, UsageError
from .model import Model
from .options import Words
from .outputs import Arrays
from .pieces import Text, ask_tensors, ask_texts, encode
from .session import Session
from .ways import find_way, find_whole

# Answers that are texts; all others are numbers.
_TEXTS = ("LABEL", "ANSWER")
_LABELS = ("LABEL", "SCORE")
_ENTITIES = (*_LABELS, "START", "END")
_ANSWERS = ("ANSWER", "SCORE", "START", "END")


class Label(NamedTuple):
    """A label of a text, and how sure the model is of it."""

    label: str
    score: float


class Entity(NamedTuple):
    """Characters `start` to `end` of a text, the last one not included, and what they name."""

    label: str
    score: float
    start: int
    end: int


class Answer(NamedTuple):
    """An answer, which is characters `start` to `end` of the context."""

    answer: str
    score: float
    start: int
    end: int


class Ranked(NamedTuple):
    """A document by its place in the list that was passed, and its score."""

    position: int
    score: float


async def ask(session: Session, texts: Sequence[Text], pairs: Sequence[Text] | None, model: str | None) -> Arrays:
    """Return output name → rows of an ensemble of any task, as `ask_texts` does."""
    found = await find_texts_model(session, model)
    return await ask_texts(session, found, encode(texts), encode(pairs or ()))


async def infer(
    session: Session,
    inputs: Mapping[str, npt.ArrayLike],
    outputs: Sequence[str] | None,
    model: str | None,
) -> Arrays:
    """Return output name → values of any model, as `ask_tensors` does."""
    return await ask_tensors(session, await session.find_model(model), inputs, outputs)


async def embed(session: Session, texts: Sequence[Text], model: str | None) -> npt.NDArray[np.float32]:
    """Return one vector a text, [texts, hidden]."""
    return (await _ask(session, texts, (), model, makes=("EMBEDDING",)))["EMBEDDING"]


async def classify(
    session: Session, texts: Sequence[Text], pairs: Sequence[Text] | None, model: str | None
) -> list[list[Label]]:
    """Return each text's labels, best first."""
    return _read_labels(await _ask(session, texts, pairs or (), model, makes=_LABELS))


def _read_labels(arrays: Arrays) -> list[list[Label]]:
    rows = zip(arrays["LABEL"], arrays["SCORE"].tolist(), strict=True)
    return [[Label(label.decode(), score) for label, score in zip(*row, strict=True)] for row in rows]


async def image(session: Session, pictures: Sequence[bytes], model: str | None) -> list[list[Label]]:
    """Return the labels of each encoded picture, best first."""
    _check_files(pictures, "picture")
    return await classify(session, pictures, None, (await _find_files(session, "IMAGE", "pictures", model)).name)


async def audio(session: Session, sounds: Sequence[bytes], model: str | None) -> list[list[Label]]:
    """Return the labels of each encoded sound, best first; they differ in length, so each is asked alone."""
    _check_files(sounds, "sound")
    name = (await _find_files(session, "AUDIO", "sounds", model)).name
    return _read_labels(await _ask(session, sounds, (), name, makes=_LABELS, rows=1))


def _check_files(files: Sequence[bytes], noun: str) -> None:
    """Refuse what is no list of whole files: a path that is a string would be sent in place of what it names.

    Raises:
        UsageError: It is one file, or one of them is something else.
    """
    if isinstance(files, (str, bytes)):
        raise UsageError(f"the {noun}s are one {noun}", expected="a list of them", got=type(files).__name__)
    for row, content in enumerate(files):
        if not isinstance(content, bytes):
            raise UsageError(
                f"{noun} {row} is not a file's bytes",
                expected="bytes",
                got=type(content).__name__,
                remedy="read the file, as pathlib.Path(...).read_bytes() does",
            )


async def _find_files(session: Session, name: str, nouns: str, model: str | None) -> Model:
    """Return the model, which takes whole files."""
    found = await session.find_model(model)
    if found.inputs != (name,):
        raise ModelError(
            f"{found.name} takes no {nouns}",
            expected=f"the input {name}",
            got=", ".join(found.inputs),
            remedy=f"choose with {session.options.words.model}",
        )
    return found


async def entities(session: Session, texts: Sequence[Text], model: str | None) -> list[list[Entity]]:
    """Return what each text names, in the order of the text."""
    arrays = await _ask(session, texts, (), model, makes=_ENTITIES)
    return [[Entity(*found) for found in row] for row in _read_spans(arrays, "LABEL")]


async def answer(
    session: Session, questions: Sequence[Text], contexts: Sequence[Text], model: str | None
) -> list[list[Answer]]:
    """Return each question's answers, best first."""
    arrays = await _ask(session, questions, contexts, model, makes=_ANSWERS)
    return [[Answer(*found) for found in row] for row in _read_spans(arrays, "ANSWER")]


async def rerank(
    session: Session, query: Text, documents: Sequence[Text], label: str | None, model: str | None
) -> list[Ranked]:
    """Return the documents by the score of `label`, best first; equal ones in the order that they came in."""
    # Encoded once: a long query would be held as often as there are documents.
    queries = encode([query]) * len(documents)
    found = await classify(session, queries, documents, model)
    scores = [_find_score(row, label, model or session.options.model, session.options.words) for row in found]
    return [Ranked(index, scores[index]) for index in sorted(range(len(scores)), key=lambda index: -scores[index])]


async def find_texts_model(session: Session, name: str | None) -> Model:
    """Return the model named, or the one ensemble there is, which takes a text or a pair of them.

    Raises:
        ClientError: There is no such model, or not exactly one ensemble, or no answer, or it takes something else.
    """
    model = await session.find_model(name)
    if not model.texts:
        raise ModelError(
            f"{model.name} takes no texts",
            expected="one or two inputs of one string a row",
            got=", ".join(model.inputs),
            remedy=await find_way(session, model),
        )
    if "input_ids" in model.outputs:
        raise ModelError(
            f"{model.name} is a step of another model",
            expected="one whose answers can be read",
            got=f"the tokens {', '.join(model.outputs)}",
            remedy=await find_whole(session, model),
        )
    return model


async def _ask(
    session: Session,
    texts: Sequence[Text],
    pairs: Sequence[Text],
    model: str | None,
    *,
    makes: tuple[str, ...],
    rows: int | None = None,
) -> Arrays:
    found = await find_texts_model(session, model)
    if set(makes) != set(found.outputs):
        raise ModelError(
            f"{found.name} is of another task",
            expected=f"a model that answers with {', '.join(makes)}",
            got=", ".join(found.outputs),
            remedy=f"choose with {session.options.words.model}, or ask this one by `infer`, which returns all of these",
        )
    arrays = await ask_texts(session, found, encode(texts), encode(pairs), rows=rows)
    check_answers(found.name, arrays)
    return arrays


def check_answers(model: str, arrays: Arrays) -> None:
    """Refuse answers of our tasks that cannot be read together: other than as many of each kind in each row.

    Raises:
        GarbledError: They are something else.
    """
    if not any({*arrays} == {*names} for names in (("EMBEDDING",), _LABELS, _ENTITIES, _ANSWERS)):
        return
    shapes = {values.shape for values in arrays.values()}
    are_alike = len(shapes) == 1 and all(len(shape) == 2 for shape in shapes)
    if not are_alike or any((values.dtype == object) != (name in _TEXTS) for name, values in arrays.items()):
        raise GarbledError(
            f"the answers of {model} cannot be read",
            expected=f"rows of {', '.join(arrays)}, as many of each",
            got=", ".join(f"{name} {values.dtype} {list(values.shape)}" for name, values in arrays.items()),
            remedy="take them as they are, by --json or the library's `infer`",
        )
    for name, values in arrays.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise GarbledError(
                f"{name} of {model} cannot be read",
                expected="finite numbers",
                got=f"{values[~np.isfinite(values)][0]}",
                remedy="mend the model, or take them as they are, by --json or the library's `infer`",
            )
    for name in set(_TEXTS).intersection(arrays):
        for text in arrays[name].flat:
            _check_text(model, name, text)


def _check_text(model: str, name: str, text: bytes) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as exc:
        raise GarbledError(
            f"{name} of {model} cannot be read", expected="texts in UTF-8", got=repr(text)[:80], remedy="mend the model"
        ) from exc


def _read_spans(arrays: Arrays, words: str) -> list[list[tuple[str, float, int, int]]]:
    """Return the answers of each row that are some: a place of -1 fills up a row that has fewer than another."""
    columns = [arrays[name].tolist() for name in (words, "SCORE", "START", "END")]
    return [
        [(word.decode(), score, start, end) for word, score, start, end in zip(*row, strict=True) if start != -1]
        for row in zip(*columns, strict=True)
    ]


def _find_score(row: list[Label], label: str | None, model: str | None, words: Words) -> float:
    if label is None and len(row) == 1:
        return row[0].score
    for found in row:
        if found.label == label:
            return found.score
    raise ModelError(
        f"{model or 'the model'} does not say which score to rank by",
        expected="the only label, or one of its answers",
        got=f"{label!r} among {', '.join(found.label for found in row)}",
        remedy=f"pass label, or choose with {words.model}",
    )
