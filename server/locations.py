"""Where files are kept and what the verbs are called: in a checkout one thing, from an installed package another."""

from pathlib import Path

import platformdirs

_BESIDE = Path(__file__).resolve().parent.parent
_IS_CHECKOUT = (_BESIDE / "pyproject.toml").is_file()

# Our Python-based backends, which tritonserver loads as files.
BACKENDS = _BESIDE / "backends"

# What is served unless the reader says otherwise.
REPOSITORY = _BESIDE / "model_repository" if _IS_CHECKOUT else Path("model_repository")

# Outlives the process, so that a caller who read it need not read it again after a restart.
KEY_FILE = (_BESIDE / ".cache" if _IS_CHECKOUT else platformdirs.user_state_path("modelyard")) / "control.key"

_MODULES = {
    "serve": "python -m server",
    "check": "python -m server --check",
    "doctor": "python -m server --doctor",
    "run": "python -m export run",
    "infer": "python client/infer.py",
    "bench": "python -m client.bench",
}


def name_command(verb: str) -> str:
    """Return what the reader types for `verb`: `modelyard VERB`, or the module that the checkout has for it."""
    return f"modelyard {verb}" if __package__.startswith("modelyard.") else _MODULES[verb]


def name_installation(extra: str) -> str:
    """Return the command that installs what `extra` brings, in the checkout's environment or in the reader's own."""
    return f"pip install 'modelyard[{extra}]'" if __package__.startswith("modelyard.") else "make setup"
