"""From the torch module to an ONNX file that the target's ONNX Runtime loads."""

import logging
import warnings
from pathlib import Path

import onnx
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn

from export.errors import GraphError
from export.signature import BATCH, WINDOWS, ModelSignature, TensorSignature
from export.targets import Target

# Every target from Triton 24.03 on loads opset 18, and it is the lowest that the exporter writes natively.
OPSET = 18

# Sizes of the example that is traced: distinct, and none of them 1, for a size of 1 may be taken for a constant.
_EXAMPLE_BATCH = 2
_EXAMPLE_SEQ_LEN = 7
_EXAMPLE_WINDOWS = 3


def export_onnx(module: nn.Module, signature: ModelSignature, path: Path, target: Target) -> None:
    """Write `module` as ONNX to `path`, and check that the file is what the signature and the target ask for.

    Raises:
        GraphError: The exporter fails, or the file has other axes, names, opset or IR version than asked for.
    """
    program = _trace(module, signature)
    # The traced source lines and module names: no part of the model, and they would carry paths of this machine.
    ClearMetadataAndDocStringPass()(program.model)
    program.model.graph.name = "main"
    program.save(str(path), external_data=False)
    check_graph(path, signature, target)


def _trace(module: nn.Module, signature: ModelSignature) -> torch.onnx.ONNXProgram:
    # String dimensions, not torch.export.Dim: a Dim that the code specialises becomes static without any error.
    axes = tuple(tensor.dynamic_axes for tensor in signature.inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # It warns at every export that torchvision is not installed, which it must not be.
        logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
        try:
            program = torch.onnx.export(
                module,
                tuple(_example(tensor) for tensor in signature.inputs),
                None,
                input_names=[tensor.name for tensor in signature.inputs],
                output_names=[tensor.name for tensor in signature.outputs],
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                dynamic_shapes=(axes,),
            )
        # The exporter wraps whatever went wrong inside the model's own code in errors of its own.
        except Exception as exc:
            raise GraphError(
                "the model cannot be exported",
                expected="a graph without data-dependent control flow",
                got=str(exc).strip().split("\n", 1)[0].rstrip("."),
                remedy="rewrite the part of the model's code that the message names",
            ) from exc
    assert program is not None, "Bug: torch.onnx.export(dynamo=True) returned no program"
    return program


def _example(tensor: TensorSignature) -> Tensor:
    symbols = {BATCH: _EXAMPLE_BATCH, WINDOWS: _EXAMPLE_WINDOWS}
    sizes = [symbols.get(dim, _EXAMPLE_SEQ_LEN) if isinstance(dim, str) else dim for dim in tensor.dims]
    return torch.ones(sizes, dtype=tensor.torch_dtype)


def check_graph(path: Path, signature: ModelSignature, target: Target) -> None:
    """Refuse an ONNX file whose structure is not what signature and target ask for.

    Raises:
        GraphError: Invalid ONNX, another opset or IR version than the target loads, or other inputs and outputs.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(str(path), load_external_data=False)
    # The checker raises its own error, shape inference another, a damaged file a third.
    except Exception as exc:
        raise GraphError(f"{path.name} is no valid ONNX file", got=str(exc).strip().split("\n", 1)[0]) from exc
    opset = next(item.version for item in model.opset_import if item.domain == "")
    for what, got, most in (
        ("opset", opset, target.max_opset),
        ("IR version", model.ir_version, target.max_ir_version),
    ):
        if got > most:
            raise GraphError(
                f"{path.name} is too new for Triton {target.release}", expected=f"{what} <= {most}", got=str(got)
            )
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
    return {torch.int64: "INT64", torch.float32: "FLOAT"}[dtype]
