"""A model, as its metadata describe it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.utils import triton_to_np_dtype

from .faults import UnreadableError

# A text, and the one that it goes with.
_MOST_TEXTS = 2


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """An input or an output.

    Attributes:
        name: Name by which the server knows it.
        datatype: KServe's name of its type, such as `BYTES` or `FP32`.
        shape: Dimensions, the batch first where the model has one; -1 for any.
        is_optional: Whether a request may lack it.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    is_optional: bool = False

    def is_of(self, values: npt.NDArray[Any]) -> bool:
        """Tell whether values are of its type and shape."""
        are_sizes_right = all(size in (-1, found) for size, found in zip(self.shape, values.shape, strict=False))
        is_shape_right = len(self.shape) == values.ndim and are_sizes_right
        return is_shape_right and values.dtype == np.dtype(triton_to_np_dtype(self.datatype))

    def make_empty(self) -> npt.NDArray[Any]:
        """Return its values for no rows at all."""
        shape = (0, *(max(size, 0) for size in self.shape[1:]))
        return np.empty(shape, dtype=triton_to_np_dtype(self.datatype))


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, as its metadata describe it.

    Attributes:
        name: Name by which the server knows it.
        version: Newest version that answers.
        takes: Its inputs.
        makes: Its outputs.
        max_batch_size: Rows that one request may hold.
        has_batch: Whether a request may hold several rows at all.
        is_decoupled: Whether it answers in any number of pieces, which a stream alone takes.
    """

    name: str
    version: str
    takes: tuple[Tensor, ...]
    makes: tuple[Tensor, ...]
    max_batch_size: int
    has_batch: bool
    is_decoupled: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of its inputs."""
        return tuple(tensor.name for tensor in self.takes)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of its outputs."""
        return tuple(tensor.name for tensor in self.makes)

    @property
    def texts(self) -> tuple[str, ...]:
        """Names of the inputs for a text and its partner, if it takes no more than one string a row of each."""
        needed = [tensor for tensor in self.takes if not tensor.is_optional]
        are_texts = all(tensor.datatype == "BYTES" and self._has_one_value(tensor) for tensor in needed)
        return tuple(tensor.name for tensor in needed) if are_texts and len(needed) <= _MOST_TEXTS else ()

    def _has_one_value(self, tensor: Tensor) -> bool:
        """Tell whether a tensor can be one value a row, or one value where there are no rows."""
        return tensor.shape == (-1, 1) or (not self.has_batch and bool(tensor.shape) and {*tensor.shape} <= {-1, 1})


def read_model(name: str, metadata: Mapping[str, Any], config: Mapping[str, Any]) -> Model:
    """Return the model that a server's two answers describe, over either protocol.

    Raises:
        UnreadableError: A number is none that a model can have; what else they may not be is Python's own error.
    """
    # The gRPC client wraps the configuration once more.
    config = config.get("config", config)
    rows = int(config.get("max_batch_size", 0))
    if rows < 0:
        raise UnreadableError(f"max_batch_size {rows} of {name}")
    optional = {tensor["name"] for tensor in config.get("input", ()) if tensor.get("optional")}
    return Model(
        name=name,
        version=max(metadata["versions"], key=int),
        takes=tuple(replace(each, is_optional=each.name in optional) for each in _read_tensors(metadata["inputs"])),
        makes=_read_tensors(metadata["outputs"]),
        max_batch_size=rows or 1,
        has_batch=rows > 0,
        is_decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled")),
    )


def _read_tensors(described: Iterable[Mapping[str, Any]]) -> tuple[Tensor, ...]:
    # gRPC spells numbers as text.
    read = tuple(
        Tensor(name=tensor["name"], datatype=tensor["datatype"], shape=tuple(map(int, tensor["shape"])))
        for tensor in described
    )
    if not all(isinstance(word, str) for tensor in read for word in (tensor.name, tensor.datatype)):
        raise TypeError("a tensor without a name or a type")
    return read
