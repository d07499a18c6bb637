"""The one straight line: checkpoint, vocabulary, torch model, ONNX file, proof, published version."""

import hashlib
import resource
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .artefacts import Artefacts
from .engines.fastest import EngineChoice, choose_fastest
from .engines.table import AUTO, Engine, list_engines
from .errors import ExportError, GraphError, RuntimeFailure, VerificationError
from .file_limit import locating
from .graph.batchings import BATCHINGS
from .graph.conversion import PrecisionReport
from .graph.onnx_export import PROVENANCE_PREFIX
from .graph.precisions import FP32, PRECISIONS, Precision
from .identity import CONFIGURATION, describe_options, hash_files, list_tools
from .options import ExportRequest
from .progress import Progress
from .proof.quality import list_single_feeds
from .proof.report_page import PAGE_FILE, render_report_page
from .proof.tolerances import choose_tolerances
from .proof.verify import VerificationReport, require_passed
from .repository.intent import check_effect
from .repository.lock import check_destination
from .repository.lockfile import LOCK_FILE, SourceHash, build_lock, render_lock
from .repository.model_config import name_models
from .repository.publication import Publication, check_contract, publish
from .repository.version import PUBLICATION_FILE, render_publication
from .source import Source, load_source
from .stages import Draft, Job, Stage, plan_stages, restored_fast_path
from .subject import describe_subject
from .targets import Target, find_target
from .tasks.base import Task
from .tasks.comparison import describe_errors

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
        choice: How the engine was chosen; None where it was named.
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
    choice: EngineChoice | None
    notes: tuple[str, ...]
    peak_bytes: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Route:
    """An engine and the stages to its files. All routes to one version begin with the same stage."""

    engine: Engine
    stages: tuple[Stage, ...]


@dataclass(frozen=True, kw_only=True)
class Proven:
    """Where a route ended: files, and their proof."""

    engine: Engine
    draft: Draft
    report: VerificationReport


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
    form = request.form
    routes, refused = _plan(request, precision, list_engines(request.engine, form), target)
    progress.expect(_count_steps(request, routes))
    source = load_source(request, progress)
    task = source.task
    if task.form != form:
        others = routes
        routes, refused = _plan(request, precision, list_engines(request.engine, task.form), target)
        progress.expect(_count_steps(request, routes) - _count_steps(request, others))
    kept = _keep_engine(request, routes, task, refused)
    progress.expect(_count_steps(request, kept) - _count_steps(request, routes))
    routes = kept
    tolerances = choose_tolerances(task.tolerances, precision, request.tolerances, request.accept_worse)
    with progress.step("hashing what was read"):
        sources = hash_files(source.files)
        # What was hashed is what was read.
        source.refuse_changed()
    job = Job(
        task=task,
        target=target,
        precision=precision,
        tolerances=tolerances,
        provenance=_describe_provenance(task, sources),
    )
    with (
        restored_fast_path(),
        tempfile.TemporaryDirectory(prefix="modelyard-") as folder,
        locating(Path(folder).parent),
    ):
        every = _run_routes(routes, refused, job, Path(folder), progress, on_report)
        choice = _choose(every, refused, task, progress) if request.engine == AUTO else None
        proven = next(each for each in every if choice is None or each.engine.name == choice.chosen)
        engine, draft = proven.engine, proven.draft
        report = replace(proven.report, engines=choice.to_json() if choice else None)
        recording = [report.recording] if report.recording else []
        notes = (*draft.notes, *_judge_warmup(request, task, report), *recording)
        source.refuse_late_save()
        lock = _build_lock(request, sources, target, report)
        publication = _publish(request, source, target, engine, draft, report, lock, progress)
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
        choice=choice,
        notes=notes,
        peak_bytes=(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, report.runtime_peak_bytes),
    )


def _plan(
    request: ExportRequest, precision: Precision, engines: Sequence[Engine], target: Target
) -> tuple[list[Route], dict[str, str]]:
    """Return a route to each engine, and name → reason of those that cannot be built here or would not be loaded there.

    Raises:
        ExportError: The last that was left cannot.
    """
    routes: list[Route] = []
    refused: dict[str, str] = {}
    for engine in engines:
        try:
            stages = plan_stages(
                precision, engine, is_own_module=request.factory is not None, batching=BATCHINGS[request.batching]
            )
            for stage in reversed(stages):
                stage.engine.check(precision.name, target)
        except ExportError as exc:
            if len(refused) + 1 == len(engines):
                raise
            refused[engine.name] = str(exc)
        else:
            routes.append(Route(engine=engine, stages=tuple(stages)))
    return routes, refused


