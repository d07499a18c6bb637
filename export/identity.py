"""What makes an export the same as an earlier one: the files that it reads, its options, its tools. Needs no torch."""

import contextlib
import hashlib
import itertools
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from .artefacts import hash_file
from .checkpoints import StoredCheckpoint, open_checkpoint
from .checkpoints.plain.documents import DOCUMENTS
from .checkpoints.plain.sentence_modules import MODULES_FILE, find_sentence_home, read_sentence_modules
from .checkpoints.storage.file_state import FileState, read_state
from .errors import ExportError
from .options import ExportRequest
from .repository.activation import activate, lacks_configs
from .repository.contents import find_active_version, list_versions
from .repository.lockfile import SourceHash, hash_source, make_plain, record_sources
from .repository.version import Version
from .targets import find_target

# What is read of a checkpoint besides its weights.
CONFIGURATION = "configuration"

# What stands beside the weights and is read as well: configuration, tokenizer, the index of shards. Others' files may
# be written there meanwhile, such as a trainer's log.
_CONFIGURATION_FILES = (*DOCUMENTS, "*.tiktoken", "*index.json", ".metadata")
# An adapter's settings, and its weights.
_ADAPTER_FILES = (*_CONFIGURATION_FILES, "adapter_config.json", "*.safetensors", "*.bin")

# Distributions that make the graph's bytes or the reference that they are compared with.
_TOOLS = ("torch", "transformers", "tokenizers", "onnx", "onnx-ir", "onnxscript", "numpy", "openvino", "nncf")

_CODE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class SameVersion:
    """A published version that the same export led to.

    Attributes:
        version: The version.
        active: The version that is active now, 0 where none is.
        origin: What was read, in words.
        missing: What a whole checkpoint of its format would have and this one lacks or cannot show.
        outcome: Whether it became active again.
    """

    version: Version
    active: int
    origin: str
    missing: tuple[str, ...]
    outcome: Literal["unchanged", "switched"]


def find_same_version(request: ExportRequest) -> SameVersion | None:
    """Return the version that an export would find to be the same, and make it active if asked to; None without one.

    It has the same files to read, options, target and tools, this code among them, and its own files are as they were
    written. The module of a factory may import anything, so its export is never known to be the same.

    Raises:
        RepositoryError: The version cannot become the active one.
    """
    if request.checkpoint is None or request.factory is not None:
        return None
    versions = _list_like(request)
    if not versions:
        return None
    # Whatever is wrong with the checkpoint is for the export to tell.
    try:
        checkpoint = open_checkpoint(request.checkpoint, tag=request.tag, base=request.base)
        sources = record_sources(hash_files(list_files(request, checkpoint)), request.address)
    except (ExportError, OSError):
        return None
    same = (each for each in versions if each.read_lock()["sources"] == sources and _is_as_written(each))
    version = next(same, None)
    return _settle(version, checkpoint, activates=not request.no_activate) if version else None


def list_files(request: ExportRequest, checkpoint: StoredCheckpoint) -> dict[str, Sequence[Path]]:
    """Return what is read → its files.

    Raises:
        CheckpointError: `modules.json` cannot be read.
        OSError: An adapter's folder, or one of pictures, cannot be read.
    """
    directory = request.base or checkpoint.directory
    files: dict[str, Sequence[Path]] = {
        "checkpoint": checkpoint.files,
        CONFIGURATION: sorted({*_list_configuration(directory), *_list_configuration(checkpoint.directory)}),
    }
    for index, folder in enumerate(request.adapters):
        files[f"adapter {index + 1}"] = [path for path in _list_matching(folder, _ADAPTER_FILES) if path.is_file()]
    return files | list_asked(request)


def look_at_files(request: ExportRequest, checkpoint: StoredCheckpoint) -> dict[Path, FileState]:
    """Return what each file is that is read, for `refuse_any_changed` to compare it with afterwards."""
    states = checkpoint.opened
    files: Mapping[str, Sequence[Path]] = {}
    # Of what cannot be looked at, whoever reads it tells what is wrong.
    with contextlib.suppress(OSError):
        files = list_files(request, checkpoint)
    for path in itertools.chain.from_iterable(files.values()):
        with contextlib.suppress(OSError):
            states.setdefault(path, read_state(path))
    return states


