"""The Triton model repository: numbered versions, staged, hashed and renamed into place.

A published model is several Triton models (see `ModelNames`) that share one version number. A new version N
appears in this order, so that whoever starts a server on the repository at any moment finds a whole one:

    1. where nothing is served yet, every config, which names N; it also says whose the folder is
    2. every file of version N, hashed as read back, in a folder `staging-*` of its model, which Triton does not take
       for a version
    3. the version folders, by renaming; the ensemble's last: from here on a first version is the published one
    4. the steps' configs, which now serve the previous version and N
    5. the ensemble's config, pinned to N: from here on N is the published version
    6. the steps' configs again, which now serve N alone

Failing or being interrupted on the way undoes what was done, in steps that need no room on the disk. Being killed, or
a disk that will not even undo, leaves a repository that serves the previous version or N, and leftovers that the next
publication removes.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tritonclient.grpc import model_config_pb2 as pb

from ..artefacts import Artefacts
from ..engines import ONNXRUNTIME, Engine
from ..errors import ExportError, RepositoryError
from ..proof.verify import VerificationReport, hash_file
from ..signature import ModelSignature
from ..tasks.comparison import describe_errors
from .config_file import CONFIG_FILE, read_config, render_config
from .contents import (
    GOLDEN_FILE,
    REPORT_FILE,
    STAGED_CONFIG,
    STAGING_PREFIX,
    check_owners,
    find_active_version,
    find_free_version,
    list_versions,
)
from .lock import PATIENCE_S, hold
from .model_config import build_configs
from .names import ModelNames
from .undo import Undo

# What a file system without hard links answers to the attempt to make one.
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}


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
        RepositoryError: One of the names is another model's, or the published one has other inputs or outputs.
    """
    check_owners(repository, names.name, names.all)
    configs = build_configs(names, signature, version=1, served=[1])
    for model_name, new in configs.items():
        old = read_config(repository / model_name)
        if old is None or not list_versions(repository / model_name):
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
    patience_s: float = PATIENCE_S,
) -> Publication:
    """Add a version to the repository, or find that the newest one has the same content.

    Args:
        repository: Is made if it is not there.
        names: Names of the ensemble and its steps.
        signature: Tensors of the ONNX file.
        files: What the export wrote.
        report: The verification report of exactly these files.
        engine: What runs the model.
        document: Given the version, returns file name → text of what is kept beside the report.
        patience_s: How long another publication is waited for.

    Raises:
        RepositoryError: The report does not vouch for these bytes, the name is taken, the disk is full or fails, or
            another publication is at work.
    """
    homes: dict[str, list[Path]] = {name: [] for name in names.all}
    homes[names.model] += files.model
    for step, paths in files.steps.items():
        homes[names.step(step)] += paths

    def build(version: int, *served: int) -> Mapping[str, pb.ModelConfig]:
        return build_configs(names, signature, version=version, served=[version, *served], engine=engine)

    undo = Undo()
    with contextlib.ExitStack() as held:
        try:
            _check_report(report, files.all)
            _make_folder(repository, undo)
            held.enter_context(hold(repository, patience_s))
            check_contract(repository, names, signature)
            _remove_leftovers(repository, names)
            version = max(list_versions(repository / names.name), default=0)
            created = not version or not _holds_files(repository, names, version, homes, report)
            if created:
                version = find_free_version(repository, names.all)
                _claim_folders(repository, names, build(version), undo)
                documents = {
                    REPORT_FILE: json.dumps(report.to_json(), indent=2) + "\n",
                    GOLDEN_FILE: json.dumps(report.golden) + "\n",
                    **document(version),
                }
                _add_version(_stage(repository, names, homes, report, documents, undo), version, undo)
            switched = _switch(repository, names, version, build, undo)
        except BaseException as exc:
            stopped = undo.run()
            if stopped or isinstance(exc, OSError):
                raise _explain(exc, stopped, repository, names.name) from exc
            raise
        undo.keep()
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


def _explain(exc: BaseException, stopped: OSError | None, repository: Path, name: str) -> RepositoryError:
    """Return the one sentence on what went wrong, and on where the repository stands if it is not as it was."""
    got = (exc.strerror if isinstance(exc, OSError) else None) or str(exc).rstrip(".") or type(exc).__name__
    if stopped is None:
        return RepositoryError(
            f"{name} cannot be written to {repository}",
            got=got,
            remedy="free the disk or correct the permissions, then export again",
        )
    served = "it is not known which version is served"
    with contextlib.suppress(ExportError, OSError):
        served = f"version {find_active_version(repository, name)} is served"
    return RepositoryError(
        f"{name} cannot be written to {repository}, and what was begun cannot be undone",
        got=f"{got}, then {stopped.strerror or stopped}",
        remedy=f"{served}; mend the disk and export again, which clears up",
    )


def _claim_folders(repository: Path, names: ModelNames, configs: Mapping[str, pb.ModelConfig], undo: Undo) -> None:
    """Write the configs that say whose a folder is, before anything else lies in it.

    They name a version that is not there yet, which nobody can load. Where nothing is served that is so for all of
    them, so that the ensemble's version folder, the last to be renamed, makes the version whole; where something is,
    only of folders that are new.
    """
    is_served = find_active_version(repository, names.name) > 0
    new = [name for name in names.all if not is_served or not (repository / name / CONFIG_FILE).exists()]
    _write_configs(repository, configs, new, undo)


