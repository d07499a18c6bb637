"""A new version of a model in a Triton model repository: staged, hashed and renamed into place.

A published model is several Triton models (see `ModelNames`) that share one version number. A new version N
appears in this order, so that whoever starts a server on the repository at any moment finds a whole one:

    1. in folders that are new, a file that says whose they are, which no server reads
    2. every file of version N, hashed as read back, in a folder `staging-N-*` of its model, which Triton does not take
       for a version
    3. the version folders, by renaming; the public model's last, which makes the version whole
    4. the configurations, which make it the active one, as `activation` describes

Failing or being interrupted on the way undoes what was done, in steps that need no room on the disk. Being killed, or
a disk that will not even undo, leaves a repository that serves the previous version or N, and leftovers that the next
change of the model removes.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from tritonclient.grpc import model_config_pb2 as pb

from ..artefacts import Artefacts, hash_file
from ..engines.table import ONNXRUNTIME, Engine
from ..errors import RepositoryError
from ..proof.verify import VerificationReport
from ..serving_options import ServingOptions
from ..signature import ModelSignature
from ..tasks.comparison import describe_errors
from .activation import check_exchangeable, lacks_configs, switch
from .addition import add_version
from .change import change
from .config_file import keep_operators_parameters, read_regular
from .contents import (
    GOLDEN_FILE,
    REPORT_FILE,
    check_owners,
    find_active_version,
    find_free_version,
    find_published_config,
    list_versions,
)
from .lock import PATIENCE_S
from .model_config import DEFAULT_SERVING, build_configs
from .names import ModelNames
from .removal import remove_leftovers
from .version import Version


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What a publication led to.

    Attributes:
        name: What clients ask for.
        version: The version that holds what was published.
        active: The version that servers serve now, 0 where none is.
        outcome: `created` a version, `switched` back to one that holds the same content, or left all `unchanged`.
        report_file: The verification report beside that version.
    """

    name: str
    version: int
    active: int
    outcome: Literal["created", "switched", "unchanged"]
    report_file: Path


def check_contract(repository: Path, names: ModelNames, signature: ModelSignature, engine: Engine) -> None:
    """Refuse a name that is taken by anything but an earlier version that this one can take the place of.

    Raises:
        RepositoryError: One of the names is another model's, or the published one has other tensors or another engine.
    """
    check_owners(repository, names.name, names.all)
    found = {model_name: find_published_config(repository, names.name, model_name) for model_name in names.all}
    old = {name: config for name, config in found.items() if config}
    check_exchangeable(old, build_configs(names, signature, version=1, served=[1], engine=engine))


def publish(
    *,
    repository: Path,
    names: ModelNames,
    signature: ModelSignature,
    files: Artefacts,
    report: VerificationReport,
    engine: Engine = ONNXRUNTIME,
    serving: ServingOptions = DEFAULT_SERVING,
    variants: Mapping[str, ServingOptions] = MappingProxyType({}),
    document: Callable[[Version], Mapping[str, str]] = lambda version: {},
    activates: bool = True,
    patience_s: float = PATIENCE_S,
) -> Publication:
    """Add a version to the repository, or find one that has the same content, and make it the active one.

    Args:
        repository: The repository, which is made if it is not there.
        names: Names of the ensemble and its steps.
        signature: Tensors of the ONNX file.
        files: What the export wrote.
        report: The verification report of exactly these files.
        engine: What runs the model.
        serving: How it is to be served; the same files that are to be served otherwise are another version.
        variants: Name → how it is to be served by a server that is told that name.
        document: Given the version, returns file name → text of what is kept beside the report.
        activates: Whether it becomes the active version; else it is only there.
        patience_s: How long another publication is waited for.

    Raises:
        RepositoryError: The report does not vouch for these bytes, the name is taken, the disk is full or fails, or
            another change is at work.
    """
    homes: dict[str, list[Path]] = {name: [] for name in names.all}
    homes[names.model] += files.model
    for step, paths in files.steps.items():
        homes[names.step(step)] += paths
    with change(repository, names.name, "written to", patience_s=patience_s) as undo:
        _check_report(report, files.all)
        check_contract(repository, names, signature, engine)
        remove_leftovers(repository, names.name, names.all)

        def configure(number: int, serving: ServingOptions = serving) -> Mapping[str, pb.ModelConfig]:
            return build_configs(
                names,
                signature,
                version=number,
                served=[number],
                engine=engine,
                serving=serving,
                has_warmup=not report.refused_warmup,
            )

        def vary(number: int) -> Mapping[str, Mapping[str, pb.ModelConfig]]:
            return {key: configure(number, each) for key, each in variants.items()}

        number = _find_equal_version(repository, names, homes, report, configure, vary)
        created = number is None
        number = number or find_free_version(repository, names.all)
        configs = configure(number)
        version = Version(repository=repository, name=names.name, number=number)
        if created:
            documents = {
                REPORT_FILE: json.dumps(report.to_json(), indent=2) + "\n",
                GOLDEN_FILE: json.dumps(report.golden) + "\n",
                **document(version),
            }
            add_version(version, homes, report.sha256, documents, configs, undo, vary(number))
        serves = activates or (version.number == find_active_version(repository, names.name) and lacks_configs(version))
        switched = serves and switch(repository, names.name, configs, undo)
        active = find_active_version(repository, names.name)
    return Publication(
        name=names.name,
        version=number,
        active=active,
        outcome="created" if created else "switched" if switched else "unchanged",
        report_file=version.folder / REPORT_FILE,
    )


