"""Rows to answers in one process: tokenizing or decoding, engine and postprocessing, without a word about Triton."""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from answers import AnswerError, build_postprocess
from engines import ENGINES

Array = npt.NDArray[Any]

# What stands in an answer where a row has less than another one, by the kind of its dtype.
_ABSENT: Mapping[str, Any] = {"O": "", "f": 0.0, "i": -1}


class LeanModel:
    """One version of a model in this process, warmed up. `close` ends what its engine does in the background.

    Args:
        folder: Its folder, with the engine's file, and perhaps `postprocess.json`.
        engine_file: Name of the file that the engine loads.
        described: What `lean.json` beside them holds.
        step: Makes tensors of rows (`python_preprocess/steps.py`).
        threads: What the engine computes with.
        has_cores: Whether there is a core for each thread of all instances.

    Raises:
        ValueError: There is no engine for that file, or it was proven on another kind of machine.
    """

    def __init__(
        self,
        folder: Path,
        engine_file: str,
        described: Mapping[str, Any],
        step: Any,
        *,
        threads: int = 1,
        has_cores: bool = False,
    ) -> None:
        if engine_file not in ENGINES:
            raise ValueError(f"no engine reads {engine_file}: expected one of {', '.join(ENGINES)}")
        self._step = step
        self._graph_inputs: list[str] = described["inputs"]
        self._graph_outputs: list[str] = described["outputs"]
        self._answers: list[str] = described["answers"]
        path = folder / "postprocess.json"
        self._postprocess = build_postprocess(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
        self._run, self.close = ENGINES[engine_file](folder / engine_file, threads, has_cores=has_cores)
        # What is allocated at a first run is allocated now.
        for row in step.list_samples():
            for made in step.encode([row]):
                if not isinstance(made, step.refusal):
                    self._run_graph([made])

    def answer(self, rows: Sequence[Any], is_cancelled: Callable[[], bool] = lambda: False) -> dict[str, Array]:
        """Return the answers to the rows of one request. None is padded: those of one size share a run.

        Args:
            rows: As the step reads them.
            is_cancelled: Asked before every run but the first.

        Raises:
            ValueError: The step's refusal of a row.
            AnswerError: A row has no answer.
            CancelledError: Nobody waits for the answers any more.
        """
        made: list[Any] = self._step.encode(rows)
        alike: dict[Hashable, list[int]] = {}
        for place, row in enumerate(made):
            if isinstance(row, self._step.refusal):
                raise row
            alike.setdefault(self._step.measure(row), []).append(place)
        parts: list[tuple[list[int], dict[str, Array]]] = []
        errors: list[AnswerError] = []
        for places in alike.values():
            if (parts or errors) and is_cancelled():
                raise CancelledError
            try:
                parts.append((places, self._answer_alike([made[place] for place in places])))
            except AnswerError as exc:
                errors.append(AnswerError(places[exc.row], exc.fault))
        if self._postprocess is None:
            errors += find_unlike(parts, self._step.name)
        if errors:
            raise min(errors, key=lambda error: error.row)
        return parts[0][1] if len(parts) == 1 else join(parts)

    def _answer_alike(self, rows: Sequence[Any]) -> dict[str, Array]:
        """Return the answers to rows of one size."""
        tensors, outputs = self._run_graph(rows)
        if self._postprocess is None:
            return dict(zip(self._answers, outputs, strict=True))
        made = dict(zip(self._graph_outputs, outputs, strict=True))
        return self._postprocess({**tensors, **made, **self._step.recall(rows)})

    def _run_graph(self, rows: Sequence[Any]) -> tuple[Mapping[str, Array], list[Array]]:
        tensors = self._step.stack(rows)
        return tensors, self._run(self._graph_outputs, {name: tensors[name] for name in self._graph_inputs})


class CancelledError(Exception):
    """Nobody waits for the answers any more."""


def find_unlike(parts: Sequence[tuple[Sequence[int], Mapping[str, Array]]], input_name: str) -> list[AnswerError]:
    """Return an error for rows whose tensors have another shape than the first: they are no answers to fill up."""
    shapes = [{name: list(array.shape[1:]) for name, array in tensors.items()} for _, tensors in parts]
    return [
        AnswerError(
            places[0],
            f"has answers of another shape than row 0: expected {shapes[0]}, got {shape}; send it in its own request",
            input_name,
        )
        for (places, _), shape in zip(parts, shapes, strict=True)
        if shape != shapes[0]
    ]


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
            place = (list(places), *(slice(size) for size in answers[name].shape[1:]))
            joined[name][place] = answers[name]
    return joined
