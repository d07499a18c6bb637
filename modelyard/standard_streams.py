"""The standard streams that a command finds. It imports nothing that takes a while."""

import codecs
import io
import os
import sys

# Stream → how it is opened, and what its descriptor may do. An answer that nobody can read is told, as one that a full
# disk does not take; nothing is lost with words beside it.
_STREAMS = {"stdin": ("r", os.O_RDWR), "stdout": ("w", os.O_RDONLY), "stderr": ("w", os.O_RDWR)}

_ESCAPES = "modelyard.escapes"


def prepare() -> None:
    """Have each stream open, and the standard output take every character."""
    _fill_closed()
    _escape_what_is_missing()


def _fill_closed() -> None:
    """Open what was closed (`>&-`) as /dev/null: else a file that is opened later would become the standard output.

    What is written to such a standard output fails with EBADF, as on one that is closed.
    """
    for name, (mode, access) in _STREAMS.items():
        if getattr(sys, name) is None:
            # The lowest that is free, which is the one that was closed; what is started from here has it as well.
            descriptor = os.open(os.devnull, access)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


def _escape_what_is_missing() -> None:
    r"""Have what the encoding of the standard output lacks written as `\u00fc`, which JSON takes for the character.

    Elsewhere Python raises over it, once everything is done; to the standard error it writes such escapes by itself.
    """
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper):
        return
    # In UTF-8 without a language, a file name that is none passes as the bytes that it is.
    is_utf_8 = codecs.lookup(stream.encoding).name == "utf-8"
    if stream.errors == "strict" or (stream.errors == "surrogateescape" and not is_utf_8):
        codecs.register_error(_ESCAPES, _escape)
        stream.reconfigure(errors=_ESCAPES)


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "Bug: escapes are for what is written"
    units = error.object[error.start : error.end].encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{units[index : index + 2].hex()}" for index in range(0, len(units), 2)), error.end
