"""A way to a server on which connections are refused, as one that starts or is full does."""

import contextlib
import socket
import threading
from collections.abc import Iterable

BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"

_DEAD = b"{\"error\":\"in ensemble 'embedder', Stub process 'embedder_model_0_0' is not healthy.\"}"
CRASHED = b"HTTP/1.1 500 Internal\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
    len(_DEAD),
    _DEAD,
)


class Relay:
    """A way to a server that can be shut and opened, counting what comes."""

    def __init__(self, target: str, refusals: Iterable[bytes]) -> None:
        """Answer the first connections with `refusals`, of which an empty one hangs up, and pass on the next."""
        self.target = target.rsplit(":", 1)
        self.refusals = iter(refusals)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.seen = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self.listener.accept()[0]
            except OSError:
                return
            self.seen += 1
            refusal = next(self.refusals, None)
            if refusal is not None:
                connection.recv(65536)
                connection.sendall(refusal)
                connection.close()
                continue
            onward = socket.create_connection((self.target[0], int(self.target[1])))
            for source, target in ((connection, onward), (onward, connection)):
                threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    # Whichever way ends first closes both.
    with source, target, contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
