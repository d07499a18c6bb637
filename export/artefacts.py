"""The files that one version is made of, before they are published."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# The steps of an ensemble around the graph; each is a Triton model of its own.
PREPROCESS = "preprocess"
POSTPROCESS = "postprocess"
# What tells one process how to do all of it.
LEAN = "lean"

# The graph's own model, where something lies beside what the engine loads, such as the names of labels.
MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class Artefacts:
    """What the export wrote.

    Attributes:
        model: The file that the engine loads, first; then whatever belongs to it.
        steps: Step of the ensemble around it → what the version folder of that step holds.
    """

    model: tuple[Path, ...]
    steps: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)

    @property
    def all(self) -> list[Path]:
        """Every file."""
        return [*self.model, *(path for paths in self.steps.values() for path in paths)]

    @property
    def graph(self) -> Path:
        """The file that the engine loads."""
        return self.model[0]

    def find(self, name: str) -> Path:
        """Return the file of that name, which is one of a step."""
        return next(path for paths in self.steps.values() for path in paths if path.name == name)


def list_model(path: Path) -> tuple[Path, ...]:
    """Return the file that an engine loads, and behind it everything else in its folder."""
    return (path, *sorted(other for other in path.parent.iterdir() if other != path))


def hash_file(path: Path) -> str:
    """Return the SHA-256 of the file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
