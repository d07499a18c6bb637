"""The CRC-32 of a whole out of those of its parts, so that they can be read in any order and by several threads."""

from __future__ import annotations

import threading

from zlib_ng import zlib_ng

from ...errors import CheckpointError
from ..remedies import RECOPY_OR_USE_OLDER
from .zip_archive import StoredBlock


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
            crc32, position = zlib_ng.crc32_combine(crc32, part, stop - start), stop
        assert position == block.length, "Bug: the end of a block was not read"
        if crc32 != block.crc32:
            raise CheckpointError(
                f"{block.path} is damaged in {block.name}",
                expected=f"CRC-32 {block.crc32:08x}",
                got=f"{crc32:08x}",
                remedy=RECOPY_OR_USE_OLDER,
            )
