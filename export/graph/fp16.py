"""fp16 with islands of fp32, by types on the edges.

Neither `onnxruntime.transformers.float16` nor `onnxconverter_common.float16` is used, for both lose what the islands
are for: the first casts every value between two fp32 nodes to fp16 and back, so 1e5 becomes infinite between them
(ONNX Runtime 1.19.2 to 1.31.1); the second keeps a constant fp32 that both kinds of nodes read, and the file does not
load (1.16.0). A test shows the first.
"""

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from .conversion import Conversion, Converted
from .files import cast_lazily, load_graph, measure_ranges, save_graph
from .islands import find_islands, is_fp32
from .onnx_export import EXTERNAL_ABOVE_BYTES


def write(conversion: Conversion) -> Converted:
    """Write the graph as fp16, with what fp16 cannot hold left in fp32.

    Values that are too large are looked for on the feeds.
    """
    source, destination, limit = conversion.source, conversion.destination, conversion.external_above_bytes
    conversion.on_step("looking for values beyond fp16")
    ranges = measure_ranges(source, conversion.feeds, destination.parent, external_above_bytes=limit)
    islands = find_islands(load_graph(source), ranges)
    write_float16(source, destination, islands, external_above_bytes=limit)
    return Converted(quality=conversion.measure(destination), kept_fp32=islands)


def write_float16(
    source: Path, destination: Path, islands: Mapping[str, str], *, external_above_bytes: int = EXTERNAL_ABOVE_BYTES
) -> None:
    """Write the fp32 graph `source` as fp16, the nodes named in `islands` as they are, inputs and outputs fp32.

    Args:
        source: Plain fp32 graph.
        destination: File of the new graph, in another folder.
        islands: Names of nodes, as `find_islands` returns them.
        external_above_bytes: Size above which the weights lie in a file of their own.
    """
    model = load_graph(source)
    _Converter(model, frozenset(islands)).convert()
    save_graph(model, destination, external_above_bytes=external_above_bytes)


class _Converter:
    """Gives every fp32 value the type of the node that makes it, and casts where a reader wants the other one."""

    def __init__(self, model: ir.Model, islands: frozenset[str]) -> None:
        self.graph = model.graph
        self.names = {value.name for value in (*self.graph.inputs, *self.graph.initializers.values())}
        self.names |= {value.name for node in self.graph.all_nodes() for value in node.outputs}
        self.fp16 = [
            node
            for node in self.graph
            if node.name not in islands and any(is_fp32(value) for value in (*node.inputs, *node.outputs))
        ]
        self.casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def convert(self) -> None:
        """Change the graph in place."""
        converted = set(self.fp16)
        halves = [value for node in self.fp16 for value in node.outputs if is_fp32(value)]
        for node in self.fp16:
            for index, value in enumerate(node.inputs):
                if value is not None and is_fp32(value) and value.producer() not in converted:
                    node.replace_input_with(index, self._give(value, ir.DataType.FLOAT16))
            if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT:
                node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT16)
        for value in halves:
            self._make_fp16(value, converted)
        for name in [name for name, value in self.graph.initializers.items() if not value.uses()]:
            del self.graph.initializers[name]

    def _make_fp16(self, value: ir.Value, converted: set[ir.Node]) -> None:
        """Type a value fp16, and let its fp32 readers, those inside other graphs and the outputs too, read a cast."""
        value.dtype = ir.DataType.FLOAT16
        readers = [(node, index) for node, index in value.uses() if node not in converted]
        if not readers and not value.is_graph_output():
            return
        cast = self._give(value, ir.DataType.FLOAT)
        for node, index in readers:
            node.replace_input_with(index, cast)
        if value.is_graph_output():
            for index, output in enumerate(self.graph.outputs):
                if output is value:
                    self.graph.outputs[index] = cast
            # The contract is the name of the output, not of what is inside.
            value.name, cast.name = cast.name, value.name

    def _give(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return a value as another type: a second initializer, or a cast right behind whatever makes it."""
        if (value, dtype) in self.casts:
            return self.casts[value, dtype]
        name = f"{value.name}_{'fp16' if dtype == ir.DataType.FLOAT16 else 'fp32'}"
        while name in self.names:
            name += "_"
        self.names.add(name)
        if value.is_initializer():
            assert value.const_value is not None, f"Bug: initializer {value.name} without values"
            given = ir.Value(name=name, const_value=cast_lazily(value.const_value, dtype), shape=value.shape)
            given.dtype = dtype
            self.graph.register_initializer(given)
        else:
            cast = ir.node("Cast", [value], attributes={"to": dtype}, name=name)
            given = cast.outputs[0]
            given.name, given.dtype, given.shape = name, dtype, value.shape
            producer = value.producer()
            if producer is None:
                self.graph.insert_before(self.graph[0], cast)
            else:
                self.graph.insert_after(producer, cast)
        self.casts[value, dtype] = given
        return given
