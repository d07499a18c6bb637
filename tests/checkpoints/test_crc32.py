import itertools
import random
import zlib
from pathlib import Path

import pytest

from export.checkpoints.storage.crc32 import Checksums
from export.checkpoints.storage.file_state import FileState
from export.checkpoints.storage.zip_archive import StoredBlock
from export.errors import CheckpointError

STATE = FileState(0, 0)


@pytest.mark.parametrize("length", [0, 1, 3, 64, 100_000])
def test_checksums_of_parts_in_any_order_make_the_checksum_of_the_whole(length: int) -> None:
    numbers = random.Random(length)
    data = numbers.randbytes(length)
    cuts = sorted({0, length, *(numbers.randrange(length + 1) for _ in range(5))})
    parts = list(itertools.pairwise(cuts))
    numbers.shuffle(parts)
    block = StoredBlock(
        path=Path("file"), name="block", offset=0, length=length, crc32=zlib.crc32(data), file_state=STATE
    )
    checksums = Checksums()
    for start, stop in parts:
        checksums.add(block, start, stop, zlib.crc32(data[start:stop]))
    checksums.check(block)


def test_parts_that_are_not_the_whole_are_refused() -> None:
    block = StoredBlock(
        path=Path("file"), name="block", offset=0, length=4, crc32=zlib.crc32(b"abcd"), file_state=STATE
    )
    checksums = Checksums()
    checksums.add(block, 2, 4, zlib.crc32(b"ab"))
    checksums.add(block, 0, 2, zlib.crc32(b"cd"))
    with pytest.raises(CheckpointError, match="damaged in block"):
        checksums.check(block)
