import pytest
import torch

from export.checkpoints.storage.cast import can_cast, cast_bytes, count_non_finite, equals_cast
from export.checkpoints.storage.dtypes import BY_NAME
from export.errors import CheckpointError

FLOATS = ("float64", "float32", "float16", "bfloat16")


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def make_numbers(dtype: str) -> torch.Tensor:
    """Every bit pattern of the 16-bit types; for the wide ones ties, subnormals, the largest and special numbers."""
    if dtype in ("float16", "bfloat16"):
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(getattr(torch, dtype))
    torch.manual_seed(3)
    bits = torch.randint(-(1 << 31), 1 << 31, (200_000,), dtype=torch.int64).to(torch.int32)
    ties = (torch.arange(1 << 15, dtype=torch.int64) << 17 | 1 << 15).to(torch.int32)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65504.0, 65520.0, 3.4e38, 1e-45])
    return torch.cat([bits.view(torch.float32), ties.view(torch.float32), special]).to(getattr(torch, dtype))


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_every_cast_is_torchs_own_bit_for_bit(source: str, target: str) -> None:
    numbers = make_numbers(source)
    expected = numbers.to(getattr(torch, target))
    data = bytearray(cast_bytes(to_bytes(numbers), BY_NAME[source], BY_NAME[target]))
    got = torch.frombuffer(data, dtype=getattr(torch, target))
    # The bits of a NaN differ between processors; that it is one does not.
    assert torch.equal(got.isnan(), expected.isnan())
    assert to_bytes(got[~got.isnan()]) == to_bytes(expected[~expected.isnan()])


def test_other_casts_are_refused() -> None:
    assert not can_cast(BY_NAME["int64"], BY_NAME["float32"])
    with pytest.raises(CheckpointError, match="int64 is not cast to float32: expected a cast between float64, float32"):
        cast_bytes(bytes(8), BY_NAME["int64"], BY_NAME["float32"])


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_a_copy_is_known_and_so_is_a_copy_with_any_other_bit(source: str, target: str) -> None:
    numbers = make_numbers(source)[:4000]
    types = BY_NAME[source], BY_NAME[target]
    data = to_bytes(numbers[~numbers.isnan()])
    copy = bytearray(cast_bytes(data, *types))
    assert equals_cast(data, types[0], bytes(copy), types[1])
    for position in range(0, len(copy), 97):
        copy[position] ^= 1 << position % 8
        assert not equals_cast(data, types[0], bytes(copy), types[1]), position
        copy[position] ^= 1 << position % 8


def test_a_number_between_two_may_have_become_either() -> None:
    data = to_bytes(torch.tensor([1.00390625, -1.01171875]))
    for first in (0x3F80, 0x3F81):
        for second in (0xBF81, 0xBF82):
            copy = first.to_bytes(2, "little") + second.to_bytes(2, "little")
            assert equals_cast(data, BY_NAME["float32"], copy, BY_NAME["bfloat16"])


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_are_counted_in_every_float(dtype: str) -> None:
    numbers = torch.tensor([0.0, 1.0, float("nan"), -float("inf"), float("inf"), 5e4], dtype=getattr(torch, dtype))
    assert count_non_finite(to_bytes(numbers), BY_NAME[dtype]) == 3
    assert count_non_finite(to_bytes(numbers[:2]), BY_NAME[dtype]) == 0
    assert count_non_finite(b"", BY_NAME[dtype]) == 0


def test_integers_have_no_nan() -> None:
    assert count_non_finite(b"\xff" * 16, BY_NAME["int64"]) == 0
