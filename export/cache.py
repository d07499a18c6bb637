"""The one answer to where the export keeps what it fetched or measured, and can fetch or measure again."""

import tempfile
from pathlib import Path

# In the checkout, or where that cannot be written, in the home folder.
FOLDERS = (Path(__file__).resolve().parent.parent / ".cache", Path("~/.cache/modelyard"))


def find_cached(name: str) -> Path | None:
    """Return what is kept under `name`, None where nothing is."""
    paths = (folder.expanduser() / name for folder in FOLDERS)
    return next((path for path in paths if path.exists()), None)


def open_cache() -> Path:
    """Return the first folder that can be written, made if it is not there.

    Raises:
        OSError: None of them can be; says why of each.
    """
    reasons = []
    for folder in FOLDERS:
        path = folder.expanduser()
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                return path
        except OSError as exc:
            reasons.append(str(exc))
    raise OSError(" and ".join(reasons))
