"""From the torch module to an ONNX file that the target's ONNX Runtime loads."""

import contextlib
import inspect
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import GraphError
from ..signature import ModelSignature, TensorSignature
from ..targets import Target, require_fits

# Every target from Triton 24.03 on loads opset 18, and it is the lowest that the exporter writes natively.
OPSET = 18

# From this size on the weights lie in a file of their own. Inside one file protobuf copies them again and again: 1.3 GB
# took 8.9 GB to write and check, where 2.1 GB in a file of their own took 2.8.
EXTERNAL_ABOVE_BYTES = 128 << 20

# How the names begin under which a file says what it was made of.
PROVENANCE_PREFIX = "modelyard."

# The names under which outputs are traced. A name that one of the model's own values has as well would be used twice,
# which the exporter does not notice and ONNX Runtime refuses.
_OUTPUT_PREFIX = "modelyard_output_"


def export_onnx(
    module: nn.Module,
    signature: ModelSignature,
    example: tuple[Tensor, ...],
    path: Path,
    target: Target,
    *,
    is_traced: bool = False,
    provenance: Mapping[str, str] | None = None,
) -> None:
    """Write `module` as ONNX to `path`, and check that the file is what the signature and the target ask for.

    Args:
        module: Takes and returns what the signature says.
        signature: Names and axes of the graph.
        example: Inputs to trace, in the order of the signature. Sizes of 1 may be taken for constants.
        path: Where the file goes; large weights go into a second one beside it.
        target: Triton release whose ONNX Runtime must load the file.
        is_traced: Whether the module is run once and what it did is recorded, which exports more modules and turns
            whatever depends on sizes or values into constants. Only a full verification can tell whether that is right.
        provenance: What it was made of, which the file says of itself (`metadata_props`).

    Raises:
        GraphError: The exporter fails, or the file has other axes, names, opset or IR version than asked for.
    """
    if is_traced:
        _write_traced(module, signature, example, path, provenance or {})
        check_graph(path, signature, target)
        return
    program = _export(module, signature, example)
    # The traced source lines and module names are not part of the model, and would carry paths of this machine.
    ClearMetadataAndDocStringPass()(program.model)
    program.model.graph.name = "main"
    program.model.metadata_props.update(provenance or {})
    _name_outputs(program.model.graph, signature)
    weights = (value.const_value for value in program.model.graph.initializers.values())
    size = sum(tensor.nbytes for tensor in weights if tensor is not None)
    program.save(str(path), external_data=size > EXTERNAL_ABOVE_BYTES)
    check_graph(path, signature, target)


def _write_traced(
    module: nn.Module,
    signature: ModelSignature,
    example: tuple[Tensor, ...],
    path: Path,
    provenance: Mapping[str, str],
) -> None:
    with _quiet():
        try:
            torch.onnx.export(
                module,
                example,
                str(path),
                input_names=[tensor.name for tensor in signature.inputs],
                output_names=[tensor.name for tensor in signature.outputs],
                dynamic_axes={tensor.name: tensor.dynamic_axes for tensor in signature},
                opset_version=OPSET,
                dynamo=False,
            )
        except Exception as exc:
            raise GraphError("the model cannot be traced", got=_find_reason(exc)) from exc
    # Weights in files of their own stay there.
    model = onnx.load(path, load_external_data=False)
    onnx.helper.set_model_props(model, dict(provenance))
    onnx.save(model, path)


def _export(module: nn.Module, signature: ModelSignature, example: tuple[Tensor, ...]) -> torch.onnx.ONNXProgram:
    # String dimensions, not torch.export.Dim: a Dim that the code specialises becomes static without any error.
    axes = tuple(tensor.dynamic_axes for tensor in signature.inputs)
    # The shapes of `forward(*inputs)` are those of one argument.
    is_variadic = any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(module.forward).parameters.values())
    with _quiet():
        try:
            program = torch.onnx.export(
                module,
                example,
                None,
                input_names=[tensor.name for tensor in signature.inputs],
                output_names=[f"{_OUTPUT_PREFIX}{index}" for index in range(len(signature.outputs))],
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                dynamic_shapes=(axes,) if is_variadic else axes,
            )
        # The exporter wraps whatever went wrong inside the model's own code in errors of its own.
        except Exception as exc:
            raise GraphError(
                "the model cannot be exported",
                expected="a graph without data-dependent control flow",
                got=_find_reason(exc),
                remedy=_find_remedy(module),
            ) from exc
    assert program is not None, "Bug: torch.onnx.export(dynamo=True) returned no program"
    return program


