"""The end of a tritonserver: what is in flight is answered, the rest is refused, and nothing is waited for in vain.

After SIGTERM tritonserver 2.51 refuses new connections, answers on those that are open, and stays the whole exit
timeout for a client that merely keeps a connection open; then it crashes if that client still sends. So it is watched,
and ended once nothing is in flight, and before that timeout in any case. Clients that never stop sending are refused
from some moment on, by unloading what they ask for: tritonserver answers first what it has accepted.
"""

import contextlib
import http.client
import json
import re
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from modelyard.exchange import fetch, limit

from .endpoints import Endpoints
from .healing.stubs import StubTable
from .tritonserver.control_key import ControlKey
from .tritonserver.process import EXIT_TIMEOUT_S, TritonServer

# Between two steps of an ensemble a request is nowhere to be seen, for well under a millisecond.
_QUIET_S = 0.3
_INTERVAL_S = 0.03

# A connection that is not let in within this time is done without.
_OPEN_S = 2.0

_METRICS_TIMEOUT_S = 1.0

# Balancers have this long to see that we are not ready any more; the rest is for what is accepted until then.
_GRACE_S = EXIT_TIMEOUT_S / 2

# Requests that have begun nowhere, and those of a generator: it takes them at once and answers them in its own time.
_PENDING = re.compile(
    r"^(?:nv_inference_pending_request_count|modelyard_generate_(?:running|waiting))\{[^}]*\} (\S+)$", re.MULTILINE
)

# What all connections have on the way when no answer is left that is still being written, and how often that is seen:
# of one that is, the system's buffer is full.
_SMALL_BYTES = 4096
_SMALL_LOOKS = 3

# Local address, state and queues of a connection in /proc/net/tcp (proc(5)); 01 is ESTABLISHED.
_ESTABLISHED = "01"


class Retirement:
    """Unloads what clients ask for, over a connection that is opened while connections are still let in.

    Args:
        endpoints: Where tritonserver listens.
        key: Opens its control endpoints.
        models: What clients ask for.
        is_let_in: Whether anybody new is; if not, nothing can be asked, and each question would take its time.
    """

    def __init__(self, endpoints: Endpoints, key: ControlKey, models: Iterable[str], *, is_let_in: bool) -> None:
        url = urllib.parse.urlsplit(endpoints.http_url)
        self._connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=_OPEN_S)
        self._headers = {"Content-Type": "application/json", **key.headers}
        self._models = set(models)
        # Asked once, or tritonserver might not have let it in yet when it lets nobody in any more.
        self._is_open = is_let_in and self._ask("index", _OPEN_S) is not None

    def begin(self) -> bool:
        """Have every further request refused, and return whether that was understood."""
        return self._is_open and all(
            self._ask(f"models/{urllib.parse.quote(model)}/unload") is not None for model in sorted(self._models)
        )

    def is_done(self) -> bool:
        """Tell whether everything that was accepted before is answered."""
        states = self._ask("index")
        return states is not None and not any(
            entry["name"] in self._models and entry.get("state") in ("READY", "UNLOADING") for entry in states
        )

    def _ask(self, path: str, timeout_s: float = EXIT_TIMEOUT_S) -> "list[dict[str, str]] | None":
        """Return the answer to an order, an empty list where it has none; None if there was no good one."""
        try:
            limit(self._connection, timeout_s)
            self._connection.request("POST", f"/v2/repository/{path}", b"{}", self._headers)
            response = self._connection.getresponse()
            answer = response.read()
            return (json.loads(answer) if answer else []) if response.status == 200 else None
        except (OSError, http.client.HTTPException, ValueError):
            return None


def drain(
    server: TritonServer,
    endpoints: Endpoints,
    table: StubTable,
    retirement: Retirement,
    *,
    all_stubs: bool,
    hurry: Callable[[], bool],
) -> bool:
    """Stop `server` and return whether everything that was accepted was answered.

    Args:
        server: The tritonserver that serves.
        endpoints: Where it listens.
        table: Its backend processes.
        retirement: Has clients refused that go on sending on open connections.
        all_stubs: Whether every model runs in such a process. Of others nobody can see whether they are at work, until
            they are retired.
        hurry: Returns whether to end at once.
    """
    server.terminate()
    start = quiet_since = idle_since = time.monotonic()
    is_retired = False

    def is_over() -> bool:
        return hurry() or time.monotonic() - start > EXIT_TIMEOUT_S

    while server.poll() is None:
        now = time.monotonic()
        is_at_work = not all_stubs or may_be_at_work(endpoints, table)
        if is_at_work:
            idle_since = now
        if is_at_work or is_on_the_wire(endpoints):
            quiet_since = now
        if is_retired and (now - idle_since >= _QUIET_S or retirement.is_done()):
            return _see_off(server, endpoints, is_over)
        if not is_retired and (now - quiet_since >= _QUIET_S or now - start >= _GRACE_S):
            is_retired = retirement.begin()
            # What was accepted just before may be nowhere to be seen for a moment.
            idle_since = time.monotonic()
        if is_over():
            server.kill()
            return False
        time.sleep(_INTERVAL_S)
    # By itself it ends with 0 when everything was answered and closed, else with 1.
    return server.kill() == 0


def _see_off(server: TritonServer, endpoints: Endpoints, is_over: Callable[[], bool]) -> bool:
    """End `server` once every answer has reached its client; return whether all have."""
    small_looks = 0
    while server.poll() is None and not is_over():
        # Who has no descriptor left to look with looks again.
        with contextlib.suppress(OSError):
            most = max((sending for sending, _ in _read_queues(endpoints)), default=0)
            if not most:
                server.kill()
                return True
            small_looks = small_looks + 1 if most <= _SMALL_BYTES else 0
            if small_looks == _SMALL_LOOKS:
                # Clients that go on asking would always have a refusal on the way to them.
                server.pause()
        time.sleep(_INTERVAL_S)
    is_ended_well = server.poll() == 0
    server.kill()
    return is_ended_well


def may_be_at_work(endpoints: Endpoints, table: StubTable) -> bool:
    """Tell whether a request may be in a queue or in a backend process."""
    try:
        if not all(stub.is_idle for stub in table.refresh()):
            return True
        metrics = fetch(f"{endpoints.metrics_url}/metrics", _METRICS_TIMEOUT_S).decode(errors="replace")
        return any(float(value) > 0 for value in _PENDING.findall(metrics))
    # Who cannot ask does not know.
    except (OSError, http.client.HTTPException):
        return True


def is_on_the_wire(endpoints: Endpoints) -> bool:
    """Tell whether bytes of an answer or of a request may still be on the way, or unread."""
    try:
        return any(sending or receiving for sending, receiving in _read_queues(endpoints))
    except OSError:
        return True


def _read_queues(endpoints: Endpoints) -> Iterator[tuple[int, int]]:
    """Yield bytes on the way to the client and bytes from it that nobody has read, of every connection."""
    ends = tuple(f":{port:04X}" for port in (endpoints.http_port, endpoints.grpc_port))
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.is_file() else []:
            _, local, _, state, queues, *_ = line.split()
            if state == _ESTABLISHED and local.endswith(ends):
                sending, receiving = queues.split(":")
                yield int(sending, 16), int(receiving, 16)
