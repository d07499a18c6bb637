import random
import zlib

from export.checkpoints.crc32 import combine_crc32


def test_checksums_of_parts_make_the_checksum_of_the_whole() -> None:
    numbers = random.Random(1)
    for length in (0, 1, 3, 64, 100_000):
        for cut in {0, length // 3, length}:
            data = numbers.randbytes(length)
            first, second = zlib.crc32(data[:cut]), zlib.crc32(data[cut:])
            assert combine_crc32(first, second, length - cut) == zlib.crc32(data)