def _keep_engine(request: ExportRequest, routes: Sequence[Route], task: Task, refused: dict[str, str]) -> list[Route]:
    """Return the routes that the name may take: it keeps its engine, and what was asked for must have an effect there.

    Why it may not take others is added to `refused`.

    Raises:
        ExportError: There is none.
    """
    kept: list[Route] = []
    for route in routes:
        try:
            for serving in (request.serving, *request.variants.values()):
                check_effect(serving, route.engine, task.signature)
                parameters = {name: getattr(serving, name) for name in route.engine.parameter_options}
                route.engine.check_parameters(parameters, task.cache_shapes, request.precision)
            check_contract(request.repository, name_models(request.name, task.signature), task.signature, route.engine)
        except ExportError as exc:
            if not kept and route is routes[-1]:
                raise
            refused[route.engine.name] = str(exc)
        else:
            kept.append(route)
    return kept


def _count_steps(request: ExportRequest, routes: Sequence[Route]) -> int:
    """Return how many steps there are besides reading: making and proving, hashing, publishing, and measuring."""
    return 2 * (1 + sum(len(route.stages) - 1 for route in routes)) + 2 + (request.engine == AUTO)


def _run_routes(
    routes: Sequence[Route],
    refused: dict[str, str],
    job: Job,
    folder: Path,
    progress: Progress,
    on_report: OnReport,
) -> list[Proven]:
    """Return the files of every route that are proven; why others are not is added to `refused`.

    Raises:
        ExportError: The last that was left fails.
    """
    # What all begin with is done once.
    begun = _run_stage(routes[0].stages[0], job, Draft(files=Artefacts(model=())), folder / "0", progress, on_report)
    proven: list[Proven] = []
    for route in routes:
        (draft, report), steps, expected = begun, progress.begun, progress.expected
        try:
            for number, stage in enumerate(route.stages[1:], 1):
                place = folder / route.engine.name / str(number)
                draft, report = _run_stage(stage, job, draft, place, progress, on_report)
        except ExportError as exc:
            if not proven and route is routes[-1]:
                raise
            refused[route.engine.name] = str(exc)
            # Those of ways that were given up are expected already.
            taken = progress.begun - steps - (progress.expected - expected)
            progress.expect(taken - 2 * len(route.stages[1:]))
        else:
            proven.append(Proven(engine=route.engine, draft=draft, report=report))
    return proven


def _choose(every: Sequence[Proven], refused: dict[str, str], task: Task, progress: Progress) -> EngineChoice:
    with progress.step("measuring engines"):
        return choose_fastest(
            {each.engine: each.draft.files.graph for each in every},
            [tensor.name for tensor in task.signature.outputs],
            list_single_feeds(task),
            refused,
        )


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
                require_passed(report, is_lossy=stage.precision is not FP32)
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
    lock: Mapping[str, object],
    progress: Progress,
) -> Publication:
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
                    {
                        "checkpoint": request.address
                        or str((request.checkpoint and request.checkpoint.absolute()) or request.factory),
                        "kind": source.origin,
                        "task": source.task.name,
                        "warnings": list(source.task.warnings),
                    }
                ),
                PAGE_FILE: render_report_page(
                    report.to_json(),
                    name=request.name,
                    version=version.number,
                    subject=describe_subject(request, source, engine.name, lock, version),
                ),
                **engine.list_version_files(
                    request.name, version.number, precision=request.precision, context=source.task.context
                ),
            },
        )


def _judge_warmup(request: ExportRequest, task: Task, report: VerificationReport) -> list[str]:
    """Return that instances are not warmed up, where that is so.

    Raises:
        ExportError: Lengths were asked for, which would have no effect.
    """
    contract = task.signature.contract
    # A lean step warms itself up, with texts.
    if not report.refused_warmup or (contract is not None and contract.is_lean):
        return []
    if lengths := [length for each in (request.serving, *request.variants.values()) for length in each.warmup]:
        raise ExportError(
            f"{request.name} cannot be warmed up, which is done with rows of zeros",
            expected="a graph that runs them",
            got=f"'{report.refused_warmup}'",
            remedy=f"leave out --warmup {' '.join(map(str, lengths))}",
        )
    return ["served without a warmup, which is rows of zeros: the graph runs texts, but not zeros alone"]


def _name_source(request: ExportRequest) -> str:
    """Return what the version is made from, for whoever looks for it again."""
    if request.address:
        return request.address
    return str(request.checkpoint.absolute()) if request.checkpoint else str(request.factory)


def _describe_provenance(task: Task, sources: Mapping[str, SourceHash]) -> dict[str, str]:
    """Return what a graph says of itself, wherever the file goes: nothing of this machine, this folder or this day."""
    facts = {"task": task.name, "served_as": task.description}
    # Another file beside the weights makes no other model of them.
    facts |= {f"{what}.sha256": source.sha256 for what, source in sources.items() if what != CONFIGURATION}
    for contents in task.step_files.values():
        facts |= {f"{name}.sha256": hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    return {f"{PROVENANCE_PREFIX}{name}": fact for name, fact in facts.items()}


def _build_lock(
    request: ExportRequest, sources: Mapping[str, SourceHash], target: Target, report: VerificationReport
) -> dict[str, object]:
    return build_lock(
        target=target,
        versions=report.versions | list_tools(),
        sources=sources,
        options=describe_options(request),
        seeds={"vocabulary": request.vocabulary.seed},
        artefacts=report.sha256,
        address=request.address,
    )
