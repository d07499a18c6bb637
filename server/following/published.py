"""What a repository says should be served: which version of each model is active, and which models are its steps."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .model_text import (
    CONFIG_FILE,
    read_config,
    read_fields,
    read_name,
    read_parameter,
    read_steps,
    read_versions,
    serve_versions,
    set_parameter,
)
from .sums import (
    CONFIGS_FOLDER,
    GOLDEN_FILE,
    SUMS_FILE,
    FileSums,
    find_damaged_sums,
    find_lacking,
    list_files,
    read_sums,
    read_told,
    select_loaded,
)

# Parameters that an operator writes into a configuration.
_OPERATORS = ("modelyard_blocked_s", "modelyard_busy_s")

# What some file systems keep in their root, which is nobody else's to read.
_FILE_SYSTEMS_OWN = "lost+found"

# In every published configuration: the public model that the folder belongs to.
_OWNER_PARAMETER = "modelyard_owner"


@dataclass(frozen=True, kw_only=True)
class Published:
    """One model that clients ask for.

    Attributes:
        name: Name of the ensemble, or of the graph where nothing stands around it.
        version: Active version of the model and its steps; 0 for a model that this project did not write, of which
            tritonserver serves what its configuration says.
        configs: Name → text of the `config.pbtxt` of every step, in order, and of the model itself, which comes last.
        sums: Path → SHA-256 of each file that tritonserver loads of it, as they were published; none where that was not
            recorded.
        damage: Why it cannot be served as it stands there; then it has no `configs`, and `version` is 0 where its own
            cannot be read.
    """

    name: str
    version: int
    configs: Mapping[str, str]
    sums: Mapping[Path, str] = field(default_factory=dict)
    damage: str = ""

    @property
    def title(self) -> str:
        """What sentences call it; one that this project did not write has no version of its own."""
        return f"version {self.version} of {self.name}" if self.version else self.name

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the ensemble's steps, in order."""
        return tuple(name for name in self.configs if name != self.name)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """One model as it was loaded: what is served is held against this, whatever its repository tells meanwhile.

    Attributes:
        published: What the repository tells of it, which may be told anew.
        files: Path → SHA-256 of each file that tritonserver loads of it, as it was then; none of a model that this
            project did not write.
        asked: The same of the recorded answers.
    """

    published: Published
    files: Mapping[Path, str]
    asked: Mapping[Path, str]


def read_repository(repository: Path, sums: FileSums | None, variant: str = "") -> dict[str, Published]:
    """Return name → what should be served of it, for every model that has a configuration and a version.

    A model that is being written is not among them. One that was published and cannot be read, or is not whole, is:
    that it cannot be served is no reason to think that it should not be.

    Args:
        repository: The repository.
        sums: Tells which files have changed; None to read none of those that are loaded.
        variant: Name of the configurations that take the place of the usual ones, where a version has them.
    """
    configs, faults = _read_configs(repository)
    found, owned = {}, set[str]()
    for name, config in configs.items():
        version, damage = _find_damage(repository, name, configs, faults)
        if sums and not damage:
            damage = _find_changed(repository, name, version, config, sums)
        is_ours = not damage or _was_published(repository, name, config)
        if is_ours:
            owned |= {step for step, _ in read_steps(config)}
        if not damage:
            found[name] = _read_ours(repository, name, version, configs, variant)
        elif is_ours:
            found[name] = Published(name=name, version=version, configs={}, damage=damage)
        elif not _is_step(name, config):
            found[name] = _read_others(repository / name, config)
    # What is wrong with a step is told of the model that it is one of.
    damaged = {name: Published(name=name, version=0, configs={}, damage=fault) for name, fault in faults.items()}
    return {name: published for name, published in (found | damaged).items() if published.version or name not in owned}


def _read_others(folder: Path, config: str) -> Published:
    """Return what should be served of a model that somebody wrote by hand.

    Of a model in Python without its code, tritonserver says no more than that a process of it is not healthy.
    """
    fields = dict(read_fields(config))
    is_python = fields.get("backend", "").endswith('"python"') and "default_model_filename" not in fields
    versions = read_versions(config) or list_versions(folder)[-1:]
    code = [folder / str(version) / "model.py" for version in versions if is_python]
    # In this order: a folder that is renamed in between is another model's by then.
    damage = next((f"{path} is missing" for path in code if not path.exists() and path.parent.is_dir()), "")
    return Published(name=folder.name, version=0, configs={} if damage else {folder.name: config}, damage=damage)


