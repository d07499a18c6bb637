"""The one straight line: checkpoint, vocabulary, torch model, ONNX file, proof, published version."""

import contextlib
import os
import platform
import resource
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from .artefacts import Artefacts
from .checkpoints import StateDict, open_checkpoint
from .engines.tensorrt_build import PlanRunner, build_engine, find_version
from .engines.tensorrt_plan import PLAN_FILE, AxisRange, BuildPlan, check_plan, plan_build
from .errors import GraphError, RuntimeFailure, SettingsError, VerificationError, VocabularyError
from .graph.conversion import PrecisionReport
from .graph.onnx_export import export_onnx
from .graph.precisions import PRECISIONS
from .locations import CACHE
from .progress import Progress
from .proof.quality import convert, list_quality_feeds
from .proof.report_page import PAGE_FILE, render_report_page
from .proof.tolerances import Tolerances, choose_tolerances
from .proof.verify import VerificationReport, hash_file, verify
from .repository.contents import check_owners
from .repository.lock import check_destination
from .repository.lockfile import LOCK_FILE, build_lock, hash_source, render_lock
from .repository.model_config import MAX_BATCH_SIZE, MODEL_INSTANCES, name_models
from .repository.names import ModelNames
from .repository.publication import Publication, check_contract, publish
from .request import ExportRequest
from .targets import Target, find_target
from .tasks import Task, TaskSource, build_task, find_task_name, may_read_text, must_read_text
from .tasks.comparison import describe_errors
from .tasks.own_module import FactoryTask, build_factory_task
from .tasks.tensors import TensorTask
from .weights.lora import merge_adapters
from .weights.tokenizer import check_special_ids, has_tokenizer, load_tokenizer, read_max_length
from .weights.torch_model import load_config
from .weights.transforms import CastToFloat32
from .weights.vocabulary_rows import VocabularyRows, fit_vocabulary

# Timings and calibration, which a second build of the same need not measure again.
_ENGINE_CACHE = CACHE / "tensorrt"

# What stands beside the weights and is read as well: configuration, tokenizer, pooling, adapters.
_CONFIGURATION_FILES = ("*.json", "*.txt", "*.model", "*/config.json")


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is to be served: the truth that the ONNX file is compared with.

    Attributes:
        origin: What it was read from, in words.
        files: What was read → its files, to be hashed.
        task: What is exported.
        parameters: How many numbers it holds.
        rows: How tokenizer and tables were brought together; None for a model without a tokenizer.
        adapters: That were merged.
        missing: What a whole checkpoint of its format would have and this one lacks or cannot show.
    """

    origin: str
    files: Mapping[str, Sequence[Path]]
    task: Task
    parameters: int
    rows: VocabularyRows | None = None
    adapters: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What came of it, for the summary.

    Attributes:
        source: What was exported.
        target: What it was exported for.
        engine: What runs it.
        model_bytes: Size of the published graph with its weights.
        report: Of the published files.
        publication: Where they are.
        precision: What another precision than fp32 costs and gains.
        notes: What had to be done otherwise than usual, and why.
        peak_bytes: The most memory that this process held, and the one of ONNX Runtime.
    """

    source: Source
    target: Target
    engine: str
    model_bytes: int
    report: VerificationReport
    publication: Publication
    precision: PrecisionReport | None
    notes: tuple[str, ...]
    peak_bytes: tuple[int, int]


def count_steps(request: ExportRequest) -> int:
    """Return how many steps `run_export` tells of."""
    converts = request.precision != "fp32" and not (request.engine == "tensorrt" and request.precision == "int8")
    return 6 + 2 * converts + 2 * (request.engine == "tensorrt")


def load_source(request: ExportRequest, progress: Progress) -> Source:
    """Read what is to be served, and build the task's module around it.

    Raises:
        ExportError: With the one reason.
    """
    if request.factory is not None:
        return _load_factory(request, progress)
    if request.checkpoint is None:
        raise SettingsError("there is nothing to export", expected="a CHECKPOINT or --factory", got="neither")
    return _load_checkpoint(request, request.checkpoint, progress)


