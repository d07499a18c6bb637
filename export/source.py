"""What is to be served: the checkpoint or the user's own function, read and built into a task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from .checkpoints import StateDict, StoredCheckpoint, open_checkpoint
from .checkpoints.adapter_names import ADAPTER_FILE
from .checkpoints.plain.documents import refuse_false_documents
from .checkpoints.plain.model_shapes import refuse_too_many_layers
from .checkpoints.plain.tokenizer_files import has_tokenizer, warn_of_unknown_names
from .checkpoints.remedies import GATHER_PIPELINE
from .checkpoints.storage.file_state import FileState, refuse_any_changed, refuse_late_save
from .checkpoints.storage.paths import has_file
from .errors import CheckpointError, SettingsError, VocabularyError, list_some
from .foresight import check_factory, check_layout, refuse_batching
from .graph.batchings import BATCHINGS
from .graph.precisions import PRECISIONS
from .identity import list_asked, list_files, look_at_files
from .options import ENSEMBLE, LEAN, ExportRequest, list_changed
from .progress import Progress
from .proof.tolerances import choose_tolerances
from .repository.contents import check_owners
from .repository.names import ModelNames
from .signature import SEQ_LEN
from .tasks.base import Task, TaskSource
from .tasks.building import (
    build_task,
    find_task_name,
    is_ensemble,
    load_class,
    may_read_text,
    must_read_text,
    writes_text,
)
from .tasks.foreseen import check_architecture, reads_pairs
from .tasks.own_module import FactoryTask, build_factory_task
from .tasks.pictures.own import FactoryPictures
from .tasks.pictures.preparation import read_preparation
from .tasks.table import TASKS
from .weights.adapter_folder import check_adapter_task, check_adapter_tokenizer
from .weights.lora import merge_adapters
from .weights.positions import refuse_scaled
from .weights.tokenizer import check_special_ids, load_tokenizer, read_max_length, warn_of_own_steps, warn_of_padding
from .weights.tokenizer_agreement import warn_of_types
from .weights.torch_model import load_config, settle_quantization
from .weights.transforms import CastToFloat32
from .weights.vocabulary_rows import VocabularyRows, fit_vocabulary


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is to be served: the truth that the ONNX file is compared with.

    Attributes:
        origin: What it was read from, in words.
        files: What was read → its files, to be hashed.
        task: What is exported.
        parameters: How many numbers it holds.
        rows: How tokenizer and tables were brought together; None for a model without a tokenizer.
        adapters: Folders of the adapters that were merged.
        missing: What a whole checkpoint of its format would have and this one lacks or cannot show.
        opened: What files were before they were read.
        weights: What those of them were that hold the weights.
    """

    origin: str
    files: Mapping[str, Sequence[Path]]
    task: Task
    parameters: int
    rows: VocabularyRows | None = None
    adapters: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()
    opened: Mapping[Path, FileState] = field(default_factory=dict)
    weights: Mapping[Path, FileState] = field(default_factory=dict)

    def refuse_changed(self) -> None:
        """Refuse what was written since it was read.

        Raises:
            CheckpointError: Something was.
        """
        refuse_any_changed(self.opened)

    def refuse_late_save(self) -> None:
        """Refuse weights that a save may have gone on with since they were read.

        Raises:
            CheckpointError: One of several files was written.
        """
        refuse_late_save(self.weights)


def load_source(request: ExportRequest, progress: Progress) -> Source:
    """Read what is to be served, and build the task's module around it.

    Raises:
        ExportError: It is refused.
    """
    if request.factory is not None:
        assert request.inputs is not None, "Bug: a request for a factory names its inputs"
        return _load_factory(request, request.factory, request.inputs, progress)
    assert request.checkpoint is not None, "Bug: a request names a checkpoint or a factory"
    return _load_checkpoint(request, request.checkpoint, progress)


