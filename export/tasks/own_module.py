"""Any `nn.Module`: built by the user's own function, described by a file, and held to the same proof as the rest.

The file is JSON:

    {"inputs": {"features": {"dtype": "float32", "shape": ["batch", "frames", 80], "values": "normal"},
                "mask":     {"dtype": "int64", "shape": ["batch", "frames"], "values": "mask"}},
     "outputs": ["scores"],
     "dims": {"frames": {"min": 1, "max": 512, "multiple_of": 1}},
     "arguments": {"width": 256},
     "samples": "real_inputs.npz"}

`values` is `normal`, `uniform`, `mask`, `zeros`, `ones`, `{"uniform": [low, high]}` or `{"integers": [low, below]}`. An
axis along which a `mask` runs may be padded. `samples` holds an array for each input, one row after another.
"""

import copy
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..checkpoints import StateDict
from ..errors import ModelError, SettingsError, list_some
from ..signature import BATCH, ModelSignature, TensorSignature
from .cases import Outputs, Row, Side, join_rows
from .comparison import TENSOR_TOLERANCES, compare_tensors, is_within
from .golden import KSERVE_DTYPES
from .own_weights import load_weights
from .tensors import InputRules, SizeRange, TensorTask, ValueRule, infer_outputs

# What the batch is called where rows depend on one another: an axis like any other, which Triton must not join.
_ROWS = "rows"

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in KSERVE_DTYPES if isinstance(dtype, torch.dtype)}
_PLAIN_VALUES = ("normal", "uniform", "mask", "zeros", "ones")
_SPEC_KEYS = ("inputs", "outputs", "dims", "arguments", "samples", "answers")


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """What the file says.

    Attributes:
        inputs: Tensors in the order in which the module's `forward` takes them.
        outputs: Their names; keys of the result where that is a mapping.
        tensors: What the inputs may be.
        arguments: Keyword arguments of the factory.
        answers: What is made of the outputs, where clients send pictures; None for the outputs themselves.
        folder: Where the file lies, and what it names.
    """

    inputs: tuple[TensorSignature, ...]
    outputs: tuple[str, ...]
    tensors: InputRules
    arguments: Mapping[str, Any]
    answers: Mapping[str, Any] | None = None
    folder: Path = Path()


