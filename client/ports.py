"""Which of a server's ports listens at an address: for the sentence about an answer that made no sense."""

import contextlib
import socket
from http.client import HTTPConnection, HTTPException

from modelyard.exchange import limit

from .errors import ForeignError
from .options import Options

TITLES = {"http": "HTTP", "grpc": "gRPC"}
_USUAL_PORTS = {"http": 8000, "grpc": 8001}

# How long to look, and how much of the metrics is looked at.
_LOOK_TIMEOUT_S = 3.0
_LOOK_BYTES = 1 << 16
# RFC 9113, section 3.4: what a client begins with, an empty SETTINGS frame, and the type of frame that answers it.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HTTP2_SETTINGS = b"\x04"


def find_wrong_port(options: Options) -> ForeignError | None:
    """Return what to say where another of the server's ports was asked than the one that was meant, else None.

    Or the one that was meant, with TLS, which it does not speak: a server that does has no answer for who does not.
    """
    found = _identify_port(options.address, min(options.timeout_s, _LOOK_TIMEOUT_S))
    if found is not None and options.is_encrypted:
        return ForeignError(
            f"{options.address} speaks no TLS",
            expected=f"a {TITLES[options.protocol]} port that does",
            got=f"a plain {found} port",
            remedy=f"leave out {options.words.tls}",
        )
    other = {title: name for name, title in TITLES.items()}.get(found or "")
    if found is None or other == options.protocol:
        return None
    ours, words = TITLES[options.protocol], options.words
    remedy = (
        f"pass the {ours} port with {words.url} ({_USUAL_PORTS[options.protocol]} unless the server was told another)"
    )
    # The gateway asks over gRPC alone, and has words but no option for it.
    if other and words.protocol.endswith(("=", " ")):
        remedy += f", or ask with {words.protocol}{other}"
    return ForeignError(
        f"{options.address} is another port than the one meant",
        expected=f"the server's {ours} port",
        got=f"its {found} port",
        remedy=remedy,
    )


def _identify_port(url: str, timeout_s: float) -> str | None:
    """Return which port of a server listens at `url`: HTTP, gRPC, metrics, status or gateway; None where it is none."""
    try:
        status, text = _get(url, "/metrics", timeout_s)
        if status == 200:
            # A backend's own metrics, with names of ours, stand among tritonserver's.
            marks = {"nv_": "metrics", "modelyard_gateway_": "gateway", "modelyard_": "status"}
            return next((name for mark, name in marks.items() if mark in text), None)
        return "HTTP" if _get(url, "/v2/health/live", timeout_s)[0] == 200 else None
    except (OSError, HTTPException):
        return "gRPC" if _speaks_http2(url, timeout_s) else None


def _get(url: str, path: str, timeout_s: float) -> tuple[int, str]:
    with contextlib.closing(HTTPConnection(url, timeout=timeout_s)) as connection:
        limit(connection, timeout_s)
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(_LOOK_BYTES).decode("utf-8", errors="replace")


def _speaks_http2(url: str, timeout_s: float) -> bool:
    host, _, port = url.rpartition(":")
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection,
    ):
        connection.sendall(_HTTP2_PREFACE)
        return connection.recv(9)[3:4] == _HTTP2_SETTINGS
    return False
