"""One call over gRPC, in as much HTTP/2 as that takes: of its answer nothing is read but whether it is done.

https://www.rfc-editor.org/rfc/rfc9113 (HTTP/2), https://www.rfc-editor.org/rfc/rfc7541 (its headers),
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import socket
import struct
import time
import urllib.parse
from collections.abc import Iterator, Mapping

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_ACK = _END_STREAM = 0x1
_END_HEADERS, _PADDED, _PRIORITY = 0x4, 0x8, 0x20

# No header may be sent as a reference to an earlier one.
_NO_TABLE = struct.pack(">HI", 1, 0)

# The only stream of the connection.
_STREAM = 1


class GrpcError(Exception):
    """The server answered that the call failed, with its reason."""


def call(address: tuple[str, int], method: str, message: bytes, headers: Mapping[str, str], timeout_s: float) -> None:
    """Call a method whose answer says nothing but that it is done.

    Args:
        address: Host and port.
        method: Path of the method, `/package.Service/Method`.
        message: The request, a protobuf message.
        headers: Metadata of the call; names in lower case.
        timeout_s: Seconds that it may take in all.

    Raises:
        GrpcError: The server says why it failed.
        OSError: No answer came, or none of gRPC.
    """
    deadline = time.monotonic() + timeout_s
    fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost"}
    fields |= {"content-type": "application/grpc", "te": "trailers", **headers}
    block = b"".join(b"\0" + _write_string(name) + _write_string(value) for name, value in fields.items())
    body = struct.pack(">BI", 0, len(message)) + message
    with socket.create_connection(address, timeout=timeout_s) as connection:
        connection.sendall(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, _NO_TABLE)
            + _frame(_HEADERS, _END_HEADERS, _STREAM, block)
            + _frame(_DATA, _END_STREAM, _STREAM, body)
        )
        while True:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            kind, flags, payload = _read_frame(connection)
            if kind == _SETTINGS and not flags & _ACK:
                connection.sendall(_frame(_SETTINGS, _ACK, 0))
            elif kind == _PING and not flags & _ACK:
                connection.sendall(_frame(_PING, _ACK, 0, payload))
            elif kind in (_RST_STREAM, _GOAWAY):
                raise ConnectionError(f"the call was ended with {payload.hex()}")
            elif kind == _HEADERS:
                block = _strip(flags, payload)
                is_last = bool(flags & _END_STREAM)
                while not flags & _END_HEADERS:
                    _, flags, payload = _read_frame(connection)
                    block += payload
                if is_last:
                    _check_status(block)
                    return


def _check_status(block: bytes) -> None:
    try:
        trailers = dict(_read_fields(block))
        status = trailers[b"grpc-status"]
    except LookupError as exc:
        raise ConnectionError(f"the answer has no status: {block[:80].hex()}") from exc
    if status != b"0":
        reason = urllib.parse.unquote(trailers.get(b"grpc-message", b"").decode(errors="replace"))
        raise GrpcError(reason or f"status {status.decode(errors='replace')}")


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _read_frame(connection: socket.socket) -> tuple[int, int, bytes]:
    length, kind, flags = struct.unpack(">IBB", b"\0" + _read(connection, 9)[:5])
    return kind, flags, _read(connection, length)


def _read(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        piece = connection.recv(count - len(received))
        if not piece:
            raise ConnectionError("the connection was closed before the answer")
        received += piece
    return received


def _strip(flags: int, payload: bytes) -> bytes:
    """Return a block of headers without what may stand around it."""
    start, end = 0, len(payload)
    if flags & _PADDED:
        start, end = 1, end - payload[0]
    return payload[start + (5 if flags & _PRIORITY else 0) : end]


def _write_string(text: str) -> bytes:
    content = text.encode()
    rest = len(content) - 127
    if rest < 0:
        return bytes([len(content)]) + content
    length = [127]
    while rest > 127:
        length.append(rest % 128 + 128)
        rest //= 128
    return bytes([*length, rest]) + content


def _read_fields(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and value of the headers that are written out; those that are looked for are in no table."""
    place = 0
    while place < len(block):
        first = block[place]
        bits = 7 if first & 0x80 else 6 if first & 0x40 else 5 if first & 0x20 else 4
        index, place = _read_number(block, place, bits)
        # A reference to a whole header, or another size of the table.
        if bits in (7, 5):
            continue
        name, place = (b"", place) if index else _read_string(block, place)
        value, place = _read_string(block, place)
        yield name, value


def _read_string(block: bytes, place: int) -> tuple[bytes, int]:
    """Return a string and where it ends; one in Huffman's code, which gRPC never writes, is left as it is."""
    length, place = _read_number(block, place, 7)
    return block[place : place + length], place + length


def _read_number(block: bytes, place: int, bits: int) -> tuple[int, int]:
    limit = (1 << bits) - 1
    number = block[place] & limit
    place += 1
    if number == limit:
        shift = 0
        while True:
            byte = block[place]
            place += 1
            number += (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
    return number, place
