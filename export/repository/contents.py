"""What lies in a model repository: whose a folder is, which versions it holds, which is active. Needs no torch."""

from collections.abc import Iterable
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from ..errors import RepositoryError
from .config_file import CONFIG_FILE, find_config, read_config
from .names import OWNER_PARAMETER, STEP_SUFFIXES

REPORT_FILE = "verification.json"
GOLDEN_FILE = "golden.json"

# The configurations of a version's Triton models as they are while it is the active one, one file each.
CONFIGS_FOLDER = "configs"

# What a publication makes before it renames it; Triton takes none of it for a version.
STAGING_PREFIX = "staging-"
STAGED_CONFIG = f"{STAGING_PREFIX}{CONFIG_FILE}"

# The configuration of a model of which nothing is served; it names the folder's owner.
CLAIM_FILE = f"inactive-{CONFIG_FILE}"


def list_versions(folder: Path) -> list[int]:
    """Return the numbers of a model's version folders, in order."""
    if not folder.is_dir():
        return []
    # As tritonserver reads them: digits, the first of which is not a zero.
    names = (entry.name for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal() and not name.startswith("0"))


def find_active_version(repository: Path, name: str) -> int:
    """Return the version of the public model `name` that is served, 0 where none is.

    Raises:
        RepositoryError: Its configuration cannot be read.
    """
    config = read_config(repository / name)
    versions = list_versions(repository / name) if config else []
    if config and config.version_policy.WhichOneof("policy_choice") == "specific":
        versions = [version for version in versions if version in config.version_policy.specific.versions]
    return max(versions, default=0)


def find_free_version(repository: Path, model_names: Iterable[str]) -> int:
    """Return the number of the next version, which no entry of any of these models has, whatever its kind."""
    folders = [folder for name in model_names if (folder := repository / name).is_dir()]
    names = (entry.name for folder in folders for entry in folder.iterdir())
    return 1 + max((int(name) for name in names if name.isascii() and name.isdecimal()), default=0)


def find_owner(repository: Path, model_name: str) -> str | None:
    """Return the public model that the folder `model_name` belongs to, None where modelyard did not write it.

    The configuration says so, or where it is missing or damaged the one that a version keeps. Older ones are
    recognised by what lies beside them: a public model by its golden answers, a step by the ensemble that names it.

    Raises:
        RepositoryError: A configuration cannot be read.
    """
    folder = repository / model_name
    config = find_config(folder) or find_config(folder, CLAIM_FILE)
    if config is None:
        names = (model_name, *_list_ensembles(model_name))
        if (owner := next((name for name in names if _find_kept(repository, name, model_name)), None)) is not None:
            return owner
        if not (folder / CONFIG_FILE).exists():
            return None
    elif OWNER_PARAMETER in config.parameters:
        return str(config.parameters[OWNER_PARAMETER].string_value)
    if _has_golden(folder):
        return model_name
    if _list_own_steps(repository, model_name):
        return model_name
    ensembles = _list_ensembles(model_name)
    return next((name for name in ensembles if model_name in _list_own_steps(repository, name)), None)


def find_published_config(repository: Path, name: str, model_name: str) -> pb.ModelConfig | None:
    """Return the configuration under which clients know a part of the public model `name`; None without a version.

    Where it is missing or damaged, it is the one that the newest version keeps.

    Raises:
        RepositoryError: A configuration cannot be read.
    """
    if not list_versions(repository / model_name):
        return None
    return find_config(repository / model_name) or _find_kept(repository, name, model_name)


def check_owners(repository: Path, name: str, model_names: Iterable[str]) -> None:
    """Refuse folders that belong to another public model than `name`, or that modelyard did not write.

    Raises:
        RepositoryError: One of `model_names` is taken.
    """
    for model_name in model_names:
        folder = repository / model_name
        if _is_vacant(folder):
            continue
        owner = find_owner(repository, model_name)
        if owner is None:
            # One that is damaged is what the reader has to know of.
            read_config(folder)
        if owner != name:
            raise RepositoryError(
                f"{folder} is not a part of the model {name}",
                expected=f"nothing there, or what was published as {name}",
                got=f"a part of the model {owner}" if owner else "what modelyard did not write",
                remedy="pass another --name",
            )


