"""SHA-256 of many files at once, on all cores: hashlib lets go of the interpreter while it works."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_CHUNK_BYTES = 1 << 20


def hash_files(paths: Iterable[Path]) -> dict[Path, str]:
    """Return file → SHA-256 of its bytes, in hexadecimal, in the order of `paths`.

    Raises:
        OSError: One of them cannot be read.
    """
    ordered = list(paths)
    # The largest first, so that none is left for the end.
    by_size = sorted(ordered, key=lambda path: path.stat().st_size, reverse=True)
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        hashes = dict(zip(by_size, pool.map(hash_file, by_size), strict=True))
    return {path: hashes[path] for path in ordered}


def hash_file(path: Path) -> str:
    """Return the SHA-256 of the file's bytes, in hexadecimal.

    Raises:
        OSError: It cannot be read.
    """
    digest = hashlib.sha256()
    for chunk in _read_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def _read_chunks(path: Path) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]
