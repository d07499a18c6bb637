"""The seam between what trainers leave on disk and everything behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

# Only for its types: the verbs that copy bytes start in a tenth of a second because nothing loads torch.
if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What is known of a tensor before any of its data is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements; 1 for a scalar, 0 if any side is 0."""
        total = 1
        for side in self.shape:
            total *= side
        return total


class StateDict(Protocol):
    """A state dict whose tensors are read one at a time, when asked for.

    Readers give one, transforms take one and give another, so weights of any size pass through in one line.
    """

    def specs(self) -> Mapping[str, TensorSpec]:
        """Return name → shape and dtype of every tensor. Reads no tensor data."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return one whole tensor on the CPU, shaped and typed as `specs()[name]` says.

        Raises:
            CheckpointError: The bytes behind `name` cannot be read.
        """
        ...
