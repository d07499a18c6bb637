"""Whether a repository still holds what was published: the bytes, and the configurations that name them."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from ..errors import RepositoryError, escape_controls, list_some
from .config_file import (
    CONFIG_FILE,
    DamagedConfigError,
    describe_no_file,
    find_config,
    keep_operators_parameters,
    pin_config,
)
from .contents import (
    CLAIM_FILE,
    GOLDEN_FILE,
    STAGING_PREFIX,
    find_active_version,
    find_owner,
    list_models,
    list_others,
    list_parts,
    list_versions,
)
from .hashing import hash_files
from .names import STEP_SUFFIXES
from .version import SUMS_FILE, Version

_IN_ITS_PLACE = "move it away, and restore the file or export again"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not as it was published.

    Attributes:
        name: The public model.
        version: The version, 0 where it is the model itself.
        path: The file or folder.
        what: What is wrong with it.
        remedy: What the reader can do about it.
    """

    name: str
    version: int
    path: Path
    what: str
    remedy: str

    def __str__(self) -> str:
        """Return it as a sentence."""
        whose = f"version {self.version} of {self.name}" if self.version else self.name
        return f"{whose}: {self.path} {self.what}; {self.remedy}."


def check_whole(version: Version) -> None:
    """Refuse a version that is not as it was published.

    Raises:
        RepositoryError: A file of it has changed, is missing or is new.
    """
    findings = list(find_damaged_files(version))
    if findings:
        more = f", and {len(findings) - 1} more of its files" if len(findings) > 1 else ""
        raise RepositoryError(
            f"version {version.number} of {version.name} in {version.repository} is damaged",
            expected=f"the files that its {SUMS_FILE} names",
            got=f"{findings[0].path}, which {findings[0].what}{more}",
            remedy="activate another version, or restore the file or export again",
        )


def find_damage(repository: Path, on_version: Callable[[Version], None] = lambda version: None) -> Iterator[Finding]:
    """Yield everything of modelyard's models that is not as it was published.

    Args:
        repository: Its models are looked at one after another.
        on_version: Called with each version before its files are read.

    Raises:
        RepositoryError: There is no such repository, or no model of modelyard's in it.
    """
    names = list_models(repository)
    strays = list(_find_strays(repository, names))
    if not names and not strays:
        raise RepositoryError(
            f"{repository} holds no models of modelyard's",
            expected="a repository that `run` or `promote` published into",
            got=list_some((entry.name for entry in repository.iterdir()), 3) or "an empty folder",
            remedy="pass --repository",
        )
    for name in names:
        try:
            versions = _list_held(repository, name)
            for version in versions:
                on_version(version)
                yield from find_damaged_files(version)
            yield from _find_damaged_configs(repository, name)
            yield from _find_others(repository, name, [version.number for version in versions])
        except (RepositoryError, OSError) as exc:
            path = repository / name
            what = f"cannot be read ({str(exc).rstrip('.')})"
            yield Finding(name=name, version=0, path=path, what=what, remedy="mend it")
    yield from strays


def _list_held(repository: Path, name: str) -> list[Version]:
    """Return the versions of a model, but for empty folders that are called as one."""
    named = find_config(repository / name) or pb.ModelConfig()
    versions = (Version(repository=repository, name=name, number=number) for number in list_versions(repository / name))
    # One that is active and has lost everything is none.
    served = [*named.version_policy.specific.versions]
    return [version for version in versions if version.number in served or version.has_entries()]


def find_damaged_files(version: Version) -> Iterator[Finding]:
    """Yield every file of a version that has changed, is missing or was not published.

    Raises:
        RepositoryError: A configuration cannot be read.
        OSError: A file cannot be read.
    """

    def find(path: Path, what: str, remedy: str = "restore it, or export again") -> Finding:
        return Finding(name=version.name, version=version.number, path=path, what=what, remedy=remedy)

    artefacts = version.read_lock().get("artefacts") or version.read_report().get("sha256") or {}
    there, told = version.list_files(), version.read_sums()
    # A release without sums recorded those of the files that are served.
    expected = told or {path: artefacts[path.name] for path in there if path.name in artefacts}
    named = {path.name: digest for path, digest in expected.items()}
    sums, is_damaged, names = version.folder / SUMS_FILE, version.has_damaged_sums(), {path.name for path in there}
    for name in sorted(artefacts):
        if name not in named and name not in names:
            yield find(version.folder, f"lacks {name}")
        elif name not in named and not is_damaged:
            yield find(sums, f"does not name {name}, which the lock does")
        elif named.get(name, artefacts[name]) != artefacts[name]:
            yield find(sums, f"names other bytes for {name} than the lock")
    if foreign := version.list_foreign_sums():
        yield find(sums, f"names what is no file of this version ({escape_controls(list_some(foreign, 3))})")
    lost = [*sorted({*expected} - {*there}), sums]
    yield from (find(path, f"is {kind}", _IN_ITS_PLACE) for path in lost if (kind := describe_no_file(path)))
    # Every release wrote the answers, and those that recorded when a version was published recorded its sums as well.
    has_sums = bool(told) or bool(describe_no_file(sums))
    recorded = (SUMS_FILE, GOLDEN_FILE) if version.read_publication() else (GOLDEN_FILE,)
    if not has_sums:
        yield from (find(path, "is missing") for name in recorded if not (path := version.folder / name).exists())
    if not expected:
        yield find(version.folder, "has nothing that records its files", "move it away, and export again")
    yield from (find(path, "is missing") for path in sorted({*expected} - {*there}) if _is_gone(path))
    # A link to a folder is not gone into, but what is named of it is there all the same.
    for path, digest in hash_files(path for path in sorted(expected) if path.is_file()).items():
        if digest != expected[path]:
            yield find(path, "has changed")
    if is_damaged:
        yield find(sums, "is cut or damaged")
    elif told:
        folders = {folder for path in told for folder in path.parents}
        unknown = {*there, *version.list_no_files()} - {*told} - {sums} - folders
        yield from (find(path, "was not published", "move it away") for path in sorted(unknown))


