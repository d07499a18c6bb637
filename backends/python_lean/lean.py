"""Texts to answers in one process: tokenizer, engine and postprocessing, without a word about Triton."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from answers import AnswerError, build_postprocess
from engines import ENGINES
from tokenization import TextError, TextTokenizer, TokenizedRow

Array = npt.NDArray[Any]

# What stands in an answer where a row has less than another one, by the kind of its dtype.
_ABSENT: Mapping[str, Any] = {"O": "", "f": 0.0, "i": -1}


class LeanModel:
    """One version of a model in this process, warmed up.

    Args:
        folder: Its folder, with `tokenizer.json`, perhaps `postprocess.json`, and the engine's file.
        engine_file: Name of the file that the engine loads.
        described: What `lean.json` beside them holds.
        input_names: What clients send, in the order in which a row has them.

    Raises:
        ValueError: There is no engine for that file, or it was proven on another kind of machine.
    """

    def __init__(
        self, folder: Path, engine_file: str, described: Mapping[str, Any], input_names: Sequence[str]
    ) -> None:
        if engine_file not in ENGINES:
            raise ValueError(f"no engine reads {engine_file}: expected one of {', '.join(ENGINES)}")
        self._input_names = input_names
        self._graph_inputs: list[str] = described["inputs"]
        self._graph_outputs: list[str] = described["outputs"]
        self._answers: list[str] = described["answers"]
        tensors = [*self._graph_inputs, *described["carried"]]
        self._tokenizer = TextTokenizer(folder / "tokenizer.json", tensors, has_windows=described["has_windows"])
        path = folder / "postprocess.json"
        self._postprocess = build_postprocess(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
        self._run = ENGINES[engine_file](folder / engine_file)
        # The longest and the shortest text: what is allocated at a first run is allocated now.
        for text in ("a " * described["longest"], "a"):
            for row in self._tokenizer.encode([(*["a"] * (len(input_names) - 1), text)]):
                if isinstance(row, TokenizedRow):
                    self._run_graph([row])

    def answer(
        self, rows: Sequence[tuple[str, ...]], is_cancelled: Callable[[], bool] = lambda: False
    ) -> dict[str, Array]:
        """Return the answers to the texts of one request. No row is padded: those of one length share a run.

        Args:
            rows: One text or two of each row.
            is_cancelled: Asked before every run but the first.

        Raises:
            TextError: A row cannot be tokenised.
            AnswerError: A row has no answer.
            CancelledError: Nobody waits for the answers any more.
        """
        encodings: list[TokenizedRow] = []
        for encoding in self._tokenizer.encode(rows):
            if isinstance(encoding, TextError):
                raise encoding
            encodings.append(encoding)
        alike: dict[tuple[int, int], list[int]] = {}
        for place, encoding in enumerate(encodings):
            size = (len(encoding.windows), max(len(window.ids) for window in encoding.windows))
            alike.setdefault(size, []).append(place)
        parts: list[tuple[list[int], dict[str, Array]]] = []
        errors: list[AnswerError] = []
        for places in alike.values():
            if (parts or errors) and is_cancelled():
                raise CancelledError
            try:
                parts.append((places, self._answer_alike([encodings[place] for place in places])))
            except AnswerError as exc:
                errors.append(AnswerError(places[exc.row], exc.fault))
        if errors:
            raise min(errors, key=lambda error: error.row)
        return parts[0][1] if len(parts) == 1 else join(parts)

    def _answer_alike(self, rows: Sequence[TokenizedRow]) -> dict[str, Array]:
        """Return the answers to rows of one length."""
        tensors, outputs = self._run_graph(rows)
        if self._postprocess is None:
            return dict(zip(self._answers, outputs, strict=True))
        texts = {
            name: np.array([[row.texts[index].encode()] for row in rows], dtype=np.object_)
            for index, name in enumerate(self._input_names)
        }
        return self._postprocess({**tensors, **dict(zip(self._graph_outputs, outputs, strict=True)), **texts})

    def _run_graph(self, rows: Sequence[TokenizedRow]) -> tuple[Mapping[str, Array], list[Array]]:
        tensors = self._tokenizer.stack(rows)
        return tensors, self._run(self._graph_outputs, {name: tensors[name] for name in self._graph_inputs})


class CancelledError(Exception):
    """Nobody waits for the answers any more."""


def join(parts: Sequence[tuple[Sequence[int], Mapping[str, Array]]]) -> dict[str, Array]:
    """Return the answers of all rows, each in its own place; what a row has less of than another is filled up.

    Args:
        parts: Places of some rows and the answers to them, [rows, ...], of one rank in all parts.
    """
    count = sum(len(places) for places, _ in parts)
    joined = {}
    for name, first in parts[0][1].items():
        shape = (count, *np.max([answers[name].shape[1:] for _, answers in parts], axis=0, initial=0).astype(int))
        joined[name] = np.full(shape, _ABSENT[first.dtype.kind], dtype=first.dtype)
        for places, answers in parts:
            joined[name][(list(places), *(slice(size) for size in answers[name].shape[1:]))] = answers[name]
    return joined
