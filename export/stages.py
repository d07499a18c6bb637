"""The stages between a task's module and the files that are published, in order. Each one's files are proven."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from .artefacts import Artefacts, hash_file, list_model
from .engines.engine import AxisRange, VerifiedGraph
from .engines.openvino_generation import OpenVINOGeneration
from .engines.table import ONNXRUNTIME, Engine
from .engines.vllm_engine import DTYPES, VLLM
from .graph.batchings import EQUAL, Batching
from .graph.conversion import PrecisionReport
from .graph.onnx_export import export_onnx
from .graph.padding_free import export_padding_free
from .graph.precisions import FP32, PRECISIONS, Precision
from .graph.ragged import flatten_rows, write_ragged
from .progress import Detail
from .proof.generation import verify_generation
from .proof.quality import build_measure, convert, list_quality_cases, list_quality_feeds
from .proof.tolerances import QUALITY_KEYS, Tolerances, find_quality_key, list_tolerances
from .proof.verify import VerificationReport, verify
from .proof.weights import verify_weights
from .targets import Target
from .tasks.base import Task
from .tasks.tensors import TensorTask
from .tasks.texts.text_generation import TextGeneration
from .weights.weights_folder import write_weights

# A size that axes of no known use have most often.
_USUAL_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all stages work on.

    Attributes:
        task: The source of truth.
        target: Triton release that is to serve the files.
        precision: Precision of the published files.
        tolerances: Bounds that files of this precision are held to.
        provenance: What a graph says of itself.
    """

    task: Task
    target: Target
    precision: Precision
    tolerances: Tolerances
    provenance: Mapping[str, str] = field(default_factory=dict)

    def find_tolerances(self, precision: Precision) -> Tolerances:
        """Return what files are held to: what was asked for those to be published, the usual for those on the way."""
        return self.tolerances if precision is self.precision else list_tolerances(self.task.tolerances, precision)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Files on their way to be published.

    Attributes:
        files: As the last stage left them.
        conversion: What their precision costs and gains; None in fp32.
        graph_sha256: File name → hash of the fp32 graph that they came from.
        notes: Why other ways of making them were given up.
    """

    files: Artefacts
    conversion: PrecisionReport | None = None
    graph_sha256: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


# Writes a module as ONNX; takes what `export_onnx` takes.
Export = Callable[..., None]

# Makes files of what the stage before left, in a folder that is there and empty.
Make = Callable[[Job, Draft, Path, Detail], Draft]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of making a stage's files.

    Attributes:
        name: What became of the files that way, for notes.
        making: What is being done, for the progress.
        make: Function that makes them.
    """

    name: str
    making: str
    make: Make


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Files are made and proven.

    Attributes:
        ways: Tried in this order until one is proven.
        proving: What is then being done, for the progress.
        precision: Precision of the files.
        engine: What runs them for the proof.
        prove: Function that compares them with the checkpoint; takes what `verify` takes.
    """

    ways: tuple[Way, ...]
    proving: str
    precision: Precision
    engine: Engine
    prove: Callable[..., VerificationReport] = verify


def plan_stages(
    precision: Precision, engine: Engine, *, is_own_module: bool, batching: Batching = EQUAL
) -> list[Stage]:
    """Return the stages from a module to files in `precision` for `engine`.

    Args:
        precision: What was asked for.
        engine: What is to run the files.
        is_own_module: Whether the module is the user's own, so that more ways of exporting it are tried.
        batching: Which requests are run together.

    Raises:
        EngineError: The engine cannot serve that precision.
    """
    if isinstance(engine, OpenVINOGeneration):
        return [_plan_decoder(precision, engine)]
    if isinstance(engine, VLLM):
        return [_plan_weights(precision, engine)]
    graph_precision = PRECISIONS[engine.find_graph_precision(precision.name)]
    exports = _EXPORTS if is_own_module else _EXPORTS[:1]
    export = Stage(
        ways=(_EXPORT_PADDING_FREE, *exports) if not batching.computes_padding else exports,
        proving="verifying against the checkpoint",
        precision=FP32,
        engine=ONNXRUNTIME,
    )
    conversion = Stage(
        ways=(
            Way(
                name="converted",
                making=f"converting to {graph_precision.name}",
                make=partial(_convert, precision=graph_precision),
            ),
        ),
        proving=f"verifying {graph_precision.name} against the checkpoint",
        precision=graph_precision,
        engine=ONNXRUNTIME,
    )
    build = Stage(
        ways=(Way(name="built", making=f"building for {engine.title}", make=partial(_build, engine=engine)),),
        proving=f"verifying in {engine.title} against the checkpoint",
        precision=precision,
        engine=engine,
    )
    stages = [export]
    if graph_precision.converts:
        stages.append(conversion)
    if engine.builds:
        stages.append(build)
    if batching.is_ragged:
        stages.append(_join_rows(graph_precision))
    return stages


def _join_rows(precision: Precision) -> Stage:
    """Return the stage in which a graph is given rows of any lengths."""
    return Stage(
        ways=(Way(name="ragged", making="having rows of any lengths joined", make=_write_ragged),),
        proving="verifying rows of different lengths against the checkpoint",
        precision=precision,
        engine=ONNXRUNTIME,
        prove=partial(verify, arrange=flatten_rows),
    )


def _plan_decoder(precision: Precision, engine: OpenVINOGeneration) -> Stage:
    """Return the one stage of a decoder: no graph of ONNX lies between the module and the file."""
    convert = Way(
        name="converted", making=f"converting for {engine.title}", make=partial(_convert_decoder, engine=engine)
    )
    return Stage(
        ways=(convert,),
        proving="verifying scores and texts against the checkpoint",
        precision=precision,
        engine=engine,
        prove=verify_generation,
    )


def _plan_weights(precision: Precision, engine: VLLM) -> Stage:
    """Return the one stage of weights that another engine runs: they are written, and compared bit for bit."""
    write = Way(name="written", making=f"writing weights for {engine.title}", make=_write_weights)
    return Stage(
        ways=(write,),
        proving="comparing weights with the checkpoint",
        precision=precision,
        engine=engine,
        prove=partial(verify_weights, precision=precision.name),
    )


@contextlib.contextmanager
def restored_fast_path() -> Iterator[None]:
    """Leave torch's fast path for attention, which is one for the whole process, as it was."""
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def write_files(task: Task, directory: Path, target: Target, *, export: Export = export_onnx) -> Artefacts:
    """Write everything that a version of `task` is made of into the empty folder `directory`; return what lies where.

    Raises:
        GraphError: The module cannot be exported.
    """
    model_file = directory / "model" / ONNXRUNTIME.model_file
    model_file.parent.mkdir(parents=True)
    export(task.module, task.signature, task.build_example(), model_file, target)
    steps: dict[str, tuple[Path, ...]] = {}
    for step, contents in task.step_files.items():
        folder = directory / "steps" / step
        folder.mkdir(parents=True)
        steps[step] = tuple(folder / name for name in contents)
        for path in steps[step]:
            path.write_bytes(contents[path.name])
    return Artefacts(model=list_model(model_file), steps=steps)


