"""Casts between floating-point types on raw bytes, and the search for NaN and infinity in them. Needs no torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import CheckpointError
from .byte_ranges import reuse_memory
from .dtypes import BFLOAT16, FLOAT16, FLOAT32, ElementType

_NUMPY_FLOATS: dict[str, Any] = {"float64": np.float64, "float32": np.float32, "float16": np.float16}

Buffer = bytes | memoryview


def can_cast(source: ElementType, target: ElementType) -> bool:
    """Tell whether `cast_bytes` knows the cast."""
    known = (*_NUMPY_FLOATS, "bfloat16")
    return source == target or (source.name in known and target.name in known)


def cast_bytes(data: Buffer, source: ElementType, target: ElementType) -> bytes:
    """Return `data`, elements of `source`, as elements of `target`, rounded to nearest even as torch rounds.

    Raises:
        CheckpointError: The cast is not between floating-point types that we know.
    """
    if source == target:
        return bytes(data)
    if not can_cast(source, target):
        raise CheckpointError(
            f"{source.name} is not cast to {target.name}",
            expected="a cast between " + ", ".join((*_NUMPY_FLOATS, "bfloat16")),
            got=f"{source.name} to {target.name}",
        )
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if source == BFLOAT16:
            wide = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            wide = np.frombuffer(data, _NUMPY_FLOATS[source.name])
        if target == BFLOAT16:
            # Through fp32 from fp64, as torch does.
            return _round_to_bfloat16(wide.astype(np.float32, copy=False))
        narrow: bytes = wide.astype(_NUMPY_FLOATS[target.name], copy=False).tobytes()
        return narrow


def equals_cast(data: Buffer, source: ElementType, copy: Buffer, target: ElementType) -> bool:
    """Tell whether `copy`, elements of `target`, is what `cast_bytes` makes of `data`.

    A number exactly between two of `target` may have become either: both are nearest.

    Raises:
        CheckpointError: The cast is not between floating-point types that we know.
    """
    if source == target:
        return bool(np.array_equal(np.frombuffer(data, np.uint8), np.frombuffer(copy, np.uint8)))
    if (source, target) == (FLOAT32, BFLOAT16):
        # A third of the time that the cast takes: as integers of the same bits, which order numbers of one sign, the
        # nearest is at most half of the last kept bit away. Only NaN may be equal and fail this.
        distance = np.frombuffer(reuse_memory("distance", len(data)), np.uint32)
        np.left_shift(np.frombuffer(copy, np.uint16), 16, out=distance, dtype=np.uint32)
        np.subtract(np.frombuffer(data, np.uint32), distance, out=distance)
        signed = distance.view(np.int32)
        if signed.min(initial=0) >= -0x8000 and signed.max(initial=0) <= 0x8000:
            return True
    return cast_bytes(data, source, target) == copy


def _round_to_bfloat16(values: Any) -> bytes:
    bits = values.view(np.uint32)
    # Half of the last kept bit less one, plus that bit: ties go to even.
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        # Adding could carry a NaN into infinity; torch writes this one (c10/util/BFloat16.h, round_to_nearest_even).
        rounded[nan] = 0x7FC0
    data: bytes = rounded.tobytes()
    return data


def count_non_finite(data: Buffer, dtype: ElementType) -> int:
    """Return how many elements of `data` are NaN or infinite; 0 for types that have neither.

    The fp8 types are accepted: each has its own code for NaN, and no reader leaves fp8 weights in a model we export.
    """
    if dtype in (BFLOAT16, FLOAT16):
        # All exponent bits set.
        exponent = np.uint16(0x7F80 if dtype == BFLOAT16 else 0x7C00)
        bits = np.frombuffer(reuse_memory("bits", len(data)), np.uint16)
        np.bitwise_and(np.frombuffer(data, np.uint16), exponent, out=bits)
        return int(np.count_nonzero(np.equal(bits, exponent, out=_reuse_flags(len(bits)))))
    if dtype.name not in _NUMPY_FLOATS:
        return 0
    values = np.frombuffer(data, _NUMPY_FLOATS[dtype.name])
    return int(values.size - np.count_nonzero(np.isfinite(values, out=_reuse_flags(values.size))))


def _reuse_flags(count: int) -> Any:
    return np.frombuffer(reuse_memory("flags", count), np.bool_)
