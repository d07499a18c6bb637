"""Every reason for which the server does not start, or does not go on.

ServerError                 exit code 1, one line on stderr
├── UsageError              exit code 2: an option that is not handed on to tritonserver, or that names no port
├── NotFoundError           no tritonserver, no repository, or one that cannot be read
│   └── EmptyError          a repository with nothing in it to serve
├── HostError               nothing can listen on this address
├── PortTakenError          another program listens where we would, or this user may not
├── KeyFileError            the file of the control key cannot be used, or is open to others
├── ShortageError           this machine has no descriptor, process, thread, memory or space left for it
├── StartError              tritonserver ended, or no model could be loaded
│   └── AbortedStartError   it was killed or stood still meanwhile; another start may go better
├── ControlError            a running tritonserver refused an order, or did not answer
│   ├── NoRoomError         a model was not loaded, for its processes have no room
│   ├── GoneError           nobody listens where it did
│   └── StrangerError       another program answers where it is to
├── RolloutError            a version cannot be served in place of the one before it
├── CheckError              a running server does not answer as it was verified
│   └── GoldenError         the recorded answers are in a form that an older modelyard wrote
└── GaveUpError             exit code 3: tritonserver died again and again
"""

import re


class ServerError(Exception):
    """A refusal in one sentence: what and where, expected, got, remedy.

    Args:
        what: What is wrong, naming the file, port, model or option.
        expected: What would have been accepted.
        got: What was found instead.
        remedy: What the reader can do about it.
    """

    exit_code = 1

    def __init__(self, what: str, *, expected: str = "", got: str = "", remedy: str = "") -> None:
        facts = [f"expected {fit(expected)}"] if expected else []
        facts += [f"got {fit(got)}"] if got else []
        self.fault = fit(what) + (f": {', '.join(facts)}" if facts else "")
        self.remedy = fit(remedy)
        super().__init__(self.fault + (f"; {self.remedy}" if remedy else "") + ".")


class UsageError(ServerError):
    """An option that is not handed on to tritonserver, that nothing answers to, or that names no port."""

    exit_code = 2


class NotFoundError(ServerError):
    """No tritonserver, no repository, or nothing in it to serve."""


class EmptyError(NotFoundError):
    """A repository holds nothing to serve."""


class HostError(ServerError):
    """Nothing can listen on this address."""


class PortTakenError(ServerError):
    """Another program listens where we would, or this user may not."""


class KeyFileError(ServerError):
    """The file of the control key cannot be used, or is open to others."""


class ShortageError(ServerError):
    """This machine has no descriptor, process, thread, memory or space left for it."""


class StartError(ServerError):
    """tritonserver ended, or no model could be loaded."""


class AbortedStartError(StartError):
    """tritonserver was killed while it loaded models, or stood still; another start may go better."""


class ControlError(ServerError):
    """A running tritonserver refused an order, or did not answer."""


class NoRoomError(ControlError):
    """A model was not ordered to be loaded, for its processes have no room."""


class GoneError(ControlError):
    """Nobody listens where tritonserver did."""


class StrangerError(ControlError):
    """Another program answers where tritonserver is to."""


class RolloutError(ServerError):
    """A version cannot be served in place of the one before it."""


class CheckError(ServerError):
    """A running server does not answer as it was verified."""


class GoldenError(CheckError, ValueError):
    """The recorded answers are in a form that an older modelyard wrote."""


class GaveUpError(ServerError):
    """Tritonserver died again and again."""

    exit_code = 3


# What ends a sentence that is told within another one, such as tritonserver's reasons, whose semicolon may stand on a
# line of its own; an ellipsis is none.
_END = re.compile(r"(?<=[\w)\]'\"`!?])(?!\.\.\.$)(?:[.; ]*;[.; ]*|[.;]+)$")

# A reason that tritonserver gives holds a path or two, and its end says most.
_MAX_PART_CHARS = 1_000


def fold(reason: str) -> str:
    """Return a reason on one line, without what ends it where it is a sentence itself."""
    return _END.sub("", " ".join(reason.split()))


def fit(part: str) -> str:
    """Return `part` of a sentence on one line, bounded, and without what a terminal would obey."""
    line = fold(part)
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)
    kept = (_MAX_PART_CHARS - 5) // 2
    return line if len(line) <= _MAX_PART_CHARS else f"{line[:kept]} ... {line[-kept:]}"
