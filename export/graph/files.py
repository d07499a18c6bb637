"""ONNX graphs on disk: loaded without copying their weights, written with the same bytes each time."""

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes import common

from ..errors import PrecisionError
from .onnx_export import EXTERNAL_ABOVE_BYTES, PROVENANCE_PREFIX

# Input name → values, as ONNX Runtime takes them.
Feed = Mapping[str, npt.NDArray[Any]]

# Smaller tensors stay in the graph's file, where shape inference can read them.
_EXTERNAL_TENSOR_BYTES = 1024

# From which size of a file a look for what is not needed any more, of half a second, is worth it.
_LARGE_BYTES = 16 << 20


def read_graph(path: Path) -> ir.Model:
    """Return the graph as it is written; weights in other files stay there.

    Of a large file those before it are let go of first, for their nodes and values name one another: an export with 90
    MB of weights in its file held 0.6 GB of such graphs, until Python came to look for them.
    """
    if path.stat().st_size > _LARGE_BYTES:
        gc.collect()
    return ir.load(path)


def load_graph(path: Path) -> ir.Model:
    """Return the graph with every constant as an initializer and every value typed; weights in other files stay there.

    Raises:
        PrecisionError: A value's type cannot be determined, and so neither can what precision does to it.
    """
    model = read_graph(path)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.NameFixPass()(model)
    if any(value.dtype is None for node in model.graph for value in node.outputs):
        common.ShapeInferencePass()(model)
    untyped = [value.name for node in model.graph for value in node.outputs if value.dtype is None and value.uses()]
    if untyped:
        raise PrecisionError(
            f"{path.name} does not say of which type {untyped[0]} is",
            expected="a type on every value",
            got=f"{len(untyped)} values without one",
            remedy="export it again with the plain exporter",
        )
    return model


def save_graph(model: ir.Model, path: Path, *, external_above_bytes: int = EXTERNAL_ABOVE_BYTES) -> None:
    """Write a graph to `path`, with no metadata but what it was made of, its weights to `path` + `.data` if many.

    One tensor at a time is in memory where they go into a file of their own.
    """
    common.TopologicalSortPass()(model)
    # Such as the quantizer's remarks, which are not part of the model.
    common.ClearMetadataAndDocStringPass()(model)
    for name in [name for name in model.metadata_props if not name.startswith(PROVENANCE_PREFIX)]:
        del model.metadata_props[name]
    model.producer_name = model.producer_version = None
    tensors = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    if sum(tensor.nbytes for tensor in tensors if tensor is not None) > external_above_bytes:
        ir.save(model, path, external_data=f"{path.name}.data", size_threshold_bytes=_EXTERNAL_TENSOR_BYTES)
    else:
        ir.external_data.load_to_model(model)
        ir.save(model, path)


def find_files(path: Path) -> list[Path]:
    """Return a graph's file and those that its weights lie in."""
    tensors = [value.const_value for graph in read_graph(path).graphs() for value in graph.initializers.values()]
    locations = {str(tensor.location) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}
    return [path, *(path.parent / location for location in sorted(locations))]


def count_bytes(path: Path) -> int:
    """Return the size of a graph and its weights."""
    return sum(file.stat().st_size for file in find_files(path))


def open_session(path: Path, *, is_in_order: bool = False) -> onnxruntime.InferenceSession:
    """Return the file in ONNX Runtime, on one thread: sums in the same order on every machine, and comparable times.

    Of a model whose weights lie in other files, no second copy in the order of multiplication is held.

    Args:
        path: The graph.
        is_in_order: Whether nodes run in the order in which they stand, as far as they can, and not in ONNX Runtime's.

    Raises:
        PrecisionError: ONNX Runtime refuses the file.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    if is_in_order:
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    # Only errors are logged, and it raises those as well.
    options.log_severity_level = 3
    if len(find_files(path)) > 1:
        options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    # ONNX Runtime raises one class per kind of fault, without a common base of its own.
    except Exception as exc:
        raise PrecisionError(
            f"ONNX Runtime cannot load {path.name}", got=str(exc).strip().split("\n", 1)[0].rstrip(".")
        ) from exc


def run_feeds(
    session: onnxruntime.InferenceSession, feeds: Sequence[Feed], outputs: Sequence[str] | None = None
) -> list[list[npt.NDArray[Any]]]:
    """Return what the session answers to each feed."""
    names = [value.name for value in session.get_inputs()]
    return [session.run(outputs, {name: feed[name] for name in names}) for feed in feeds]


def measure_ranges(
    source: Path, feeds: Sequence[Feed], folder: Path, *, external_above_bytes: int = EXTERNAL_ABOVE_BYTES
) -> dict[str, float]:
    """Return value name → the largest magnitude of any fp32 value inside the graph, over all feeds.

    Infinite where it is infinite or NaN. Each value is reduced inside the graph as soon as it is there, so that little
    more memory is needed than for an ordinary run: reduced in the order of ONNX Runtime's own choice, after everything
    else, those of 12 layers on 2,048 tokens took 5.5 GB in place of 0.9.

    Args:
        source: Plain fp32 graph.
        feeds: What to run.
        folder: Where a temporary copy of the graph may lie, for the length of the call.
        external_above_bytes: Size above which the weights lie in a file of their own.
    """
    model = load_graph(source)
    graph = model.graph
    zero = ir.Value(name="range_zero", const_value=ir.tensor(np.zeros(1, np.float32), name="range_zero"))
    flat = ir.Value(name="range_flat", const_value=ir.tensor(np.array([-1]), name="range_flat"))
    graph.register_initializer(zero)
    graph.register_initializer(flat)
    values = [value for node in graph for value in node.outputs if value.dtype == ir.DataType.FLOAT and value.name]
    graph.outputs.clear()
    for index, value in enumerate(values):
        magnitude = ir.node("Abs", [value])
        row = ir.node("Reshape", [magnitude.outputs[0], flat])
        # With a zero behind it, for the largest of no values at all is an error.
        padded = ir.node("Concat", [row.outputs[0], zero], attributes={"axis": 0})
        largest = ir.node("ReduceMax", [padded.outputs[0]], attributes={"keepdims": 0})
        output = largest.outputs[0]
        output.name, output.dtype, output.shape = f"range_{index}", ir.DataType.FLOAT, ir.Shape([])
        producer = value.producer()
        assert producer is not None, "Bug: a node's output without a producer"
        graph.insert_after(producer, [magnitude, row, padded, largest])
        graph.outputs.append(output)
    with TemporaryDirectory(prefix=".precision-", dir=folder) as workspace:
        path = Path(workspace) / "ranges.onnx"
        save_graph(model, path, external_above_bytes=external_above_bytes)
        answers = run_feeds(open_session(path, is_in_order=True), feeds)
    largest_of = np.max(np.nan_to_num(np.array(answers, dtype=np.float64), nan=np.inf, posinf=np.inf), axis=0)
    return {str(value.name): float(most) for value, most in zip(values, largest_of, strict=True)}


def cast_lazily(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.LazyTensor:
    """Return a tensor that is cast when it is written, so that one at a time is in memory. Rounds to nearest even."""
    shape = ir.Shape(tensor.shape.numpy())
    return ir.LazyTensor(lambda: ir.tensor(tensor.numpy().astype(dtype.numpy()), dtype=dtype), dtype=dtype, shape=shape)
