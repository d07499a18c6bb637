"""Every reason for which the export refuses to go on.

ExportError                 exit code 1, one line on stderr
├── SettingsError           the file of options says something that means nothing
├── CheckpointError         the folder or a file in it cannot be read as a checkpoint
├── AdapterError            a low-rank adapter is empty, of another kind, or of another model
├── VocabularyError         tokenizer and embedding rows do not belong together
├── ModelError              the weights do not fit the architecture, or the task is not supported
├── GraphError              the ONNX file is not what was asked for
├── PrecisionError          the model cannot be brought to the precision that was asked for
├── EngineError             the TensorRT plan cannot be built, or is not for the target
├── VerificationError       the ONNX file computes something else than the checkpoint
├── TargetError             no Triton release is called so, or it cannot load the file
├── RuntimeFailure          the target's ONNX Runtime cannot be had, or cannot load or run the file, or dies of it
└── RepositoryError         the version cannot be published
"""

from collections.abc import Iterable
from typing import TypeVar


class ExportError(Exception):
    """A refusal in one sentence: what and where, expected, got, remedy.

    Args:
        what: What is wrong, naming the tensor, file or option.
        expected: What would have been accepted.
        got: What was found instead.
        remedy: What the reader can do about it.
    """

    def __init__(self, what: str, *, expected: str = "", got: str = "", remedy: str = "") -> None:
        self.what = what
        facts = [f"expected {expected}"] if expected else []
        facts += [f"got {got}"] if got else []
        sentence = what
        if facts:
            sentence += ": " + ", ".join(facts)
        if remedy:
            sentence += f"; {remedy}"
        super().__init__(" ".join(sentence.split()) + ".")


class SettingsError(ExportError):
    """The file of options says something that means nothing."""


class CheckpointError(ExportError):
    """The folder or a file in it cannot be read as a checkpoint."""


class AdapterError(ExportError):
    """A low-rank adapter is empty, of another kind, or of another model."""


class VocabularyError(ExportError):
    """Tokenizer and embedding rows do not belong together."""


class ModelError(ExportError):
    """The weights do not fit the architecture, or the task is not supported."""


class GraphError(ExportError):
    """The ONNX file is not what was asked for."""


class PrecisionError(ExportError):
    """The model cannot be brought to the precision that was asked for."""


class EngineError(ExportError):
    """The TensorRT plan cannot be built, or is not for the target."""


class VerificationError(ExportError):
    """The ONNX file computes something else than the checkpoint."""


class TargetError(ExportError):
    """No Triton release is called so, or it cannot load the file."""


# Called so because a RuntimeError is something else in Python.
class RuntimeFailure(ExportError):  # noqa: N818
    """The target's ONNX Runtime cannot be had, or cannot load or run the file, or dies of it."""


class RepositoryError(ExportError):
    """The version cannot be published."""


T = TypeVar("T")


def list_some(names: Iterable[T], limit: int = 10) -> str:
    """Return `names` sorted and joined, the first `limit` of them, then `+N more`."""
    ordered = sorted(str(name) for name in names)
    text = ", ".join(ordered[:limit])
    return text + (f", +{len(ordered) - limit} more" if len(ordered) > limit else "")
