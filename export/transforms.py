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
        """See `StateDict`."""
        return {
            name: replace(spec, dtype=torch.float32) if spec.dtype.is_floating_point else spec
            for name, spec in self.source.specs().items()
        }

    def read(self, name: str) -> torch.Tensor:
        """See `StateDict`."""
        tensor = self.source.read(name)
        return tensor.to(torch.float32) if tensor.dtype.is_floating_point else tensor


@dataclass(frozen=True, kw_only=True)
class AssignRows:
    """The matrix `name` with `rows` written from row `start` on; every other tensor as it is.

    The matrix grows where the rows reach beyond its end, and keeps its other rows to the bit. Checkpoints whose table
    was padded already own the rows of the next few tokens, so adding a token need not add a row.

    Attributes:
        source: The state dict to change.
        name: A matrix [rows, columns] in `source`.
        start: The first row to write, at most the matrix's number of rows.
        rows: What is written, [new rows, columns], in the matrix's dtype.
    """

    source: StateDict
    name: str
    start: int
    rows: torch.Tensor

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `StateDict`."""
        specs = dict(self.source.specs())
        old_rows, columns = specs[self.name].shape
        specs[self.name] = replace(specs[self.name], shape=(max(old_rows, self.start + self.rows.shape[0]), columns))
        return specs

    def read(self, name: str) -> torch.Tensor:
        """See `StateDict`."""
        tensor = self.source.read(name)
        if name != self.name:
            return tensor
        return torch.cat([tensor[: self.start], self.rows, tensor[self.start + self.rows.shape[0] :]])
