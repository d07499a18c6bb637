"""What an export is refused for that options, config.json and the repository tell alone: at once, without torch.

What is refused here is refused later too, in the same words, for whoever calls the pipeline by itself. Where it takes
the model to tell, nothing is said here.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tritonclient.grpc import model_config_pb2 as pb

from .checkpoints import StoredCheckpoint
from .checkpoints.storage.paths import read_json_if_any
from .engines.engine import Engine
from .engines.limits import LEAN_BACKEND, MAX_BATCH_SIZE
from .engines.table import list_engines
from .errors import ExportError, SettingsError
from .graph.batchings import BATCHINGS
from .graph.precisions import PRECISIONS
from .options import ENSEMBLE, LEAN, ExportRequest
from .repository.activation import check_exchangeable
from .repository.contents import check_owners, find_published_config
from .repository.effect import refuse_idle
from .repository.names import ModelNames
from .targets import find_target
from .tasks.foreseen import (
    check_architecture,
    check_layers,
    check_pooling,
    find_hidden_width,
    foresee_contract,
    foresee_tasks,
)
from .tasks.table import PICTURES, TASKS, TaskEntry, check_task_options

Choice = TypeVar("Choice")


def check_foreseen(request: ExportRequest, checkpoint: StoredCheckpoint | None) -> None:
    """Refuse what nothing needs to be built for.

    Args:
        request: What was asked for.
        checkpoint: What is to be exported; None where there is none, or none that can be read, which the export tells.

    Raises:
        ExportError: The export would be refused.
    """
    target = find_target(request.target)

    def check_names(engine: Engine) -> None:
        engine.check_names(request.precision, target)

    _require_one(list_engines(request.engine, request.form), check_names)
    if request.factory is not None:
        check_factory(request)
        engines = list_engines(request.engine, "graph")
        _require_one(engines, lambda engine: _check_serving(request, engine, is_batched=True, has_lengths=False))
        if recipe := request.task_options["preprocess"]:
            from .tasks.pictures.preparation import read_preparation

            # Before the user's own code is run.
            read_preparation(recipe)
        _check_owners(request, has_steps=bool(recipe))
    elif checkpoint is not None:
        directory = request.base or checkpoint.directory
        config = _read_config(directory, checkpoint)
        check_architecture(directory, config)
        tasks = [request.task] if request.task else foresee_tasks(directory, config, checkpoint.tensors)
        _require_one(tasks, lambda name: _check_task(request, name, directory, config))


def check_layout(request: ExportRequest, name: str) -> None:
    """Refuse what does not apply to what stands around the graph of a task, and pictures that are wanting.

    Args:
        request: What was asked for.
        name: The task.

    Raises:
        SettingsError: One of them.
    """
    entry = TASKS[name]
    if request.steps == LEAN and not entry.has_lean:
        _refuse_layout(f"--steps {LEAN}", f"--task {name}", "a task that answers texts, pictures or sounds at once")
    if request.lengths and not entry.has_lengths:
        _refuse_layout("--lengths", f"--task {name}", "a task that answers texts at once")
    if BATCHINGS[request.batching].is_ragged and not entry.has_lengths:
        refuse_batching(request, f"--task {name}")
    if PICTURES in entry.options:
        _check_pictures(request)


def check_factory(request: ExportRequest) -> None:
    """Refuse what has no effect on a module of the user's own, and pictures that are wanting.

    Raises:
        SettingsError: One of them.
    """
    sent = "--preprocess RECIPE, by which it is sent pictures"
    if request.task_options["preprocess"]:
        _check_pictures(request)
        return
    if request.task_options["pictures"]:
        _refuse_layout("--pictures", f"--factory {request.factory}", sent)
    if request.steps == LEAN:
        _refuse_layout(f"--steps {LEAN}", f"--factory {request.factory}", sent)


def refuse_batching(request: ExportRequest, got: str) -> NoReturn:
    """Refuse the way in which requests would be run together.

    Raises:
        SettingsError: Always.
    """
    expected = "a task with one answer for each text, whose graph takes rows of tokens"
    _refuse_layout(f"--batching {request.batching}", got, expected)


def _check_task(request: ExportRequest, name: str, directory: Path, config: Mapping[str, Any]) -> None:
    entry = TASKS[name]
    check_task_options(name, request.task_options)
    check_layout(request, name)
    _check_owners(request, has_steps=entry.has_lean)
    if name == "feature-extraction":
        check_pooling(directory)
        check_layers(directory, find_hidden_width(config))
    public = _foresee_public(request, name, directory, config)

    def check(engine: Engine) -> None:
        # Of the others the model alone tells whether Triton joins requests.
        is_batched = entry.form != "decoder"
        _check_serving(request, engine, is_batched=is_batched, has_lengths=entry.has_lengths)
        if public:
            _check_contract(request, entry, engine, public)

    _require_one(list_engines(request.engine, entry.form), check)


def _check_owners(request: ExportRequest, *, has_steps: bool) -> None:
    """Refuse names of steps that are taken; whether there is one behind the graph, the model alone tells."""
    names = ModelNames(name=request.name, is_ensemble=has_steps and request.steps != LEAN)
    check_owners(request.repository, request.name, names.all)


def _check_serving(request: ExportRequest, engine: Engine, *, is_batched: bool, has_lengths: bool) -> None:
    for serving in (request.serving, *request.variants.values()):
        refuse_idle(serving, engine, is_lean=request.steps == LEAN, is_batched=is_batched, has_lengths=has_lengths)


def _foresee_public(
    request: ExportRequest, name: str, directory: Path, config: Mapping[str, Any]
) -> pb.ModelConfig | None:
    """Return what clients will see; None where that is not known, or there is nothing to compare it with.

    Tensors that the model alone tells are taken to be those of today, where these are of the same kind.
    """
    now, entry = _read_published(request, request.name), TASKS[name]
    if now is None:
        return None
    described = foresee_contract(name, directory, config, request.task_options)
    has_steps = now.platform == ENSEMBLE or now.backend == LEAN_BACKEND
    if described is None and (has_steps != entry.has_lean or entry.form == "decoder"):
        return None
    public = pb.ModelConfig(max_batch_size=now.max_batch_size)
    if described is None:
        public.input.extend(now.input)
        public.output.extend(now.output)
    for tensors, known in zip((public.input, public.output), described or (), strict=False):
        for tensor, dtype, dims in known:
            tensors.add(name=tensor, data_type=pb.DataType.Value(f"TYPE_{dtype}"), dims=dims)
    return public


def _check_contract(request: ExportRequest, entry: TaskEntry, engine: Engine, public: pb.ModelConfig) -> None:
    """Refuse a name whose clients would see other tensors, or whose graph another engine would run."""
    config = pb.ModelConfig()
    config.CopyFrom(public)
    new = {request.name: config}
    if entry.form == "decoder":
        config.backend, config.max_batch_size = engine.backend, 0
        engine.configure(config)
    elif not entry.has_lean:
        config.backend = engine.backend
    elif request.steps == LEAN:
        config.backend, config.max_batch_size = LEAN_BACKEND, MAX_BATCH_SIZE
    else:
        config.platform, config.max_batch_size = ENSEMBLE, MAX_BATCH_SIZE
        graph = ModelNames(name=request.name).model
        if now := _read_published(request, graph):
            new[graph] = pb.ModelConfig(backend=engine.backend, max_batch_size=MAX_BATCH_SIZE)
            new[graph].input.extend(now.input)
            new[graph].output.extend(now.output)
    check_exchangeable({name: now for name in new if (now := _read_published(request, name))}, new)


def _read_published(request: ExportRequest, model_name: str) -> pb.ModelConfig | None:
    """Return the configuration that a publication is compared with, None where there is none."""
    return find_published_config(request.repository, request.name, model_name)


def _require_one(choices: Sequence[Choice], check: Callable[[Choice], None]) -> None:
    """Refuse where every choice is refused, and in the same words.

    Raises:
        ExportError: They are.
    """
    refusals = []
    for choice in choices:
        try:
            check(choice)
        except ExportError as exc:
            refusals.append(exc)
    if refusals and len(refusals) == len(choices) and len({str(exc) for exc in refusals}) == 1:
        raise refusals[-1]


def _read_config(directory: Path, checkpoint: StoredCheckpoint) -> Mapping[str, Any]:
    """Return what tells the architecture; empty where nothing that can be read does."""
    try:
        config = read_json_if_any(directory / "config.json") or checkpoint.config
    except ExportError:
        return {}
    return config if isinstance(config, Mapping) else {}


def _refuse_layout(option: str, got: str, expected: str) -> NoReturn:
    raise SettingsError(
        f"{option} has no effect on {got.split()[-1]}", expected=expected, got=got, remedy="leave it out"
    )


def _check_pictures(request: ExportRequest) -> None:
    """Refuse a precision that is made for real inputs, and judged on them, where there are none."""
    if PRECISIONS[request.precision].real_inputs_only and not request.task_options["pictures"]:
        raise SettingsError(
            f"{request.precision} is made for, and judged on, what clients send",
            expected="--pictures FOLDER with pictures such as they are",
            got="none",
            remedy="pass some, a hundred if you have them, or another --precision",
        )
