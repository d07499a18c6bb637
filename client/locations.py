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


def name_command(verb: str) -> str:
    """Return what the reader types for `verb`: `modelyard VERB`, or the module that the checkout has for it."""
    return f"modelyard {verb}" if __package__.startswith("modelyard.") else f"python -m client.{verb}"