class FactoryTask(TensorTask):
    """A module of the user's own.

    Attributes:
        notes: What was found out about it that limits how it is served.
    """

    def __init__(self, module: nn.Module, spec: InputSpec) -> None:
        self.name = "module"
        self.unused_tensors: list[str] = []
        self.notes: list[str] = []
        self.tensors = spec.tensors
        self.module = FlatModule(module.requires_grad_(False), spec.outputs).eval()
        _check_finite(self.module)
        self.signature = self._build_signature(spec)
        self._check_determinism()
        if self.signature.is_batched and not self._rows_are_independent():
            self.signature = self._build_apart(spec, "rows of a batch change one another's answers")
        if self.tensors.padded and not self._padding_is_harmless():
            axes = ", ".join(self.tensors.padded)
            self.notes.append(f"padding changes the answers in spite of the mask, so {axes} must not be padded")
            self.tensors = replace(self.tensors, padded=())
        if self.tensors.padded and not self._padding_is_harmless("left"):
            self.tensors = replace(self.tensors, counts_from_left=True)

    @property
    def description(self) -> str:
        """See `Task`."""
        facts = [f"{len(self.signature.inputs)} inputs, {len(self.signature.outputs)} outputs", *self.notes]
        return "; ".join(facts)

    def _build_signature(self, spec: InputSpec) -> ModelSignature:
        with_batch = [tensor.dims[:1] == (BATCH,) for tensor in spec.inputs]
        if not all(with_batch):
            named = any(BATCH in tensor.dims for tensor in spec.inputs)
            return self._build_apart(spec, "not every input begins with the batch" if named else "")
        outputs = infer_outputs(self.module, spec.inputs, spec.outputs, self.tensors)
        if any(tensor.dims[:1] != (BATCH,) for tensor in outputs):
            return self._build_apart(spec, "not every output begins with the batch")
        if any(tensor.dims == (BATCH,) for tensor in (*spec.inputs, *outputs)):
            # tritonserver takes no batch of tensors without a dimension of their own.
            return self._build_apart(spec, "not every tensor has an axis beside the batch")
        smallest = {symbol: limits.smallest for symbol, limits in self.tensors.sizes.items() if limits.smallest > 1}
        return ModelSignature(inputs=spec.inputs, outputs=outputs, smallest=smallest)

    def _build_apart(self, spec: InputSpec, why: str) -> ModelSignature:
        """Return the signature of a graph whose requests are never joined: its batch is an axis like any other."""
        inputs = spec.inputs
        if why:
            self.notes.append(f"{why}, so requests are never joined")
            places = {tensor.name: tensor.dims.index(BATCH) for tensor in inputs if BATCH in tensor.dims}
            samples = [
                {name: np.expand_dims(value, places[name]) if name in places else value for name, value in row.items()}
                for row in self.tensors.samples
            ]
            inputs = tuple(
                replace(tensor, dims=tuple(_ROWS if dim == BATCH else dim for dim in tensor.dims)) for tensor in inputs
            )
            self.tensors = replace(
                self.tensors, samples=samples, sizes={_ROWS: SizeRange(largest=32), **self.tensors.sizes}, padded=()
            )
        return ModelSignature(inputs=inputs, outputs=infer_outputs(self.module, inputs, spec.outputs, self.tensors))

    def _check_determinism(self) -> None:
        """Refuse a module that answers the same input in two ways, or that remembers what it was asked."""
        example = self.build_example()
        before = copy.deepcopy(self.module.state_dict())
        with torch.no_grad():
            first, second = self.module(*example), self.module(*example)
        if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True)):
            raise ModelError(
                "the module answers the same input in two ways",
                expected="the same values twice",
                got="others",
                remedy="take what is random out of its forward",
            )
        changed = [name for name, value in self.module.state_dict().items() if not torch.equal(value, before[name])]
        if changed:
            raise ModelError(
                "the module changes itself when it is asked",
                expected="the same parameters and buffers afterwards",
                got=f"others in {list_some(changed)}",
                remedy="take the assignment out of its forward",
            )

    def _rows_are_independent(self) -> bool:
        sizes = {symbol: limits.choose_example(7) for symbol, limits in self.tensors.sizes.items()}
        rows = [self._make_row(sizes, np.random.default_rng(seed)) for seed in range(3)]
        return self._joins_well(rows)

    def _padding_is_harmless(self, side: Side = "right") -> bool:
        rows = []
        for place, seed in ((7, 0), (3, 1), (5, 2)):
            sizes = {
                symbol: limits.choose_example(place if symbol in self.tensors.padded else 7)
                for symbol, limits in self.tensors.sizes.items()
            }
            rows.append(self._make_row(sizes, np.random.default_rng(seed)))
        return self._joins_well(rows, side)

    def _joins_well(self, rows: Sequence[Row], side: Side = "right") -> bool:
        """Tell whether rows come out of one batch as they come out alone."""
        together = self._run(rows, side)
        alone = [outputs for row in rows for outputs in self._run([row], side)]
        return is_within(compare_tensors(alone, together), TENSOR_TOLERANCES)

    def _run(self, rows: Sequence[Row], side: Side) -> list[Outputs]:
        batch = join_rows(rows, self.signature, self.padding_values, side)
        inputs = [torch.from_numpy(np.ascontiguousarray(batch.feeds[t.name])) for t in self.signature.inputs]
        with torch.no_grad():
            return batch.cut(self.signature.outputs, [output.numpy() for output in self.module(*inputs)])


class FlatModule(nn.Module):
    """A module whose result is a flat tuple of tensors, whatever it was."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self.names = names

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the named outputs, in the order of their names."""
        result = self.module(*inputs)
        if isinstance(result, Mapping):
            missing = [name for name in self.names if name not in result]
            if missing:
                raise ModelError(
                    "the module's result lacks an output",
                    expected=", ".join(self.names),
                    got=", ".join(map(str, result)),
                    remedy="name keys of the result under outputs",
                )
            return tuple(result[name] for name in self.names)
        return tuple(result) if isinstance(result, tuple | list) else (result,)


