"""An encoded file that a client sent, whatever it holds."""

from dataclasses import dataclass


class FileError(ValueError):
    """A file that cannot be used; the message is for the caller who sent it."""


@dataclass(frozen=True)
class SentFile:
    """One row of a request.

    Attributes:
        content: The encoded file.
        name: Name of the input, for messages.
        row: Its place in the request, for messages.
    """

    content: bytes
    name: str
    row: int

    def refuse(self, what: str) -> FileError:
        """Return the error that says `what` of this file."""
        return FileError(f"{self.name} row {self.row} {what}")
