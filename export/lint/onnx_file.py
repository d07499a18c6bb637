"""What an ONNX file says about itself, read without its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    import onnx

_MAX_BYTES = 1 << 31

# ONNX element type → what a configuration calls it (triton-inference-server/onnxruntime_backend, onnxruntime_utils.cc).
TRITON_TYPES = {
    1: "TYPE_FP32",
    2: "TYPE_UINT8",
    3: "TYPE_INT8",
    4: "TYPE_UINT16",
    5: "TYPE_INT16",
    6: "TYPE_INT32",
    7: "TYPE_INT64",
    8: "TYPE_STRING",
    9: "TYPE_BOOL",
    10: "TYPE_FP16",
    11: "TYPE_FP64",
    12: "TYPE_UINT32",
    13: "TYPE_UINT64",
}

# Operators that every ONNX Runtime has; a TensorRT provider adds those of its plugins.
KNOWN_DOMAINS = {
    *("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview", "ai.onnx.preview.training"),
    *(
        "com.microsoft",
        "com.microsoft.nchwc",
        "com.microsoft.experimental",
        "com.microsoft.dml",
        "com.ms.internal.nhwc",
    ),
    *("org.pytorch.aten", "trt.plugins"),
}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """An input or output of a graph.

    Attributes:
        dtype: What a configuration calls its type; empty for one that Triton has no word for.
        dims: Its dimensions, batch included, -1 where they have no number; None where the file says nothing of them.
    """

    name: str
    dtype: str
    dims: list[int] | None


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What the rules ask of an ONNX file.

    Attributes:
        overridable: Names of inputs that have a value in the file.
        opset: Version of the default operator set.
        foreign: Domain → an operator of it, of operators that neither ONNX Runtime nor the file itself defines.
        external: Files beside the graph that its weights lie in.
        embedding_rows: Rows of the table that `input_ids` looks up, 0 where there is none.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    overridable: set[str]
    opset: int
    ir_version: int
    foreign: dict[str, str]
    external: list[str]
    embedding_rows: int


def read(path: Path) -> Graph | str:
    """Return what an ONNX file says, or why it is not one."""
    # Takes half a second, which only repositories with such a file shall wait for.
    import onnx

    file = path / "model.onnx" if path.is_dir() else path
    if not file.is_file():
        return "it is not a regular file"
    if file.stat().st_size > _MAX_BYTES:
        return "it has more than the 2 GiB that protobuf reads; weights can lie in a file beside it"
    try:
        proto = onnx.load(str(file), load_external_data=False)
    except (DecodeError, OSError) as exc:
        return " ".join(str(exc).split()) or "it cannot be read"
    graph = proto.graph
    if not graph.output:
        return "it has no outputs"
    initialized = {tensor.name for tensor in graph.initializer}
    opsets = {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import}
    return Graph(
        inputs=[_read_tensor(value) for value in graph.input if value.name not in initialized],
        outputs=[_read_tensor(value) for value in graph.output],
        overridable={value.name for value in graph.input if value.name in initialized},
        opset=opsets.get("ai.onnx", 0),
        ir_version=proto.ir_version,
        foreign=_find_foreign(proto),
        external=sorted(
            {entry.value for tensor in graph.initializer for entry in tensor.external_data if entry.key == "location"}
        ),
        embedding_rows=_count_rows(graph),
    )


def _read_tensor(value: onnx.ValueInfoProto) -> Tensor:
    tensor = value.type.tensor_type
    dims = None
    if tensor.HasField("shape"):
        dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
    return Tensor(name=value.name, dtype=TRITON_TYPES.get(tensor.elem_type, ""), dims=dims)


def _find_foreign(proto: onnx.ModelProto) -> dict[str, str]:
    defined = {(function.domain, function.name) for function in proto.functions}
    found: dict[str, str] = {}
    waiting: list[Sequence[Any]] = [proto.graph.node, *(function.node for function in proto.functions)]
    while waiting:
        for node in waiting.pop():
            if node.domain not in KNOWN_DOMAINS and (node.domain, node.op_type) not in defined:
                found.setdefault(node.domain, node.op_type)
            waiting += [attribute.g.node for attribute in node.attribute if attribute.HasField("g")]
    return found


def _count_rows(graph: onnx.GraphProto) -> int:
    """Return the rows of the table of which `input_ids` picks some, directly or after a cast."""
    ids = {"input_ids"}
    tables = {tensor.name: tensor.dims for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type in ("Cast", "Reshape", "Identity", "Unsqueeze", "Squeeze") and node.input[0] in ids:
            ids.update(node.output)
        if node.op_type == "Gather" and node.input[1] in ids and len(tables.get(node.input[0], ())) == 2:
            return int(tables[node.input[0]][0])
    return 0
