"""Where files are kept and what the verbs are called: in a checkout one thing, from an installed package another."""

import os
from pathlib import Path

import platformdirs

_CHECKOUT = Path(__file__).resolve().parent.parent
_IS_CHECKOUT = (_CHECKOUT / "pyproject.toml").is_file()

# Holds the perf_analyzer that was fetched. Not in a checkout that is somebody else's.
CACHE = (
    _CHECKOUT / ".cache"
    if _IS_CHECKOUT and os.access(_CHECKOUT, os.W_OK)
    else platformdirs.user_cache_path("modelyard")
)


_IS_INSTALLED = __package__.startswith("modelyard.")
_OTHERS = {} if _IS_INSTALLED else {"run": "python -m export run", "check": "python -m server check"}


def name_command(verb: str) -> str:
    """Return what the reader types for `verb`, of whichever part it is."""
    return _OTHERS.get(verb, f"modelyard {verb}" if _IS_INSTALLED else f"python -m client.{verb}")
