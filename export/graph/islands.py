"""Which nodes of a graph must stay fp32 when the rest becomes fp16, and why.

There are five kinds, found from the graph and from its values on real text:

- operators that ONNX does not define for fp16, or that sum squares or take powers, where fp16 overflows or loses
  everything below 6e-5 although input and output look harmless;
- whatever is computed from integers and constants alone: positions, masks, counts. fp16 has no odd number above
  2048. These tensors are small, so fp32 costs nothing;
- readers of a constant that fp16 cannot hold, such as 1e6 or an epsilon of 1e-12, and of everything that such a
  constant is added to or chosen for, as the mask of an attention is, up to the operator that ends it;
- producers and readers of values that came near the largest fp16 on the samples;
- what makes an output and is not a product of matrices: a vector scaled to length 1 keeps that length.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
import onnx_ir as ir

FP16_MAX = float(np.finfo(np.float16).max)

# What was seen on samples may be exceeded on other text: values beyond a quarter of the largest fp16 count as too
# large.
MARGIN = 4.0

# fp16 rounds by 2^-11 at most, so a constant that is off by more than this lost values to over- or underflow.
_MAX_CONSTANT_ERROR = 1e-3

# They sum squares, divide by their roots, take powers, or turn angles: never worth the risk, for all of them together
# are a small part of a transformer's time.
_PRECISE_OPS = frozenset({
    "LayerNormalization", "GroupNormalization", "InstanceNormalization", "BatchNormalization", "RMSNormalization",
    "LpNormalization", "MeanVarianceNormalization", "LRN", "ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1",
    "ReduceL2", "ReduceProd", "ReduceLogSum", "ReduceLogSumExp", "CumSum", "Pow", "Exp", "Log", "Sqrt", "Reciprocal",
    "LogSoftmax", "Sin", "Cos",
})  # fmt: skip

# Through them a constant keeps its size. Softmax, normalisation and products of matrices end it.
_CARRYING_OPS = frozenset({
    "Add", "Sub", "Mul", "Where", "Max", "Min", "Neg", "Identity", "Cast", "Expand", "Tile", "Reshape", "Flatten",
    "Squeeze", "Unsqueeze", "Transpose", "Slice", "Concat", "Split", "Gather", "Pad",
})  # fmt: skip

# Where the time goes, so that they become fp16 even as the last of a graph.
_PRODUCTS = frozenset(["MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum"])

_GRAPHS = frozenset([ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS])
_TENSORS = frozenset([ir.AttributeType.TENSOR, ir.AttributeType.TENSORS, ir.AttributeType.SPARSE_TENSOR])

_LOOKUPS = frozenset(["Gather", "GatherElements", "GatherND"])


def is_fp32(value: ir.Value | None) -> bool:
    """Tell whether a value is there and fp32."""
    return value is not None and value.dtype == ir.DataType.FLOAT


def find_islands(model: ir.Model, ranges: Mapping[str, float]) -> dict[str, str]:
    """Return node name → why it must stay fp32, of the nodes that have an fp32 input or output.

    Args:
        model: Plain fp32 graph, every value typed, every constant an initializer, nodes in order.
        ranges: Value name → the largest magnitude on the samples.
    """
    graph = model.graph
    constants = {value.name: _judge_constant(value) for value in graph.initializers.values() if is_fp32(value)}
    carried = {name for name, reason in constants.items() if reason.startswith("beyond")}
    indices: set[str | None] = set()
    islands = {}
    for node in graph:
        if not any(is_fp32(value) for value in (*node.inputs, *node.outputs)):
            continue
        if _computes_indices(node, indices):
            indices |= {value.name for value in node.outputs}
        for reason in _find_reasons(node, model, constants, carried, indices, ranges):
            islands[str(node.name)] = reason
            break
        if node.op_type in _CARRYING_OPS and any(value is not None and value.name in carried for value in node.inputs):
            carried |= {value.name for value in node.outputs}
    return islands | dict.fromkeys(_find_between(model, islands), "between others of these")


def _find_between(model: ir.Model, islands: Mapping[str, str]) -> list[str]:
    """Return the names of the nodes that read only what islands made, and that only islands read.

    As fp16 they would cost two casts and round what nothing else asks them to, such as the norm that a vector is
    divided by.
    """
    kept = set(islands)

    def makes_fp32(value: ir.Value | None) -> bool:
        producer = None if value is None else value.producer()
        return producer is not None and producer.name in kept

    nodes = [node for node in model.graph if node.name not in islands and node.op_type not in _PRODUCTS]
    for node in nodes:
        read = [value for value in node.inputs if value is not None and is_fp32(value) and not value.is_initializer()]
        if read and all(makes_fp32(value) for value in read):
            kept.add(str(node.name))
    # What others read is dropped from the end, and with it whatever it would have fed.
    for node in reversed(nodes):
        made = [value for value in node.outputs if is_fp32(value)]
        readers = [use.node for value in made for use in value.uses()]
        if any(reader.name not in kept for reader in readers) or any(value.is_graph_output() for value in made):
            kept.discard(str(node.name))
    return sorted(kept - set(islands))


def _find_reasons(
    node: ir.Node,
    model: ir.Model,
    constants: Mapping[str | None, str],
    carried: set[str | None],
    indices: set[str | None],
    ranges: Mapping[str, float],
) -> Iterator[str]:
    if not _takes_fp16(node, model.graph.opset_imports):
        yield f"{node.op_type} is not defined for fp16"
    if node.op_type in _PRECISE_OPS:
        yield f"{node.op_type} is summed or scaled in fp32"
    read = [value for value in node.inputs if is_fp32(value)]
    for value in read:
        if value is not None and constants.get(value.name):
            yield f"reads a constant {constants[value.name]}"
    if any(value is not None and value.name in carried for value in read):
        yield "reads what a constant beyond fp16 went into, such as a mask"
    if any(value.name in indices for value in node.outputs):
        yield "computed from integers and constants alone"
    if node.op_type not in _PRODUCTS and any(value.is_graph_output() for value in node.outputs):
        yield "makes an output"
    seen = [ranges.get(str(value.name), 0.0) for value in (*read, *node.outputs) if value is not None]
    if max(seen, default=0.0) > FP16_MAX / MARGIN:
        yield f"values up to {max(seen):.3g} on the samples"


def _judge_constant(value: ir.Value) -> str:
    """Return how fp16 cannot hold an initializer, or nothing where it can."""
    assert value.const_value is not None, f"Bug: initializer {value.name} without values"
    exact = value.const_value.numpy()
    if not exact.size:
        return ""
    largest = float(np.abs(exact).max())
    # Infinities fp16 has, but what they are added to is to be kept apart as well.
    if not largest <= FP16_MAX:
        return f"beyond fp16, {largest:.3g}"
    error = float(np.linalg.norm(exact - exact.astype(np.float16).astype(np.float32)))
    length = float(np.linalg.norm(exact))
    return "that fp16 rounds too much" if error > _MAX_CONSTANT_ERROR * length else ""


def _computes_indices(node: ir.Node, indices: set[str | None]) -> bool:
    """Tell whether a node's result comes from integers and constants alone, and not a vector looked up in a table."""
    if node.op_type in _LOOKUPS and is_fp32(node.inputs[0]) and _is_table(node.inputs[0]):
        return False
    # A branch or a loop reads more than its inputs.
    if any(attribute.type in _GRAPHS for attribute in node.attributes.values()):
        return False
    read = [value for value in node.inputs if value is not None]
    known = all(not is_fp32(value) or value.is_initializer() or value.name in indices for value in read)
    # From constants alone it is a weight, such as a transposed one.
    return known and any(not value.is_initializer() for value in read)


def _is_table(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and value.shape is not None and len(value.shape) > 1


def _takes_fp16(node: ir.Node, opset_imports: Mapping[str, int]) -> bool:
    """Tell from the operator's definition whether every fp32 input and output may be fp16 as well.

    A node with a graph, a tensor or a type in its attributes has more to convert than its inputs: it stays fp32.
    """
    kinds = {attribute.type for attribute in node.attributes.values()}
    if kinds & (_GRAPHS | _TENSORS) or "dtype" in node.attributes:
        return False
    try:
        schema = onnx.defs.get_schema(node.op_type, opset_imports[node.domain], node.domain)
    # Of another domain, or a function of the model.
    except (onnx.defs.SchemaError, KeyError):
        return False
    allowed = {item.type_param_str: item.allowed_type_strs for item in schema.type_constraints}
    for values, parameters in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for index, value in enumerate(values):
            # The last parameter may stand for any number of values.
            kind = parameters[min(index, len(parameters) - 1)].type_str
            if is_fp32(value) and "tensor(float16)" not in allowed.get(kind, [kind]):
                return False
    return True
