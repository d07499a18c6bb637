"""The Triton model repository: numbered versions, staged, hashed and renamed into place.

A published model is several Triton models (see `ModelNames`) that share one version number. A new version N
appears in this order, so that whoever starts a server on the repository at any moment finds a whole one:

    1. every file of version N, hashed as read back, in a folder `staging-*` of its model, which Triton does not take
       for a version
    2. the version folders, by renaming; the ensemble's last
    3. the steps' configs, which now serve the previous version and N
    4. the ensemble's config, pinned to N: from here on N is the published version
    5. the steps' configs again, which now serve N alone

Failing or being interrupted on the way undoes what was done. Being killed leaves a repository that serves the
previous version or N, and leftovers that the next publication removes.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tritonclient.grpc import model_config_pb2 as pb

from ..artefacts import Artefacts
from ..engines import ONNXRUNTIME, Engine
from ..errors import RepositoryError
from ..proof.verify import VerificationReport, hash_file
from ..signature import ModelSignature
from ..tasks.comparison import describe_errors
from .config_file import CONFIG_FILE, read_config, render_config
from .model_config import build_configs
from .names import ModelNames

REPORT_FILE = "verification.json"
GOLDEN_FILE = "golden.json"

_STAGING_PREFIX = "staging-"


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What a publication led to.

    Attributes:
        name: What clients ask for.
        version: The version that is now served.
        outcome: `created` a version, `switched` back to one that holds the same content, or left all `unchanged`.
        report_file: The verification report beside that version.
    """

    name: str
    version: int
    outcome: Literal["created", "switched", "unchanged"]
    report_file: Path


def check_contract(repository: Path, names: ModelNames, signature: ModelSignature) -> None:
    """Refuse a name that is taken by something else than an earlier version of this very contract.

    Clients rely on a name's inputs and outputs, and during a rollout both versions share one config: so a name keeps
    its shapes and dtypes for good.

    Raises:
        RepositoryError: Another model has one of the names, or the published one has other inputs or outputs.
    """
    configs = build_configs(names, signature, version=1, served=[1])
    for model_name, new in configs.items():
        old = read_config(repository / model_name)
        if old is None or not _list_versions(repository / model_name):
            continue
        if _contract(old) != _contract(new):
            raise RepositoryError(
                f"{model_name} is already published with another contract",
                expected=_contract(old),
                got=_contract(new),
                remedy="pass another --name, so that its clients keep working",
            )


def publish(
    *,
    repository: Path,
    names: ModelNames,
    signature: ModelSignature,
    files: Artefacts,
    report: VerificationReport,
    engine: Engine = ONNXRUNTIME,
    document: Callable[[int], Mapping[str, str]] = lambda version: {},
) -> Publication:
    """Add a version to the repository, or find that the newest one has the same content.

    Args:
        repository: Is made if it is not there.
        names: Of the ensemble and its steps.
        signature: Of the ONNX file.
        files: What the export wrote.
        report: Of exactly these files.
        engine: What runs the model.
        document: Given the version, returns file name → text of what is kept beside the report.

    Raises:
        RepositoryError: The report does not vouch for these bytes, the name is taken, the disk is full, or another
            publication is at work.
    """
    _check_report(report, files.all)
    homes: dict[str, list[Path]] = {name: [] for name in names.all}
    homes[names.model] += files.model
    for step, paths in files.steps.items():
        homes[names.step(step)] += paths
    with contextlib.ExitStack() as undo:
        _make_directory(repository, undo)
        with _lock(repository):
            check_contract(repository, names, signature)
            _remove_leftovers(repository, names)
            version = max(_list_versions(repository / names.name), default=0)
            created = not version or not _holds_files(repository, names, version, homes, report)
            try:
                if created:
                    version += 1
                    documents = {
                        REPORT_FILE: json.dumps(report.to_json(), indent=2) + "\n",
                        GOLDEN_FILE: json.dumps(report.golden) + "\n",
                        **document(version),
                    }
                    _add_version(_stage(repository, names, homes, report, documents, undo), version, undo)
                switched = _switch(repository, names, signature, version, engine, undo)
            except OSError as exc:
                raise RepositoryError(
                    f"version {version} of {names.name} cannot be written to {repository}",
                    got=exc.strerror or str(exc),
                    remedy="free the disk or correct the permissions, then export again",
                ) from exc
            undo.pop_all()
    return Publication(
        name=names.name,
        version=version,
        outcome="created" if created else "switched" if switched else "unchanged",
        report_file=repository / names.name / str(version) / REPORT_FILE,
    )


