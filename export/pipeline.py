"""The one straight line: checkpoint, vocabulary, torch model, ONNX file, proof, published version."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from export import vocabulary
from export.artefacts import Artefacts
from export.checkpoints import StateDict, StoredCheckpoint, open_checkpoint
from export.comparison import describe_errors
from export.errors import VerificationError, VocabularyError
from export.lora import merge_adapters
from export.model_config import ModelNames
from export.onnx_export import export_onnx
from export.progress import Progress
from export.repository import Publication, check_contract, check_name, publish
from export.request import ExportRequest
from export.targets import DEFAULT_TARGET
from export.tasks import Task, TaskSource, TextTask, build_task, find_task_name, may_read_text, must_read_text
from export.torch_model import load_config
from export.transforms import CastToFloat32
from export.verify import VerificationReport, verify
from export.vocabulary_rows import VocabularyRows, fit_vocabulary

STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Source:
    """The checkpoint as it is to be served: the truth that the ONNX file is compared with.

    Attributes:
        checkpoint: As it was opened.
        task: What is exported.
        parameters: How many numbers the checkpoint holds.
        rows: How tokenizer and tables were brought together; None for a model without a tokenizer.
        adapters: That were merged.
    """

    checkpoint: StoredCheckpoint
    task: Task
    parameters: int
    rows: VocabularyRows | None
    adapters: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What came of it, for the summary."""

    source: Source
    model_bytes: int
    report: VerificationReport
    publication: Publication


def load_source(request: ExportRequest, progress: Progress) -> Source:
    """Read a checkpoint, bring tokenizer and embedding rows together, and build the task's module around the model.

    Raises:
        ExportError: With the one reason.
    """
    with progress.step("reading checkpoint and vocabulary"):
        checkpoint = open_checkpoint(request.checkpoint, tag=request.tag, allow_non_finite=request.allow_non_finite)
        directory = request.base or checkpoint.directory
        config = load_config(directory, checkpoint.config)
        weights: StateDict = CastToFloat32(source=checkpoint)
        settings = checkpoint.directory if (checkpoint.directory / "adapter_config.json").is_file() else directory
        weights = merge_adapters(weights, settings, request.adapters, request.lora_scaling)
        task_name = request.task or find_task_name(directory, config, weights.specs())
        tokenizer, rows = None, None
        if must_read_text(task_name) or (may_read_text(task_name) and vocabulary.has_tokenizer(directory)):
            tokenizer = vocabulary.load_tokenizer(directory)
            if not request.vocabulary.allow_other_tokenizer:
                vocabulary.check_special_ids(directory, tokenizer, checkpoint.config)
            weights, rows = fit_vocabulary(config, weights, tokenizer, request.vocabulary)
        elif request.vocabulary.added_tokens:
            raise VocabularyError(
                f"tokens cannot be added to {directory}", expected="a model with a tokenizer", got=f"--task {task_name}"
            )
        is_required = must_read_text(task_name)
        max_length = vocabulary.read_max_length(directory, tokenizer, config, is_required=is_required)
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
    return Source(
        checkpoint=checkpoint,
        task=task,
        parameters=parameters,
        rows=rows,
        adapters=request.adapters,
    )


def run_export(
    request: ExportRequest, progress: Progress, on_report: Callable[[VerificationReport], None]
) -> ExportResult:
    """Take a checkpoint to a published version, or refuse and leave the repository as it was.

    Args:
        request: What to do.
        progress: Told of every step.
        on_report: Called with the verification report before it is judged.

    Raises:
        ExportError: With the one reason.
    """
    check_name(request.name)
    source = load_source(request, progress)
    task = source.task
    names = name_models(request.name, task)
    check_contract(request.repository, names, task.signature)
    with tempfile.TemporaryDirectory(prefix="modelyard-") as folder:
        with progress.step("exporting to ONNX"):
            files = write_files(task, Path(folder))
        with progress.step("verifying against the checkpoint") as tell:
            report = verify(task=task, files=files, target=DEFAULT_TARGET, on_case=tell)
        on_report(report)
        _require_passed(report)
        model_bytes = sum(path.stat().st_size for path in files.model)
        with progress.step("publishing"):
            publication = publish(
                repository=request.repository, names=names, signature=task.signature, files=files, report=report
            )
    return ExportResult(source=source, model_bytes=model_bytes, report=report, publication=publication)


def write_files(task: Task, directory: Path) -> Artefacts:
    """Write everything that a version of `task` is made of into `directory`, and return what lies where.

    Raises:
        GraphError: The module cannot be exported.
    """
    model_file = directory / "model" / "model.onnx"
    model_file.parent.mkdir()
    export_onnx(task.module, task.signature, task.build_example(), model_file, DEFAULT_TARGET)
    tokenizer_file = postprocess_file = None
    if isinstance(task, TextTask):
        tokenizer_file = directory / "tokenizer.json"
        task.encoder.build_server_tokenizer().save(str(tokenizer_file))
    if task.settings is not None:
        postprocess_file = directory / "postprocess.json"
        postprocess_file.write_text(json.dumps(task.settings, ensure_ascii=False) + "\n", encoding="utf-8")
    return Artefacts(
        model=tuple(sorted(model_file.parent.iterdir())), tokenizer=tokenizer_file, postprocess=postprocess_file
    )


def name_models(name: str, task: Task) -> ModelNames:
    """Return the names that a publication of `task` has in the repository."""
    if not isinstance(task, TextTask):
        return ModelNames(name=name, is_ensemble=False)
    return ModelNames(name=name, has_postprocess=task.signature.contract.has_postprocess)


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
