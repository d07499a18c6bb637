"""Where files are kept and what the verbs are called: in a checkout one thing, from an installed package another."""

import os
import shlex
from pathlib import Path

import platformdirs

_CHECKOUT = Path(__file__).resolve().parent.parent
_IS_CHECKOUT = (_CHECKOUT / "pyproject.toml").is_file()

# What is fetched or measured once: ONNX Runtimes of other targets, TensorRT's timings. Not in a checkout that is
# somebody else's.
CACHE = (
    _CHECKOUT / ".cache"
    if _IS_CHECKOUT and os.access(_CHECKOUT, os.W_OK)
    else platformdirs.user_cache_path("modelyard")
)

# Where a version is published unless the reader says otherwise.
REPOSITORY = _CHECKOUT / "model_repository" if _IS_CHECKOUT else Path("model_repository")

# What the reader types in front of this part's verbs.
_IS_INSTALLED = __package__.startswith("modelyard.")
PROGRAM = "modelyard" if _IS_INSTALLED else "python -m export"


def name_command(verb: str, *words: object) -> str:
    """Return what the reader types for `verb`, which may be one of the server's, and behind it, as a shell takes it."""
    ours = {"serve": "python -m server", "check": "python -m server check"}
    command = ours[verb] if verb in ours and not _IS_INSTALLED else f"{PROGRAM} {verb}"
    return " ".join((command, *(shlex.quote(str(word)) for word in words)))