def _check_report(report: VerificationReport, files: list[Path]) -> None:
    if not report.passed:
        raise RepositoryError(
            "a model that failed its verification is not published",
            expected="every case within the tolerances",
            got=f"{describe_errors(report.worst.errors)} in {report.worst.name!r}",
        )
    hashes = {path.name: hash_file(path) for path in files}
    if hashes != report.sha256:
        changed = sorted(name for name in {*hashes, *report.sha256} if hashes.get(name) != report.sha256.get(name))
        raise RepositoryError(
            "the report is of other files",
            expected="the bytes that were verified",
            got="changed, missing or new: " + ", ".join(changed),
            remedy="verify again",
        )


def _stage(
    repository: Path,
    names: ModelNames,
    files: Mapping[str, list[Path]],
    report: VerificationReport,
    documents: Mapping[str, str],
    undo: contextlib.ExitStack,
) -> dict[str, Path]:
    """Return model name → a staging folder with that model's whole version, on disk and read back."""
    staged: dict[str, Path] = {}
    for model_name in names.all:
        _make_directory(repository / model_name, undo)
        folder = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=repository / model_name))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        # mkdtemp makes it private; a server under another user must read it.
        folder.chmod(0o755)
        for source in files[model_name]:
            _copy(source, folder / source.name)
            if hash_file(folder / source.name) != report.sha256[source.name]:
                raise RepositoryError(
                    f"{source.name} reads back otherwise than it was written",
                    expected=f"SHA-256 {report.sha256[source.name]}",
                    got="another",
                    remedy="check the disk",
                )
        staged[model_name] = folder
    for file_name, text in documents.items():
        _write(staged[names.name] / file_name, text)
    for folder in staged.values():
        _sync_directory(folder)
    return staged


def _add_version(staged: Mapping[str, Path], version: int, undo: contextlib.ExitStack) -> None:
    """Rename each staged folder to `version` of its model; the ensemble's last, which makes the version whole."""
    for staging_folder in staged.values():
        folder = staging_folder.with_name(str(version))
        staging_folder.rename(folder)
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        _sync_directory(folder.parent)


def _switch(
    repository: Path,
    names: ModelNames,
    signature: ModelSignature,
    version: int,
    engine: Engine,
    undo: contextlib.ExitStack,
) -> bool:
    """Make `version` the one that is served, in the order that the module describes; False if it was so already."""
    after = build_configs(names, signature, version=version, served=[version], engine=engine)
    if all(_read_config(repository / model_name) == render_config(after[model_name]) for model_name in names.all):
        return False
    previous = _find_served_version(repository, names)
    during = build_configs(names, signature, version=version, served={version, previous or version}, engine=engine)
    for model_name in names.all:
        _replace_config(repository / model_name / CONFIG_FILE, during[model_name], undo)
    for model_name in names.all:
        if during[model_name] != after[model_name]:
            _replace_config(repository / model_name / CONFIG_FILE, after[model_name], undo)
    return True


def _find_served_version(repository: Path, names: ModelNames) -> int:
    """Return the version that the ensemble's config pins its steps to, or the one that a lone model serves.

    0 where there is none on disk.
    """
    config = read_config(repository / names.name) or pb.ModelConfig()
    if not names.is_ensemble:
        return max({*config.version_policy.specific.versions} & {*_list_versions(repository / names.name)}, default=0)
    steps = config.ensemble_scheduling.step
    return next((step.model_version for step in steps if _list_versions(repository / step.model_name)), 0)


