"""The CRC-32 of a whole out of those of its parts, so that the parts can be read in any order and by several threads.

A CRC is the remainder of the data, taken as a polynomial over the field of two elements, by a fixed polynomial. Data
followed by N bytes is multiplied by x to the power of 8 N, so its remainder is, too (zlib, crc32.c, `crc32_combine`;
Python's zlib does not offer it).
"""

from __future__ import annotations

from functools import cache

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
