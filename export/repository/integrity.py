"""Whether a repository still holds what was published: the bytes, and the configurations that name them."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import RepositoryError
from .config_file import keep_operators_parameters, read_config
from .contents import find_active_version, list_models, list_versions
from .hashing import hash_files
from .version import SUMS_FILE, Version


def find_damage(repository: Path, on_version: Callable[[Version], None] = lambda version: None) -> Iterator[str]:
    """Yield a sentence on everything of modelyard's models that is not as it was published.

    Args:
        repository: Its models are looked at one after another.
        on_version: Called with each version before its files are read.

    Raises:
        RepositoryError: There is no such repository.
    """
    for name in list_models(repository):
        for number in list_versions(repository / name):
            version = Version(repository=repository, name=name, number=number)
            on_version(version)
            yield from _find_damaged_files(version)
        try:
            yield from _find_damaged_configs(repository, name)
        except RepositoryError as exc:
            yield str(exc)


def _find_damaged_files(version: Version) -> Iterator[str]:
    what = f"version {version.number} of {version.name}"
    artefacts = version.read_lock().get("artefacts") or version.read_report().get("sha256") or {}
    there, told = version.list_files(), version.read_sums()
    # A release without sums recorded those of the files that are served.
    expected = told or {path: artefacts[path.name] for path in there if path.name in artefacts}
    named = {path.name: digest for path, digest in expected.items()}
    for name in sorted(artefacts):
        if name not in named:
            yield f"{what}: {name} is missing"
        elif named[name] != artefacts[name]:
            yield f"{what}: its lock and its {SUMS_FILE} name different bytes for {name}"
    if not expected:
        yield f"{what}: nothing records which files it had"
    yield from (f"{what}: {path} is missing" for path in sorted({*expected} - {*there}))
    for path, digest in hash_files(path for path in there if path in expected).items():
        if digest != expected[path]:
            yield f"{what}: {path} has changed"
    if told:
        unknown = {*there} - {*told} - {version.folder / SUMS_FILE}
        yield from (f"{what}: {path} was not published" for path in sorted(unknown))


def _find_damaged_configs(repository: Path, name: str) -> Iterator[str]:
    active = find_active_version(repository, name)
    if not active:
        return
    for model_name, config in Version(repository=repository, name=name, number=active).read_configs().items():
        found = read_config(repository / model_name)
        if found is None or keep_operators_parameters(found, config) != found:
            yield f"{model_name}: its config.pbtxt is not the one of version {active}, which is active"