def _read_config(model_directory: Path) -> str:
    path = model_directory / CONFIG_FILE
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _holds_files(
    repository: Path,
    names: ModelNames,
    version: int,
    files: Mapping[str, list[Path]],
    report: VerificationReport,
) -> bool:
    """Tell whether `version` is complete and holds these very files, by their hashes."""
    for model_name in names.all:
        folder = repository / model_name / str(version)
        present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        is_public = model_name == names.name
        if is_public and not {REPORT_FILE, GOLDEN_FILE} <= present:
            return False
        # The documents beside the report tell of the same files; releases differ in which there are.
        if is_public and not _tells_the_same(folder, report):
            return False
        wanted = {source.name for source in files[model_name]}
        if not wanted <= present or (not is_public and present != wanted):
            return False
        if any(hash_file(folder / source.name) != report.sha256[source.name] for source in files[model_name]):
            return False
    return True


def _tells_the_same(folder: Path, report: VerificationReport) -> bool:
    """Tell whether a published report vouches for the same: the same bytes may be proven for another target.

    Its golden answers must be in today's form too, so that exporting again mends what an older modelyard wrote.
    """
    try:
        told = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
        golden = json.loads((folder / GOLDEN_FILE).read_text(encoding="utf-8"))
        form = golden["samples"][0].keys()
    except (OSError, ValueError, LookupError):
        return False
    now = report.to_json()
    is_same = all(told.get(key) == now.get(key) for key in ("target", "tolerances", "accepted_worse"))
    return is_same and form == report.golden["samples"][0].keys()


def _list_versions(model_directory: Path) -> list[int]:
    if not model_directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in model_directory.iterdir() if entry.is_dir() and entry.name.isdecimal())


def _contract(config: pb.ModelConfig) -> str:
    """Return a config's inputs and outputs as one line that can be compared and read."""
    tensors = [*config.input, *config.output]
    return ", ".join(f"{t.name} {pb.DataType.Name(t.data_type).removeprefix('TYPE_')} {list(t.dims)}" for t in tensors)


def _remove_leftovers(repository: Path, names: ModelNames) -> None:
    """Remove what a killed publication left: staged files, and step versions newer than any of the ensemble."""
    newest = max(_list_versions(repository / names.name), default=0)
    for model_name in names.all:
        unfinished = {str(version) for version in _list_versions(repository / model_name) if version > newest}
        for entry in (repository / model_name).glob("*"):
            if entry.is_dir() and (entry.name.startswith(_STAGING_PREFIX) or entry.name in unfinished):
                shutil.rmtree(entry)
            elif entry.name.startswith(_STAGING_PREFIX):
                entry.unlink()


@contextlib.contextmanager
def _lock(repository: Path) -> Iterator[None]:
    """Hold the repository against other publications; the lock goes with the process and leaves no file."""
    descriptor = os.open(repository, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise RepositoryError(
                f"another publication is at work in {repository}",
                expected="the repository for itself",
                got="a lock",
                remedy="wait until it has ended, then export again",
            ) from exc
        yield
    finally:
        os.close(descriptor)


def _make_directory(directory: Path, undo: contextlib.ExitStack) -> None:
    if directory.is_dir():
        return
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True)
    except OSError as exc:
        raise RepositoryError(
            f"{directory} cannot be made", got=exc.strerror or str(exc), remedy="pass a --repository you may write to"
        ) from exc
    undo.callback(shutil.rmtree, missing[-1], ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    _sync(target)


def _write(target: Path, text: str) -> None:
    target.write_text(text, encoding="utf-8")
    _sync(target)


def _replace_config(path: Path, config: pb.ModelConfig, undo: contextlib.ExitStack) -> None:
    """Replace a config in one step, so that no reader ever sees half of it."""
    before = path.read_bytes() if path.exists() else None
    staged = path.with_name(f"{_STAGING_PREFIX}{path.name}")
    undo.callback(staged.unlink, missing_ok=True)
    _write(staged, render_config(config))
    if before is None:
        undo.callback(path.unlink, missing_ok=True)
    else:
        undo.callback(path.write_bytes, before)
    staged.replace(path)
    _sync_directory(path.parent)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
