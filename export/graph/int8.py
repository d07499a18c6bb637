"""Dynamic int8: weights per output channel, activations per tensor as they come, the most sensitive nodes in fp32.

The quantizer of ONNX Runtime quantizes everything once. Each candidate is that graph with some nodes put back as they
were, which is the same graph as the quantizer makes when it leaves them out, and a hundred times cheaper.

Not guaranteed: activations are scaled by the largest value in the whole batch, so an answer depends on its batch mates
and on padding, within the same quality.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx_ir.passes import common
from onnxruntime.quantization import QuantType, quantize_dynamic

from ..errors import PrecisionError, format_apart
from .conversion import Conversion, Converted, Quality
from .files import Feed, count_bytes, load_graph, open_session, read_graph, run_feeds, save_graph

# What the quantizer is given: products with a constant matrix, and tables. Its convolutions take unsigned weights
# only on a CPU, and are slower there than fp32.
_OPS = ("MatMul", "Gather")
# A Gemm becomes a MatMul and a sum first. Operator → which of its inputs is the constant.
_READ_AS = {"MatMul": 1, "Gemm": 1, "Gather": 0}

# Tables below this are put back: a token type's or a position's row errs as much as a word's, and saves nothing.
_MIN_TABLE_BYTES = 1_000_000

# Runs of the graph that the ranking may take: each node once on as many feeds as fit, at least one.
_RANKING_RUNS = 600

# The input that chooses int8 or fp32 for each node while they are ranked.
_CHOICE = "use_int8"


def write(conversion: Conversion) -> Converted:
    """Write the graph as int8, with the fewest nodes in fp32 with which the bounds hold.

    Nodes are ranked by how far the answers move when that node alone is int8. Then bisection finds how many of the
    first must stay fp32, every step measured on a real file: about log2 of the number of nodes, plus two.

    Raises:
        PrecisionError: Nothing can be quantized, or the bounds hold only when nothing is.
    """
    source, destination, limit = conversion.source, conversion.destination, conversion.external_above_bytes
    conversion.on_step("ranking nodes by what int8 does to them")
    with TemporaryDirectory(prefix=".precision-", dir=destination.parent) as name:
        folder = Path(name)
        quantized = _quantize(source, folder, limit)
        nodes, others = _find_quantized(source, quantized)
        if not nodes:
            raise PrecisionError(
                f"nothing in {source.name} can become int8",
                expected="products with a constant matrix, or tables",
                got="none",
                remedy="export with --precision fp32",
            )
        ranking = _rank(source, quantized, nodes, conversion.feeds, folder, limit)

        def write_candidate(count: int, path: Path) -> None:
            model = _restore(source, quantized, [*ranking[:count], *others])
            save_graph(model, path, external_above_bytes=limit)

        qualities: dict[int, Quality] = {}

        def holds(count: int) -> bool:
            write_candidate(count, folder / "candidate.onnx")
            qualities[count] = conversion.measure(folder / "candidate.onnx")
            return qualities[count].holds(conversion.bounds[qualities[count].metric])

        count = _find_fewest(len(ranking) - 1, holds)
        if count is None:
            best = max(qualities.values(), key=lambda quality: quality.worst)
            bound = conversion.bounds[best.metric]
            raise PrecisionError(
                f"int8 does not hold the quality asked for, whichever of {len(ranking)} nodes stay fp32",
                expected=f"{best.metric.replace('_', ' ')} >= {bound:g}",
                got=f"{format_apart(best.worst, bound, 6)} at best",
                remedy="ask for less, or export with --precision fp16",
            )
        write_candidate(count, destination)
    kept = others | dict.fromkeys(ranking[:count], "sensitive to int8")
    return Converted(quality=qualities[count], kept_fp32=kept, measured=len(qualities))


def _find_fewest(most: int, holds: Callable[[int], bool]) -> int | None:
    """Return the smallest count from 0 to `most` that holds, or None; every one that is returned was tried.

    More nodes in fp32 are taken to be no worse, which is so but for noise: the count returned holds in any case.
    """
    if holds(0):
        return 0
    if most < 1 or not holds(most):
        return None
    fails, works = 0, most
    while works - fails > 1:
        middle = (fails + works) // 2
        if holds(middle):
            works = middle
        else:
            fails = middle
    return works


def _quantize(source: Path, folder: Path, external_above_bytes: int) -> Path:
    """Let ONNX Runtime quantize everything."""
    plain, quantized = folder / "plain.onnx", folder / "quantized.onnx"
    shared = _write_plain(source, plain, external_above_bytes)
    try:
        with _keep_quiet():
            quantize_dynamic(
                plain,
                quantized,
                op_types_to_quantize=list(_OPS),
                per_channel=True,
                # Of signed weights a CPU without VNNI adds two products in 16 bits, which saturate: another quality
                # than the one measured here. Unsigned ones give every CPU the same integers, and are as fast with VNNI.
                weight_type=QuantType.QUInt8,
                nodes_to_exclude=shared,
                use_external_data_format=count_bytes(plain) > external_above_bytes,
            )
    # It raises whatever its parts raise.
    except Exception as exc:
        raise PrecisionError(
            f"ONNX Runtime cannot quantize {source.name}", got=str(exc).strip().split("\n", 1)[0].rstrip(".")
        ) from exc
    before, after = (onnx.load(path, load_external_data=False) for path in (plain, quantized))
    opsets = [{item.domain: item.version for item in model.opset_import} for model in (before, after)]
    assert opsets[0] == opsets[1], f"Bug: the quantizer changed opsets from {opsets[0]} to {opsets[1]}"
    assert before.ir_version == after.ir_version, "Bug: the quantizer changed the IR version"
    return quantized


def _write_plain(source: Path, path: Path, external_above_bytes: int) -> list[str]:
    """Write the graph as the quantizer takes it, and return the names of the nodes that it is to leave alone.

    A copy, for its temporary files lie beside its input.
    """
    model = load_graph(source)
    shared = _find_shared(model)
    for name in shared:
        node = model.graph.node(name)
        if node.op_type == "Gemm":
            # It transposes the matrix of a Gemm for all readers of that matrix, unless the matrix is not a constant.
            held = ir.node("Identity", [node.inputs[1]])
            node.replace_input_with(1, held.outputs[0])
            model.graph.insert_before(node, held)
    save_graph(model, path, external_above_bytes=external_above_bytes)
    proto = onnx.load(path, load_external_data=False)
    # It transposes it under the same name, and then stumbles over the shape that is recorded.
    constants = {tensor.name for tensor in proto.graph.initializer}
    shapes = [item for item in proto.graph.value_info if item.name not in constants]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(shapes)
    onnx.save(proto, path)
    return shared


@contextmanager
def _keep_quiet() -> Iterator[None]:
    """Keep the quantizer from recommending a preprocessing through the root logger, and from giving that a handler."""
    logger, handler = logging.getLogger(), logging.NullHandler()
    disabled = logger.disabled
    logger.disabled = True
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.disabled = disabled


def _find_shared(model: ir.Model) -> list[str]:
    """Return the names of the nodes whose matrix or table other nodes read as well, such as a tied output embedding.

    Quantized, it would be converted back to fp32, whole, in every run.
    """
    shared = []
    for node in model.graph:
        constant = node.inputs[_READ_AS[node.op_type]] if node.op_type in _READ_AS else None
        if constant is None or not constant.is_initializer():
            continue
        others = [use for use in constant.uses() if _READ_AS.get(use.node.op_type) != use.idx]
        kinds = {use.node.op_type == "Gather" for use in constant.uses()}
        if others or len(kinds) > 1 or constant.is_graph_output():
            shared.append(str(node.name))
    return shared


def _find_quantized(source: Path, quantized: Path) -> tuple[list[str], dict[str, str]]:
    """Return the names of the nodes that the quantizer changed, and of those among them to put back, with the reason.

    All nodes are in the order of the graph.
    """
    made = ir.convenience.create_value_mapping(read_graph(quantized).graph)
    model = load_graph(source)
    others = dict.fromkeys(_find_shared(model), "its constant is read by other nodes as well")
    nodes: list[str] = []
    for node in model.graph:
        name, output, table = str(node.name), node.outputs[0], node.inputs[0] if node.inputs else None
        if node.op_type not in _READ_AS or name in others or output.name not in made:
            continue
        if not _comes_from_int8(made[output.name]):
            continue
        if (
            node.op_type == "Gather"
            and table is not None
            and table.const_value is not None
            and table.const_value.nbytes < _MIN_TABLE_BYTES
        ):
            others[name] = "small table"
        else:
            nodes.append(name)
    return nodes, others


def _comes_from_int8(value: ir.Value) -> bool:
    """Tell whether a value is made of an integer product, scaled and with a bias at most, or of an int8 table."""
    node = value.producer()
    for _ in range(4):
        if node is None:
            return False
        if node.op_type in ("MatMulInteger", "DequantizeLinear"):
            return True
        if node.op_type not in ("Add", "Mul", "Cast") or node.inputs[0] is None:
            return False
        node = node.inputs[0].producer()
    return False


def _restore(source: Path, quantized: Path, names: Sequence[str]) -> ir.Model:
    """Return the quantized graph with the nodes of these names as they are in the fp32 graph."""
    model = read_graph(quantized)
    original = load_graph(source).graph
    values = ir.convenience.create_value_mapping(model.graph)
    for name in names:
        after = _copy_node(original, name, model.graph, values)
        before = values[str(after.name)]
        before.replace_all_uses_with(after, replace_graph_outputs=True)
        before.name, values[str(after.name)] = f"{after.name}_int8", after
    common.RemoveUnusedNodesPass()(model)
    return model


def _copy_node(original: ir.Graph, name: str, graph: ir.Graph, values: dict[str, ir.Value]) -> ir.Value:
    """Put a node of the fp32 graph, and the constants it reads, into the quantized graph; return its output."""
    node = original.node(name)
    inputs: list[ir.Value | None] = []
    for value in node.inputs:
        if value is not None and value.is_initializer() and value.name not in graph.initializers:
            constant = ir.Value(name=value.name, const_value=value.const_value, shape=value.shape, type=value.type)
            graph.register_initializer(constant)
            values[str(value.name)] = constant
        inputs.append(None if value is None else values[str(value.name)])
    copied = ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), name=f"{name}_fp32")
    output = copied.outputs[0]
    output.name, output.type, output.shape = node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape
    graph.append(copied)
    return output


def _rank(
    source: Path, quantized: Path, nodes: Sequence[str], feeds: Sequence[Feed], folder: Path, external_above_bytes: int
) -> list[str]:
    """Return the nodes, first the one that pays most for staying fp32.

    That is the squared distance by which all outputs move when this node alone is int8, in parts of the bytes that it
    needs in fp32: those cost size and, in a product, time.
    """
    path = folder / "choices.onnx"
    save_graph(_build_choices(source, quantized, nodes), path, external_above_bytes=external_above_bytes)
    session = open_session(path)
    feeds = feeds[: max(1, _RANKING_RUNS // len(nodes))]

    def answer(use_int8: npt.NDArray[np.bool_]) -> list[npt.NDArray[np.float64]]:
        answers = run_feeds(session, [{**feed, _CHOICE: use_int8} for feed in feeds])
        return [output.astype(np.float64) for outputs in answers for output in outputs]

    truth = answer(np.zeros(len(nodes), dtype=bool))
    graph = load_graph(source).graph
    gains = []
    for name, alone in zip(nodes, np.eye(len(nodes), dtype=bool), strict=True):
        error = sum(float(np.square(got - want).sum()) for got, want in zip(answer(alone), truth, strict=True))
        constants = [value.const_value for value in graph.node(name).inputs if value is not None]
        # NaN is as far off as can be.
        gains.append(
            float(np.nan_to_num(error, nan=np.inf)) / sum(tensor.nbytes for tensor in constants if tensor is not None)
        )
    # The sort keeps the graph's order among equals.
    return [nodes[index] for index in sorted(range(len(nodes)), key=lambda index: -gains[index])]


def _build_choices(source: Path, quantized: Path, nodes: Sequence[str]) -> ir.Model:
    """Return a graph with both forms of every node and an input that chooses between them: it is loaded only once."""
    model, original = read_graph(quantized), load_graph(source).graph
    graph = model.graph
    values = ir.convenience.create_value_mapping(graph)
    choice = ir.Value(name=_CHOICE, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([len(nodes)]))
    graph.inputs.append(choice)
    for index, name in enumerate(nodes):
        plain = _copy_node(original, name, graph, values)
        integer = values[str(plain.name)]
        place = ir.Value(name=f"choice_{index}", const_value=ir.tensor(np.array(index), name=f"choice_{index}"))
        graph.register_initializer(place)
        # Named here: a name that is made up may be that of a constant which is put in later.
        chosen = ir.node("Gather", [choice, place], name=f"choose_{index}")
        chosen.outputs[0].name = f"chosen_{index}"
        merged = ir.node("Where", [chosen.outputs[0], integer, plain], name=f"merge_{index}")
        integer.replace_all_uses_with(merged.outputs[0], replace_graph_outputs=True)
        merged.replace_input_with(1, integer)
        output = merged.outputs[0]
        output.type, output.shape = plain.type, plain.shape
        output.name, integer.name, plain.name = plain.name, f"{plain.name}_int8", f"{plain.name}_fp32"
        # Whatever is put in later reads the one that was chosen.
        values[str(output.name)] = output
        graph.extend([chosen, merged])
    return model
