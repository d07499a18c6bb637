"""`golden.json`: requests and the checkpoint's own answers to them, to ask a running server for.

Written here and nowhere else; `docs/contracts.md` describes the file, and the server and the client each read it.
"""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from modelyard.recorded_answers import measure_answer

from ..signature import BATCH, STRING, Contract, ModelSignature, TensorSignature

# torch's dtype → what KServe v2 calls it.
KSERVE_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.uint32: "UINT32",
    torch.float16: "FP16",
    torch.float32: "FP32",
    torch.float64: "FP64",
    STRING: "BYTES",
}


def build_sample(
    contract: Contract | ModelSignature, asked: Mapping[str, Any], answered: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Return one request of one row, and the answer to it, as KServe v2 tensors.

    Args:
        contract: What clients see: that of the ensemble, or of the graph itself.
        asked: Input name → its values, in any shape; strings are texts, or all of them bytes. Of optional ones those
            that are sent.
        answered: Output name → its values, in any shape. Of optional ones those that the answer holds.
    """
    return {
        "inputs": _describe(contract.inputs, asked),
        "outputs": _describe(contract.outputs, answered),
    }


def measure_sample(
    wanted: Sequence[Mapping[str, Any]], had: Sequence[Mapping[str, Any]], tolerances: Mapping[str, float]
) -> float:
    """Return how far an answer is from a recorded one, as a server that starts measures it.

    Args:
        wanted: The outputs that are recorded.
        had: The outputs of the answer, in any order; there may be more.
        tolerances: Of the `golden.json`; their names tell how errors are counted.

    Returns:
        The largest difference, in parts of the largest value where `max_relative_error` is bounded; infinite where no
        bound would do.
    """
    bounds = {**tolerances, "max_relative_error" if "max_relative_error" in tolerances else "max_abs_error": math.inf}
    try:
        return measure_answer(wanted, had, bounds)
    except ValueError:
        return math.inf


def list_others(outputs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return name → values of the recorded outputs that have no distance: labels, ids, counts."""
    return {tensor["name"]: tensor["data"] for tensor in outputs if not is_float(tensor)}


def is_float(tensor: Mapping[str, Any]) -> bool:
    """Tell whether the values of a recorded tensor have a distance."""
    return bool(tensor["datatype"].startswith("FP"))


def _describe(tensors: Iterable[TensorSignature], values: Mapping[str, Any]) -> list[dict[str, Any]]:
    described = []
    for tensor in tensors:
        if tensor.is_optional and tensor.name not in values:
            continue
        kind = np.object_ if tensor.dtype == STRING else np.dtype(str(tensor.dtype).removeprefix("torch."))
        array = np.array(values[tensor.name], dtype=kind)
        data = array.reshape(-1).tolist()
        # An encoded file, such as a picture: KServe's JSON holds texts alone.
        is_binary = any(isinstance(value, bytes) for value in data)
        described.append(
            {
                "name": tensor.name,
                "datatype": KSERVE_DTYPES[tensor.dtype],
                "shape": _find_shape(tensor, array),
                **({"parameters": {"encoding": "base64"}} if is_binary else {}),
                "data": [base64.b64encode(value).decode() for value in data] if is_binary else data,
            }
        )
    return described


def _find_shape(tensor: TensorSignature, values: "np.ndarray[Any, Any]") -> list[int]:
    """Return the shape of one row; for flat values from the dimensions, one of which may follow from their number."""
    if values.ndim == len(tensor.dims):
        return list(values.shape)
    shape = [1 if dim == BATCH else dim if isinstance(dim, int) else -1 for dim in tensor.dims]
    known = math.prod(size for size in shape if size > 0)
    return [size if size > 0 else values.size // known for size in shape]
