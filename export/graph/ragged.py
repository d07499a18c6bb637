"""A graph that takes rows of different lengths one behind another, as Triton's batcher joins them: a ragged batch.

The first nodes lay the rows out as the graph has always taken them, padded to the longest. Native backends hand over
each ragged input flat, and the shape of every row beside it (`batch_input` of the kind `BATCH_ITEM_SHAPE`;
https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/ragged_batching.html).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ..signature import ROW_SHAPES, ModelSignature
from ..targets import Target
from .files import Feed, read_graph, save_graph
from .onnx_export import check_graph

_PADDED = "modelyard_padded_{}"


def write_ragged(
    source: Path, signature: ModelSignature, padding: Mapping[str, int], path: Path, target: Target
) -> None:
    """Write the graph at `source` to `path`, in another folder, so that it takes rows one behind another.

    Args:
        source: Graph with the inputs of the signature, each [batch, seq_len]; its weights may lie in other files.
        signature: One whose rows can be told apart by their lengths; see `ModelSignature.ragged`.
        padding: Input name → what stands in its padding, 0 where it is not named.
        path: Where the file goes; large weights go into a second one beside it.
        target: Triton release whose ONNX Runtime must load the file.

    Raises:
        GraphError: What was written is not what the signature asks for.
    """
    model = read_graph(source)
    _prepend_padding(model.graph, signature, padding)
    save_graph(model, path)
    check_graph(path, signature.ragged, target)


def flatten_rows(feed: Feed) -> dict[str, Any]:
    """Return the inputs of a ragged graph for a padded batch.

    Every second row keeps its padding, as a row does that shares its request with a longer one; the others lose what
    they have of it behind their tokens. Padding in front of tokens may have moved their positions, and stays.

    Args:
        feed: Input name → int64 [batch, seq_len], one of them the mask.
    """
    mask = feed["attention_mask"]
    # Wherever a token is still to come.
    kept = mask[:, ::-1].cumsum(axis=1)[:, ::-1] > 0
    kept[1::2] = True
    shapes = kept.sum(axis=1, dtype=np.int32)[:, np.newaxis]
    return {name: values[kept] for name, values in feed.items()} | {ROW_SHAPES: shapes}


def _prepend_padding(graph: ir.Graph, signature: ModelSignature, padding: Mapping[str, int]) -> None:
    def constant(name: str, values: Any) -> ir.Value:
        value = ir.Value(name=f"modelyard_{name}", const_value=ir.tensor(np.array(values, np.int64)))
        assert value.const_value is not None
        value.const_value.name = value.name
        graph.register_initializer(value)
        return value

    shapes = ir.Value(name=ROW_SHAPES)
    (signed,) = [tensor for tensor in signature.ragged.inputs if tensor.name == ROW_SHAPES]
    shapes.shape, shapes.dtype = ir.Shape(signed.dims), ir.DataType.INT32
    nodes: list[ir.Node] = []

    def add(kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        nodes.append(ir.node(kind, list(inputs), attributes=attributes))
        return nodes[-1].outputs[0]

    zero, one = constant("ragged_zero", 0), constant("ragged_one", 1)
    first = constant("ragged_first", [0])
    # [batch, 1]: how many tokens each row has, and how many come before it.
    lengths = add("Cast", shapes, to=ir.DataType.INT64)
    starts = add("CumSum", lengths, zero, exclusive=1)
    longest = add("ReduceMax", lengths, keepdims=0)
    # [1, seq_len]
    steps = add("Unsqueeze", add("Range", zero, longest, one), first)
    is_token = add("Less", steps, lengths)
    places = add("Where", is_token, add("Add", starts, steps), zero)
    # Inputs that differ in length would move the rows behind them: ONNX Runtime refuses another number of values.
    total = add("Unsqueeze", add("ReduceSum", lengths, keepdims=0), first)
    by_name = {value.name: value for value in graph.inputs}
    flat = signature.ragged
    for index, tensor in enumerate(signature.inputs):
        old = by_name[tensor.name]
        given = ir.Value(name=tensor.name, shape=ir.Shape(flat.inputs[index].dims), type=old.type)
        filled = constant(f"ragged_padding_{index}", padding.get(tensor.name, 0))
        padded = add("Where", is_token, add("Gather", add("Reshape", given, total), places), filled)
        padded.shape, padded.type = old.shape, old.type
        old.name = None
        padded.name = _PADDED.format(tensor.name)
        ir.convenience.replace_all_uses_with(old, padded)
        graph.inputs[index] = given
    graph.inputs.append(shapes)
    graph.insert_before(graph[0], nodes)
