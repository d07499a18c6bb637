"""The files of a new version, put into the repository and renamed into place. Needs no torch."""

import contextlib
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from tritonclient.grpc import model_config_pb2 as pb

from ..artefacts import hash_file
from ..errors import RepositoryError
from ..file_limit import is_full
from .config_file import render_config
from .contents import CONFIGS_FOLDER, list_models, list_versions
from .files import claim_folder, copy, link, move, sync_folder, write
from .removal import name_staged
from .undo import Undo
from .version import SUMS_FILE, Version, index_sums, render_sums


def add_version(
    version: Version,
    files: Mapping[str, list[Path]],
    digests: Mapping[str, str],
    documents: Mapping[str, str],
    configs: Mapping[str, pb.ModelConfig],
    undo: Undo,
    variants: Mapping[str, Mapping[str, pb.ModelConfig]] = MappingProxyType({}),
) -> None:
    """Stage every file of a version, and rename it into place; the public model's folder last.

    Args:
        version: The version to make.
        files: Triton model → its files.
        digests: File name → SHA-256 that it must have.
        documents: File name → text, of what lies in the public model's folder.
        configs: Triton model → its configuration while the version is the active one.
        undo: Takes back what is done.
        variants: Name → the same configurations on a server that is told the name.

    Raises:
        RepositoryError: A file reads back differently from how it was written.
    """
    documents = dict(documents)
    for place, kept in (
        (CONFIGS_FOLDER, configs),
        *((f"{CONFIGS_FOLDER}/{key}", each) for key, each in variants.items()),
    ):
        documents |= {f"{place}/{model_name}.pbtxt": render_config(config) for model_name, config in kept.items()}
    equal = index_sums(
        Version(repository=version.repository, name=name, number=number)
        for name in list_models(version.repository)
        for number in list_versions(version.repository / name)
    )
    staged: dict[Path, Path] = {}
    sums: dict[str, str] = {}
    copied = [source for sources in files.values() for source in sources if digests[source.name] not in equal]
    needed = sum(source.stat().st_size for source in copied) + sum(map(len, documents.values()))
    with _telling(needed):
        for model_name, sources in files.items():
            claim_folder(version.repository / model_name, configs[model_name], undo)
            folder = version.find_folder(model_name)
            staged[folder] = folder.with_name(name_staged(version.number))
            undo.add_litter(partial(shutil.rmtree, staged[folder]))
            staged[folder].mkdir()
            is_public = model_name == version.name
            for source in sources:
                _store(source, staged[folder] / source.name, digests[source.name], equal)
                place = source.name if is_public else f"../../{model_name}/{version.number}/{source.name}"
                sums[place] = digests[source.name]
            if is_public:
                for name, text in documents.items():
                    (staged[folder] / name).parent.mkdir(parents=True, exist_ok=True)
                    write(staged[folder] / name, text)
                    sums[name] = hashlib.sha256(text.encode()).hexdigest()
                write(staged[folder] / SUMS_FILE, render_sums(sums))
        for folder in staged.values():
            for each in (*(entry for entry in folder.rglob("*") if entry.is_dir()), folder):
                sync_folder(each)
    for folder, staged_folder in staged.items():
        move(staged_folder, folder, undo)


@contextlib.contextmanager
def _telling(needed_bytes: int) -> Iterator[None]:
    """Have the error of a full disk in the block say how much room the version takes."""
    try:
        yield
    except OSError as exc:
        if is_full(exc):
            exc.strerror = f"{exc.strerror} (the version takes {max(needed_bytes / 1e6, 0.1):.1f} MB)"
        raise


def _store(source: Path, target: Path, digest: str, equal: Mapping[str, Path]) -> None:
    """Put a file into the repository, once however many versions hold it."""
    known = equal.get(digest)
    if known is not None and known.is_file():
        link(known, target)
        if hash_file(target) == digest:
            return
        # What was said to be equal is damaged.
        target.unlink()
    copy(source, target)
    if hash_file(target) != digest:
        raise RepositoryError(
            f"{source.name} reads back differently from how it was written",
            expected=f"SHA-256 {digest}",
            got="another",
            remedy="check the disk",
        )