def _find_changed(repository: Path, name: str, version: int, config: str, sums: FileSums) -> str:
    """Return which file of a version is not as it was published, as far as its sums or its lock say."""
    folder = repository / name / str(version)
    parts = _list_parts(repository, name, version, [step for step, _ in read_steps(config)])
    return sums.find_changed(select_loaded(folder, read_told(folder, parts)))


def _list_parts(repository: Path, name: str, version: int, steps: Iterable[str]) -> list[Path]:
    """Return the folders of one version of a model's steps and of itself."""
    return [repository / part / str(version) for part in (*steps, name)]


def _was_published(repository: Path, name: str, config: str) -> bool:
    """Tell whether a folder was published under its name; its configuration may not say so any more."""
    owner = read_parameter(config, _OWNER_PARAMETER)
    is_others = owner is None or read_name(config) not in (name, "")
    return owner == name or (is_others and any((repository / name).glob(f"*/{GOLDEN_FILE}")))


def _read_configs(repository: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return name → the text of every configuration that is one, and name → what is wrong with every other."""
    configs, faults = {}, {}
    for folder in sorted(repository.iterdir()):
        if folder.name.startswith(".") or folder.name == _FILE_SYSTEMS_OWN:
            continue
        path = folder / CONFIG_FILE
        try:
            if not _is_folder(folder) or not list_versions(folder):
                continue
            config = read_config(path)
            if not read_fields(config):
                raise ValueError("it is empty")
            read_steps(config), read_versions(config)
        except FileNotFoundError:
            # No version of it is active, or it is being replaced.
            continue
        except OSError as exc:
            # Of a folder in the place of the file, Python names its descriptor.
            place = exc.filename if isinstance(exc.filename, str) else path
            faults[folder.name] = f"{place} cannot be read: {exc.strerror}"
        except ValueError as exc:
            faults[folder.name] = f"{path} is no configuration: {exc}"
        else:
            configs[folder.name] = config
    return configs, faults


def _is_folder(path: Path) -> bool:
    """Tell whether `path` is a folder.

    Raises:
        PermissionError: It is one, and cannot be looked into.
    """
    if not path.is_dir():
        return False
    with os.scandir(path) as entries:
        next(entries, None)
    return True


def _find_damage(repository: Path, name: str, configs: Mapping[str, str], faults: Mapping[str, str]) -> tuple[int, str]:
    """Return the active version of a model that is whole as it was published; else also what is wrong with it."""
    path, config = repository / name / CONFIG_FILE, configs[name]
    if (own := read_name(config)) not in (name, ""):
        return 0, f"{path} is that of {own}"
    steps = read_steps(config)
    versions = {version for _, version in steps} | {*read_versions(config)}
    if len(versions) != 1:
        return 0, f"{path} names versions {sorted(versions)}, where it should name one"
    (version,) = versions
    for part in (*(step for step, _ in steps), name):
        if part in faults:
            return version, faults[part]
        if version not in list_versions(repository / part):
            return version, f"{repository / part / str(version)} is missing"
        if part not in configs:
            return version, f"{repository / part / CONFIG_FILE} is missing"
        if (own := read_name(configs[part])) not in (part, ""):
            return version, f"{repository / part / CONFIG_FILE} is that of {own}"
        owner = read_parameter(configs[part], _OWNER_PARAMETER)
        if owner not in (read_parameter(config, _OWNER_PARAMETER), name, None):
            return version, f"{path} has {part} as a step, which is one of {owner}"
    folders = _list_parts(repository, name, version, [step for step, _ in steps])
    if fault := next(filter(None, map(find_fault, folders)), ""):
        return version, fault
    golden = repository / name / str(version) / GOLDEN_FILE
    if not golden.exists():
        return version, f"{golden} is missing"
    lost = _find_absent(golden.parent) or find_lacking(golden.parent, folders)
    return version, lost or find_damaged_sums(golden.parent)


def _find_absent(version: Path) -> str:
    """Return which of the files that a version was published with is not there as one, as far as that can be seen."""
    for path in read_sums(version):
        try:
            if not path.is_file():
                return f"{path} is {'no regular file' if path.exists() else 'missing'}"
        except OSError:
            continue
    return ""


def find_fault(version: Path) -> str:
    """Return what tritonserver would wait for in the folder of a version, such as a pipe, or what cannot be read."""
    try:
        for folder, _, names in os.walk(version, onerror=_raise):
            for path in (Path(folder, name) for name in names):
                if not path.is_file():
                    return f"{path} is {'no regular file' if path.exists() else 'a link that leads nowhere'}"
    # Where this process lacks descriptors or memory to look with, that says nothing of the files.
    except (PermissionError, FileNotFoundError, NotADirectoryError) as exc:
        return f"{exc.filename} cannot be read: {exc.strerror}"
    except OSError:
        pass
    return ""


def find_missing(paths: Iterable[Path], part: Path) -> str:
    """Return which of the files in the folder `part` is not there; empty where all are."""
    meant = (path for path in paths if part in path.parents)
    # Whatever keeps it from being seen.
    return next((f"{path} is missing" for path in meant if not os.path.exists(path)), "")  # noqa: PTH110


def _raise(error: OSError) -> None:
    raise error


def _is_step(name: str, config: str) -> bool:
    """Tell whether a folder was published as a step; before its ensemble lies beside it, it is nothing to serve.

    Its name says so as well: a published folder that was copied under another name is served.
    """
    owner = read_parameter(config, _OWNER_PARAMETER)
    return owner is not None and name.startswith(f"{owner}_")


def list_versions(folder: Path) -> list[int]:
    """Return the numbers of a model folder's versions, in order."""
    try:
        return sorted(int(entry.name) for entry in folder.iterdir() if entry.is_dir() and entry.name.isdecimal())
    except OSError:
        return []


def list_variants(repository: Path) -> set[str]:
    """Return the names of all variants that versions in a repository have."""
    return {path.name for path in repository.glob(f"*/*/{CONFIGS_FOLDER}/*") if path.is_dir()}


def _vary(config: str, path: Path) -> str:
    """Return a configuration as a variant has it, with what an operator has written into it; itself without one."""
    try:
        varied = read_config(path)
    except OSError:
        return config
    for key in _OPERATORS:
        if (value := read_parameter(config, key)) is not None:
            varied = set_parameter(varied, key, value)
    return varied


def take_files(repository: Path, published: Published, sums: FileSums) -> Loaded:
    """Return what is about to be loaded, with what its files are."""
    if not published.version:
        return Loaded(published=published, files={}, asked={})
    folder = repository / published.name / str(published.version)
    parts = _list_parts(repository, published.name, published.version, published.steps)
    files = {path: "" for part in parts for path in list_files(part)}
    told = read_told(folder, parts)
    taken = sums.take(select_loaded(folder, files), told)
    return Loaded(published=published, files=taken, asked=sums.take([folder / GOLDEN_FILE], told))


def find_gone(repository: Path, loaded: Loaded) -> str:
    """Return what is not there any more of a version that was loaded, a folder or a file; empty where all is."""
    published = loaded.published
    folders = _list_parts(repository, published.name, published.version, published.steps) if published.version else []
    return find_missing((*folders, *loaded.files), repository)


def find_partial(repository: Path, published: Published, sums: FileSums) -> str:
    """Return which file of a version, records among them, is not the one in its sums; empty where it is whole."""
    folder = repository / published.name / str(published.version)
    told = read_sums(folder)
    if select_loaded(folder, told) != published.sums:
        # Written since it was read, so that the lock was held against what was there before.
        return f"{folder / SUMS_FILE} is being written"
    return find_damaged_sums(folder) or sums.find_changed(told)


def _read_ours(repository: Path, name: str, version: int, configs: Mapping[str, str], variant: str) -> Published:
    """Return what should be served of a model that is whole."""
    names = [*(step for step, _ in read_steps(configs[name])), name]
    folder = repository / name / str(version) / CONFIGS_FOLDER / variant
    try:
        if variant:
            configs = {step: _vary(configs[step], folder / f"{step}.pbtxt") for step in names}
        served = {step: serve_versions(configs[step], [version]) for step in names}
    except ValueError as exc:
        return Published(name=name, version=version, configs={}, damage=f"{folder} holds no configurations: {exc}")
    version_folder = repository / name / str(version)
    return Published(
        name=name, version=version, configs=served, sums=select_loaded(version_folder, read_sums(version_folder))
    )