def _stage(
    repository: Path,
    names: ModelNames,
    files: Mapping[str, list[Path]],
    report: VerificationReport,
    documents: Mapping[str, str],
    undo: Undo,
) -> dict[str, Path]:
    """Return model name → a staging folder with that model's whole version, on disk and read back."""
    staged: dict[str, Path] = {}
    for model_name in names.all:
        folder = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=repository / model_name))
        undo.add_litter(partial(shutil.rmtree, folder))
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


def _add_version(staged: Mapping[str, Path], version: int, undo: Undo) -> None:
    """Rename each staged folder to `version` of its model; the ensemble's last, which makes the version whole."""
    for staging_folder in staged.values():
        folder = staging_folder.with_name(str(version))
        undo.add(partial(_rename_back, folder, staging_folder))
        staging_folder.rename(folder)
        _sync_directory(folder.parent)


def _rename_back(folder: Path, staging_folder: Path) -> None:
    # An interruption may come before or after the renaming.
    if not staging_folder.exists():
        folder.rename(staging_folder)


def _switch(
    repository: Path, names: ModelNames, version: int, build: Callable[..., Mapping[str, pb.ModelConfig]], undo: Undo
) -> bool:
    """Make `version` the one that is served, in the order that the module describes; False if it was so already."""
    after = build(version)
    steps = [name for name in names.all if name != names.name]
    before = find_active_version(repository, names.name)
    if not any(_differs(repository / name, after[name]) for name in names.all):
        return False
    _write_configs(repository, build(version, before or version), steps, undo)
    _write_configs(repository, after, [names.name], undo)
    _write_configs(repository, after, steps, undo)
    return True


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


def _contract(config: pb.ModelConfig) -> str:
    """Return a config's inputs and outputs as one line that can be compared and read."""
    tensors = [*config.input, *config.output]
    return ", ".join(f"{t.name} {pb.DataType.Name(t.data_type).removeprefix('TYPE_')} {list(t.dims)}" for t in tensors)


def _remove_leftovers(repository: Path, names: ModelNames) -> None:
    """Remove what a killed publication left: staged files, and its steps' versions, which the ensemble has not got.

    Such versions are there only while the ensemble's own is staged, which is therefore removed last. Everything else
    is somebody's: a link, or a version that was put there by hand.
    """
    public = repository / names.name
    newest = max(list_versions(public), default=0)
    is_unfinished = any(_is_staged(entry) for entry in _list_entries(public))
    for model_name in names.all:
        folder = repository / model_name
        unfinished = [version for version in list_versions(folder) if version > newest and is_unfinished]
        for version_folder in (folder / str(version) for version in unfinished):
            if not version_folder.is_symlink():
                shutil.rmtree(version_folder)
        for entry in _list_entries(folder):
            if _is_staged(entry):
                shutil.rmtree(entry)
            elif entry.name.startswith(STAGED_CONFIG) and entry.is_file():
                entry.unlink()


def _list_entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_staged(entry: Path) -> bool:
    return entry.name.startswith(STAGING_PREFIX) and entry.is_dir() and not entry.is_symlink()


def _make_folder(folder: Path, undo: Undo) -> None:
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        # Only where it is empty: somebody else may have come to use it.
        undo.add_litter(path.rmdir)
        path.mkdir(exist_ok=True)


def _write_configs(
    repository: Path, configs: Mapping[str, pb.ModelConfig], model_names: Iterable[str], undo: Undo
) -> None:
    """Replace the configs of `model_names` that are not so yet, each in one step that no reader sees half of."""
    for model_name in model_names:
        folder, config = repository / model_name, configs[model_name]
        if _differs(folder, config):
            _make_folder(folder, undo)
            _replace_config(folder, config, undo)


def _differs(folder: Path, config: pb.ModelConfig) -> bool:
    path = folder / CONFIG_FILE
    return not path.is_file() or path.read_text(encoding="utf-8") != render_config(config)


def _replace_config(folder: Path, config: pb.ModelConfig, undo: Undo) -> None:
    path, staged = folder / CONFIG_FILE, folder / STAGED_CONFIG
    undo.add_litter(partial(staged.unlink, missing_ok=True))
    _write(staged, render_config(config))
    if path.exists():
        # Set aside first, so that the way back is a renaming, which needs no room on the disk.
        before = path.with_name(f"{STAGED_CONFIG}.{secrets.token_hex(4)}")
        undo.add_litter(partial(before.unlink, missing_ok=True))
        _link(path, before)
        undo.add(partial(before.replace, path))
    else:
        undo.add(partial(_give_up, folder))
    staged.replace(path)
    _sync_directory(folder)


def _give_up(folder: Path) -> None:
    """Remove the config that said whose a new folder is, unless something lies there that the next one must remove."""
    if {entry.name for entry in folder.iterdir()} <= {CONFIG_FILE, STAGED_CONFIG}:
        (folder / CONFIG_FILE).unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    """Give the file a second name, or make a copy where the file system has no hard links."""
    try:
        target.hardlink_to(source)
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    _sync(target)


def _write(target: Path, text: str) -> None:
    target.write_text(text, encoding="utf-8")
    _sync(target)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
