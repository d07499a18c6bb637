"""Callers of a running server: a library, a command line, the parity check over the wire, and the load measurement.

`Client` and `AsyncClient` ask, and `answer_file` about all rows of a file. What they raise is a `ClientError`, and what
they return has rows of `Label`, `Entity`, `Answer` and `Ranked`. What needs a library is imported when it is named: a
command whose libraries are missing can say so.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .errors import AccessError as AccessError
from .errors import ClientError as ClientError
from .errors import CrashError as CrashError
from .errors import DeadlineError as DeadlineError
from .errors import ForeignError as ForeignError
from .errors import GarbledError as GarbledError
from .errors import ModelError as ModelError
from .errors import RefusedError as RefusedError
from .errors import UnavailableError as UnavailableError
from .errors import UnreachableError as UnreachableError
from .errors import UntrustedError as UntrustedError
from .errors import UsageError as UsageError

if TYPE_CHECKING:
    from .answers import Answer as Answer
    from .answers import Entity as Entity
    from .answers import Label as Label
    from .answers import Ranked as Ranked
    from .asynchronous import AsyncClient as AsyncClient
    from .batch.files import answer_file as answer_file
    from .synchronous import Client as Client

_PLACES = {
    "Client": "synchronous",
    "AsyncClient": "asynchronous",
    "answer_file": "batch.files",
    **dict.fromkeys(("Answer", "Entity", "Label", "Ranked"), "answers"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