def _check_report(report: VerificationReport, files: list[Path]) -> None:
    if not report.passed:
        raise RepositoryError(
            "a model that failed its verification is not published",
            expected="every case within the tolerances",
            got=f"{describe_errors(report.worst.errors, report.tolerances)} in {report.worst.name!r}",
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


def _find_equal_version(
    repository: Path,
    names: ModelNames,
    files: Mapping[str, list[Path]],
    report: VerificationReport,
    configure: Callable[[int], Mapping[str, pb.ModelConfig]],
    vary: Callable[[int], Mapping[str, Mapping[str, pb.ModelConfig]]],
) -> int | None:
    """Return the newest version that is complete, holds these very files, was proven for the same and is served so."""
    for number in reversed(list_versions(repository / names.name)):
        version = Version(repository=repository, name=names.name, number=number)
        if (
            _holds_files(repository, names, number, files, report)
            and _is_served_so(version, configure(number))
            and version.read_variants() == vary(number)
        ):
            return number
    return None


def _is_served_so(version: Version, configs: Mapping[str, pb.ModelConfig]) -> bool:
    """Tell whether these are the configurations with which a version becomes active."""
    kept = version.read_configs()
    return {*kept} == {*configs} and all(
        keep_operators_parameters(kept[name], configs[name]) == kept[name] for name in kept
    )


def _holds_files(
    repository: Path,
    names: ModelNames,
    version: int,
    files: Mapping[str, list[Path]],
    report: VerificationReport,
) -> bool:
    """Tell whether `version` is complete and holds these very files, by their hashes."""
    # The public model's first, whose report tells most versions apart without reading their files.
    for model_name in reversed(names.all):
        folder = repository / model_name / str(version)
        present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        is_public = model_name == names.name
        if is_public and not {REPORT_FILE, GOLDEN_FILE} <= present:
            return False
        # The documents beside the report describe the same files; releases differ in which there are.
        if is_public and not _tells_the_same(folder, report):
            return False
        wanted = {source.name for source in files[model_name]}
        if not wanted <= present or (not is_public and present != wanted):
            return False
        if not all(_has_sum(folder / source.name, report.sha256[source.name]) for source in files[model_name]):
            return False
    return True


def _has_sum(path: Path, digest: str) -> bool:
    # A pipe would be waited for.
    return path.is_file() and hash_file(path) == digest


def _tells_the_same(folder: Path, report: VerificationReport) -> bool:
    """Tell whether a published report vouches for the same: the same bytes may be proven for another target.

    Its golden answers must be in today's form too, so that exporting again mends what an older modelyard wrote.
    """
    now = report.to_json()
    try:
        told = dict(json.loads(read_regular(folder / REPORT_FILE)))
        golden = json.loads(read_regular(folder / GOLDEN_FILE))
        form = dict(golden["samples"][0]).keys()
    # Whatever was made of them by hand: they are written anew.
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False
    is_same = all(told.get(key) == now.get(key) for key in ("sha256", "target", "tolerances", "accepted_worse"))
    return is_same and form == report.golden["samples"][0].keys()