def _load_factory(request: ExportRequest, progress: Progress) -> Source:
    entry, spec_file = request.factory or "", request.inputs
    if spec_file is None:
        raise SettingsError("the factory's inputs are not described", expected="--inputs FILE", got="none")
    weights: StateDict | None = None
    missing: tuple[str, ...] = ()
    files: dict[str, Sequence[Path]] = {"inputs": [spec_file]}
    source_file = Path(entry.rpartition(":")[0])
    if source_file.suffix == ".py":
        files["factory"] = [source_file]
    with progress.step("building the module"):
        if request.checkpoint is not None:
            checkpoint = open_checkpoint(request.checkpoint, tag=request.tag, allow_non_finite=request.allow_non_finite)
            weights, files["checkpoint"] = CastToFloat32(source=checkpoint), checkpoint.weight_files
            missing = checkpoint.facts.missing
        task = build_factory_task(entry, spec_file, weights)
    parameters = sum(parameter.numel() for parameter in task.module.parameters())
    origin = f"{entry} with {request.checkpoint}" if request.checkpoint else entry
    return Source(origin=origin, files=files, task=task, parameters=parameters, missing=missing)


def _load_checkpoint(request: ExportRequest, path: Path, progress: Progress) -> Source:
    with progress.step("reading checkpoint and vocabulary"):
        checkpoint = open_checkpoint(path, tag=request.tag, allow_non_finite=request.allow_non_finite)
        directory = request.base or checkpoint.directory
        config = load_config(directory, checkpoint.config)
        weights: StateDict = CastToFloat32(source=checkpoint)
        settings = checkpoint.directory if (checkpoint.directory / "adapter_config.json").is_file() else directory
        weights = merge_adapters(weights, settings, request.adapters, request.lora_scaling)
        task_name = request.task or find_task_name(directory, config, weights.specs())
        # Before the weights are read, which may take minutes.
        names = ModelNames(name=request.name, is_ensemble=must_read_text(task_name))
        check_owners(request.repository, names.name, names.all)
        tokenizer, rows = None, None
        if must_read_text(task_name) or (may_read_text(task_name) and has_tokenizer(directory)):
            tokenizer = load_tokenizer(directory)
            if not request.vocabulary.allow_other_tokenizer:
                check_special_ids(directory, tokenizer, checkpoint.config)
            weights, rows = fit_vocabulary(config, weights, tokenizer, request.vocabulary)
        elif request.vocabulary.added_tokens:
            raise VocabularyError(
                f"tokens cannot be added to {directory}", expected="a model with a tokenizer", got=f"--task {task_name}"
            )
        is_required = must_read_text(task_name)
        max_length = read_max_length(directory, tokenizer, config, is_required=is_required)
    parameters = sum(spec.numel for spec in weights.specs().values() if spec.dtype.is_floating_point)
    with progress.step(f"loading {parameters / 1e6:.1f} M parameters"):
        source = TaskSource(
            directory=directory,
            config=config,
            weights=weights,
            tokenizer=tokenizer,
            max_length=max_length,
            options=request.task_options,
            added_tokens=tuple(item.token for item in request.vocabulary.added_tokens),
        )
        task = build_task(task_name, source)
    files: dict[str, Sequence[Path]] = {
        "checkpoint": checkpoint.weight_files,
        "configuration": [item for pattern in _CONFIGURATION_FILES for item in directory.glob(pattern)],
    }
    for index, folder in enumerate(request.adapters):
        files[f"adapter {index + 1}"] = [item for item in folder.iterdir() if item.is_file()]
    return Source(
        origin=checkpoint.format_name,
        files=files,
        task=task,
        parameters=parameters,
        rows=rows,
        adapters=request.adapters,
        missing=checkpoint.facts.missing,
    )


