"""Which version of a model is the active one, which servers serve; changed without an export and without a copy.

In this order, so that whoever starts a server on the repository at any moment finds a whole version, and a server that
follows can load each state as it finds it:

    1. the configs of the steps, which now serve the version that is active and the one that is to be
    2. the config of the public model: of an ensemble, pinned to the new version; from here on that one is active
    3. the configs of the steps again, which now serve the new version alone

A lone model has no steps, and thus the second of these alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tritonclient.grpc import model_config_pb2 as pb

from ..engines.engine import Engine
from ..engines.limits import LEAN_BACKEND
from ..engines.table import ENGINES
from ..errors import RepositoryError
from .change import change
from .config_file import find_config, join_configs, keep_operators_parameters
from .contents import CLAIM_FILE, check_published, find_active_version
from .files import remove, write_configs
from .integrity import check_whole
from .removal import remove_leftovers
from .undo import Undo
from .version import Version, find_version, list_recorded


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What an activation led to.

    Attributes:
        name: The public model.
        version: The version that is active now.
        before: The one that was, 0 where none was.
        outcome: Whether anything was written.
    """

    name: str
    version: int
    before: int
    outcome: Literal["activated", "unchanged"]


def activate(
    repository: Path, name: str, version: int | None = None, tell: Callable[[Version], None] = lambda version: None
) -> Activation:
    """Make a version the active one.

    Args:
        repository: Where it was published.
        name: The public model.
        version: The number; the newest one if left out.
        tell: Called with the version before its files are hashed.

    Raises:
        RepositoryError: There is no such model or version, it is not whole, a file of it is not as it was published,
            its engine or its tensors differ from those of the version that is active, or the disk fails.
    """
    check_published(repository, name)
    with change(repository, name, "switched in") as undo:
        newest = max(list_recorded(repository, name), default=0)
        chosen = find_version(repository, name, newest if version is None else version)
        tell(chosen)
        check_whole(chosen)
        configs = chosen.read_configs()
        remove_leftovers(repository, name, configs)
        before = find_active_version(repository, name)
        is_switched = switch(repository, name, configs, undo)
    return Activation(
        name=name, version=chosen.number, before=before, outcome="activated" if is_switched else "unchanged"
    )


def switch(repository: Path, name: str, configs: Mapping[str, pb.ModelConfig], undo: Undo) -> bool:
    """Make the version of these configurations the active one; return False if it was so already.

    Args:
        repository: The repository, which the caller holds.
        name: The public model.
        configs: Triton model → its configuration while the version is the active one.
        undo: Takes back what is done.

    Raises:
        RepositoryError: No configuration could serve the active version beside it.
    """
    found = {model_name: find_config(repository / model_name) for model_name in configs}
    before = {model_name: config or configs[model_name] for model_name, config in found.items()}
    check_exchangeable(before, configs)
    after = {model_name: keep_operators_parameters(before[model_name], new) for model_name, new in configs.items()}
    is_switched = any(found[model_name] != config for model_name, config in after.items())
    if is_switched:
        steps = [model_name for model_name in configs if model_name != name]
        active, (number,) = find_active_version(repository, name), configs[name].version_policy.specific.versions
        during = {step: join_configs(before[step], after[step], served=[active, number]) for step in steps}
        write_configs(repository, during if active not in (0, number) else after, steps, undo)
        write_configs(repository, after, [name], undo)
        write_configs(repository, after, steps, undo)
    for model_name in configs:
        undo.add_last(partial(remove, repository / model_name / CLAIM_FILE))
    return is_switched


def lacks_configs(version: Version) -> bool:
    """Tell whether no server can load a version, because a configuration of one of its models is missing or damaged.

    Raises:
        RepositoryError: The version is not whole.
    """
    return any(find_config(version.repository / model_name) is None for model_name in version.read_configs())


def check_exchangeable(old: Mapping[str, pb.ModelConfig], new: Mapping[str, pb.ModelConfig]) -> None:
    """Refuse configurations under which the old and the new version of a model could not both be served.

    Clients rely on a name's inputs and outputs, and during a rollout both versions share one config: so a name keeps
    its shapes, its dtypes and its engine for good.

    Raises:
        RepositoryError: A model would have other tensors or another engine.
    """
    for model_name in sorted({*old} & {*new}):
        before, after = old[model_name], new[model_name]
        if (expected := _describe_tensors(before)) != (got := _describe_tensors(after)):
            raise RepositoryError(
                f"{model_name} is already published with another contract",
                expected=expected,
                got=got,
                remedy="pass another --name, so that its clients keep working",
            )
        if _find_runner(before) != _find_runner(after):
            options = _spell_runner(before)
            by_options = f"export it with {options}, or " if options != _spell_runner(after) else ""
            raise RepositoryError(
                f"{model_name} is already published with another engine",
                expected=_describe_runner(before),
                # A lean step reads its version's own file, whichever engine that is for.
                got=_describe_runner(after, with_file=False),
                remedy=f"{by_options}pass another --name, so that its clients keep working",
            )


def _describe_tensors(config: pb.ModelConfig) -> str:
    """Return a config's inputs and outputs as one line that can be compared and read."""
    tensors = [*config.input, *config.output]
    return ", ".join(f"{t.name} {pb.DataType.Name(t.data_type).removeprefix('TYPE_')} {list(t.dims)}" for t in tensors)


def _find_runner(config: pb.ModelConfig) -> tuple[str, bool]:
    """Return what runs a model, which reads its version's files; both versions of a rollout have the same."""
    return config.backend or config.platform, bool(config.max_batch_size)


def _describe_runner(config: pb.ModelConfig, *, with_file: bool = True) -> str:
    """Return the same in words: whoever passes options knows the engine by its title."""
    engine, (name, is_joined) = _find_engine(config, with_file=with_file), _find_runner(config)
    if name == LEAN_BACKEND:
        title = f"lean steps in {engine.title}" if engine else "lean steps"
    else:
        title = engine.title if engine else "an ensemble" if config.platform == "ensemble" else name
    return f"{title}, {'requests joined' if is_joined else 'requests one by one'}"


def _spell_runner(config: pb.ModelConfig) -> str:
    """Return the options of an export that have a model run as it is; empty where there are none."""
    if config.platform == "ensemble":
        return "--steps ensemble"
    engine = _find_engine(config)
    options = [f"--engine {engine.name}"] if engine else []
    return " ".join([*options, "--steps lean"] if config.backend == LEAN_BACKEND else options)


def _find_engine(config: pb.ModelConfig, *, with_file: bool = True) -> Engine | None:
    """Return the engine whose backend runs a model, or whose file a lean step loads."""
    for engine in ENGINES.values():
        is_its_file = with_file and engine.has_lean and engine.model_file == config.default_model_filename
        if is_its_file if config.backend == LEAN_BACKEND else engine.backend == config.backend:
            return engine
    return None
