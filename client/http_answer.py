"""Answers over HTTP within a bound, packed and unpacked: a program that floods would have all of the memory."""

import zlib
from typing import Any

import aiohttp

from .faults import FloodError, RedirectError

# Half of what gRPC takes: it is held twice for a moment.
MOST_BYTES = 1 << 30
# What is unpacked at a time, to count it.
_PIECE_BYTES = 1 << 20
_REDIRECTS = (301, 302, 303, 307, 308)
# Characters of an address.
_MOST_TOLD = 200
# Encoding → what zlib calls its header.
PACKED = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class BoundedResponse(aiohttp.ClientResponse):
    """An answer that is read to the bound and no further, unpacks to no more, and leads nowhere else."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Read the headers.

        Raises:
            RedirectError: They lead to another address, which aiohttp would go on to, and turn a request to a question.
        """
        await super().start(connection)
        if self.status in _REDIRECTS and "Location" in self.headers:
            raise RedirectError(f"HTTP {self.status} to {self.headers['Location'][:_MOST_TOLD]}")
        return self

    async def read(self) -> bytes:
        """Return the body.

        Raises:
            FloodError: It is larger than that.
        """
        if self._body is None:
            try:
                self._body = await self._collect()
                if header := PACKED.get(self.headers.get("Content-Encoding", "")):
                    check_unpacked(self._body, header, MOST_BYTES)
            except BaseException:
                # Else aiohttp tells of a connection that was not closed.
                self.close()
                raise
        return await super().read()

    async def _collect(self) -> bytes:
        pieces, count = [], 0
        async for piece in self.content.iter_any():
            pieces.append(piece)
            count += len(piece)
            if count > MOST_BYTES:
                # The error keeps what it was met with.
                pieces.clear()
                raise FloodError(f"an answer of more than {MOST_BYTES >> 20} MB")
        return b"".join(pieces)


def check_unpacked(body: bytes, header: int, most_bytes: int) -> None:
    """Refuse a body that unpacks to more than that; tritonclient unpacks it whole.

    Raises:
        FloodError: It does.
        zlib.error: It is not packed, or damaged.
    """
    count, unpacker = 0, zlib.decompressobj(header)
    for start in range(0, len(body), _PIECE_BYTES):
        packed = body[start : start + _PIECE_BYTES]
        while packed:
            # gzip may have several members, one behind the other, and zeros at its end.
            if unpacker.eof and not (packed := packed.lstrip(b"\0")):
                break
            unpacker = zlib.decompressobj(header) if unpacker.eof else unpacker
            count += len(unpacker.decompress(packed, _PIECE_BYTES))
            packed = unpacker.unconsumed_tail or unpacker.unused_data
            if count > most_bytes:
                raise FloodError(f"an answer that unpacks to more than {most_bytes >> 20} MB")