def run_export(
    request: ExportRequest, progress: Progress, on_report: Callable[[VerificationReport], None]
) -> ExportResult:
    """Take a checkpoint to a published version, or refuse and leave the repository as it was.

    Args:
        request: What to do.
        progress: Told of every step.
        on_report: Called with each verification report before it is judged.

    Raises:
        ExportError: With the one reason.
    """
    check_destination(request.repository, request.name)
    target = find_target(request.target)
    # Before anything is read: here, where there is no GPU, nothing can come of it.
    tensorrt_version = find_version() if request.engine == "tensorrt" else None
    source = load_source(request, progress)
    task = source.task
    tolerances = choose_tolerances(
        task.tolerances, PRECISIONS[request.precision], request.tolerances, request.accept_worse
    )
    exact = tolerances if request.precision == "fp32" else Tolerances(bounds=task.tolerances)
    names = name_models(request.name, task.signature)
    check_contract(request.repository, names, task.signature)
    plan = plan_engine(task, request.precision, tensorrt_version) if tensorrt_version else None
    # TensorRT finds the scales of int8 by itself, on the fp32 graph.
    graph_precision = plan.graph_precision if plan else request.precision
    precision = None
    with _restored_fast_path(), tempfile.TemporaryDirectory(prefix="modelyard-") as folder:
        files, report, notes = _export_and_verify(task, exact, target, Path(folder), progress, on_report)
        verified = {path.name: report.sha256[path.name] for path in files.model}
        if graph_precision != "fp32":
            with progress.step(f"converting to {request.precision}") as tell:
                files, precision = convert(
                    task=task,
                    files=files,
                    precision=PRECISIONS[request.precision],
                    bounds=tolerances.bounds,
                    target=target,
                    directory=Path(folder) / request.precision,
                    on_step=tell,
                )
            with progress.step(f"verifying {request.precision} against the checkpoint") as tell:
                report = verify(task=task, files=files, target=target, tolerances=tolerances, on_case=tell)
            report = replace(report, precision=precision.to_json())
            on_report(report)
            _require_passed(report)
        if plan:
            files, report = _build_engine(task, files, plan, tolerances, target, verified, Path(folder), progress)
            report = replace(report, precision=precision.to_json() if precision else None)
            on_report(report)
            _require_passed(report)
        with progress.step("hashing what was read"):
            lock = render_lock(_build_lock(request, source, target, report))
        model_bytes = sum(path.stat().st_size for path in files.model)
        with progress.step("publishing"):
            publication = publish(
                repository=request.repository,
                names=names,
                signature=task.signature,
                files=files,
                report=report,
                engine=request.engine,
                document=lambda version: {
                    LOCK_FILE: lock,
                    PAGE_FILE: render_report_page(report.to_json(), name=request.name, version=version),
                },
            )
    return ExportResult(
        source=source,
        target=target,
        engine=request.engine,
        model_bytes=model_bytes,
        report=report,
        publication=publication,
        precision=precision,
        notes=notes,
        peak_bytes=(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, report.runtime_peak_bytes),
    )


@contextlib.contextmanager
def _restored_fast_path() -> Iterator[None]:
    """Leave torch's fast path for attention, which is one for the whole process, as it was."""
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def plan_engine(task: Task, precision: str, tensorrt_version: str) -> BuildPlan:
    """Return how a TensorRT plan for `task` is built.

    Raises:
        EngineError: This TensorRT cannot do that.
    """
    ranges = {}
    if isinstance(task, TensorTask):
        for symbol, sizes in task.tensors.sizes.items():
            # TensorRT knows no empty axis: a first step without a past has one that is masked.
            smallest, largest = max(1, sizes.smallest), max(1, sizes.largest)
            usual = min(max(smallest, sizes.choose_example(32)), largest)
            ranges[symbol] = AxisRange(minimum=smallest, optimum=usual, maximum=largest)
    return plan_build(
        task.signature,
        precision=precision,
        tensorrt_version=tensorrt_version,
        max_batch_size=MAX_BATCH_SIZE,
        instances=MODEL_INSTANCES,
        ranges=ranges,
    )


def _build_engine(
    task: Task,
    files: Artefacts,
    plan: BuildPlan,
    tolerances: Tolerances,
    target: Target,
    verified: Mapping[str, str],
    directory: Path,
    progress: Progress,
) -> tuple[Artefacts, VerificationReport]:
    """Return the files with a TensorRT plan in place of the graph, and their report from the GPU."""
    folder = directory / "tensorrt"
    folder.mkdir()
    with progress.step("building the TensorRT plan"):
        feeds = list_quality_feeds(task)
        _ENGINE_CACHE.mkdir(parents=True, exist_ok=True)
        metadata = build_engine(plan, files.graph, folder, onnx_sha256=verified, feeds=feeds, cache=_ENGINE_CACHE)
        check_plan(
            metadata,
            release=target.release,
            tensorrt_version=target.tensorrt_version,
            plan_sha256=hash_file(folder / PLAN_FILE),
            onnx_sha256=verified,
            max_batch_size=MAX_BATCH_SIZE,
        )
    planned = replace(files, model=tuple(sorted(folder.iterdir())))
    with progress.step("verifying the plan against the checkpoint") as tell:
        runner = PlanRunner(folder / PLAN_FILE)
        report = verify(task=task, files=planned, target=target, tolerances=tolerances, runner=runner, on_case=tell)
    return planned, report


