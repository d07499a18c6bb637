"""Every architecture, exported and proven: the table in docs/architectures.md is written by this file."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from harness import CHECKOUT
from rich.console import Console
from trainers.architectures import ARCHITECTURES, WITH_PAST, save_model

from export.artefacts import list_model
from export.engines.onnxruntime_process import open_runtime
from export.errors import GraphError
from export.graph.batchings import PADDING_FREE, RAGGED
from export.graph.onnx_export import export_onnx
from export.graph.padding_free import export_padding_free
from export.graph.ragged import flatten_rows, write_ragged
from export.options import ExportRequest
from export.progress import Progress
from export.proof.verify import verify
from export.source import Source, load_source
from export.stages import write_files
from export.targets import DEFAULT_TARGET
from export.tasks.base import Task

LOGITS, PAST = "text-generation-logits", "text-generation-logits-with-past"
# Decoders are served as text where they have a tokenizer; that is proven elsewhere.
EVERY = [(name, LOGITS if name in WITH_PAST else architecture.task) for name, architecture in ARCHITECTURES.items()] + [
    (name, PAST) for name in WITH_PAST
]

# One of each kind that no other test exports; the others are run by `make architectures`.
IN_EVERY_RUN = {
    ("llama", LOGITS),
    ("bart", None),
    ("wav2vec2 speech", None),
}

TABLE = CHECKOUT / "docs" / "architectures.md"
HEAD = """# Architectures

Small random models of these architectures, saved by transformers, exported, and compared with torch at every shape:
`make architectures` does it again and writes this page. The error is the worst of all cases, of logits and vectors in
parts of the largest value; the bound is 1e-4 for tensors and logits, 1e-5 for vectors. The seconds are of two cores,
and grow with whatever else they have to do. The last column is what `--batching` reaches, where a text has one answer.

Longformer and LED are refused: their attention is cut into as many windows as a text fills, which becomes no graph.
For texts of their lengths, train ModernBERT. So is XLNet, whose relative positions follow a text's length, and BigBird
where it reads texts so long that it attends to them in blocks, which transformers does until it has read a short one.
Texts of a model with longrope positions (Phi-3 with a long context) are cut at `original_max_position_embeddings`:
beyond them it turns all positions by other factors, those of what is beside it in a batch as well. Positions of
`rope_type` dynamic are refused, with what to write in place of it.

| architecture | task | nodes | cases | worst error | export s | verify s | together |
|---|---|---|---|---|---|---|---|
"""


@pytest.fixture(scope="module")
def rows() -> Iterator[list[str]]:
    """Collect the table's rows, and write them where `make architectures` asks for it."""
    found: list[str] = []
    yield found
    if os.environ.get("MODELYARD_WRITE_TABLE"):
        TABLE.write_text(HEAD + "\n".join(found) + "\n", encoding="utf-8")


def load(name: str, task: str | None, directory: Path) -> Source:
    save_model(ARCHITECTURES[name], directory / "checkpoint")
    request = ExportRequest(
        checkpoint=directory / "checkpoint", name="model", repository=directory / "models", task=task
    )
    return load_source(request, Progress(Console(quiet=True)))


@pytest.mark.parametrize(
    ("name", "task"),
    [
        pytest.param(
            *case, marks=[] if case in IN_EVERY_RUN else [pytest.mark.architectures], id="-".join(filter(None, case))
        )
        for case in EVERY
    ],
)
def test_an_architecture_is_exported_and_proven(name: str, task: str | None, rows: list[str], tmp_path: Path) -> None:
    source = load(name, task, tmp_path)
    start = time.perf_counter()
    files = write_files(source.task, tmp_path / "files", DEFAULT_TARGET)
    exported = time.perf_counter()
    report = verify(task=source.task, files=files, target=DEFAULT_TARGET)
    verified = time.perf_counter()
    assert report.passed, (report.worst.name, report.worst.errors)
    graph = onnx.load(files.graph, load_external_data=False).graph
    for value in [*graph.input, *graph.output]:
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    rows.append(
        f"| {name} | {source.task.name} | {len(graph.node)} | {len(report.cases)} | {report.worst.error:.1e} "
        f"| {exported - start:.1f} | {verified - exported:.1f} | {find_batching(source.task, tmp_path)} |"
    )


def find_batching(task: Task, folder: Path) -> str:
    """Return how far rows of different lengths can be run together, the whole gate passed; empty where they cannot."""
    if not task.signature.can_be_ragged:
        return ""
    for batching, export in ((PADDING_FREE, export_padding_free), (RAGGED, export_onnx)):
        with contextlib.suppress(GraphError):
            files = write_files(task, folder / batching.name, DEFAULT_TARGET, export=export)
            path = folder / f"{batching.name}.joined" / files.graph.name
            path.parent.mkdir()
            write_ragged(files.graph, task.signature, task.padding_values, path, DEFAULT_TARGET)
            files = replace(files, model=list_model(path))
            if verify(task=task, files=files, target=DEFAULT_TARGET, arrange=flatten_rows).passed:
                return batching.name
    raise AssertionError(f"rows of {task.name} cannot be joined")


def test_the_table_names_every_architecture() -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    named = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")][1:]
    assert named == [name for name, _ in EVERY]


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.rarer)])
def test_a_text_written_token_by_token_has_the_scores_of_the_whole(name: str, tmp_path: Path) -> None:
    source = load(name, PAST, tmp_path)
    task = source.task
    files = write_files(task, tmp_path / "files", DEFAULT_TARGET)
    ids = np.array([[7, 30, 12, 99, 41, 5], [8, 8, 250, 3, 17, 64]])
    with torch.no_grad():
        expected = task.module.model(input_ids=torch.from_numpy(ids), use_cache=False).logits.numpy()
    names = [tensor.name for tensor in task.signature.outputs]
    past = {
        tensor.name: np.zeros(tensor.resolve_dims({"batch": 2, "past_len": 0}), dtype=np.float32)
        for tensor in task.signature.inputs[2:]
    }
    with open_runtime(DEFAULT_TARGET) as runtime:
        session = runtime.load(files.graph)
        for start, end in ((0, 2), (2, 3), (3, 4), (4, 6)):
            feeds = {"input_ids": ids[:, start:end], "attention_mask": np.ones((2, end), dtype=np.int64), **past}
            logits, *present = session.run(names, feeds)
            np.testing.assert_allclose(logits, expected[:, start:end], atol=1e-4)
            past = dict(zip(past, present, strict=True))
