"""SHA-256 of many files at once, on all cores: hashlib lets go of the interpreter while it works."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..artefacts import hash_file


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