def _export_and_verify(
    task: Task,
    tolerances: Tolerances,
    target: Target,
    directory: Path,
    progress: Progress,
    on_report: Callable[[VerificationReport], None],
) -> tuple[Artefacts, VerificationReport, tuple[str, ...]]:
    """Return the files in fp32, their report, and why earlier ways of exporting were given up.

    A module of the user's own is tried in several ways, the most faithful first: exported; exported without torch's
    fast path for attention, whose padded values no graph has; traced, which makes constants of whatever depends on
    sizes. Each is verified in full, so that whichever is published is proven.
    """
    ways = (
        ("exported", "exported without torch's fast path", "traced") if isinstance(task, FactoryTask) else ("exported",)
    )
    notes: list[str] = []
    for way in ways:
        if way == "exported without torch's fast path":
            # To the end: what the rest of the export is compared with is then the module without it.
            torch.backends.mha.set_fastpath_enabled(False)
        last = way == ways[-1]
        try:
            with progress.step(f"exporting to ONNX{'' if way == ways[0] else f', {way}'}"):
                files = write_files(task, directory / str(len(notes)), target, is_traced=way == "traced")
            with progress.step("verifying against the checkpoint") as tell:
                report = verify(task=task, files=files, target=target, tolerances=tolerances, on_case=tell)
        except (GraphError, RuntimeFailure, VerificationError) as exc:
            if last:
                raise
            notes.append(f"not {way}: {exc}")
            continue
        if report.passed or last:
            on_report(report)
            _require_passed(report)
            return files, report, (*notes, *([f"{way}, after other ways failed"] if notes else []))
        notes.append(f"not {way}: {describe_errors(report.worst.errors)} in {report.worst.name!r}")
    raise AssertionError("Bug: the last way returns or raises")


def write_files(task: Task, directory: Path, target: Target, *, is_traced: bool = False) -> Artefacts:
    """Write everything that a version of `task` is made of into `directory`, which is made, and return what lies where.

    Raises:
        GraphError: The module cannot be exported.
    """
    model_file = directory / "model" / "model.onnx"
    model_file.parent.mkdir(parents=True)
    export_onnx(task.module, task.signature, task.build_example(), model_file, target, is_traced=is_traced)
    steps: dict[str, tuple[Path, ...]] = {}
    for step, contents in task.step_files.items():
        (directory / step).mkdir()
        steps[step] = tuple(directory / step / name for name in contents)
        for path in steps[step]:
            path.write_bytes(contents[path.name])
    return Artefacts(model=tuple(sorted(model_file.parent.iterdir())), steps=steps)


def _build_lock(
    request: ExportRequest, source: Source, target: Target, report: VerificationReport
) -> dict[str, object]:
    options = asdict(request)
    # Where it was published, and where it was read from, is no part of what it is.
    del options["repository"], options["checkpoint"]
    if request.factory:
        options["factory"] = Path(request.factory).name
    return build_lock(
        target=target,
        versions=report.versions | {"python": platform.python_version()},
        sources={what: hash_source(_find_root(files), files) for what, files in source.files.items() if files},
        options=options,
        seeds={"vocabulary": request.vocabulary.seed},
        artefacts=report.sha256,
    )


def _find_root(files: Sequence[Path]) -> Path:
    """Return the innermost folder that holds all of `files`."""
    return Path(os.path.commonpath([path.parent.absolute() for path in files]))


def _require_passed(report: VerificationReport) -> None:
    failed = [case for case in report.cases if not case.passed]
    if failed:
        raise VerificationError(
            f"the ONNX model is not equal to the checkpoint in {len(failed)} of {len(report.cases)} cases, "
            f"worst in {report.worst.name!r}",
            expected=describe_errors(report.tolerances, bounds=True),
            got=describe_errors(report.worst.errors),
            remedy="nothing was published; see every case in the table above",
        )
