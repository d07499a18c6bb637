"""The one description of a model's tensors that graph, config and test inputs are all derived from."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import torch

# The symbolic dimensions of the models known here. Every other dimension is a number, or a symbol of the user's own.
BATCH = "batch"
SEQ_LEN = "seq_len"
# The pieces that a long text is cut into, each of them a sequence.
WINDOWS = "windows"
# The tokens whose keys and values a decoder already has, and the sequence that a decoder writes.
PAST_LEN = "past_len"
DECODER_LEN = "decoder_len"
# How many answers one text has, such as entities; a dimension of the ensemble only.
ANSWERS = "answers"

# The tokens of a ragged batch, whose rows stand one behind another, and the shape of each row.
TOKENS = "tokens"
ROW_SHAPES = "row_shapes"

# What a tensor holds that torch has no dtype for.
STRING: Final = "string"


def split_dim(dim: str | int) -> tuple[str, ...]:
    """Return the symbols whose sum a dimension is; none for a number."""
    return tuple(dim.split("+")) if isinstance(dim, str) else ()


@dataclass(frozen=True, kw_only=True)
class TensorSignature:
    """One input or output.

    Attributes:
        name: Its name in the ONNX graph and in Triton.
        dtype: Its dtype, the same in every step of the ensemble; `STRING` for texts and encoded files.
        dims: All dimensions; a string is symbolic, and one such as `past_len+seq_len` the sum of others.
        is_optional: Whether a request, or an answer, may lack it.
        label_file: File of the version, beside the graph, that names the values of an output, one a line; or none.
    """

    name: str
    dtype: torch.dtype | Literal["string"]
    dims: tuple[str | int, ...]
    is_optional: bool = False
    label_file: str = ""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its dtype where it is a tensor of the graph, which holds no strings."""
        assert isinstance(self.dtype, torch.dtype), f"Bug: {self.name} holds strings, which no graph here takes"
        return self.dtype

    def resolve_dims(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the dimensions where every symbol has the size that `sizes` gives it."""
        return tuple(
            dim if isinstance(dim, int) else sum(sizes[symbol] for symbol in split_dim(dim)) for dim in self.dims
        )

    @property
    def symbols(self) -> frozenset[str]:
        """Every symbol of its dimensions, those of sums one by one."""
        return frozenset(symbol for dim in self.dims for symbol in split_dim(dim))

    @property
    def dynamic_axes(self) -> dict[int, str]:
        """Axis → symbol, as torch.onnx takes dynamic shapes."""
        return {axis: dim for axis, dim in enumerate(self.dims) if isinstance(dim, str)}


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What clients of the ensemble send and get, and what its steps are besides the graph.

    Attributes:
        inputs: What clients send, the batch first.
        outputs: What they get. Without a postprocess step they are the graph's outputs under other names.
        preprocess: Triton backend of the step that makes the graph's inputs, and the carried tensors, of `inputs`; None
            where the backend that runs the model takes `inputs` itself, and no steps are around it.
        postprocess: Triton backend of the step that makes `outputs` of the graph's outputs, the carried tensors and,
            where they are no files, `inputs`; None where there is no such step.
        carried: Tensors that the preprocess step makes for the postprocess step, past the graph.
        is_lean: Whether one process does what the steps of an ensemble would do.
        has_files: Whether `inputs` are whole files: megabytes, which take milliseconds to decode.
        lengths: What the preprocess step pads a request to, the smallest first, so that it can be joined with others.
        unknown_id: Id of a token that begins a word wherever it stands, -1 for none; None where no step asks.
    """

    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    preprocess: str | None
    postprocess: str | None = None
    carried: tuple[TensorSignature, ...] = ()
    is_lean: bool = False
    has_files: bool = False
    lengths: tuple[int, ...] = ()
    unknown_id: int | None = None

    @property
    def passed(self) -> tuple[TensorSignature, ...]:
        """What passes the graph by on its way to the postprocess step."""
        return self.carried + (() if self.has_files else self.inputs)


@dataclass(frozen=True, kw_only=True)
class ModelSignature:
    """The tensors of a graph.

    Attributes:
        inputs: In the order of the module's `forward`.
        outputs: In the order of the tuple that `forward` returns.
        longest: Symbol → the largest size that is served, where whoever makes the inputs keeps to one.
        smallest: Symbol → the smallest size that the graph runs with, where that is not 1.
        contract: What clients see; None where they send the graph's own inputs.
        is_ragged: Whether the graph that is published takes rows one behind another, as in `ragged`; clients send the
            same as ever.
    """

    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    longest: Mapping[str, int] = field(default_factory=dict)
    smallest: Mapping[str, int] = field(default_factory=dict)
    contract: Contract | None = None
    is_ragged: bool = False

    def __iter__(self) -> Iterator[TensorSignature]:
        return iter(self.inputs + self.outputs)

    @property
    def is_batched(self) -> bool:
        """Whether every tensor's first dimension is the batch, so that requests can be joined."""
        return all(tensor.dims[:1] == (BATCH,) for tensor in self)

    def list_warmups(self, lengths: Iterable[int] = ()) -> dict[str, Mapping[str, int]]:
        """Return name → sizes of the rows of zeros that are run before it is ready; a symbol without one has size 1.

        Args:
            lengths: Of texts in tokens, besides the shortest and the longest.
        """
        if SEQ_LEN in self.longest:
            longest = self.longest[SEQ_LEN]
            return {
                "shortest, 1 tokens": {SEQ_LEN: 1},
                **{f"{length} tokens": {SEQ_LEN: length} for length in lengths},
                f"longest, {longest} tokens": {SEQ_LEN: longest},
            }
        return {"one row": {PAST_LEN: 0, **self.smallest}} if self.is_batched else {}

    @property
    def can_be_ragged(self) -> bool:
        """Whether rows of any lengths can be joined: each input is a row of tokens, and no output depends on it."""
        return (
            all(tensor.dims == (BATCH, SEQ_LEN) for tensor in self.inputs)
            and "attention_mask" in {tensor.name for tensor in self.inputs}
            and all(tensor.symbols == {BATCH} for tensor in self.outputs)
        )

    @property
    def ragged(self) -> "ModelSignature":
        """The tensors of a graph that takes rows one behind another, with their shapes [batch, 1] beside them."""
        assert self.can_be_ragged, "Bug: rows of this graph cannot be told apart"
        flat = tuple(replace(tensor, dims=(TOKENS,)) for tensor in self.inputs)
        shapes = TensorSignature(name=ROW_SHAPES, dtype=torch.int32, dims=(BATCH, 1))
        return ModelSignature(inputs=(*flat, shapes), outputs=self.outputs)

    @property
    def served(self) -> "ModelSignature":
        """The tensors of the Triton model that runs it: the graph's, or clients' where no step is around it."""
        if self.contract is None or self.contract.preprocess is not None:
            return self
        return ModelSignature(inputs=self.contract.inputs, outputs=self.contract.outputs)
