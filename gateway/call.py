"""One request of a caller: who it is, what it used, and how it is answered."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

from .keys import Key

# What an operation returns: a whole body, or server-sent events of which the first is there.
Reply = bytes | AsyncGenerator[bytes, None]

# What joins the traces of the server to the caller's (W3C Trace Context).
_TRACING = (b"traceparent", b"tracestate")


@dataclass
class Call:
    """A request.

    Attributes:
        route: Its path where there is such an operation.
        caller: Who asks: the name of a key, or an address.
        id: Which is told the caller.
        key: Whose it is; None where nobody needs one.
        tracing: Headers that go on to the server.
        status: Of the answer.
        used: Model and kind of tokens → how many.
        hold: Takes so many bytes of what all answers may take, before the answer is made, or refuses.
    """

    route: str
    caller: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    key: Key | None = None
    tracing: Mapping[str, str] = field(default_factory=dict)
    status: int = 500
    used: dict[tuple[str, str], int] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)
    hold: Callable[[int], None] = field(default=lambda size: None)

    def use(self, model: str, kind: str, tokens: int) -> None:
        """Count tokens, of the kind `prompt` or `completion`."""
        self.used[model, kind] = self.used.get((model, kind), 0) + tokens


def read_tracing(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers of a request that its traces go on with, but for what gRPC carries in no header."""
    return {
        name.decode(): value.decode("latin-1")
        for name, value in headers
        if name in _TRACING and all(0x20 <= byte <= 0x7E for byte in value)
    }
