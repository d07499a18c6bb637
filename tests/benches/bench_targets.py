"""What the ONNX Runtime of every target loads, measured again on its wheel from PyPI: `make targets`.

    python -m benches.bench_targets

Graphs of one Identity node of every opset and IR version are loaded in turn. Exits with 1 where `export/targets.py`
says otherwise. Fetches ten wheels of 13 to 20 MB into `.cache` the first time.
"""

import sys
import tempfile
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from export.engines.onnxruntime_process import TargetRuntime, open_runtime
from export.errors import RuntimeFailure
from export.targets import TARGETS

# Beyond what any of them loads.
MAX_TRIED = 30

# What every runtime loads while the other of the two is tried.
OPSET, IR_VERSION = 18, 8


def loads(runtime: TargetRuntime, folder: Path, opset: int, ir_version: int) -> bool:
    """Tell whether a graph of this opset and IR version is accepted."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "main", tensors[:1], tensors[1:])
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version), path)
    try:
        runtime.load(path).close()
    except RuntimeFailure as exc:
        # Anything else, such as a wheel that cannot be had, measures nothing.
        if "cannot load model.onnx" not in str(exc):
            raise
        return False
    return True


def measure() -> bool:
    """Print a line for each ONNX Runtime; return whether the table agrees with all of them."""
    agrees = True
    runtimes = {target.onnxruntime_version: target for target in TARGETS}
    sys.stdout.write("ONNX Runtime   max opset   max IR   Triton\n")
    with tempfile.TemporaryDirectory() as folder:
        for version, target in runtimes.items():
            with open_runtime(target) as runtime:
                opset = max(value for value in range(7, MAX_TRIED) if loads(runtime, Path(folder), value, IR_VERSION))
                ir = max(value for value in range(4, MAX_TRIED) if loads(runtime, Path(folder), OPSET, value))
            releases = [item.release for item in TARGETS if item.onnxruntime_version == version]
            same = (opset, ir) == (target.max_opset, target.max_ir_version)
            note = "" if same else f"   targets.py says {target.max_opset} and {target.max_ir_version}"
            sys.stdout.write(f"{version:12}   {opset:9}   {ir:6}   {', '.join(releases)}{note}\n")
            agrees = agrees and same
    return agrees


if __name__ == "__main__":
    sys.exit(0 if measure() else 1)