def _export(
    job: Job, draft: Draft, directory: Path, tell: Detail, *, is_traced: bool = False, has_fast_path: bool = True
) -> Draft:
    if not has_fast_path:
        # It stays off to the end: the rest of the export is then compared with the module without it.
        torch.backends.mha.set_fastpath_enabled(False)
    export = partial(export_onnx, is_traced=is_traced, provenance=job.provenance)
    files = write_files(job.task, directory, job.target, export=export)
    return Draft(files=files, graph_sha256={path.name: hash_file(path) for path in files.model})


# A module of the user's own is tried in several ways, the most faithful first: exported; exported without torch's fast
# path for attention, whose padded values no graph has; traced, which makes constants of whatever depends on sizes.
_EXPORTS = (
    Way(name="exported", making="exporting to ONNX", make=_export),
    Way(
        name="exported without torch's fast path",
        making="exporting to ONNX, exported without torch's fast path",
        make=partial(_export, has_fast_path=False),
    ),
    Way(
        name="traced",
        making="exporting to ONNX, traced",
        make=partial(_export, is_traced=True, has_fast_path=False),
    ),
)


def _export_padding_free(job: Job, draft: Draft, directory: Path, tell: Detail) -> Draft:
    export = partial(export_padding_free, provenance=job.provenance)
    files = write_files(job.task, directory, job.target, export=export)
    return Draft(files=files, graph_sha256={path.name: hash_file(path) for path in files.model})


