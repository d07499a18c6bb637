"""The steps around a graph: the folders of `backends/` that run them, and the files that they read."""

import json
from typing import Any

from ..signature import ModelSignature

PREPROCESS_BACKEND = "python_preprocess"
POSTPROCESS_BACKEND = "python_postprocess"
POSTPROCESS_FILE = "postprocess.json"
LEAN_FILE = "lean.json"


def describe_lean(signature: ModelSignature, **more: Any) -> dict[str, bytes]:
    """Return `lean.json` by its name: the tensors of a process that does all steps, and what else it needs to know."""
    assert signature.contract is not None, "Bug: a lean model without a contract"
    described = {
        "inputs": [tensor.name for tensor in signature.inputs],
        "outputs": [tensor.name for tensor in signature.outputs],
        "carried": [tensor.name for tensor in signature.contract.carried],
        "answers": [tensor.name for tensor in signature.contract.outputs],
        **more,
    }
    return {LEAN_FILE: (json.dumps(described, indent=2) + "\n").encode()}
