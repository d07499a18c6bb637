"""Tasks that are served as they are: tensors in, tensors out, nothing in front of the graph and nothing behind it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..signature import BATCH, ModelSignature, TensorSignature
from .base import Task
from .cases import SIZES, Case, Outputs, Row, Side, join_rows
from .comparison import TENSOR_TOLERANCES, compare_tensors
from .golden import build_sample

# Sizes that are traced: distinct, and none of them 1, which may be taken for a constant.
_EXAMPLE_BATCH = 2
_EXAMPLE_SIZES = (7, 5, 6, 9, 11)

# Beyond this an axis is not tried, unless its smallest size is near it: attention takes memory by the square of it.
_LONGEST = 512
_LONGEST_IN_SMALLEST = 4

# Of a batch of real rows: 32 pictures of 224 x 224. A SegFormer that was given 32 of 512 x 512 took 8 GB.
_MOST_VALUES = 32 * 3 * 224 * 224

_SEEDS = (0, 1)


@dataclass(frozen=True, kw_only=True)
class ValueRule:
    """How values of an input are made up, where there are no real ones.

    Attributes:
        kind: `normal` of mean 0 and deviation 1; `uniform` from `low` to `high`; `integers` from `low` up to below
            `high`; `mask`, ones for what is there; `zeros` and `ones`.
        low: Lower end of uniform values and integers.
        high: Upper end of uniform values and integers.
        padding: What stands in padding.
        hidden: For a mask, the symbol of the places at its beginning, some of which are 0.
    """

    kind: Literal["normal", "uniform", "integers", "mask", "zeros", "ones"] = "normal"
    low: float = 0.0
    high: float = 1.0
    padding: int = 0
    hidden: str = ""

    def make(self, shape: tuple[int, ...], dtype: torch.dtype, random: np.random.Generator) -> np.ndarray[Any, Any]:
        """Return values of that shape and dtype."""
        kind = np.dtype(str(dtype).removeprefix("torch."))
        if self.kind in ("mask", "ones"):
            return np.ones(shape, dtype=kind)
        if self.kind == "normal":
            return random.standard_normal(shape).astype(kind)
        if self.kind == "uniform":
            return random.uniform(self.low, self.high, shape).astype(kind)
        if self.kind == "integers":
            return random.integers(int(self.low), int(self.high), shape).astype(kind)
        return np.zeros(shape, dtype=kind)


@dataclass(frozen=True, kw_only=True)
class SizeRange:
    """The sizes that an axis may have.

    Attributes:
        smallest: At least this.
        largest: At most this.
        multiple_of: Only multiples of this.
    """

    smallest: int = 1
    largest: int = 128
    multiple_of: int = 1

    def list_sizes(self) -> list[int]:
        """Return the sizes that are tried, ascending: the smallest, the traced one and the next, the largest."""
        step, first = self.multiple_of, self._round_up(max(self.smallest, 0))
        last = max(first, min(self.largest, max(_LONGEST, _LONGEST_IN_SMALLEST * first)) // step * step)
        wanted = {first, last, *(self._round_up(max(size, first)) for size in (*SIZES, first + step, 2 * first + step))}
        return sorted(size for size in wanted if first <= size <= last)

    def choose_example(self, preferred: int) -> int:
        """Return a size to trace, as far above the smallest as `preferred` is above 1."""
        size = self._round_up(max(self.smallest, 1) - 1 + preferred)
        return size if size <= self.largest else max(self.list_sizes())

    def _round_up(self, size: int) -> int:
        return -(-size // self.multiple_of) * self.multiple_of


@dataclass(frozen=True, kw_only=True)
class InputRules:
    """What the inputs of a graph may be.

    Attributes:
        rules: Input name → how its values are made up.
        sizes: Symbol → its range, for every symbol but the batch and sums.
        padded: Symbols that rows of one batch may differ in, since a mask tells what is padding. Others may not.
        counts_from_left: Whether padding on the left moves the positions, so that a row comes out unlike alone.
        samples: Real rows, to be tried as well.
    """

    rules: Mapping[str, ValueRule]
    sizes: Mapping[str, SizeRange]
    padded: tuple[str, ...] = ()
    counts_from_left: bool = False
    samples: Sequence[Row] = field(default_factory=tuple)


class TensorTask(Task):
    """A model that clients send tensors to.

    Attributes:
        tensors: What the inputs may be.
    """

    tolerances: ClassVar[Mapping[str, float]] = TENSOR_TOLERANCES

    tensors: InputRules

    @property
    def padding_values(self) -> Mapping[str, int]:
        """See `Task`."""
        return {name: rule.padding for name, rule in self.tensors.rules.items()}

    @property
    def tested_sizes(self) -> str:
        """See `Task`."""
        listed = {symbol: limits.list_sizes() for symbol, limits in self.tensors.sizes.items()}
        return ", ".join(f"{symbol} from {sizes[0]} to {sizes[-1]}" for symbol, sizes in listed.items())

    def compare(
        self, expected: Sequence[Outputs], got: Sequence[Outputs], bounds: Mapping[str, float]
    ) -> dict[str, float]:
        """See `Task`."""
        return compare_tensors(expected, got)

    def infer_outputs(self, inputs: tuple[TensorSignature, ...], names: Sequence[str]) -> tuple[TensorSignature, ...]:
        """Return the signature of what the task's module makes of these inputs, see the function of this name.

        Raises:
            ModelError: transformers' model does not run.
        """
        try:
            return infer_outputs(self.module, inputs, names, self.tensors)
        # What a configuration that can be built and loaded makes of a model may be anything.
        except (ValueError, RuntimeError, TypeError, LookupError, ArithmeticError, AttributeError) as exc:
            raise ModelError(
                "the model does not run",
                expected=f"outputs for {', '.join(tensor.name for tensor in inputs)}",
                got=str(exc).splitlines()[0].rstrip(".") if str(exc) else type(exc).__name__,
                remedy="use the config.json that the checkpoint was trained with",
            ) from exc

    def build_example(self) -> tuple[Tensor, ...]:
        """See `Task`."""
        sizes = {symbol: pair[0] for symbol, pair in _choose_pairs(self.tensors.sizes).items()}
        random = np.random.default_rng(0)
        rows = [self._make_row(sizes, random) for _ in range(_EXAMPLE_BATCH if self.signature.is_batched else 1)]
        feeds = join_rows(rows, self.signature, self.padding_values).feeds
        return tuple(torch.from_numpy(np.ascontiguousarray(feeds[tensor.name])) for tensor in self.signature.inputs)

    def build_cases(self) -> Iterator[Case]:
        """See `Task`. Every size of every axis, in combinations that differ from seed to seed."""
        tensors, is_batched = self.tensors, self.signature.is_batched
        ranges = {symbol: limits.list_sizes() for symbol, limits in tensors.sizes.items()}
        rounds = max((len(sizes) for sizes in ranges.values()), default=1)
        # With the second seed a small size of one axis meets a large one of the next, with the third the other way.
        for seed in (*_SEEDS, *((2,) if len(ranges) > 1 else ())):
            random = np.random.default_rng(seed)
            shift = (0, 1, -1)[seed]
            for turn in range(rounds):
                sizes = {
                    symbol: listed[min(turn, len(listed) - 1) if not shift else (turn + shift * place) % len(listed)]
                    for place, (symbol, listed) in enumerate(ranges.items())
                }
                described = ", ".join(f"{symbol} {size}" for symbol, size in sizes.items()) or "one row"
                rows = [self._make_row(sizes, random) for _ in range(1 + (turn % 3 if is_batched else 0))]
                yield Case(name=f"{described}, seed {seed}", rows=rows, batch_size=len(rows))
            if is_batched:
                yield from self._build_batches(ranges, random, seed)
        if tensors.samples:
            yield Case(name="samples one by one", rows=tensors.samples, batch_size=1, is_real=True)
            if is_batched and (tensors.padded or _have_one_shape(tensors.samples)):
                whole, size = len(tensors.samples), _choose_batch_size(tensors.samples)
                name = "samples in one batch" if size == whole else f"samples in batches of {size}"
                yield Case(name=name, rows=tensors.samples, batch_size=size, is_real=True)

    def _build_batches(
        self, ranges: Mapping[str, Sequence[int]], random: np.random.Generator, seed: int
    ) -> Iterator[Case]:
        """Yield batches in which each row must come out as if it were alone."""
        middle = {symbol: listed[len(listed) // 2] for symbol, listed in ranges.items()}
        rows = [self._make_row(middle, random) for _ in range(5)]
        yield Case(name=f"5 rows of one size, seed {seed}", rows=rows, batch_size=5)
        sides: tuple[Side, ...] = ("right", "left") if self.tensors.padded else ()
        for side in sides:
            # Without the largest, which a row alone has: for each in the batch there is an output of the padded size.
            shorter = {symbol: ranges[symbol][:-1] or ranges[symbol] for symbol in self.tensors.padded}
            rows = [
                self._make_row(middle | {s: sizes[min(turn, len(sizes) - 1)] for s, sizes in shorter.items()}, random)
                for turn in range(max(map(len, shorter.values())))
            ]
            name = f"padded {side}, seed {seed}"
            moved = side == "left" and self.tensors.counts_from_left
            yield Case(name=name, rows=rows, batch_size=len(rows), padding_side=side, padded_reference=moved)

    def build_golden(self) -> dict[str, Any]:
        """See `Task`. One row, and what the module makes of it."""
        example = self.build_example()
        row = [tensor[:1] if self.signature.is_batched else tensor for tensor in example]
        with torch.no_grad():
            outputs = self.module(*row)
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        asked = {tensor.name: value for tensor, value in zip(self.signature.inputs, row, strict=True)}
        answered = {tensor.name: value for tensor, value in zip(self.signature.outputs, several, strict=True)}
        sample = build_sample(self.signature, asked, answered)
        return {"tolerances": dict(self.tolerances), "samples": [sample]}

    def _make_row(self, sizes: Mapping[str, int], random: np.random.Generator) -> Row:
        return make_row(self.signature.inputs, self.tensors, sizes, random, is_batched=self.signature.is_batched)


def make_row(
    inputs: Sequence[TensorSignature],
    tensors: InputRules,
    sizes: Mapping[str, int],
    random: np.random.Generator,
    *,
    is_batched: bool,
) -> Row:
    """Return values for every input, with the given sizes and without the batch, where there is one."""
    row = {}
    for tensor in inputs:
        rule = tensors.rules[tensor.name]
        content = TensorSignature(name=tensor.name, dtype=tensor.dtype, dims=tensor.dims[1:]) if is_batched else tensor
        row[tensor.name] = rule.make(content.resolve_dims(sizes), tensor.torch_dtype, random)
        if rule.hidden:
            row[tensor.name][: int(random.integers(0, sizes[rule.hidden] // 2 + 1))] = 0
    return row


def infer_outputs(
    module: nn.Module, inputs: tuple[TensorSignature, ...], names: Sequence[str], tensors: InputRules
) -> tuple[TensorSignature, ...]:
    """Return the signature of what `module` returns, by running it at two sets of sizes.

    An axis that has the same size in both is a number; one that is as large as a symbol of the inputs, or as two of
    them together, gets that symbol; any other gets one of its own.

    Raises:
        ModelError: It returns another number of tensors than `names`, or no tensors.
    """
    random = np.random.default_rng(0)
    runs = []
    pairs = _choose_pairs(tensors.sizes)
    for run, batch in enumerate((2, 3)):
        sizes = {symbol: pair[run] for symbol, pair in pairs.items()}
        signature = ModelSignature(inputs=inputs, outputs=())
        rows = [
            make_row(inputs, tensors, sizes, random, is_batched=signature.is_batched)
            for _ in range(batch if signature.is_batched else 1)
        ]
        feeds = join_rows(rows, signature, {}).feeds
        with torch.no_grad():
            outputs = module(*(torch.from_numpy(np.ascontiguousarray(feeds[tensor.name])) for tensor in inputs))
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(several) != len(names) or not all(isinstance(output, Tensor) for output in several):
            raise ModelError(
                f"{type(module).__name__} returns other outputs than were named",
                expected=f"{len(names)} tensors: {', '.join(names)}",
                got=", ".join(type(output).__name__ for output in several),
                remedy="name every output once",
            )
        runs.append(({BATCH: batch} | sizes, several))
    (first_sizes, first), (second_sizes, second) = runs
    sums = {f"{a}+{b}": (a, b) for a in tensors.sizes for b in tensors.sizes if a != b}
    signatures = []
    for name, one, two in zip(names, first, second, strict=True):
        dims: list[str | int] = []
        for axis, pair in enumerate(zip(one.shape, two.shape, strict=True)):
            known = {symbol: (first_sizes[symbol], second_sizes[symbol]) for symbol in first_sizes}
            known |= {
                text: (first_sizes[a] + first_sizes[b], second_sizes[a] + second_sizes[b])
                for text, (a, b) in sums.items()
            }
            symbol = next((text for text, both in known.items() if both == pair), f"{name}_axis_{axis}")
            dims.append(pair[0] if pair[0] == pair[1] else symbol)
        signatures.append(TensorSignature(name=name, dtype=one.dtype, dims=tuple(dims)))
    return tuple(signatures)


def _choose_pairs(ranges: Mapping[str, SizeRange]) -> dict[str, tuple[int, int]]:
    """Return two sizes of each axis, which differ, and from those of the other axes, wherever the ranges allow it."""
    pairs: dict[str, tuple[int, int]] = {}
    for place, (symbol, limits) in enumerate(ranges.items()):
        size = _EXAMPLE_SIZES[place % len(_EXAMPLE_SIZES)]
        first = (limits.choose_example(size), limits.choose_example(size + 6 + limits.smallest))
        others = itertools.permutations(limits.list_sizes(), 2)
        good = (pair for pair in (first, *others) if pair[0] != pair[1] and pair not in pairs.values())
        pairs[symbol] = next(good, first)
    return pairs


def _choose_batch_size(rows: Sequence[Row]) -> int:
    """Return how many real rows are run at once: what a network keeps of each grows with what it is given."""
    largest = max(sum(array.size for array in row.values()) for row in rows)
    return min(len(rows), max(2, _MOST_VALUES // largest))


def _have_one_shape(rows: Sequence[Row]) -> bool:
    return len({tuple(array.shape for array in row.values()) for row in rows}) == 1
