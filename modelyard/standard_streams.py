"""The standard streams that a command finds. It imports nothing that takes a while."""

import os
import sys

# Stream → how it is opened, and what its descriptor may do. An answer that nobody can read is told, as one that a full
# disk does not take; nothing is lost with words beside it.
_STREAMS = {"stdin": ("r", os.O_RDWR), "stdout": ("w", os.O_RDONLY), "stderr": ("w", os.O_RDWR)}


def fill_closed() -> None:
    """Open what was closed (`>&-`) as /dev/null: else a file that is opened later would become the standard output.

    What is written to such a standard output fails with EBADF, as on one that is closed.
    """
    for name, (mode, access) in _STREAMS.items():
        if getattr(sys, name) is None:
            # The lowest that is free, which is the one that was closed; what is started from here has it as well.
            descriptor = os.open(os.devnull, access)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
