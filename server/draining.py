"""The end of a tritonserver: what is in flight is answered, the rest is refused, and nothing is waited for in vain.

After SIGTERM tritonserver 2.51 refuses new connections, answers on those that are open, and stays the whole exit
timeout for a client that merely keeps a connection open. So it is watched, and ended once nothing is in flight.
"""

import http.client
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from .process import EXIT_TIMEOUT_S, Endpoints, TritonServer
from .stubs import StubTable

# Between two steps of an ensemble a request is nowhere to be seen, for well under a millisecond.
_QUIET_S = 0.3
_INTERVAL_S = 0.03

_PENDING = re.compile(r"^nv_inference_pending_request_count\{[^}]*\} (\S+)$", re.MULTILINE)

# Local and remote address, state and queues of a connection in /proc/net/tcp (proc(5)); 01 is ESTABLISHED.
_ESTABLISHED = "01"


def drain(
    server: TritonServer, endpoints: Endpoints, table: StubTable, *, all_stubs: bool, hurry: Callable[[], bool]
) -> bool:
    """Stop `server` and return whether everything that was in flight was answered.

    Args:
        server: The tritonserver that serves.
        endpoints: Where it listens.
        table: Its backend processes.
        all_stubs: Whether every model runs in such a process. Of others nobody can see whether they are at work, so
            tritonserver's own exit is awaited.
        hurry: Returns whether to end at once.
    """
    server.terminate()
    start = quiet_since = time.monotonic()
    while server.poll() is None:
        now = time.monotonic()
        if not all_stubs or is_busy(endpoints, table):
            quiet_since = now
        elif now - quiet_since >= _QUIET_S:
            server.kill()
            return True
        # The second is for tritonserver's own way out after its own timeout.
        if hurry() or now - start > EXIT_TIMEOUT_S + 1:
            server.kill()
            return False
        time.sleep(_INTERVAL_S)
    # By itself it ends with 0 when everything was answered and closed, else with 1.
    return server.kill() == 0


def is_busy(endpoints: Endpoints, table: StubTable) -> bool:
    """Tell whether a request may be in flight: at work, waiting in a queue, or on the wire."""
    try:
        if not all(stub.is_idle for stub in table.refresh()):
            return True
        with urllib.request.urlopen(f"{endpoints.metrics_url}/metrics", timeout=1.0) as response:
            metrics = response.read().decode()
        if any(float(value) > 0 for value in _PENDING.findall(metrics)):
            return True
        return any(_has_bytes_under_way(port) for port in (endpoints.http_port, endpoints.grpc_port))
    # Who cannot ask does not know.
    except (OSError, http.client.HTTPException):
        return True


def _has_bytes_under_way(port: int) -> bool:
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if not table.is_file():
            continue
        for line in table.read_text().splitlines()[1:]:
            _, local, _, state, queues, *_ = line.split()
            if state == _ESTABLISHED and local.endswith(f":{port:04X}") and queues != "00000000:00000000":
                return True
    return False
