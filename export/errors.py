"""Every reason for which the export refuses to go on.

ExportError                 exit code 1, one line on stderr
├── SettingsError           an option, or the file of options, has a value that cannot be used
├── CheckpointError         the folder or a file in it cannot be read as a checkpoint
├── AdapterError            a low-rank adapter is empty, of another kind, or of another model
├── VocabularyError         tokenizer and embedding rows do not belong together
├── ModelError              the weights do not fit the architecture, or the task is not supported
├── GraphError              the ONNX file is not what was asked for
├── PrecisionError          the model cannot be brought to the precision that was asked for
├── EngineError             the engine is missing, cannot build its file or run it, or is not for the target
├── VerificationError       the ONNX file does not compute what the checkpoint does
├── TargetError             there is no Triton release of that name, or it cannot load the file
├── RuntimeFailure          the target's ONNX Runtime cannot be fetched, or cannot load or run the file, or dies of it
├── RepositoryError         the version cannot be published, activated or removed
├── ServingError            a running server does not serve what became active; exit code 3
└── UnansweredError         what was asked for is done, and nothing takes the answer; exit code 5
"""

import re
import reprlib
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
        facts = [f"expected {_fit(expected)}"] if expected else []
        facts += [f"got {_fit(got)}"] if got else []
        sentence = _fit(what)
        if facts:
            sentence += ": " + ", ".join(facts)
        if remedy:
            sentence += f"; {_fit(remedy)}"
        super().__init__(sentence + ".")


class SettingsError(ExportError):
    """An option, or the file of options, has a value that cannot be used."""


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
    """The engine is missing, cannot build its file or run it, or is not for the target."""


class VerificationError(ExportError):
    """The ONNX file does not compute what the checkpoint does."""


class TargetError(ExportError):
    """There is no Triton release of that name, or it cannot load the file."""


# Not named RuntimeError, which is something else in Python.
class RuntimeFailure(ExportError):  # noqa: N818
    """The target's ONNX Runtime cannot be fetched, or cannot load or run the file, or dies of it."""


class RepositoryError(ExportError):
    """The version cannot be published, activated or removed."""


class ServingError(ExportError):
    """A running server does not serve what became active."""


class UnansweredError(ExportError):
    """What was asked for is done, and nothing takes the answer."""


T = TypeVar("T")

# Ten tensors' names take 900 characters, and a path up to 4,096, whose end says most.
_MAX_PART_CHARS = 1_000
_MAX_NAME_CHARS = 200
# What a name may consist of beside text: a key of a pickle may be a tuple of anything, however long.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


# What ends a sentence that is told within another one, as libraries' errors are, on whatever line; an
# ellipsis is none.
_END = re.compile(r"(?<=[\w)\]'\"`!?])(?!\.\.\.$)(?:[.; ]*;[.; ]*|[.;]+)$")

# Path → what sentences call it.
_SHOWN: dict[str, str] = {}


def show_path_as(path: str, name: str) -> None:
    """Have sentences say `name` for `path`, which the reader did not type."""
    _SHOWN[path] = name


def list_some(names: Iterable[T], limit: int = 10) -> str:
    """Return `names` sorted and joined, the first `limit` of them, then `+N more`; a long one without its middle."""
    ordered = sorted(_name(name) for name in names)
    text = ", ".join(ordered[:limit])
    return text + (f", +{len(ordered) - limit} more" if len(ordered) > limit else "")


def format_apart(value: float, bound: float, digits: int) -> str:
    """Return `value` with as many digits as show on which side of `bound` it lies, and with `digits` at least."""
    for shown in range(digits, 17):
        text = f"{value:.{shown}g}"
        if (float(text) > bound, float(text) < bound) == (value > bound, value < bound):
            return text
    return repr(value)


def escape_controls(text: str) -> str:
    r"""Return `text` with every character that is not for printing as Python writes it, such as `\x1b`.

    What a file says may hold sequences that a terminal obeys, and halves of characters that no encoding has.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _fit(part: str) -> str:
    """Return `part` of a sentence on one line, bounded, and safe to print."""
    for path, name in _SHOWN.items():
        part = part.replace(path, name)
    # Bounded first: splitting ten million characters would take as many times their memory.
    line = _END.sub("", " ".join(shorten(part, 2 * _MAX_PART_CHARS).split()))
    return shorten(escape_controls(line), _MAX_PART_CHARS)


def shorten(text: str, limit: int) -> str:
    """Return `text`, without its middle if it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    kept = (limit - 5) // 2
    return f"{text[:kept]} ... {text[-kept:]}"


def _name(name: object) -> str:
    if isinstance(name, str):
        return shorten(name, _MAX_NAME_CHARS)
    return shorten(_SHORT.repr(name) if isinstance(name, (tuple, bytes)) else str(name), _MAX_NAME_CHARS)
