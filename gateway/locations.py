"""Where the repository lies and what the reader types: in a checkout one thing, from an installed package another."""

from pathlib import Path

_BESIDE = Path(__file__).resolve().parent.parent
_IS_CHECKOUT = (_BESIDE / "pyproject.toml").is_file()

# What `serve` serves unless the reader says otherwise.
REPOSITORY = _BESIDE / "model_repository" if _IS_CHECKOUT else Path("model_repository")

_IS_INSTALLED = __package__.startswith("modelyard.")

# What the reader types.
PROGRAM = "modelyard gateway" if _IS_INSTALLED else "python -m gateway"
SERVE = "modelyard serve" if _IS_INSTALLED else "python -m server"
