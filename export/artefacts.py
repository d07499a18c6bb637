"""The files that one version is made of, before they are published."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# The steps of an ensemble around the graph; each is a Triton model of its own.
PREPROCESS = "preprocess"
POSTPROCESS = "postprocess"


@dataclass(frozen=True, kw_only=True)
class Artefacts:
    """What the export wrote.

    Attributes:
        model: `model.onnx` or `model.plan`, and whatever belongs to it.
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
        """The file that is run: of ONNX Runtime, or a plan of TensorRT."""
        return next(path for path in self.model if path.name in ("model.onnx", "model.plan"))

    def find(self, name: str) -> Path:
        """Return the file of that name, which is one of a step."""
        return next(path for paths in self.steps.values() for path in paths if path.name == name)