def build_factory_task(
    entry: str,
    spec_file: Path,
    weights: StateDict | None,
    *,
    build: Callable[[nn.Module, InputSpec], FactoryTask] | None = None,
    unshared: frozenset[str] | None = frozenset(),
) -> FactoryTask:
    """Return the task around what the user's function builds, with `weights` in it where there are any.

    This runs the user's code, which is what it is for.

    Args:
        entry: `package.module:function` or `file.py:function`.
        spec_file: File that describes the inputs.
        weights: Tensors with exactly the names and shapes of the module's state dict; None keeps those that the
            function made.
        build: Makes the task, where that is another than `FactoryTask`, whose clients send the module's own tensors.
        unshared: Names whose values another name of the same tensor may not have; None where nothing tells.

    Raises:
        SettingsError: The entry or the file cannot be used.
        ModelError: The function fails, the weights do not fit, or the module cannot be served.
    """
    spec = read_spec(spec_file)
    if spec.answers is not None and build is None:
        raise SettingsError(
            f"the answers in {spec_file} have no effect without pictures",
            expected="--preprocess RECIPE",
            got="none",
            remedy="pass it, or take them out",
        )
    function = _import_function(entry)
    try:
        module = function(**spec.arguments)
    # Whatever the user's own code raises.
    except Exception as exc:
        raise ModelError(f"{entry} fails", expected="a torch.nn.Module", got=f"{type(exc).__name__}: {exc}") from exc
    if not isinstance(module, nn.Module):
        raise ModelError(f"{entry} does not build a module", expected="a torch.nn.Module", got=type(module).__name__)
    if weights is not None:
        load_weights(module, weights, unshared)
    try:
        return (build or FactoryTask)(module, spec)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as exc:
        raise ModelError(
            f"what {entry} builds cannot take the inputs of {spec_file}",
            expected=", ".join(f"{t.name} {list(t.dims)}" for t in spec.inputs),
            got=f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}",
            remedy="correct the shapes, dtypes and values in that file",
        ) from exc