def _load_factory(request: ExportRequest, entry: str, spec_file: Path, progress: Progress) -> Source:
    weights: StateDict | None = None
    unshared: frozenset[str] | None = frozenset()
    missing: tuple[str, ...] = ()
    opened: dict[Path, FileState] = {}
    files: dict[str, Sequence[Path]] = {"inputs": [spec_file]}
    source_file = Path(entry.rpartition(":")[0])
    if source_file.suffix == ".py":
        files["factory"] = [source_file]
    progress.expect(1)
    with progress.step("building the module"):
        if request.checkpoint is not None:
            checkpoint = open_checkpoint(request.checkpoint, tag=request.tag, allow_non_finite=request.allow_non_finite)
            weights, files["checkpoint"] = CastToFloat32(source=checkpoint), checkpoint.files
            missing, opened = checkpoint.facts.missing, checkpoint.opened
            _refuse_unfiled(checkpoint)
            unshared = checkpoint.unshared
        recipe, pictures = request.task_options["preprocess"], request.task_options["pictures"]
        check_factory(request)
        build = None
        if recipe:
            files |= list_asked(request)
            build = partial(FactoryPictures, preparation=read_preparation(recipe), pictures=pictures)
        else:
            _check_tolerances(request, FactoryTask)
        task = build_factory_task(entry, spec_file, weights, build=build, unshared=unshared)
        _lay_out(request, task)
    parameters = sum(parameter.numel() for parameter in task.module.parameters())
    origin = f"{entry} with {request.checkpoint}" if request.checkpoint else entry
    return Source(
        origin=origin, files=files, task=task, parameters=parameters, missing=missing, opened=opened, weights=opened
    )


def _refuse_unfiled(checkpoint: StoredCheckpoint) -> None:
    """Refuse a checkpoint in which a place has weights of its own that stand under no name: no module would have them.

    Raises:
        CheckpointError: It is one.
    """
    if checkpoint.unfiled:
        raise CheckpointError(
            f"{checkpoint.directory} lacks weights of a place of the model",
            expected="those that it trained for itself in the file of a layer, as of the place that is given as "
            f"{list_some(checkpoint.unfiled)}",
            got="no such file, for the place is a function",
            remedy=GATHER_PIPELINE,
        )


def _load_checkpoint(request: ExportRequest, path: Path, progress: Progress) -> Source:
    progress.expect(2)
    with progress.step("reading checkpoint and vocabulary"):
        checkpoint = open_checkpoint(
            path, tag=request.tag, base=request.base, allow_non_finite=request.allow_non_finite
        )
        opened = look_at_files(request, checkpoint)
        directory = request.base or checkpoint.directory
        name, source, rows = _read_task_source(request, checkpoint, directory)
        # Before the weights are read, which may take minutes.
        check_layout(request, name)
        names = ModelNames(name=request.name, is_ensemble=is_ensemble(name) and request.steps == ENSEMBLE)
        check_owners(request.repository, names.name, names.all)
        _check_tolerances(request, load_class(TASKS[name]))
    parameters = sum(spec.numel for spec in source.weights.specs().values() if spec.dtype.is_floating_point)
    with progress.step(f"loading {parameters / 1e6:.1f} M parameters"):
        task = build_task(name, source)
    _lay_out(request, task)
    return Source(
        origin=checkpoint.format_name,
        files=list_files(request, checkpoint),
        task=task,
        parameters=parameters,
        rows=rows,
        adapters=request.adapters,
        missing=checkpoint.facts.missing,
        opened=opened,
        weights=checkpoint.opened,
    )


def _check_tolerances(request: ExportRequest, task_class: type[Task]) -> None:
    """Refuse bounds that do not apply, as far as the class of a task tells, before it is built.

    Raises:
        SettingsError: One does not, or is wider than the usual one without a reason.
    """
    exact = task_class.tolerances
    # Of a module of the user's own that is sent pictures, what it answers with says them.
    if isinstance(exact, Mapping):
        choose_tolerances(exact, PRECISIONS[request.precision], request.tolerances, request.accept_worse)


