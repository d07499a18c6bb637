"""The files that one version is made of, before they are published."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Artefacts:
    """What the export wrote.

    Attributes:
        model: `model.onnx` or `model.plan`, and whatever belongs to it.
        tokenizer: `tokenizer.json`, where there is a step that reads texts.
        postprocess: `postprocess.json`, where the task has such a step.
    """

    model: tuple[Path, ...]
    tokenizer: Path | None = None
    postprocess: Path | None = None

    @property
    def all(self) -> list[Path]:
        """Every file."""
        return [*self.model, *(path for path in (self.tokenizer, self.postprocess) if path)]

    @property
    def graph(self) -> Path:
        """The file that is run: of ONNX Runtime, or a plan of TensorRT."""
        return next(path for path in self.model if path.name in ("model.onnx", "model.plan"))
