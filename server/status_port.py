"""The status port: /ready, /metrics and /versions for a few callers at once, whoever else connects.

One thread and a bounded number of connections answer everything, so nothing that comes in here can use up what the
launcher needs to look after tritonserver. Where more connect, the oldest makes room: an answer takes a millisecond, and
whoever stayed longer sends nothing or reads nothing.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

from .errors import ShortageError
from .status import Status

MAX_CONNECTIONS = 64

# So many are taken in before those that they displace are closed: asyncio takes in all that wait, and a flood of them
# would have every descriptor of the launcher.
_TAKEN_AT_ONCE = 8

# From the first byte of a connection to its last.
_CONNECTION_S = 5.0
_MAX_HEAD_BYTES = 8192

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


def serve_status(status: Status, host: str, port: int) -> Callable[[], None]:
    """Answer /metrics, /ready and /versions on a thread of its own; return the function that ends it.

    Raises:
        ShortageError: The port was taken just now, or there is no descriptor or thread for it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ended = asyncio.Event()
    try:
        listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        loop = asyncio.new_event_loop()
        # It would be told on stderr, a traceback at a time; asyncio itself waits a second and goes on.
        loop.set_exception_handler(lambda loop, context: None)
        serving = _serve(status, listener, ended)
        answering = threading.Thread(target=loop.run_until_complete, args=(serving,), daemon=True)
        answering.start()
    except (OSError, RuntimeError) as exc:
        raise ShortageError(
            f"the status port {port} on {host} cannot be served",
            expected="a free port, descriptors and a thread",
            got=f"'{exc}'",
        ) from exc

    def stop() -> None:
        loop.call_soon_threadsafe(ended.set)
        answering.join()
        loop.close()

    return stop


async def _serve(status: Status, listener: socket.socket, ended: asyncio.Event) -> None:
    connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "Bug: asyncio calls this from a task"
        connections[task] = writer
        if len(connections) > MAX_CONNECTIONS:
            # Out of the table at once, so that the next newcomer displaces another one.
            oldest = next(iter(connections))
            connections.pop(oldest).transport.abort()
            oldest.cancel()
        try:
            await asyncio.wait_for(_answer(status, reader, writer), _CONNECTION_S)
            writer.close()
        # Whoever hangs up, sends too much, is too slow, or has to make room.
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError, asyncio.TimeoutError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            connections.pop(task, None)

    server = await asyncio.start_server(take, sock=listener, limit=_MAX_HEAD_BYTES, backlog=_TAKEN_AT_ONCE)
    # What asyncio has set to that as well: how many may wait.
    listener.listen(MAX_CONNECTIONS)
    await ended.wait()
    server.close()
    for task in list(connections):
        task.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


async def _answer(status: Status, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # All of it has left before this returns, for what is still to be sent is not bounded in time.
    writer.transport.set_write_buffer_limits(0)
    head = await reader.readuntil(b"\r\n\r\n")
    method, path = _read_request_line(head)
    code, text = _choose(status, method, path)
    body = text.encode()
    lines = [
        f"HTTP/1.1 {code} {_REASONS[code]}",
        "Content-Type: text/plain; version=0.0.4; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode() + (b"" if method == "HEAD" else body))
    await writer.drain()


def _read_request_line(head: bytes) -> tuple[str, str]:
    with contextlib.suppress(ValueError):
        method, target, version = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if version.startswith("HTTP/1."):
            return method, target.partition("?")[0]
    return "", ""


def _choose(status: Status, method: str, path: str) -> tuple[int, str]:
    """Return code and text of the answer."""
    if not method:
        return 400, "expected HTTP/1.1\n"
    if method not in ("GET", "HEAD"):
        return 405, "expected GET or HEAD\n"
    if path == "/metrics":
        return 200, status.render()
    if path == "/versions":
        return 200, status.render_versions()
    if path == "/ready":
        return 200 if status.ready else 503, status.describe_readiness() + "\n"
    return 404, "expected /metrics, /ready or /versions\n"
