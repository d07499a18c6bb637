"""Which requests Triton runs together, and what a graph has to be for that. Imports nothing heavy."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Batching:
    """One way of running requests together.

    Attributes:
        name: What `--batching` takes.
        help: Which requests, for `--help`.
        is_ragged: Whether the graph takes rows of any lengths, one behind another.
        computes_padding: Whether the graph's layers compute the padding between rows of different lengths.
    """

    name: str
    help: str
    is_ragged: bool = True
    computes_padding: bool = True


EQUAL = Batching(name="equal", help="those of one length", is_ragged=False)
RAGGED = Batching(name="ragged", help="those of any lengths, which the graph pads to the longest")
PADDING_FREE = Batching(name="padding-free", help="the same, and layers compute no padding", computes_padding=False)

BATCHINGS = {batching.name: batching for batching in (EQUAL, RAGGED, PADDING_FREE)}
