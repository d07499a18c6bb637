import ast
import sys
from pathlib import Path

import pytest
from harness import CHECKOUT

# What each room may import besides the standard library and itself.
ALLOWED = {
    "export": {
        "torch", "transformers", "tokenizers", "safetensors", "onnx", "onnx_ir", "onnxruntime", "numpy", "rich",
        "google", "tritonclient", "jinja2", "tensorrt", "zlib_ng",
    },
    "backends/python_preprocess": {"numpy", "tokenizers", "PIL", "triton_python_backend_utils"},
    "backends/python_postprocess": {"numpy", "triton_python_backend_utils"},
    "backends/onnxruntime": {"numpy", "onnxruntime", "triton_python_backend_utils"},
    "server": set(),
    "client": {"tritonclient", "numpy"},
    "demo": set(),
}  # fmt: skip


def imported_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively, which fails inside Triton"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    files = sorted((CHECKOUT / room).rglob("*.py"))
    assert files
    own = {room.split("/")[0]} if "/" not in room else {path.stem for path in files}
    for path in files:
        foreign = imported_names(path) - set(sys.stdlib_module_names) - own - ALLOWED[room]
        assert not foreign, f"{path.relative_to(CHECKOUT)} imports {sorted(foreign)}"


def test_every_folder_with_code_is_a_known_room() -> None:
    folders = {path.relative_to(CHECKOUT).parts[0] for path in CHECKOUT.glob("*/**/*.py") if ".venv" not in path.parts}
    assert folders - {"build", ".cache"} == {room.split("/")[0] for room in ALLOWED} | {"tests"}
