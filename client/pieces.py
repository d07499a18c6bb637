"""Lists of any length, cut into requests that the server takes, and the answers put together again in order."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .errors import GarbledError, RefusedError, UnavailableError, UsageError
from .model import Model
from .options import Options, Words
from .outputs import Answered, Arrays
from .session import Session, gather

Text = str | bytes


class Asker(Protocol):
    """Who asks a server: a `Session`, or what has it wait for its turn."""

    options: Options

    @property
    def infer(self) -> Callable[..., Awaitable[Answered]]:
        """What `Session.infer` is."""


# A preprocess step takes 1 MiB of text in one request, or 128 KiB where it reads long texts in windows.
_MOST_BYTES = 128 * 1024

# How often what is not of the version of the others is asked again. Twice is enough where one server is rolled; behind
# a balancer whose servers are of two versions, each time leaves half of it at most.
_MOST_ROUNDS = 6


def encode(texts: Iterable[Text]) -> list[bytes]:
    """Return texts as UTF-8; what is bytes goes out as it is.

    Raises:
        UsageError: One is neither a string nor bytes, or holds half of a character.
    """
    if isinstance(texts, (str, bytes)):
        raise UsageError("the texts are one text", expected="a list of them", got=type(texts).__name__)
    return [_encode(row, text) for row, text in enumerate(texts)]


def _encode(row: int, text: object) -> bytes:
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str):
        raise UsageError(f"text {row} is not a text", expected="str, or bytes of UTF-8", got=type(text).__name__)
    try:
        return text.encode()
    except UnicodeEncodeError as exc:
        raise UsageError(
            f"text {row} has no UTF-8", expected="whole characters", got=f"U+{ord(text[exc.start]):04X}"
        ) from exc


def check_pairs(model: Model, texts: Sequence[bytes], pairs: Sequence[bytes], words: Words) -> None:
    """Refuse texts without their partners, and partners that the model does not take.

    Raises:
        UsageError: The numbers do not fit the model or each other.
    """
    takes_pairs = len(model.texts) > 1
    if takes_pairs and len(pairs) != len(texts):
        raise UsageError(
            f"{model.name} takes pairs",
            expected=f"a second text for each of {len(texts)}",
            got=str(len(pairs)),
            remedy=f"pass as many {words.pair} as {words.text}",
        )
    if pairs and not takes_pairs:
        raise UsageError(f"{model.name} takes single texts", expected=f"no {words.pair}", got=str(len(pairs)))


async def ask_texts(
    session: Asker,
    model: Model,
    texts: Sequence[bytes],
    pairs: Sequence[bytes] = (),
    *,
    rows: int | None = None,
    binary: bool = True,
    headers: Mapping[str, str] | None = None,
) -> Arrays:
    """Return output name → answers, one row a text, all of one version of the model.

    Args:
        session: The server.
        model: An ensemble that takes texts, or pairs of them.
        texts: UTF-8.
        pairs: The second text of each, where the model takes pairs.
        rows: Of one request at most; None for as many as the model takes.
        binary: How tensors travel over HTTP, as `Session.infer` takes it.
        headers: Of these requests alone.

    Returns:
        Where one text has more answers than another, the shorter rows are filled up with empty texts, scores of 0 and
        places of -1, as the server does within a batch.

    Raises:
        ClientError: The server refuses a text or does not answer, or goes from one version to another and back.
    """
    check_pairs(model, texts, pairs, session.options.words)
    columns = (texts, pairs)[: len(model.texts)]
    sizes = [sum(map(len, row)) for row in zip(*columns, strict=True)]
    # The first input takes the texts, the second one, where there is one, their partners.
    inputs = {
        name: np.array(values, dtype=np.object_).reshape(-1, 1)
        for name, values in zip(model.texts, columns, strict=True)
    }
    pieces = _cut(sizes, rows or model.max_batch_size)
    return await _ask_pieces(session, model, inputs, pieces, binary=binary, headers=headers)


async def ask_tensors(
    session: Session, model: Model, inputs: Mapping[str, npt.ArrayLike], outputs: Sequence[str] | None = None
) -> Arrays:
    """Return output name → values; rows beyond what one request may hold are sent in several, to one version.

    Args:
        session: The server.
        model: Whom to ask.
        inputs: Name → values, the batch first where the model has one.
        outputs: Names of those that are wanted; None for all.

    Raises:
        ClientError: A name is unknown, or the inputs differ in rows, or the server refuses or does not answer.
    """
    arrays = {name: _to_array(values) for name, values in inputs.items()}
    for kind, given, known in (("input", arrays, model.inputs), ("output", outputs or (), model.outputs)):
        if unknown := [name for name in given if name not in known]:
            raise UsageError(f"{model.name} has no {kind} {', '.join(unknown)}", expected=f"some of {', '.join(known)}")
    if not model.has_batch:
        return (await session.infer(model, arrays, outputs)).arrays
    rows = {name: len(values) if values.ndim else -1 for name, values in arrays.items()}
    if len(set(rows.values())) != 1 or -1 in rows.values():
        raise UsageError(
            f"the inputs of {model.name} are not one batch",
            expected="as many rows in each",
            got=", ".join(f"{name} {values.shape}" for name, values in arrays.items()) or "none",
        )
    sizes = [0] * next(iter(rows.values()))
    return await _ask_pieces(session, model, arrays, _cut(sizes, model.max_batch_size), outputs=outputs)


def _to_array(values: npt.ArrayLike) -> npt.NDArray[Any]:
    array = np.asarray(values)
    # KServe's strings have no common width.
    return array.astype(np.object_) if array.dtype.kind in "US" else array


def _cut(sizes: Sequence[int], most_rows: int) -> list[range]:
    """Return the rows of each request: as many as one may hold, unless their texts are too long together."""
    pieces, start, held = [], 0, 0
    for row, size in enumerate(sizes):
        if row > start and (row - start == most_rows or held + size > _MOST_BYTES):
            pieces.append(range(start, row))
            start, held = row, 0
        held += size
    return [*pieces, range(start, len(sizes))] if sizes else []


async def _ask_pieces(
    session: Asker,
    model: Model,
    inputs: Mapping[str, npt.NDArray[Any]],
    pieces: Sequence[range],
    *,
    outputs: Sequence[str] | None = None,
    binary: bool = True,
    headers: Mapping[str, str] | None = None,
) -> Arrays:
    names = tuple(outputs or model.outputs)
    dimensions = {tensor.name: len(tensor.shape) for tensor in model.takes}
    if not pieces:
        return {tensor.name: tensor.make_empty() for tensor in model.makes if tensor.name in names}

    async def ask(rows: range) -> Answered:
        part = {name: values[rows.start : rows.stop] for name, values in inputs.items()}
        if not model.has_batch:
            # One value, in as many dimensions as the model has it.
            part = {name: values.reshape((1,) * dimensions[name]) for name, values in part.items()}
        try:
            return await session.infer(model, part, names, binary=binary, headers=headers)
        except RefusedError as exc:
            if len(pieces) == 1:
                raise
            # The server counts rows from the first of its request.
            error = type(exc)(
                f"{exc.what} (in a request of rows {rows.start} to {rows.stop - 1})",
                expected=exc.expected,
                got=exc.got,
                remedy=exc.remedy,
            )
            error.rows, error.is_content = rows, exc.is_content
            raise error from exc

    answers = await _ask_one_version(model, pieces, ask)
    if not model.has_batch:
        answers = [_take_row(model, answer) for answer in answers]
    return {name: join_rows([answer[name] for answer in answers]) for name in names}


async def _ask_one_version(
    model: Model, pieces: Sequence[range], ask: Callable[[range], Awaitable[Answered]]
) -> list[Arrays]:
    """Return the answer to each piece; during a rollout, pieces are asked again until all are of one version.

    Scores of two versions mean nothing beside each other, nor do vectors.

    Raises:
        UnavailableError: They never were.
    """
    answers: dict[int, Answered] = {}
    asked: Sequence[int] = range(len(pieces))
    for _ in range(1 + _MOST_ROUNDS):
        answers |= zip(asked, await gather(ask(pieces[index]) for index in asked), strict=True)
        counts = Counter(answer.version for answer in answers.values())
        if len(counts) == 1:
            return [answers[index].arrays for index in range(len(pieces))]
        # Of the versions that answered just now, for another may be gone for good, the one that most are of.
        version = max((answers[index].version for index in asked), key=lambda version: counts[version])
        asked = [index for index, answer in answers.items() if answer.version != version]
    raise UnavailableError(
        f"{model.name} answers in one version and in another by turns",
        expected="one version for all rows of a call",
        got=", ".join(sorted(counts)),
        remedy="ask again when one is active everywhere",
    )


def _take_row(model: Model, answer: Arrays) -> Arrays:
    """Return the answer to one text of a model without a batch as a row of its own.

    Raises:
        GarbledError: It has as many rows as the model likes, and not one.
    """
    rows = {}
    for tensor in model.makes:
        values = answer.get(tensor.name)
        if values is None:
            continue
        is_row = values.shape[:1] == (1,) and tensor.shape[:1] in ((-1,), (1,))
        if not is_row and tensor.shape[:1] == (-1,):
            raise GarbledError(
                f"{tensor.name} of {model.name} cannot be told apart by text",
                expected="one row for a text",
                got=str(len(values)),
                remedy="ask for one text after another by the library's `infer`, which returns what it answers",
            )
        rows[tensor.name] = values if is_row else values[np.newaxis]
    return rows


def join_rows(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return the rows of all requests, each filled up to the most answers that one has."""
    shape = np.array([array.shape[1:] for array in arrays]).max(axis=0)
    filling: Any = {"O": b"", "f": 0.0}.get(arrays[0].dtype.kind, -1)
    padded = [
        np.pad(
            array,
            [(0, 0), *((0, most - got) for most, got in zip(shape, array.shape[1:], strict=True))],
            constant_values=filling,
        )
        for array in arrays
    ]
    return np.concatenate(padded)
