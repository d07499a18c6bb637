"""The one straight line: checkpoint, vocabulary, torch model, ONNX file, proof, published version."""

import resource
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from .artefacts import Artefacts
from .engines import ENGINES, Engine, choose_engine
from .engines.vllm_engine import DTYPES, VLLM
from .errors import GraphError, RuntimeFailure, VerificationError
from .graph.conversion import PrecisionReport
from .graph.precisions import PRECISIONS, Precision
from .identity import describe_options, hash_files, list_tools
from .options import ExportRequest
from .progress import Progress
from .proof.report_page import PAGE_FILE, render_report_page
from .proof.tolerances import choose_tolerances
from .proof.verify import VerificationReport, require_passed
from .repository.intent import check_effect
from .repository.lock import check_destination
from .repository.lockfile import LOCK_FILE, build_lock, render_lock
from .repository.model_config import name_models
from .repository.publication import Publication, check_contract, publish
from .repository.version import PUBLICATION_FILE, Version, render_publication
from .repository.vllm_arguments import ARGUMENTS_FILE, render_arguments
from .source import Source, load_source
from .stages import Draft, Job, Stage, plan_stages, restored_fast_path
from .subject import describe_subject
from .targets import Target, find_target
from .tasks.comparison import describe_errors
from .tasks.text_generation import TextGeneration

