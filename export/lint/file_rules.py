"""Rules on the folders and files of a repository."""

import re
from collections.abc import Iterator

from ..repository.config_file import CONFIG_FILE
from ..repository.contents import CLAIM_FILE, STAGING_PREFIX
from ..repository.version import Version
from .backends import BACKEND_OF_FILE
from .finding import Problem
from .model import Model, Repository

# What somebody may have meant as a version, and Triton does not take for one.
_ALMOST_VERSION = re.compile(r"0\d*|[vV]\d+|\d+[-._ ].*")

# Backends that fail without the file; others may know more names.
_STRICT = ("onnxruntime", "tensorrt", "python", "pytorch", "tensorflow", "vllm")


def check_has_version(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a model without a version folder."""
    if model.text is not None and not model.versions:
        yield Problem(
            path=model.folder,
            what=f"{model.name} has no version",
            instead=f"make the folder {model.folder / '1'}, even if nothing lies in it",
        )


def check_serves_version(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a policy that none of the versions meets."""
    if model.versions and not model.served:
        yield Problem(
            path=model.config_path,
            line=model.line("version_policy"),
            what="none of the versions that version_policy names is there",
            instead=f"write `version_policy {{ specific {{ versions: [ {model.versions[-1]} ] }} }}`",
        )


def check_specific_versions(model: Model, _: Repository) -> Iterator[Problem]:
    """Find versions that are asked for and not there."""
    missing = [v for v in model.config.version_policy.specific.versions if v not in model.versions]
    if missing and model.served:
        yield Problem(
            path=model.config_path,
            line=model.line("version_policy", "specific", "versions"),
            what=f"version_policy names {', '.join(map(str, missing))}, which is not there",
            instead=f"write `versions: {model.served}`",
        )


def check_version_names(model: Model, _: Repository) -> Iterator[Problem]:
    """Find folders that look like versions and are none to Triton."""
    for entry in sorted(model.folder.iterdir()) if model.is_model else ():
        if entry.is_dir() and _ALMOST_VERSION.fullmatch(entry.name):
            yield Problem(
                path=entry,
                what=f"{entry.name} is not a version to Triton, which counts from 1 without zeros in front",
                instead=f"call the folder {re.sub('[^0-9].*', '', entry.name.lstrip('vV0')) or '1'}",
            )


def check_model_file(model: Model, _: Repository) -> Iterator[Problem]:
    """Find versions without the file that their backend loads, or without one that modelyard published them with."""
    yield from _find_unpublished(model)
    config = model.config
    if model.backend not in _STRICT or config.cc_model_filenames or config.HasField("model_repository_agents"):
        return
    for version in model.served:
        if model.find_model_file(version) is None:
            folder = model.folder / str(version)
            yield Problem(
                path=folder,
                what=f"version {version} of {model.name} has no {' or '.join(model.model_files)}",
                instead=f"put {folder / model.model_files[0]} there, or name the file in `default_model_filename`",
            )


def _find_unpublished(model: Model) -> Iterator[Problem]:
    for version in model.served:
        published = Version(repository=model.folder.parent, name=model.name, number=version)
        for path in published.read_sums():
            if not path.exists():
                yield Problem(
                    path=path,
                    what=f"version {version} of {model.name} was published with {path.name}, which is not there",
                    instead="publish it again, or activate another version",
                )


def check_extra_file(model: Model, _: Repository) -> Iterator[Problem]:
    """Find files of other backends beside the one that is loaded."""
    for version in model.served if model.backend in _STRICT else ():
        for name, backend in BACKEND_OF_FILE.items():
            path = model.folder / str(version) / name
            if path.exists() and name not in model.model_files and backend != "python":
                yield Problem(
                    path=path,
                    what=f"{name} is not what the backend {model.backend} loads",
                    instead=f'remove it, or write `backend: "{backend}"`',
                )


def check_leftovers(model: Model, _: Repository) -> Iterator[Problem]:
    """Find what a killed publication left."""
    staged = [entry for entry in sorted(model.folder.iterdir()) if entry.name.startswith(STAGING_PREFIX)]
    claims = [model.folder / CLAIM_FILE] if model.text is not None and (model.folder / CLAIM_FILE).exists() else []
    for entry in (*staged, *claims):
        yield Problem(
            path=entry,
            what=f"{entry.name} was left by a publication that is at work or was killed",
            instead="remove it unless one is at work; the next one does",
        )


def check_is_model(model: Model, _: Repository) -> Iterator[Problem]:
    """Find folders that are not models."""
    if not (model.is_model or model.is_inactive or model.name.startswith(STAGING_PREFIX)):
        yield Problem(
            path=model.folder,
            what=f"{model.name} holds neither {CONFIG_FILE} nor a version, and tritonserver tries to load every folder",
            instead="move it out of the repository",
        )
