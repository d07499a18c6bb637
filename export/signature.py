"""The one description of a model's tensors that graph, config and test inputs are all derived from."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# The two symbolic dimensions of a text model. Every other dimension is a number.
BATCH = "batch"
SEQ_LEN = "seq_len"


@dataclass(frozen=True, kw_only=True)
class TensorSignature:
    """One input or output.

    Attributes:
        name: Its name in the ONNX graph and in Triton.
        dtype: Its dtype, the same in every step of the ensemble.
        dims: All dimensions, the batch first; a string is symbolic.
    """

    name: str
    dtype: torch.dtype
    dims: tuple[str | int, ...]

    @property
    def dynamic_axes(self) -> dict[int, str]:
        """Axis → symbol, as torch.onnx takes dynamic shapes."""
        return {axis: dim for axis, dim in enumerate(self.dims) if isinstance(dim, str)}


@dataclass(frozen=True, kw_only=True)
class ModelSignature:
    """The tensors of a text model.

    Attributes:
        inputs: In the order of the module's `forward`.
        outputs: In the order of the tuple that `forward` returns.
        max_length: The longest sequence, in tokens, special tokens included.
    """

    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    max_length: int

    def __iter__(self) -> Iterator[TensorSignature]:
        return iter(self.inputs + self.outputs)
