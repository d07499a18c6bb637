"""The CRC-32 of a whole out of those of its parts, so that the parts can be read in any order and by several threads.

A CRC is the remainder of the data, taken as a polynomial over the field of two elements, by a fixed polynomial. Data
followed by N bytes is multiplied by x to the power of 8 N, so its remainder is, too (zlib, crc32.c, `crc32_combine`;
Python's zlib does not offer it).
"""

from __future__ import annotations

import threading
from functools import cache

from export.checkpoints.zip_archive import StoredBlock
from export.errors import CheckpointError

# The fixed polynomial without its highest term, and the polynomial 1: the highest bit is the lowest power.
_MODULUS = 0xEDB88320
_ONE = 1 << 31


def combine_crc32(first: int, second: int, second_length: int) -> int:
    """Return the CRC-32 of two runs of bytes, one after the other, of which the second is `second_length` long."""
    return _multiply(_power_of_bytes(second_length), first) ^ second


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials, modulo the fixed one."""
    product, bit = 0, _ONE
    while bit:
        if a & bit:
            product ^= b
        bit >>= 1
        b = (b >> 1) ^ (_MODULUS if b & 1 else 0)
    return product


@cache
def _power_of_bytes(count: int) -> int:
    """Return x to the power of 8 times `count`."""
    power, square = _ONE, _ONE >> 8
    while count:
        if count & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        count >>= 1
    return power


class Checksums:
    """What was read of each block, by any thread and in any order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Block → (start, stop, CRC-32).
        self._read: dict[StoredBlock, list[tuple[int, int, int]]] = {}

    def add(self, block: StoredBlock, start: int, stop: int, crc32: int) -> None:
        """Note the checksum of the block's bytes [start, stop)."""
        with self._lock:
            self._read.setdefault(block, []).append((start, stop, crc32))

    def check(self, block: StoredBlock) -> None:
        """Put together what was read of a block, which must be all of it, once.

        Raises:
            CheckpointError: Its bytes are not those that were saved.
        """
        if block.crc32 is None:
            return
        crc32, position = 0, 0
        for start, stop, part in sorted(self._read.get(block, ())):
            assert start == position, "Bug: a part of a block was not read, or read twice"
            crc32, position = combine_crc32(crc32, part, stop - start), stop
        assert position == block.length, "Bug: the end of a block was not read"
        if crc32 != block.crc32:
            raise CheckpointError(
                f"{block.path} is damaged in {block.name}",
                expected=f"CRC-32 {block.crc32:08x}",
                got=f"{crc32:08x}",
                remedy="copy the checkpoint again, or use the one before it",
            )
