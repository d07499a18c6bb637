"""Where files are kept and what the verbs are called: in a checkout one thing, from an installed package another."""

import shlex
from pathlib import Path

_BESIDE = Path(__file__).resolve().parent.parent
_IS_CHECKOUT = (_BESIDE / "pyproject.toml").is_file()


def _find_state() -> Path:
    if _IS_CHECKOUT:
        return _BESIDE / ".cache"
    # Not above: from a checkout this part runs on any Python, and says in a sentence what that lacks.
    import platformdirs

    return platformdirs.user_state_path("modelyard")


# Our Python-based backends, which tritonserver loads as files.
BACKENDS = _BESIDE / "backends"

# What is served unless the reader says otherwise.
REPOSITORY = _BESIDE / "model_repository" if _IS_CHECKOUT else Path("model_repository")

# Outlives the process, so that a caller who read it need not read it again after a restart.
KEY_FILE = _find_state() / "control.key"

_IS_INSTALLED = __package__.startswith("modelyard.")

# What the reader types in front of this part's verbs, and for the verbs of others in a checkout.
PROGRAM = "modelyard" if _IS_INSTALLED else "python -m server"
_OTHERS = (
    {}
    if _IS_INSTALLED
    else {
        "run": "python -m export run",
        "infer": "python client/infer.py",
        "bench": "python -m client.bench",
    }
)


def name_command(verb: str, *words: object) -> str:
    """Return what the reader types for `verb`, of whichever part it is, and behind it, as a shell takes it."""
    return " ".join((_OTHERS.get(verb, f"{PROGRAM} {verb}"), *(shlex.quote(str(word)) for word in words)))


def name_opening(repository: Path) -> str:
    """Return the command that lets every user read a repository."""
    return f"chmod -R a+rX {shlex.quote(str(repository))}"


def name_installation(extra: str) -> str:
    """Return the command that installs what `extra` brings, in the checkout's environment or in the reader's own."""
    return f"pip install 'modelyard[{extra}]'" if _IS_INSTALLED else "make setup"
