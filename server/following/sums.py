"""Whether what tritonserver loads of a version is what was published: other bytes may load, and answer wrongly."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from .model_text import read_config

# SHA-256 of each file of a version, and its place from there.
SUMS_FILE = "SHA256SUMS"

GOLDEN_FILE = "golden.json"

# What a version was made from and with; it names the files that are served as well.
LOCK_FILE = "modelyard.lock.json"

# In the folder of a version: configurations, those of each variant in a folder of its own.
CONFIGS_FOLDER = "configs"

# What is published about a version, beside what is loaded of it. Recorded answers are judged as they are asked for.
_RECORDS = (SUMS_FILE, GOLDEN_FILE, LOCK_FILE, "publication.json", "verification.json", "verification.html")

# More is not read before it has changed: that takes as long as to load it, and the recorded answers tell as much.
_LARGE_BYTES = 64 * 2**20

_BLOCK_BYTES = 2**20

_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


# What is another after any change of a file: device, inode, size, and times of the last write and the last change, of
# which the first alone can be set; and how many names it has, whose change is one of the file as well.
Identity = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class _State:
    """A file as it was when it was last looked at.

    Attributes:
        identity: Of the file at that time.
        digest: SHA-256 of its bytes in hexadecimal; empty where they are taken for those that were published.
    """

    identity: Identity
    digest: str


class FileSums:
    """Compares files with the sums that they were published with, and reads none twice that nobody has touched.

    A large file is taken for what was published when it is first seen.
    """

    def __init__(self) -> None:
        self._states: dict[Path, _State] = {}

    def copy(self) -> "FileSums":
        """Return one that knows as much, for another thread: what is read there is not marked as looked at here."""
        copied = FileSums()
        copied._states = self._states.copy()
        return copied

    def find_changed(self, sums: Mapping[Path, str], part: Path | None = None, *, since: str = "published") -> str:
        """Return which file is not as it was; empty where all are.

        Args:
            sums: Path → SHA-256.
            part: A folder, outside of which none is looked at.
            since: What was done with them when they had those sums.
        """
        for path, digest in sums.items():
            is_meant = part is None or part in path.parents
            if is_meant and self._read(path) not in (digest, ""):
                return f"{path} has changed since it was {since}"
        return ""

    def mark(self, paths: Iterable[Path]) -> Mapping[Path, Identity]:
        """Return what those files were that have been looked at, when that was last."""
        return {path: self._states[path].identity for path in paths if path in self._states}

    def find_touched(self, marks: Mapping[Path, Identity]) -> str:
        """Return which file is, or was, another one since it was marked; empty where none is.

        Who reads a file in between may have read other bytes than are there before and after. One that was only given
        another name, or has lost one, is not touched: publications share the files that they have in common.
        """
        for path, identity in marks.items():
            with contextlib.suppress(OSError):
                now = _identify(path.stat())
                if now == identity or (now[:4] == identity[:4] and now[5] != identity[5]):
                    continue
            return f"{path} was touched while it was loaded"
        return ""

    def take(self, paths: Iterable[Path], told: Mapping[Path, str]) -> Mapping[Path, str]:
        """Return the sums of files as they are now, those that can be read.

        Args:
            paths: The files.
            told: The sums that are known of some. Of the others nobody knows more: the largest are read as well.
        """
        found = {path: told.get(path) or self._read(path, at_any_size=True) for path in paths}
        return {path: digest for path, digest in found.items() if digest}

    def _read(self, path: Path, *, at_any_size: bool = False) -> str:
        """Return the digest of a file; empty where it cannot be told, which says nothing of its bytes."""
        state = self._states.get(path)
        try:
            stat = path.stat()
            if not S_ISREG(stat.st_mode):
                return ""
            identity = _identify(stat)
            if state and state.identity == identity and (state.digest or not at_any_size):
                return state.digest
            is_taken = not state and stat.st_size > _LARGE_BYTES and not at_any_size
            digest = "" if is_taken else hash_file(path)
        except OSError:
            return ""
        self._states[path] = _State(identity=identity, digest=digest)
        return digest


def _identify(stat: os.stat_result) -> Identity:
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_nlink)


def read_sums(version: Path) -> Mapping[Path, str]:
    """Return path → SHA-256 of each file that a version was published with; none where that is not recorded.

    As `sha256sum --check` reads it: a blank or an asterisk in front of the path, and any end of a line.
    """
    try:
        text = read_config(version / SUMS_FILE)
    except (OSError, ValueError):
        return {}
    # A last line that was cut may name no file that there ever was.
    lines = [line.rstrip("\r") for line in text.split("\n")[:-1]]
    matches = [match for match in map(_LINE.fullmatch, lines) if match]
    # Of the repository's own path nothing is shortened: what stands in front of .. may be a link.
    repository, name = version.parent.parent, version.parent.name
    paths = [repository / os.path.normpath(Path(name, version.name, match[2])) for match in matches]
    return {path: match[1].lower() for path, match in zip(paths, matches, strict=True)}


def find_damaged_sums(version: Path) -> str:
    """Return why sums that are there do not say of every file what it was; empty where they do, or there are none.

    Args:
        version: The folder of a version of the public model, where the sums of its steps are as well.
    """
    path = version / SUMS_FILE
    try:
        # A whole last line ends as the others do.
        *lines, rest = read_config(path).split("\n")
    except PermissionError as exc:
        return f"{path} cannot be read: {exc.strerror}"
    except ValueError as exc:
        return f"{path} holds no sums: {exc}"
    # One that is not there, or that this process lacks something to look at, says nothing.
    except OSError:
        return ""
    if rest or not lines or not all(_LINE.fullmatch(line.rstrip("\r")) for line in lines):
        return f"{path} is cut or damaged"
    digests = {file.name: digest for file, digest in read_sums(version).items()}
    for name, digest in _read_artefacts(version).items():
        if name not in digests:
            return f"{path} does not name {name}, as {LOCK_FILE} does"
        if digests[name] != digest:
            return f"{path} names other bytes for {name} than {LOCK_FILE}"
    # Another file than these is loaded by nobody, and keeps no version from being served.
    lacking = next((name for name in _RECORDS if name not in (*digests, SUMS_FILE) and (version / name).exists()), None)
    return f"{path} does not name {lacking}" if lacking else ""


def list_files(version: Path) -> list[Path]:
    """Return the files in the folder of a version, but for its sums and for what a program keeps for itself there."""
    found: list[Path] = []
    for folder, folders, names in os.walk(version):
        folders[:] = [name for name in folders if not is_kept_aside(name)]
        found += [Path(folder, name) for name in names if not is_kept_aside(name) and name != SUMS_FILE]
    return sorted(found)


def is_kept_aside(name: str) -> bool:
    """Tell whether a program keeps for itself what has this name, such as Python what it has compiled."""
    return name.startswith(".") or name == "__pycache__"


def read_told(version: Path, parts: Iterable[Path]) -> Mapping[Path, str]:
    """Return path → SHA-256 of each file of a version as it was published, by its sums or else by its lock.

    Args:
        version: The folder of the public model's version.
        parts: The folders of that version of the model and of its steps. The lock names files, not where they are.
    """
    if told := read_sums(version):
        return told
    artefacts = _read_artefacts(version)
    return {path: artefacts[path.name] for part in parts for path in list_files(part) if path.name in artefacts}


def find_lacking(version: Path, parts: Iterable[Path]) -> str:
    """Return which file a lock names that no part of its version has, where no sums tell of it; empty where none."""
    if (version / SUMS_FILE).exists():
        return ""
    found = {path.name for part in parts for path in list_files(part)}
    lacking = next((name for name in _read_artefacts(version) if name not in found), "")
    return f"{version} lacks {lacking}, which {LOCK_FILE} names" if lacking else ""


def _read_artefacts(version: Path) -> Mapping[str, str]:
    """Return name → SHA-256 of the files that the lock of a version names; none where it cannot be read."""
    try:
        artefacts = json.loads(read_config(version / LOCK_FILE))["artefacts"]
        return {str(name): str(digest) for name, digest in artefacts.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}


def select_loaded(version: Path, sums: Mapping[Path, str]) -> Mapping[Path, str]:
    """Return the sums of those files of a version that tritonserver loads; the others tell about it."""
    return {
        path: digest
        for path, digest in sums.items()
        if version / CONFIGS_FOLDER not in path.parents and (path.parent != version or path.name not in _RECORDS)
    }


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal.

    Raises:
        OSError: It cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
