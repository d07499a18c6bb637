"""Changes to what the model contains: lazy state dict in, lazy state dict out, no I/O of their own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..checkpoints import StateDict, TensorSpec


@dataclass(frozen=True, kw_only=True)
class CastToFloat32:
    """Every floating-point tensor in fp32; integers and booleans as they are.

    Nothing is lost: each fp16 and bf16 value is also an fp32 value.
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
class LeaveOut:
    """Every tensor but those of certain names.

    Attributes:
        source: The state dict.
        names: What is left out.
    """

    source: StateDict
    names: frozenset[str]

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `StateDict`."""
        return {name: spec for name, spec in self.source.specs().items() if name not in self.names}

    def read(self, name: str) -> torch.Tensor:
        """See `StateDict`."""
        return self.source.read(name)


@dataclass(frozen=True, kw_only=True)
class AssignRows:
    """The tensor `name` with `rows` written from row `start` on; every other tensor as it is.

    It grows where the rows reach beyond its end, and keeps its other rows to the bit. Checkpoints whose table
    was padded already own the rows of the next few tokens, so adding a token need not add a row.

    Attributes:
        source: The state dict to change.
        name: A matrix [rows, columns] in `source`, or a bias [rows].
        start: The first row to write, at most the number of rows.
        rows: What is written, [new rows, columns] or [new rows], in the tensor's dtype.
    """

    source: StateDict
    name: str
    start: int
    rows: torch.Tensor

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `StateDict`."""
        specs = dict(self.source.specs())
        old_rows, *columns = specs[self.name].shape
        specs[self.name] = replace(specs[self.name], shape=(max(old_rows, self.start + self.rows.shape[0]), *columns))
        return specs

    def read(self, name: str) -> torch.Tensor:
        """See `StateDict`."""
        tensor = self.source.read(name)
        if name != self.name:
            return tensor
        return torch.cat([tensor[: self.start], self.rows, tensor[self.start + self.rows.shape[0] :]])


@dataclass(frozen=True, kw_only=True)
class CutRows:
    """The tensor `name` without the rows from `rows` on; every other tensor as it is.

    Attributes:
        source: The state dict to change.
        name: A tensor [rows, ...] in `source`.
        rows: How many stay, at most as many as there are.
    """

    source: StateDict
    name: str
    rows: int

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `StateDict`."""
        specs = dict(self.source.specs())
        specs[self.name] = replace(specs[self.name], shape=(self.rows, *specs[self.name].shape[1:]))
        return specs

    def read(self, name: str) -> torch.Tensor:
        """See `StateDict`."""
        tensor = self.source.read(name)
        return tensor[: self.rows] if name == self.name else tensor


@dataclass(frozen=True, kw_only=True)
class FitColumns:
    """The tensor `name` with as many columns as `columns` says, cut or followed by zeros; every other as it is.

    Attributes:
        source: The state dict to change.
        name: A matrix [rows, columns] in `source`.
        columns: How many it gets.
    """

    source: StateDict
    name: str
    columns: int

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `StateDict`."""
        specs = dict(self.source.specs())
        specs[self.name] = replace(specs[self.name], shape=(specs[self.name].shape[0], self.columns))
        return specs

    def read(self, name: str) -> torch.Tensor:
        """See `StateDict`."""
        tensor = self.source.read(name)
        if name != self.name:
            return tensor
        return torch.nn.functional.pad(tensor, (0, self.columns - tensor.shape[1]))


@dataclass(frozen=True, kw_only=True)
class SelectPrefix:
    """The tensors whose names begin with `prefix`, named without it; no others.

    Attributes:
        source: The state dict to change.
        prefix: Beginning of the names, with its dot.
    """

    source: StateDict
    prefix: str

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `StateDict`."""
        return {
            name.removeprefix(self.prefix): spec
            for name, spec in self.source.specs().items()
            if name.startswith(self.prefix)
        }

    def read(self, name: str) -> torch.Tensor:
        """See `StateDict`."""
        return self.source.read(self.prefix + name)


@dataclass(frozen=True, kw_only=True)
class LowRankUpdate:
    """What is added to one weight: `scaling * left @ right`, as the weight is stored.

    Attributes:
        left: [rows, rank], fp32.
        right: [rank, columns], fp32.
        scaling: Factor.
        is_transposed: Whether the product is of the transposed weight, such as that of a Conv1D.
    """

    left: torch.Tensor
    right: torch.Tensor
    scaling: float
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight."""
        rows, columns = self.left.shape[0], self.right.shape[1]
        return (columns, rows) if self.is_transposed else (rows, columns)

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `weight` with the update, computed in peft's order, so that it is equal to the bit."""
        product = self.left @ self.right
        return weight + (product.T if self.is_transposed else product) * self.scaling


@dataclass(frozen=True, kw_only=True)
class MergeUpdates:
    """Weights with updates added, and other tensors replaced or added; every other tensor as it is.

    Attributes:
        source: The state dict to change, in fp32.
        updates: Tensor name → what is added.
        replaced: Tensor name → the tensor that stands there instead, or is added.
    """

    source: StateDict
    updates: Mapping[str, LowRankUpdate]
    replaced: Mapping[str, torch.Tensor]

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `StateDict`."""
        return {**self.source.specs(), **describe_tensors(self.replaced)}

    def read(self, name: str) -> torch.Tensor:
        """See `StateDict`."""
        weight = self.replaced[name] if name in self.replaced else self.source.read(name)
        return self.updates[name].apply(weight) if name in self.updates else weight


def describe_tensors(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, TensorSpec]:
    """Return the shape and type of each tensor, as a state dict tells them."""
    return {name: TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in tensors.items()}


@dataclass(frozen=True, kw_only=True)
class Rename:
    """The same tensors under other names; what has none is left out.

    Attributes:
        source: The state dict to change.
        names: New name → name in `source`.
    """

    source: StateDict
    names: Mapping[str, str]

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `StateDict`."""
        specs = self.source.specs()
        return {new: specs[old] for new, old in self.names.items()}

    def read(self, name: str) -> torch.Tensor:
        """See `StateDict`."""
        return self.source.read(self.names[name])
