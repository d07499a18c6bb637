"""Whether what tritonserver loads of a version is what was published: other bytes may load, and answer wrongly."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from .model_text import read_config

# SHA-256 of each file of a version, and its place from there.
SUMS_FILE = "SHA256SUMS"

GOLDEN_FILE = "golden.json"

# In the folder of a version: configurations, those of each variant in a folder of its own.
CONFIGS_FOLDER = "configs"

# What is published about a version, beside what is loaded of it. Recorded answers are judged as they are asked for.
_RECORDS = (GOLDEN_FILE, "modelyard.lock.json", "publication.json", "verification.json", "verification.html")

# More is not read before it has changed: that takes as long as to load it, and the recorded answers tell as much.
_LARGE_BYTES = 64 * 2**20

_BLOCK_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class _State:
    """A file as it was when it was last looked at.

    Attributes:
        content: What is another for other bytes: device, inode, size and time of the last write.
        changed: Time of any change, that of its name or mode included; a time of writing can be set.
        links: How many names it has. A version that shares it adds one, which is a change of this file as well.
        digest: SHA-256 of its bytes in hexadecimal; empty where they are taken for those that were published.
    """

    content: tuple[int, int, int, int]
    changed: int
    links: int
    digest: str

    def is_of(self, stat: os.stat_result) -> bool:
        """Tell whether a file has the same bytes as then."""
        return self.content == _identify(stat) and (self.changed == stat.st_ctime_ns or self.links != stat.st_nlink)


class FileSums:
    """Compares files with the sums that they were published with, and reads none twice that nobody has touched.

    A large file is taken for what was published when it is first seen.
    """

    def __init__(self) -> None:
        self._states: dict[Path, _State] = {}

    def find_changed(self, version: Path, part: Path | None = None) -> str:
        """Return which file that is loaded of a version is not as it was published; empty where all are.

        Args:
            version: Folder of a version of a public model.
            part: Folder of the same version of one of its steps, whose files alone are looked at.
        """
        version = Path(os.path.normpath(version))
        for path, digest in read_sums(version).items():
            is_loaded = path.parent != version or path.name not in _RECORDS
            is_loaded &= version / CONFIGS_FOLDER not in path.parents
            is_meant = part is None or Path(os.path.normpath(part)) in path.parents
            if is_loaded and is_meant and self._read(path) not in (digest, ""):
                return f"{path} has changed since it was published"
        return ""

    def _read(self, path: Path) -> str:
        """Return the digest of a file; empty where it cannot be told, which says nothing of its bytes."""
        state = self._states.get(path)
        try:
            stat = path.stat()
            if not S_ISREG(stat.st_mode):
                return ""
            if state and state.is_of(stat):
                digest = state.digest
            elif not state and stat.st_size > _LARGE_BYTES:
                digest = ""
            else:
                digest = hash_file(path)
        except OSError:
            return ""
        self._states[path] = _State(
            content=_identify(stat), changed=stat.st_ctime_ns, links=stat.st_nlink, digest=digest
        )
        return digest


def read_sums(version: Path) -> Mapping[Path, str]:
    """Return path → SHA-256 of each file that a version was published with; none where that is not recorded."""
    try:
        text = read_config(version / SUMS_FILE)
    except (OSError, ValueError):
        return {}
    # A last line that was cut may name no file that there ever was.
    lines = [line.rstrip("\n").partition("  ") for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {Path(os.path.normpath(version / place)): digest for digest, _, place in lines if place}


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


def _identify(stat: os.stat_result) -> tuple[int, int, int, int]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
