"""Changes to what the model contains: lazy state dict in, lazy state dict out, no I/O of their own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from export.checkpoints import StateDict, TensorSpec


@dataclass(frozen=True, kw_only=True)
class CastToFloat32:
    """Every floating-point tensor in fp32; integers and booleans as they are.

    The whole line is exact in fp32: each fp16 and bf16 value is also an fp32 value.
    """

    source: StateDict

    def specs(self) -> Mapping[str, TensorSpec]:
        return {
            name: replace(spec, dtype=torch.float32) if spec.dtype.is_floating_point else spec
            for name, spec in self.source.specs().items()
        }

    def read(self, name: str) -> torch.Tensor:
        tensor = self.source.read(name)
        return tensor.to(torch.float32) if tensor.dtype.is_floating_point else tensor


@dataclass(frozen=True, kw_only=True)
class AppendRows:
    """The tensor `name` with `rows` below its own; every other tensor as it is.

    Attributes:
        source: The state dict to change.
        name: A matrix [rows, columns] in `source`.
        rows: What is appended, [new rows, columns], in the matrix's dtype.
    """

    source: StateDict
    name: str
    rows: torch.Tensor

    def specs(self) -> Mapping[str, TensorSpec]:
        specs = dict(self.source.specs())
        rows, columns = specs[self.name].shape
        specs[self.name] = replace(specs[self.name], shape=(rows + self.rows.shape[0], columns))
        return specs

    def read(self, name: str) -> torch.Tensor:
        tensor = self.source.read(name)
        return torch.cat([tensor, self.rows]) if name == self.name else tensor