_EXPORT_PADDING_FREE = Way(
    name="exported without padding", making="exporting to ONNX, without padding", make=_export_padding_free
)


def _write_ragged(job: Job, draft: Draft, directory: Path, tell: Detail) -> Draft:
    path = directory / draft.files.graph.name
    write_ragged(draft.files.graph, job.task.signature, job.task.padding_values, path, job.target)
    return replace(draft, files=replace(draft.files, model=list_model(path)))


def _convert(job: Job, draft: Draft, directory: Path, tell: Detail, *, precision: Precision) -> Draft:
    files, report = convert(
        task=job.task,
        files=draft.files,
        precision=precision,
        bounds=job.find_tolerances(precision).bounds,
        target=job.target,
        directory=directory,
        on_step=tell,
    )
    return replace(draft, files=files, conversion=report)


def _build(job: Job, draft: Draft, directory: Path, tell: Detail, *, engine: Engine) -> Draft:
    key = find_quality_key(job.task.tolerances)
    graph = VerifiedGraph(
        path=draft.files.graph,
        signature=job.task.signature,
        precision=job.precision.name,
        target=job.target,
        sizes=_list_axis_ranges(job.task),
        feeds=list_quality_feeds(job.task),
        sha256=draft.graph_sha256,
        measure=build_measure(job.task, list_quality_cases(job.task), key, job.target, engine),
        bounds={QUALITY_KEYS[key]: job.tolerances.bounds[key]},
        on_step=tell,
        padding=job.task.padding_values,
    )
    engine.build(graph, directory)
    return replace(draft, files=replace(draft.files, model=list_model(directory / engine.model_file)))


def _convert_decoder(job: Job, draft: Draft, directory: Path, tell: Detail, *, engine: OpenVINOGeneration) -> Draft:
    task = job.task
    assert isinstance(task, TextGeneration), "Bug: an engine takes what the task does not hand over"
    for name, content in task.model_files.items():
        (directory / name).write_bytes(content)
    engine.write(task.model, task.cache_shapes, directory / engine.model_file, job.precision.name)
    return Draft(files=Artefacts(model=list_model(directory / engine.model_file)))


def _write_weights(job: Job, draft: Draft, directory: Path, tell: Detail) -> Draft:
    task = job.task
    assert isinstance(task, TextGeneration), "Bug: an engine takes what the task does not hand over"
    dtype = DTYPES[job.precision.name]
    for name, content in task.list_weights_files(dtype).items():
        (directory / name).write_bytes(content)
    write_weights(task.weights, directory, dtype)
    return Draft(files=Artefacts(model=list_model(directory / VLLM.model_file)))


def _list_axis_ranges(task: Task) -> dict[str, AxisRange]:
    """Return symbol → the sizes of its axis, of a task whose sizes nothing else tells."""
    ranges = {}
    for symbol, sizes in task.tensors.sizes.items() if isinstance(task, TensorTask) else ():
        # No engine has an empty axis: a first step without a past has one that is masked.
        smallest, largest = max(1, sizes.smallest), max(1, sizes.largest)
        usual = min(max(smallest, sizes.choose_example(_USUAL_SIZE)), largest)
        ranges[symbol] = AxisRange(minimum=smallest, optimum=usual, maximum=largest)
    return ranges