def _is_gone(path: Path) -> bool:
    return not path.exists() and not describe_no_file(path)


def _find_strays(repository: Path, models: Collection[str]) -> Iterator[Finding]:
    """Yield every folder of a model that is not there, such as its steps once it was renamed by hand or removed."""
    for folder in sorted(path for path in repository.iterdir() if list_versions(path) or (path / CLAIM_FILE).exists()):
        try:
            owner = find_owner(repository, folder.name)
        except RepositoryError:
            # Somebody else's, or told of already.
            continue
        if owner is None or owner in models:
            continue
        place = repository / owner
        is_step = folder.name.removeprefix(owner) in STEP_SUFFIXES
        remedy = f"bring {place} back or remove the folder" if is_step else f"rename it to {owner} or remove it"
        yield Finding(
            name=owner,
            version=0,
            path=folder,
            what=f"is a part of the model {owner}, and {place} is not there",
            remedy=remedy if list_versions(folder) else f"take it away with `remove {owner}`",
        )


def _find_others(repository: Path, name: str, versions: Iterable[int]) -> Iterator[Finding]:
    """Yield what lies in a model's folders beside its versions, unless it is being changed, or that was killed."""
    others = list_others(repository, list_parts(repository, name), versions)
    if not any(path.name.startswith(STAGING_PREFIX) for path in others):
        # Whether such a folder was made by hand or has lost everything, it does not tell.
        empty = [repository / name / str(number) for number in list_versions(repository / name)]
        for path in others:
            what = "is an empty folder" if path in empty else "was not published"
            remedy = "move it away, or restore what it held" if path in empty else "move it away"
            yield Finding(name=name, version=0, path=path, what=what, remedy=remedy)


def _find_damaged_configs(repository: Path, name: str) -> Iterator[Finding]:
    path = repository / name / CONFIG_FILE
    try:
        active = find_active_version(repository, name)
    except DamagedConfigError:
        what = "is no Triton model configuration"
        yield Finding(name=name, version=0, path=path, what=what, remedy="move it away, then activate a version")
        return
    if not active:
        if path.exists():
            what = "names no version that is there"
            yield Finding(name=name, version=0, path=path, what=what, remedy="activate a version")
        elif not list_versions(path.parent):
            remedy = f"take away what is left of it with `remove {name}`, or export it"
            yield Finding(name=name, version=0, path=path.parent, what="has no version", remedy=remedy)
        elif not path.with_name(CLAIM_FILE).exists():
            yield Finding(name=name, version=0, path=path, what="is missing", remedy="activate a version")
        return
    for part, config in Version(repository=repository, name=name, number=active).read_configs().items():
        found = find_config(repository / part)
        if found and (
            _is_like(found, config) or (part != name and _serves_both(found, repository, name, part, active))
        ):
            continue
        path = repository / part / CONFIG_FILE
        what = f"is not the one of version {active}, which is active"
        remedy = f"activate version {active} again"
        if found is None:
            what = "is no Triton model configuration" if path.exists() else "is missing"
        if kind := describe_no_file(path):
            what, remedy = f"is {kind}", f"move it away, then {remedy}"
        yield Finding(name=name, version=0, path=path, what=what, remedy=remedy)


def _is_like(found: pb.ModelConfig, config: pb.ModelConfig) -> bool:
    return bool(keep_operators_parameters(found, config) == found)


def _serves_both(found: pb.ModelConfig, repository: Path, name: str, part: str, active: int) -> bool:
    """Tell whether a step serves the active version besides another: it is being switched, or that was killed."""
    numbers = [*found.version_policy.specific.versions]
    if active not in numbers or not {*numbers} <= {*list_versions(repository / part)}:
        return False
    configs = (Version(repository=repository, name=name, number=number).read_configs()[part] for number in numbers)
    return any(_is_like(_leave_out(found), _leave_out(config)) for config in configs)


def _leave_out(config: pb.ModelConfig) -> pb.ModelConfig:
    """Return a configuration without what is another while two versions are served."""
    rest = pin_config(config, version=0, served=[])
    rest.ClearField("model_warmup")
    return rest