# Called with the report of each stage before it is judged.
OnReport = Callable[[VerificationReport, Stage], None]


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What an export led to, for the summary.

    Attributes:
        source: What was exported.
        target: What it was exported for.
        engine: Name of what runs it.
        precision: Name of the precision of the published files.
        model_bytes: Size of the published model with its weights.
        report: Proof of the published files.
        publication: Where they are.
        conversion: What another precision than fp32 costs and gains; None where nothing was converted.
        notes: What had to be done otherwise than usual, and why.
        peak_bytes: The most memory that this process held, and the one of ONNX Runtime.
    """

    source: Source
    target: Target
    engine: str
    precision: str
    model_bytes: int
    report: VerificationReport
    publication: Publication
    conversion: PrecisionReport | None
    notes: tuple[str, ...]
    peak_bytes: tuple[int, int]


def run_export(request: ExportRequest, progress: Progress, on_report: OnReport) -> ExportResult:
    """Take a checkpoint to a published version, or refuse and leave the repository as it was.

    Args:
        request: What to do.
        progress: Told of every step.
        on_report: Called with the report of each stage before it is judged.

    Raises:
        ExportError: The export is refused.
    """
    check_destination(request.repository, request.name)
    target, precision = find_target(request.target), PRECISIONS[request.precision]
    # Before anything is read: here, without a GPU or a network perhaps, nothing can come of it.
    usual = choose_engine(None, "graph") if request.engine is None else ENGINES[request.engine]
    stages = _plan(request, precision, usual, target)
    progress.expect(2 * len(stages) + 2)
    source = load_source(request, progress)
    task = source.task
    engine = choose_engine(request.engine, task.form)
    if engine is not usual:
        others, stages = stages, _plan(request, precision, engine, target)
        progress.expect(2 * len(stages) - 2 * len(others))
    for serving in (request.serving, *request.variants.values()):
        check_effect(serving, engine, task.signature)
    check_contract(request.repository, name_models(request.name, task.signature), task.signature, engine)
    tolerances = choose_tolerances(task.tolerances, precision, request.tolerances, request.accept_worse)
    job = Job(task=task, target=target, precision=precision, tolerances=tolerances)
    with restored_fast_path(), tempfile.TemporaryDirectory(prefix="modelyard-") as folder:
        draft = Draft(files=Artefacts(model=()))
        for number, stage in enumerate(stages):
            draft, report = _run_stage(stage, job, draft, Path(folder, str(number)), progress, on_report)
        publication = _publish(request, source, target, engine, draft, report, progress)
        model_bytes = sum(path.stat().st_size for path in draft.files.model)
    return ExportResult(
        source=source,
        target=target,
        engine=engine.name,
        precision=precision.name,
        model_bytes=model_bytes,
        report=report,
        publication=publication,
        conversion=draft.conversion,
        notes=draft.notes,
        peak_bytes=(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, report.runtime_peak_bytes),
    )


def _plan(request: ExportRequest, precision: Precision, engine: Engine, target: Target) -> list[Stage]:
    """Return the stages, having refused what cannot be built here or would not be loaded there."""
    stages = plan_stages(precision, engine, is_own_module=request.factory is not None)
    for stage in reversed(stages):
        stage.engine.check(precision.name, target)
    return stages


def _run_stage(
    stage: Stage, job: Job, before: Draft, folder: Path, progress: Progress, on_report: OnReport
) -> tuple[Draft, VerificationReport]:
    """Return the files of the first way that are proven, with notes why others were given up, and their report.

    Raises:
        ExportError: The last way fails, or what it made is not equal to the checkpoint.
    """
    notes: list[str] = []
    for way in stage.ways:
        is_last, begun = way is stage.ways[-1], progress.begun
        directory = folder / str(len(notes))
        directory.mkdir(parents=True)
        try:
            with progress.step(way.making) as tell:
                draft = way.make(job, before, directory, tell)
            report = _prove(stage, job, draft, progress)
        except (GraphError, RuntimeFailure, VerificationError) as exc:
            if is_last:
                raise
            reason = str(exc)
        else:
            if report.passed or is_last:
                on_report(report, stage)
                require_passed(report)
                notes += [f"{way.name}, after other ways failed"] if notes else []
                return replace(draft, notes=(*before.notes, *notes)), report
            reason = f"{describe_errors(report.worst.errors, report.tolerances)} in {report.worst.name!r}"
        notes.append(f"not {way.name}: {reason}")
        progress.expect(progress.begun - begun)
    raise AssertionError("Bug: the last way returns or raises")


def _prove(stage: Stage, job: Job, draft: Draft, progress: Progress) -> VerificationReport:
    """Return how the files of a stage compare with the checkpoint. Does not judge."""
    with progress.step(stage.proving) as tell:
        report = stage.prove(
            task=job.task,
            files=draft.files,
            target=job.target,
            tolerances=job.find_tolerances(stage.precision),
            engine=stage.engine,
            on_case=tell,
        )
    return replace(report, precision=draft.conversion.to_json() if draft.conversion else None)


def _publish(
    request: ExportRequest,
    source: Source,
    target: Target,
    engine: Engine,
    draft: Draft,
    report: VerificationReport,
    progress: Progress,
) -> Publication:
    with progress.step("hashing what was read"):
        lock = _build_lock(request, source, target, report)
    with progress.step("publishing"):
        return publish(
            repository=request.repository,
            names=name_models(request.name, source.task.signature),
            signature=source.task.signature,
            files=draft.files,
            report=report,
            engine=engine,
            serving=request.serving,
            variants=request.variants,
            activates=not request.no_activate,
            document=lambda version: {
                LOCK_FILE: render_lock(lock),
                PUBLICATION_FILE: render_publication(
                    checkpoint=request.address
                    or str((request.checkpoint and request.checkpoint.absolute()) or request.factory),
                    kind=source.origin,
                    task=source.task.name,
                ),
                PAGE_FILE: render_report_page(
                    report.to_json(),
                    name=request.name,
                    version=version.number,
                    subject=describe_subject(request, source, engine.name, lock, version),
                ),
                **_list_arguments(request, source, engine, version),
            },
        )


def _name_source(request: ExportRequest) -> str:
    """Return what the version is made from, for whoever looks for it again."""
    if request.address:
        return request.address
    return str(request.checkpoint.absolute()) if request.checkpoint else str(request.factory)


def _list_arguments(request: ExportRequest, source: Source, engine: Engine, version: Version) -> dict[str, str]:
    """Return what an engine is told that names the version's own place: file name → text."""
    task = source.task
    if not isinstance(engine, VLLM) or not isinstance(task, TextGeneration):
        return {}
    arguments = {"dtype": DTYPES[request.precision], "max_model_len": task.context}
    return {ARGUMENTS_FILE: render_arguments(request.name, version.number, arguments)}


def _build_lock(
    request: ExportRequest, source: Source, target: Target, report: VerificationReport
) -> dict[str, object]:
    return build_lock(
        target=target,
        versions=report.versions | list_tools(),
        sources=hash_files(source.files),
        options=describe_options(request),
        seeds={"vocabulary": request.vocabulary.seed},
        artefacts=report.sha256,
        address=request.address,
    )