def list_models(repository: Path) -> list[str]:
    """Return the public models that modelyard published, whether one of their versions is active or not.

    Raises:
        RepositoryError: There is no such repository.
    """
    if not repository.is_dir():
        raise RepositoryError(
            f"there is no repository {repository}",
            expected="a folder",
            got="a file" if repository.exists() else "nothing",
            remedy="pass --repository",
        )
    return sorted(entry.name for entry in repository.iterdir() if _is_public(repository, entry.name))


def check_published(repository: Path, name: str) -> None:
    """Refuse the name of a model that modelyard did not publish here.

    Raises:
        RepositoryError: It is not there, or is another's.
    """
    known = list_models(repository)
    if name not in known:
        raise RepositoryError(
            f"{repository} holds no model {name} of modelyard's",
            expected=f"one of {', '.join(known)}" if known else "a published model",
            got=name,
            remedy="see `versions list`",
        )


def _is_public(repository: Path, name: str) -> bool:
    try:
        return find_owner(repository, name) == name
    except RepositoryError:
        # Perhaps somebody else's, which then does not matter.
        return _has_golden(repository / name)


def _has_golden(folder: Path) -> bool:
    return any((folder / str(version) / GOLDEN_FILE).is_file() for version in list_versions(folder))


def list_parts(repository: Path, name: str) -> list[str]:
    """Return the Triton models that a public model consists of: its steps, and itself last.

    Raises:
        RepositoryError: A configuration cannot be read.
    """
    names = [*(f"{name}{end}" for end in STEP_SUFFIXES), name]
    return [part for part in names if find_owner(repository, part) == name]


def list_remains(repository: Path, name: str) -> list[str]:
    """Return what is there of a public model: its parts, and folders of their names that hold nothing any more.

    Where it was removed but for some of it, these are all that tells of it.

    Raises:
        RepositoryError: A configuration cannot be read.
    """
    there = {entry.name for entry in repository.iterdir() if not entry.is_symlink()} if repository.is_dir() else set()
    names = [part for part in (*(f"{name}{end}" for end in STEP_SUFFIXES), name) if part in there]
    owned = [part for part in names if not _is_vacant(repository / part) and find_owner(repository, part) == name]
    # The public model's folder goes last: without it, a step's that is empty is somebody else's.
    is_known = name in there or bool(owned)
    return [part for part in names if is_known and (part in owned or _is_vacant(repository / part))]


def list_others(repository: Path, parts: Iterable[str], versions: Iterable[int]) -> list[Path]:
    """Return what lies in the folders of a public model and is neither a version of it nor a configuration.

    Args:
        repository: Where they are.
        parts: Its folders.
        versions: Its versions.
    """
    known = {CONFIG_FILE, CLAIM_FILE, *map(str, versions)}
    entries = [entry for part in parts for entry in sorted((repository / part).iterdir())]
    return [entry for entry in entries if entry.name not in known or entry.is_symlink()]


def _list_own_steps(repository: Path, name: str) -> set[str]:
    """Return the steps of the ensemble `name` if they are called as modelyard calls them, else none."""
    config = find_config(repository / name)
    steps = {step.model_name for step in config.ensemble_scheduling.step} if config else set()
    return steps if steps <= {f"{name}{end}" for end in STEP_SUFFIXES} else set()


def _list_ensembles(model_name: str) -> list[str]:
    """Return the public models of which a folder of this name could be a step."""
    return [model_name[: -len(end)] for end in STEP_SUFFIXES if model_name.endswith(end)]


def _find_kept(repository: Path, name: str, model_name: str) -> pb.ModelConfig | None:
    """Return what the newest version of `name` keeps as the configuration of its part `model_name`, None without one.

    A link, or a folder without that version, was put there by somebody else.

    Raises:
        RepositoryError: It cannot be read.
    """
    folder = repository / model_name
    if folder.is_symlink():
        return None
    for number in reversed(list_versions(repository / name)):
        if not (folder / str(number)).is_dir():
            continue
        config = find_config(repository / name / str(number) / CONFIGS_FOLDER, f"{model_name}.pbtxt")
        if config is not None and config.parameters[OWNER_PARAMETER].string_value == name:
            return config
    return None


def _is_vacant(folder: Path) -> bool:
    """Tell whether nothing is there, or only what a publication left that was killed before its first config."""
    if folder.is_symlink() and not folder.exists():
        return False
    if not folder.exists():
        return True
    return folder.is_dir() and all(entry.name == STAGED_CONFIG for entry in folder.iterdir())
