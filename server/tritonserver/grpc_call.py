"""One call over gRPC: of its answer nothing is read but whether it is done.

Over h2 and not grpcio, whose threads do not outlive the forks by which the launcher starts tritonserver.
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import socket
import struct
import time
import urllib.parse
from collections.abc import Callable, Mapping

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError

_PIECE_BYTES = 1 << 16
_PAUSE_S = 1.0
_CONNECT_S = 10.0


class _Connection(H2Connection):
    # The reason of a failed load is a header, three bytes of it for each that is no letter, and holds whatever a model
    # raised; h2 itself takes 64 KiB.
    DEFAULT_MAX_HEADER_LIST_SIZE = 16 << 20


class GrpcError(Exception):
    """The server answered that the call failed, with its reason."""


def call(
    address: tuple[str, int],
    method: str,
    message: bytes,
    headers: Mapping[str, str],
    timeout_s: float,
    *,
    gives_up: Callable[[], bool] = lambda: False,
) -> None:
    """Call a method whose answer says nothing but that it is done.

    Args:
        address: Host and port.
        method: Path of the method, `/package.Service/Method`.
        message: The request, a protobuf message.
        headers: Metadata of the call; names in lower case.
        timeout_s: Seconds that it may take in all.
        gives_up: Asked once a second, until it says that there is nothing to wait for.

    Raises:
        GrpcError: The server says why it failed.
        OSError: No answer came, or none of gRPC.
    """
    deadline = time.monotonic() + timeout_s
    http2 = _Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    http2.initiate_connection()
    stream = http2.get_next_available_stream_id()
    fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost"}
    fields |= {"content-type": "application/grpc", "te": "trailers", **headers}
    http2.send_headers(stream, list(fields.items()))
    http2.send_data(stream, struct.pack(">BI", 0, len(message)) + message, end_stream=True)
    told: dict[str, str] = {}
    with socket.create_connection(address, timeout=min(timeout_s, _CONNECT_S)) as connection:
        while True:
            connection.sendall(http2.data_to_send())
            left_s = deadline - time.monotonic()
            # However much of it comes meanwhile.
            if left_s <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(min(_PAUSE_S, left_s))
            try:
                events = _receive(connection, http2)
            except TimeoutError:
                if gives_up():
                    raise
                continue
            for event in events:
                if isinstance(event, ResponseReceived | TrailersReceived):
                    told |= {str(name): str(value) for name, value in event.headers}
                elif isinstance(event, DataReceived):
                    http2.acknowledge_received_data(event.flow_controlled_length, stream)
                elif isinstance(event, StreamReset | ConnectionTerminated):
                    raise ConnectionError(f"the call was ended with {event.error_code}")
                elif isinstance(event, StreamEnded):
                    _check_status(told)
                    return


def _receive(connection: socket.socket, http2: H2Connection) -> list[Event]:
    received = connection.recv(_PIECE_BYTES)
    if not received:
        raise ConnectionError("the connection was closed before the answer")
    try:
        return http2.receive_data(received)
    except (ProtocolError, UnicodeDecodeError) as exc:
        raise ConnectionError(f"the answer is not HTTP/2: {exc}") from exc


def _check_status(told: Mapping[str, str]) -> None:
    status = told.get("grpc-status")
    if status is None:
        raise ConnectionError(f"the answer has no status: {dict(told)}")
    if status != "0":
        raise GrpcError(urllib.parse.unquote(told.get("grpc-message", "")) or f"status {status}")