class _Swallowed(io.StringIO):
    """What is thrown away, but for what rich writes: a spinner that turns meanwhile goes where it went before."""

    def __init__(self, before: object) -> None:
        super().__init__()
        self.rich_proxied_file = getattr(before, "rich_proxied_file", before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep to itself what the exporter tells: of torchvision, which must not be there, and whole graphs at a failure.

    What went wrong is in the exception as well.
    """
    disabled = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(_Swallowed(sys.stderr)),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)


def _find_remedy(module: nn.Module) -> str:
    if any(isinstance(part, PreTrainedModel) for part in module.modules()):
        return (
            "export an architecture that docs/architectures.md lists, or pass --factory with a module of your own "
            "whose code has none"
        )
    return "rewrite the part of the model's code that the message names"


def _find_reason(exc: Exception) -> str:
    """Return what went wrong in the model's code, which the exporter tells at the end of a long report."""
    lines = [line.strip() for line in str(exc).split("## Exception summary")[-1].splitlines()]
    lines = [line for line in lines if line and not line.startswith("(Refer to") and not set(line) <= {"-", "="}]
    return " ".join(lines[:2]).rstrip(".")[:400] if lines else type(exc).__name__


def _name_outputs(graph: ir.Graph, signature: ModelSignature) -> None:
    """Give the outputs the signature's names, and their symbolic axes its symbols."""
    if len(graph.outputs) != len(signature.outputs):
        raise GraphError(
            "the model does not return as many outputs as its signature names",
            expected=", ".join(tensor.name for tensor in signature.outputs),
            got=str(len(graph.outputs)),
        )
    wanted = {tensor.name for tensor in signature.outputs}
    for value in [value for node in graph for value in node.outputs] + list(graph.initializers.values()):
        if value.name in wanted and not value.is_graph_output():
            value.name = f"{value.name}_inner"
    taken: set[int] = set()
    for index, tensor in enumerate(signature.outputs):
        output = graph.outputs[index]
        # An input that is returned as it came, or a value that is returned twice, gets a value of its own.
        if output.is_graph_input() or output.is_initializer() or id(output) in taken:
            node = ir.node("Identity", [output])
            node.outputs[0].shape, node.outputs[0].type = output.shape, output.type
            graph.append(node)
            graph.outputs[index] = output = node.outputs[0]
        taken.add(id(output))
        output.name = tensor.name
        if output.shape is not None and len(output.shape) == len(tensor.dims):
            # The exporter's own words for an axis: "seq_len + past_len", "s77". A number stays, and is then refused.
            named = [
                want if isinstance(want, str) and not isinstance(have, int) else have
                for have, want in zip(output.shape, tensor.dims, strict=True)
            ]
            output.shape = ir.Shape(named)


def check_graph(path: Path, signature: ModelSignature, target: Target) -> None:
    """Refuse an ONNX file whose structure is not what signature and target ask for.

    Raises:
        GraphError: Invalid ONNX, or other inputs and outputs.
        TargetError: Another opset or IR version than the target loads.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(str(path), load_external_data=False)
    # The checker raises its own error, shape inference another, a damaged file a third.
    except Exception as exc:
        raise GraphError(f"{path.name} is not a valid ONNX file", got=str(exc).strip().split("\n", 1)[0]) from exc
    opset = next(item.version for item in model.opset_import if item.domain == "")
    require_fits(path.name, opset, model.ir_version, target)
    _check_tensors(path.name, "inputs", signature.inputs, model.graph.input)
    _check_tensors(path.name, "outputs", signature.outputs, model.graph.output)


def _check_tensors(
    file_name: str, what: str, expected: tuple[TensorSignature, ...], got: "list[onnx.ValueInfoProto]"
) -> None:
    wanted = [f"{t.name} {_dtype_name(t.torch_dtype)} {list(t.dims)}" for t in expected]
    found = []
    for value in got:
        tensor_type = value.type.tensor_type
        dims = [dim.dim_param or dim.dim_value for dim in tensor_type.shape.dim]
        found.append(f"{value.name} {onnx.TensorProto.DataType.Name(tensor_type.elem_type)} {dims}")
    if wanted != found:
        raise GraphError(
            f"{file_name} has other {what} than the model",
            expected="; ".join(wanted),
            got="; ".join(found),
            remedy="an axis that became a number was fixed by the model's own code",
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(onnx.TensorProto.DataType.Name(ir.tensor(torch.zeros(0, dtype=dtype)).dtype.value))
