"""bf16: matrices of half the size, arithmetic in fp32."""

import onnx_ir as ir

from .conversion import Conversion, Converted
from .files import cast_lazily, load_graph, save_graph
from .islands import is_fp32


def write(conversion: Conversion) -> Converted:
    """Write the graph with its matrices stored as bf16 and cast to fp32 in front of whatever reads them.

    Half the file and fp32 arithmetic: ONNX Runtime has no bf16 sums or products on a CPU, so nothing else could be
    verified there, and on load it folds the casts, after which it is as fast and needs as much memory as fp32. What a
    bf16 rounding of the weights does to the answers is thereby exactly what is measured. Biases, norms and scalars
    stay fp32: they weigh nothing.
    """
    model = load_graph(conversion.source)
    graph = model.graph
    for value in list(graph.initializers.values()):
        if not is_fp32(value) or value.const_value is None or len(value.const_value.shape) < 2:
            continue
        name = str(value.name)
        del graph.initializers[name]
        stored = ir.Value(
            name=f"{name}_bf16",
            const_value=cast_lazily(value.const_value, ir.DataType.BFLOAT16),
            shape=value.shape,
            type=ir.TensorType(ir.DataType.BFLOAT16),
        )
        graph.register_initializer(stored)
        cast = ir.node("Cast", [stored], attributes={"to": ir.DataType.FLOAT}, name=f"{name}_to_fp32")
        cast.outputs[0].dtype, cast.outputs[0].shape = ir.DataType.FLOAT, value.shape
        value.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
        cast.outputs[0].name = name
        graph.insert_before(graph[0], cast)
    save_graph(model, conversion.destination, external_above_bytes=conversion.external_above_bytes)
    return Converted(quality=conversion.measure(conversion.destination))
