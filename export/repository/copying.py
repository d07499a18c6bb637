"""A version with the files of another, to the byte. Needs no torch."""

from collections.abc import Mapping
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from ..errors import RepositoryError
from .addition import add_version
from .config_file import pin_config
from .contents import CONFIGS_FOLDER
from .integrity import check_whole
from .undo import Undo
from .version import SUMS_FILE, Version


def read_whole_sums(version: Version, doing: str) -> dict[Path, str]:
    """Return file of a version → SHA-256, each of which it has.

    Args:
        version: The version.
        doing: What is to be done with it, such as `promoted`.

    Raises:
        RepositoryError: A file is not as it was published, or the sums were never recorded.
    """
    check_whole(version)
    sums = version.read_sums()
    if not sums:
        raise RepositoryError(
            f"version {version.number} of {version.name} in {version.repository} cannot be {doing}",
            expected=f"a {SUMS_FILE} of all its files",
            got="none, for an older modelyard published it",
            remedy="export it again",
        )
    return sums


def add_copy(
    chosen: Version,
    version: Version,
    sums: Mapping[Path, str],
    configs: Mapping[str, pb.ModelConfig],
    documents: Mapping[str, str],
    undo: Undo,
) -> None:
    """Add a version that holds the files of another, whose proof is thereby its own.

    Args:
        chosen: The other, of this repository or of another one.
        version: The version to make.
        sums: What `read_whole_sums` tells of the other.
        configs: Triton model → its configuration while the version is the active one. Variants are those of the other.
        documents: File name → text that stands in place of the other's.
        undo: Takes back what is done.

    Raises:
        RepositoryError: A file reads back differently from how it was written.
    """
    number = version.number
    # The configurations name the number; the proof is kept to the byte, under that which it was made for.
    kept = chosen.folder / CONFIGS_FOLDER
    copied = [path for path in sums if not path.is_relative_to(kept) and path.name not in documents]
    files = {part: [path for path in copied if path.parent.parent.name == part] for part in configs}
    variants = {
        key: {part: pin_config(config, version=number, served=[number]) for part, config in each.items()}
        for key, each in chosen.read_variants().items()
    }
    add_version(version, files, {path.name: sums[path] for path in copied}, documents, configs, undo, variants)
    check_whole(version)
