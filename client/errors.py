"""Every reason for which a client has no answer.

ClientError                 one sentence; exit code 1 of the command line
├── UsageError              what was passed cannot be sent
├── UnreachableError        nobody answers at the address, or the connection broke; repeated while there is time
│   └── ForeignError        what answers there is not a server, or another of its ports
├── UntrustedError          the server's certificate is not one that is trusted
├── DeadlineError           no answer in time; also a TimeoutError
├── AccessError             the server wants a token, or another one
├── UnavailableError        the server refuses for now: overloaded, starting or draining; repeated while there is time
├── ModelError              the server has no such model, or it is of another task
└── RefusedError            the server refuses this request, and would refuse it again
    ├── CrashError          what computed it died; repeated a few times, for the request may be what kills
    └── GarbledError        what comes back is not KServe's, as from something in front of it
"""

from .printable import make_printable


class ClientError(Exception):
    """Why there is no answer, in one sentence: what and where, expected, got, remedy.

    Attributes:
        what: What is wrong, naming the server, model or row.
        expected: What would have been accepted; empty where nothing can be said.
        got: What was found instead.
        remedy: What the reader can do about it.
        may_repeat: Whether the same request may be answered if it is sent again.
    """

    may_repeat = False

    def __init__(self, what: str, *, expected: str = "", got: str = "", remedy: str = "") -> None:
        self.what, self.expected, self.got, self.remedy = what, expected, got, remedy
        facts = ", ".join(f"{word} {fact}" for word, fact in (("expected", expected), ("got", got)) if fact)
        sentence = what + (f": {facts}" if facts else "") + (f"; {remedy}" if remedy else "") + "."
        # What a server says may hold sequences that a terminal obeys.
        super().__init__(make_printable(sentence))


class UsageError(ClientError, ValueError):
    """What was passed cannot be sent."""


class UnreachableError(ClientError, ConnectionError):
    """Nobody answers at the address, or the connection broke.

    Without an answer it is unknown whether the model ran; it may run again, for an inference changes nothing.
    """

    may_repeat = True


class ForeignError(UnreachableError):
    """What answers at the address is not a server, or another of its ports."""

    may_repeat = False


class UntrustedError(ClientError):
    """The server's certificate is not one that is trusted."""


class DeadlineError(ClientError, TimeoutError):
    """No answer in time; not repeated, for the server may still be at work on it."""


class AccessError(ClientError):
    """The server wants a token, or another one."""


class UnavailableError(ClientError):
    """The server refuses for now: overloaded, starting or draining."""

    may_repeat = True


class ModelError(ClientError):
    """The server has no such model, or it is of another task."""


class RefusedError(ClientError):
    """The server refuses this request, and would refuse it again.

    Attributes:
        rows: Rows of the list, from 0, that were in the request; None where all were.
        is_content: Whether it is refused for what it holds, not because the model failed.
    """

    rows: range | None = None
    is_content = False


class CrashError(RefusedError):
    """The process that computed the request died, or is not back yet."""

    may_repeat = True


class GarbledError(RefusedError):
    """What comes back is not KServe's: a refusal of something in front of a server, or an answer of no known form."""
