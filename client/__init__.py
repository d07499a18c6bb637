"""Callers of a running server: a library, a command line, the parity check over the wire, and the load measurement.

`Client` and `AsyncClient` ask, what they raise is a `ClientError`, and what they return has rows of `Label`, `Entity`,
`Answer` and `Ranked`. None of these is imported before it is named: a command whose libraries are missing can say so.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .answers import Answer, Entity, Label, Ranked
    from .asynchronous import AsyncClient
    from .errors import (
        AccessError,
        ClientError,
        DeadlineError,
        ForeignError,
        GarbledError,
        ModelError,
        RefusedError,
        UnavailableError,
        UnreachableError,
        UntrustedError,
        UsageError,
    )
    from .synchronous import Client

__all__ = [
    "AccessError",
    "Answer",
    "AsyncClient",
    "Client",
    "ClientError",
    "DeadlineError",
    "Entity",
    "ForeignError",
    "GarbledError",
    "Label",
    "ModelError",
    "Ranked",
    "RefusedError",
    "UnavailableError",
    "UnreachableError",
    "UntrustedError",
    "UsageError",
]

_PLACES = {"Client": "synchronous", "AsyncClient": "asynchronous"} | dict.fromkeys(
    ("Answer", "Entity", "Label", "Ranked"), "answers"
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PLACES.get(name, 'errors')}", __name__), name)