def _lay_out(request: ExportRequest, task: Task) -> None:
    """Have the task's contract say what stands around its graph."""
    if request.steps == LEAN or request.lengths:
        if request.lengths:
            _check_lengths(request.lengths, task)
        assert task.signature.contract, "Bug: a task with steps has a contract"
        contract = replace(task.signature.contract, is_lean=request.steps == LEAN, lengths=request.lengths)
        task.signature = replace(task.signature, contract=contract)
    if BATCHINGS[request.batching].is_ragged:
        if not task.signature.can_be_ragged:
            refuse_batching(request, f"--task {task.name}")
        task.signature = replace(task.signature, is_ragged=True)


def _check_lengths(lengths: Sequence[int], task: Task) -> None:
    longest = task.signature.longest[SEQ_LEN]
    if max(lengths, default=0) > longest:
        raise SettingsError(
            "a text would be padded beyond what the model reads",
            expected=f"--lengths of at most {longest}",
            got=str(max(lengths)),
            remedy="pass smaller ones",
        )


def _read_task_source(
    request: ExportRequest, checkpoint: StoredCheckpoint, directory: Path
) -> tuple[str, TaskSource, VocabularyRows | None]:
    """Return the name of the task, what it is built from, and how the vocabulary was brought together."""
    refuse_false_documents(directory)
    config = load_config(directory, checkpoint.config, weights=checkpoint.directory)
    check_architecture(directory, config.to_dict())
    refuse_too_many_layers(directory, len(checkpoint.tensors))
    warnings = settle_quantization(config, checkpoint.specs(), directory)
    weights: StateDict = CastToFloat32(source=checkpoint)
    settings = checkpoint.directory if has_file(checkpoint.directory / ADAPTER_FILE) else directory
    weights = merge_adapters(weights, config, settings, request.adapters, request.lora_scaling)
    name = request.task or find_task_name(directory, config, weights.specs())
    for folder in request.adapters if request.task is None else ():
        check_adapter_task(folder, name)
    refuse_scaled(config, name, reads_text=must_read_text(name), writes=writes_text(name))
    tokenizer, rows = None, None
    if must_read_text(name) or (may_read_text(name) and has_tokenizer(directory)):
        tokenizer = load_tokenizer(directory, config)
        if not request.vocabulary.allow_other_tokenizer:
            check_special_ids(directory, tokenizer, checkpoint.config)
            for folder in request.adapters:
                check_adapter_tokenizer(folder, tokenizer, config, directory)
        # Of the others, whoever sends rows of tokens pads them, or nobody does.
        warnings += warn_of_padding(directory, tokenizer) if is_ensemble(name) else ()
        warnings += warn_of_own_steps(directory, config)
        warnings += warn_of_types(directory, tokenizer) if reads_pairs(name) else ()
        weights, rows = fit_vocabulary(config, weights, tokenizer, request.vocabulary)
        warnings += rows.warnings
    elif idle := list_changed(request.vocabulary):
        raise VocabularyError(
            f"{', '.join(option.flag for option in idle)} cannot be applied to {directory}",
            expected="a model with a tokenizer",
            got=f"--task {name}" if has_tokenizer(directory) else "none",
            remedy=f"leave {'it' if len(idle) == 1 else 'them'} out",
        )
    if tokenizer is None and may_read_text(name):
        warnings += warn_of_unknown_names(directory)
    source = TaskSource(
        directory=directory,
        config=config,
        weights=weights,
        tokenizer=tokenizer,
        max_length=read_max_length(directory, tokenizer, config, is_required=must_read_text(name)),
        options=request.task_options,
        added_tokens=tuple(item.token for item in request.vocabulary.added_tokens),
        warnings=warnings,
    )
    return name, source, rows
