"""What a graph is tried on: rows of inputs, and how they are brought together in batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..signature import BATCH, WINDOWS, ModelSignature, TensorSignature, split_dim

Array = npt.NDArray[Any]

# Input name → its values for one row, without the batch; for a graph that has none, the whole input.
Row = Mapping[str, Array]

# The graph's outputs for one row, each without batch and padding.
Outputs = tuple[Array, ...]

Side = Literal["right", "left"]

# Sizes that are tried besides the largest: the two at which an axis likes to become a constant, the traced one and
# the next, and odd ones.
SIZES = (1, 2, 3, 7, 8, 31, 127)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Some rows, run as batches of `batch_size`, padded to the longest of each batch.

    Attributes:
        name: Name of the case, for the report.
        rows: Inputs of each row.
        batch_size: How many rows run at once.
        padding_side: Side on which shorter rows are padded.
        padded_reference: Whether the module is given the padded batch as well. Otherwise it runs each row alone and
            without padding, so that neighbours and padding must change nothing.
        is_real: Whether these are inputs that users might send, on which the quality of a lossy precision is judged.
    """

    name: str
    rows: Sequence[Row]
    batch_size: int
    padding_side: Side = "right"
    padded_reference: bool = False
    is_real: bool = False

    @property
    def batches(self) -> list[Sequence[Row]]:
        """The rows, as they are run together."""
        return [self.rows[start : start + self.batch_size] for start in range(0, len(self.rows), self.batch_size)]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows that were brought to equal sizes.

    Attributes:
        feeds: Input name → [rows, ...].
        sizes: Symbol → size, for each row.
        longest: The largest of these, which all rows now have.
        padding_side: Where the padding stands.
        is_bare: Whether this is one row of a graph without a batch dimension.
    """

    feeds: Mapping[str, Array]
    sizes: Sequence[Mapping[str, int]]
    longest: Mapping[str, int]
    padding_side: Side
    is_bare: bool = False

    def cut(self, tensors: Sequence[TensorSignature], outputs: Sequence[Array]) -> list[Outputs]:
        """Return the outputs of each row, without what belongs to its padding."""
        if self.is_bare:
            return [tuple(outputs)]
        return [
            tuple(
                output[index][_place(tensor, sizes, self.longest, self.padding_side)]
                for tensor, output in zip(tensors, outputs, strict=True)
            )
            for index, sizes in enumerate(self.sizes)
        ]


def join_rows(
    rows: Sequence[Row], signature: ModelSignature, padding_values: Mapping[str, int], padding_side: Side = "right"
) -> Batch:
    """Return `rows` as one batch, padded to the largest size of each symbol.

    Args:
        rows: One or more.
        signature: Tensors of the graph.
        padding_values: Input name → what stands in its padding, 0 where it is not named.
        padding_side: Side for every symbol but the windows, which are always padded at the end.
    """
    if not signature.is_batched:
        (row,) = rows
        return Batch(feeds=row, sizes=[{}], longest={}, padding_side=padding_side, is_bare=True)
    sizes = [read_sizes(signature, row) for row in rows]
    longest = {symbol: max(size[symbol] for size in sizes) for symbol in sizes[0]}
    feeds = {}
    for tensor in signature.inputs:
        values = [row[tensor.name] for row in rows]
        shape = tensor.resolve_dims({**longest, BATCH: len(rows)})
        array = np.full(shape, padding_values.get(tensor.name, 0), dtype=values[0].dtype)
        for index, value in enumerate(values):
            place = (index, *_place(tensor, sizes[index], longest, padding_side))
            array[place] = value
        feeds[tensor.name] = array
    return Batch(feeds=feeds, sizes=sizes, longest=longest, padding_side=padding_side)


def read_sizes(signature: ModelSignature, row: Row) -> dict[str, int]:
    """Return symbol → its size in `row`, for every symbol of the inputs but the batch."""
    first = int(signature.is_batched)
    return {
        symbols[0]: size
        for tensor in signature.inputs
        for dim, size in zip(tensor.dims[first:], row[tensor.name].shape, strict=True)
        if len(symbols := split_dim(dim)) == 1
    }


def _place(
    tensor: TensorSignature, sizes: Mapping[str, int], longest: Mapping[str, int], padding_side: Side
) -> tuple[slice, ...]:
    """Return where a row's own values lie in its padded tensor."""
    return tuple(_slice(dim, sizes, longest, padding_side) for dim in tensor.dims[1:])


def _slice(dim: str | int, sizes: Mapping[str, int], longest: Mapping[str, int], padding_side: Side) -> slice:
    symbols = split_dim(dim)
    # A size that only the graph itself knows, such as the frames of a sound, is not padded by us.
    if not symbols or any(symbol not in sizes for symbol in symbols):
        return slice(None)
    own, whole = sum(sizes[symbol] for symbol in symbols), sum(longest[symbol] for symbol in symbols)
    return slice(whole - own, None) if padding_side == "left" and dim != WINDOWS else slice(0, own)