def list_asked(request: ExportRequest) -> dict[str, Sequence[Path]]:
    """Return what the options of a task name → its files.

    Raises:
        OSError: A folder of pictures cannot be read.
    """
    recipe, given = request.task_options["preprocess"], request.task_options["pictures"] or ()
    pictures = [file for path in given for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file()]
    # A recipe may have a name in place of a file.
    return {"recipe": [Path(recipe)] if recipe and Path(recipe).is_file() else [], "pictures": pictures}


def hash_files(files: Mapping[str, Sequence[Path]]) -> dict[str, SourceHash]:
    """Return what was read → the hashes of its files, which are named from the innermost folder that holds them all.

    Raises:
        CheckpointError: A file cannot be read.
    """
    return {what: hash_source(_find_root(paths), paths) for what, paths in files.items() if paths}


def describe_options(request: ExportRequest) -> dict[str, Any]:
    """Return the options as a lock records them: not where it is published, whether it is active, nor its source."""
    options = asdict(request)
    del options["repository"], options["checkpoint"], options["address"], options["no_activate"]
    if request.factory:
        options["factory"] = Path(request.factory).name
    return options


def list_tools() -> dict[str, str]:
    """Return tool → its version, as far as they can be told without loading them; of this code, a hash."""
    return {
        **{name: metadata.version(name) for name in _TOOLS},
        "python": platform.python_version(),
        "modelyard": f"code {_hash_code()}",
    }


def _list_like(request: ExportRequest) -> list[Version]:
    """Return the versions of the same options, target and tools, the newest first."""
    wanted = {
        "options": make_plain(describe_options(request)),
        "target": asdict(find_target(request.target)),
    }
    tools = list_tools()
    found = []
    for number in reversed(list_versions(request.repository / request.name)):
        version = Version(repository=request.repository, name=request.name, number=number)
        lock = version.read_lock()
        if (
            lock
            and all(lock[key] == value for key, value in wanted.items())
            and tools.items() <= lock["versions"].items()
        ):
            found.append(version)
    return found


def _is_as_written(version: Version) -> bool:
    """Tell whether every file of a version is there and has the bytes that it was published with."""
    sums = version.read_sums()
    return bool(sums) and all(path.is_file() and hash_file(path) == digest for path, digest in sums.items())


def _settle(version: Version, checkpoint: StoredCheckpoint, *, activates: bool) -> SameVersion:
    active = find_active_version(version.repository, version.name)
    # One that is active is mended whether it is to become so or not.
    switches = lacks_configs(version) if active == version.number else activates
    if switches:
        activate(version.repository, version.name, version.number)
    return SameVersion(
        version=version,
        active=version.number if switches else active,
        origin=checkpoint.format_name,
        missing=checkpoint.facts.missing,
        outcome="switched" if switches else "unchanged",
    )


def _list_configuration(directory: Path) -> list[Path]:
    found = _list_matching(directory, _CONFIGURATION_FILES)
    home = find_sentence_home(directory)
    if home is not None:
        # Dense layers have weights of their own.
        folders = [module.folder for module in read_sentence_modules(directory) or ()]
        found += [path for folder in folders if folder.absolute() != directory.absolute() for path in folder.glob("*")]
        found.append(home / MODULES_FILE)
    return [path for path in found if path.is_file()]


def _list_matching(directory: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in directory.glob(pattern)})


def _find_root(files: Sequence[Path]) -> Path:
    """Return the innermost folder that holds all of `files`."""
    return Path(os.path.commonpath([path.parent.absolute() for path in files]))


def _hash_code() -> str:
    """Return the first digits of the hash of this package's code: another release may export otherwise."""
    digest = hashlib.sha256()
    for path in sorted(_CODE.rglob("*.py")):
        digest.update(f"{path.relative_to(_CODE).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