def read_spec(path: Path) -> InputSpec:
    """Return what a file says of inputs and outputs, checked.

    Raises:
        SettingsError: It cannot be read, or holds something that cannot be used.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise SettingsError(f"{path} cannot be read", expected="a JSON file", got=str(exc).rstrip(".")) from exc
    unknown = sorted(set(content) - set(_SPEC_KEYS)) if isinstance(content, dict) else ["no object"]
    if unknown or not content.get("inputs") or not content.get("outputs"):
        raise SettingsError(
            f"{path} describes no inputs",
            expected="inputs and outputs, and if need be dims, arguments and samples",
            got=", ".join(unknown) or ", ".join(content),
        )
    if not isinstance(content.get("answers"), dict | None):
        raise SettingsError(
            f"the answers in {path} are no object",
            expected='such as {"answers": "labels", "labels": "names.txt"}',
            got=json.dumps(content["answers"])[:80],
        )
    inputs, rules = [], {}
    for name, given in content["inputs"].items():
        inputs.append(_read_input(path, name, given))
        rules[name] = _read_rule(path, name, given)
    symbols = sorted({symbol for tensor in inputs for symbol in tensor.symbols} - {BATCH})
    sizes = {symbol: _read_range(path, symbol, content.get("dims", {}).get(symbol, {})) for symbol in symbols}
    masks = [tensor for tensor in inputs if rules[tensor.name].kind == "mask"]
    padded = tuple(symbol for symbol in symbols if any(symbol in tensor.dims for tensor in masks))
    tensors = InputRules(rules=rules, sizes=sizes, padded=padded)
    if "samples" in content:
        tensors = replace(tensors, samples=_read_samples(path.parent / content["samples"], inputs))
    return InputSpec(
        inputs=tuple(inputs),
        outputs=tuple(content["outputs"]),
        tensors=tensors,
        arguments=content.get("arguments", {}),
        answers=content.get("answers"),
        folder=path.parent,
    )


def _read_input(path: Path, name: str, given: Any) -> TensorSignature:
    shape = given.get("shape") if isinstance(given, dict) else None
    dims: list[Any] = shape if isinstance(shape, list) else [None]
    if not all(isinstance(dim, str) or (isinstance(dim, int) and dim > 0) for dim in dims):
        raise SettingsError(
            f"the shape of {name} in {path} is not valid",
            expected='a list of sizes and names, such as ["batch", "frames", 80]',
            got=repr(shape),
        )
    dtype = given.get("dtype", "float32")
    if dtype not in _DTYPES:
        raise SettingsError(
            f"the dtype of {name} in {path} is unknown", expected="one of " + ", ".join(_DTYPES), got=str(dtype)
        )
    return TensorSignature(name=name, dtype=_DTYPES[dtype], dims=tuple(dims))


def _read_rule(path: Path, name: str, given: Mapping[str, Any]) -> ValueRule:
    values, padding = given.get("values", "normal"), int(given.get("padding", 0))
    if isinstance(values, str) and values in _PLAIN_VALUES:
        return ValueRule(kind=values, padding=padding)  # type: ignore[arg-type]
    if isinstance(values, dict) and len(values) == 1:
        ((kind, limits),) = values.items()
        if kind in ("uniform", "integers") and isinstance(limits, list) and len(limits) == 2:
            return ValueRule(kind=kind, low=limits[0], high=limits[1], padding=padding)
    raise SettingsError(
        f"the values of {name} in {path} are not valid",
        expected=", ".join(_PLAIN_VALUES) + ', {"uniform": [low, high]} or {"integers": [low, below]}',
        got=json.dumps(values),
    )


def _read_range(path: Path, symbol: str, given: Any) -> SizeRange:
    known = {"min": "smallest", "max": "largest", "multiple_of": "multiple_of"}
    if not isinstance(given, dict) or set(given) - set(known) or not all(isinstance(v, int) for v in given.values()):
        raise SettingsError(
            f"the range of {symbol} in {path} is not valid", expected="min, max and multiple_of", got=json.dumps(given)
        )
    limits = SizeRange(**{known[key]: value for key, value in given.items()})
    if limits.smallest < 0 or limits.largest < limits.smallest or limits.multiple_of < 1:
        raise SettingsError(f"the range of {symbol} in {path} is empty", expected="min <= max", got=json.dumps(given))
    return limits


def _read_samples(path: Path, inputs: Sequence[TensorSignature]) -> list[Row]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            columns = {tensor.name: arrays[tensor.name] for tensor in inputs}
    except (OSError, ValueError, KeyError) as exc:
        raise SettingsError(
            f"{path} cannot be read", expected=f"an .npz with {', '.join(t.name for t in inputs)}", got=str(exc)
        ) from exc
    lengths = {len(array) for array in columns.values()}
    kinds = {t.name: np.dtype(str(t.torch_dtype).removeprefix("torch.")) for t in inputs}
    wrong = [name for name, array in columns.items() if array.dtype != kinds[name]]
    if len(lengths) != 1 or wrong:
        raise SettingsError(
            f"the samples in {path} do not fit the inputs",
            expected="as many rows for each, in their dtypes",
            got=", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in columns.items()),
        )
    return [{name: array[index] for name, array in columns.items()} for index in range(lengths.pop())]


def _import_function(entry: str) -> Callable[..., Any]:
    place, separator, name = entry.rpartition(":")
    if not separator or not place or not name:
        raise SettingsError(
            "the factory is not valid", expected="package.module:function or file.py:function", got=entry
        )
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location("modelyard_factory", place)
            assert spec is not None, "Bug: a .py file has a loader"
            assert spec.loader is not None, "Bug: a .py file has a loader"
            module = importlib.util.module_from_spec(spec)
            # So that the file's own dataclasses and pickles find their module.
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        function = getattr(module, name)
    # Whatever the user's own code raises while it is imported.
    except Exception as exc:
        raise SettingsError(
            f"the factory {entry} cannot be imported", got=f"{type(exc).__name__}: {str(exc).rstrip('.')}"
        ) from exc
    if not callable(function):
        raise SettingsError(f"the factory {entry} cannot be called", expected="a function", got=type(function).__name__)
    return function  # type: ignore[no-any-return]


def _check_finite(module: nn.Module) -> None:
    broken = [
        name
        for name, value in module.state_dict().items()
        if value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]
    if broken:
        raise ModelError(
            "the module holds values that are not numbers",
            expected="finite parameters and buffers",
            got=f"NaN or infinity in {list_some(broken)}",
            remedy="train again, or export an earlier checkpoint",
        )
