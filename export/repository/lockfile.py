"""`modelyard.lock.json`: what a version was made from and with, so that the same can be made again, to the byte."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from ..errors import CheckpointError, RepositoryError, list_some
from ..targets import Target
from .config_file import read_regular

LOCK_FILE = "modelyard.lock.json"

# Raised when a key changes its meaning.
_LOCK_VERSION = 1

# Section → the kind of its values; of `target` and `options` each has its own.
_SECTIONS: Mapping[str, type] = {
    "target": object,
    "versions": str,
    "sources": dict,
    "options": object,
    "seeds": int,
    "artefacts": str,
}
_KEYS = {"lock_version", *_SECTIONS}

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SourceHash:
    """The bytes that a folder was read from.

    Attributes:
        files: Path below the folder, with slashes → SHA-256, sorted.
        sha256: Hash of all of them, taken of the lines `HASH  PATH` in that order, as `sha256sum` prints them.
    """

    files: Mapping[str, str]
    sha256: str


def hash_source(
    directory: Path,
    files: Iterable[Path] | None = None,
    on_progress: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
) -> SourceHash:
    """Hash files of any size in `directory`, a mebibyte at a time.

    Args:
        directory: What their names are relative to; it is not recorded.
        files: The files to hash; every one below it where None.
        on_progress: Called with the bytes read so far and those of all files.

    Raises:
        CheckpointError: A file cannot be read.
    """
    chosen = files if files is not None else (path for path in directory.rglob("*") if path.is_file())
    named = {path.absolute().relative_to(directory.absolute()).as_posix(): path for path in chosen}
    hashes = {}
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    try:
        total = sum(path.stat().st_size for path in named.values())
        done = 0
        for name, path in sorted(named.items()):
            digest = hashlib.sha256()
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(buffer[:count])
                    done += count
                    on_progress(done, total)
            hashes[name] = digest.hexdigest()
    except OSError as exc:
        raise CheckpointError(
            f"the files of {directory} cannot be hashed", got=str(exc), remedy="copy the checkpoint again"
        ) from exc
    lines = "".join(f"{value}  {name}\n" for name, value in hashes.items())
    return SourceHash(files=hashes, sha256=hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest())


def build_lock(
    *,
    target: Target,
    versions: Mapping[str, str],
    sources: Mapping[str, SourceHash],
    options: Mapping[str, Any],
    seeds: Mapping[str, int],
    artefacts: Mapping[str, str],
    address: str = "",
) -> dict[str, Any]:
    """Return the lock of a version: plain values that say nothing of this machine, this folder or this day.

    Args:
        target: The Triton release.
        versions: Distribution → version of what made the files; `python` among them.
        sources: What was read → its bytes, such as `checkpoint`, `base`, `adapter 1`.
        options: The options of the export. Only the name of a path is recorded.
        seeds: What they seed → seed.
        artefacts: File → SHA-256 of every file of the version but this one.
        address: Where the checkpoint was fetched from, with its commit; empty for a folder.
    """
    return {
        "lock_version": _LOCK_VERSION,
        "target": asdict(target),
        "versions": dict(versions),
        "sources": record_sources(sources, address),
        "options": make_plain(options),
        "seeds": dict(seeds),
        "artefacts": dict(artefacts),
    }


def record_sources(sources: Mapping[str, SourceHash], address: str = "") -> dict[str, Any]:
    """Return what was read and its hashes, as a lock records them; of a checkpoint that was fetched, from where."""
    recorded: dict[str, Any] = {
        name: {"files": dict(source.files), "sha256": source.sha256} for name, source in sources.items()
    }
    if address:
        recorded["checkpoint"]["address"] = address
    return recorded


def render_lock(lock: Mapping[str, Any]) -> str:
    """Return the one text of a lock: ASCII, sorted keys, two spaces, no NaN, a newline at the end."""
    return json.dumps(lock, sort_keys=True, indent=2, allow_nan=False) + "\n"


def read_lock(path: Path) -> dict[str, Any]:
    """Return the lock in the file at `path`.

    Raises:
        RepositoryError: It cannot be read, is not a lock, or is one of another version of modelyard.
    """
    try:
        lock: dict[str, Any] = json.loads(read_regular(path))
    # Python gives up on a thousand brackets within one another.
    except (OSError, ValueError, RecursionError) as exc:
        raise RepositoryError(f"{path} cannot be read", expected="a lock", got=str(exc), remedy="export again") from exc
    keys = set(lock) if isinstance(lock, dict) else set()
    if keys != _KEYS or lock["lock_version"] != _LOCK_VERSION:
        found = f"lock_version {lock['lock_version']}" if "lock_version" in keys else list_some(keys) or "none of it"
        raise RepositoryError(
            f"{path} is not a lock that this modelyard can read",
            expected=f"lock_version {_LOCK_VERSION} with {list_some(_KEYS - {'lock_version'})}",
            got=found,
            remedy="export again",
        )
    if damaged := [section for section in sorted(_SECTIONS) if not _is_sound(section, lock[section])]:
        raise RepositoryError(
            f"{path} is damaged",
            expected=f"what a lock records under {list_some(damaged)}",
            got=json.dumps(lock[damaged[0]])[:80],
            remedy="export again",
        )
    return lock


def _is_sound(section: str, content: Any) -> bool:
    """Tell whether what stands in a section is of the kind that is read there."""
    if not isinstance(content, dict) or not all(isinstance(value, _SECTIONS[section]) for value in content.values()):
        return False
    if section != "sources":
        return True
    return all(
        isinstance(source.get("sha256"), str)
        and isinstance(source.get("files"), dict)
        and all(isinstance(digest, str) for digest in source["files"].values())
        for source in content.values()
    )


def make_plain(value: Any) -> Any:
    """Return `value` as JSON would hold it."""
    if isinstance(value, Mapping):
        return {str(key): make_plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(make_plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [make_plain(item) for item in value]
    if isinstance(value, PurePath):
        return value.name
    assert value is None or isinstance(value, str | int | float | bool), f"Bug: {value!r} cannot be locked"
    return value
