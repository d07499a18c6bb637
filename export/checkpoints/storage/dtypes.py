"""Element types under their names in torch and in safetensors, known without importing either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ElementType:
    """What one element of a tensor is."""

    # torch's name without the module: `bfloat16`.
    name: str
    # The name in a safetensors header (huggingface/safetensors, README "Format"): `BF16`.
    safetensors_name: str
    itemsize: int

    @property
    def is_floating_point(self) -> bool:
        """Whether it has NaN and infinities, and may be cast to another such type."""
        return "float" in self.name

    def to_torch(self) -> torch.dtype:
        """Return torch's own dtype. Imports torch, which the streaming path never needs."""
        import torch

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype


FLOAT32 = ElementType(name="float32", safetensors_name="F32", itemsize=4)
FLOAT16 = ElementType(name="float16", safetensors_name="F16", itemsize=2)
BFLOAT16 = ElementType(name="bfloat16", safetensors_name="BF16", itemsize=2)

ELEMENT_TYPES = (
    FLOAT32,
    FLOAT16,
    BFLOAT16,
    ElementType(name="float64", safetensors_name="F64", itemsize=8),
    ElementType(name="float8_e4m3fn", safetensors_name="F8_E4M3", itemsize=1),
    ElementType(name="float8_e5m2", safetensors_name="F8_E5M2", itemsize=1),
    ElementType(name="int64", safetensors_name="I64", itemsize=8),
    ElementType(name="int32", safetensors_name="I32", itemsize=4),
    ElementType(name="int16", safetensors_name="I16", itemsize=2),
    ElementType(name="int8", safetensors_name="I8", itemsize=1),
    ElementType(name="uint8", safetensors_name="U8", itemsize=1),
    ElementType(name="uint16", safetensors_name="U16", itemsize=2),
    ElementType(name="uint32", safetensors_name="U32", itemsize=4),
    ElementType(name="uint64", safetensors_name="U64", itemsize=8),
    ElementType(name="bool", safetensors_name="BOOL", itemsize=1),
)

BY_NAME = {element.name: element for element in ELEMENT_TYPES}
BY_SAFETENSORS_NAME = {element.safetensors_name: element for element in ELEMENT_TYPES}

# torch's typed storages (torch/storage.py, `_dtype_to_storage_type_map`). Complex and quantised ones are left out:
# no weight of a model that we export is stored so.
BY_STORAGE_NAME = {
    "FloatStorage": BY_NAME["float32"],
    "HalfStorage": BY_NAME["float16"],
    "BFloat16Storage": BY_NAME["bfloat16"],
    "DoubleStorage": BY_NAME["float64"],
    "LongStorage": BY_NAME["int64"],
    "IntStorage": BY_NAME["int32"],
    "ShortStorage": BY_NAME["int16"],
    "CharStorage": BY_NAME["int8"],
    "ByteStorage": BY_NAME["uint8"],
    "BoolStorage": BY_NAME["bool"],
}
