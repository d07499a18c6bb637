"""From the verified fp32 files of a task to files of another precision."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..artefacts import Artefacts, list_model
from ..engines.table import ONNXRUNTIME, Engine
from ..graph.conversion import Conversion, Measure, PrecisionReport, Quality, convert_graph
from ..graph.files import Feed
from ..graph.precisions import Precision
from ..targets import Target
from ..tasks.base import Task
from ..tasks.cases import Case, Outputs, join_rows
from .tolerances import QUALITY_KEYS, find_quality_key
from .verify import Reference


def convert(
    *,
    task: Task,
    files: Artefacts,
    precision: Precision,
    bounds: Mapping[str, float],
    target: Target,
    directory: Path,
    on_step: Callable[[str], None],
) -> tuple[Artefacts, PrecisionReport]:
    """Write the graph in `precision` into `directory`, and return the files with it in place of the fp32 one.

    Args:
        task: The source of truth.
        files: The files in fp32, verified.
        precision: One that converts.
        bounds: What the file must hold.
        target: Triton release whose ONNX Runtime judges.
        directory: Empty folder for the new files.
        on_step: Called with what is being done.

    Raises:
        PrecisionError: The precision does not reach this quality.
    """
    path = directory / files.graph.name
    cases = list_quality_cases(task)
    key = find_quality_key(task.tolerances)
    conversion = Conversion(
        source=files.graph,
        destination=path,
        feeds=list_quality_feeds(task),
        measure=build_measure(task, cases, key, target),
        bounds={QUALITY_KEYS[key]: bounds[key]},
        on_step=on_step,
    )
    report = convert_graph(precision, conversion)
    return replace(files, model=list_model(path)), report


def list_quality_cases(task: Task) -> list[Case]:
    """Return the inputs that quality is measured on: those that users might send, or all where there are none."""
    cases = list(task.build_cases())
    return [case for case in cases if case.is_real] or [case for case in cases if not case.padded_reference]


def list_quality_feeds(task: Task) -> list[Feed]:
    """Return these inputs as the graph is given them, in batches."""
    return [
        join_rows(rows, task.signature, task.padding_values, case.padding_side).feeds
        for case in list_quality_cases(task)
        for rows in case.batches
    ]


def list_single_feeds(task: Task) -> list[Feed]:
    """Return these inputs as the graph is given them row by row, each at its own length."""
    return [
        join_rows([row], task.signature, task.padding_values, case.padding_side).feeds
        for case in list_quality_cases(task)
        for row in case.rows
    ]


def build_measure(task: Task, cases: list[Case], key: str, target: Target, engine: Engine = ONNXRUNTIME) -> Measure:
    """Return how good a file is, by the task's own comparison with the checkpoint.

    Args:
        task: The source of truth.
        cases: What is asked.
        key: The error that counts, 1 where nothing is wrong.
        target: Triton release that is to run the file.
        engine: What runs it.
    """
    reference = Reference(task)
    names = [tensor.name for tensor in task.signature.outputs]

    def measure(path: Path) -> Quality:
        expected: list[Outputs] = []
        got: list[Outputs] = []
        with engine.open(path, target) as session:
            for case in cases:
                for rows in case.batches:
                    batch = join_rows(rows, task.signature, task.padding_values, case.padding_side)
                    got += batch.cut(task.signature.outputs, session.run(names, batch.feeds))
                    expected += [reference.answer_row(row) for row in rows]
        each = [task.compare([want], [have], {})[key] for want, have in zip(expected, got, strict=True)]
        # Labels are counted over all rows, the direction of the worst row is a row's own.
        whole = task.compare(expected, got, {})[key]
        return Quality(metric=QUALITY_KEYS[key], worst=whole, mean=float(np.mean(each)), rows=len(each))

    return measure
