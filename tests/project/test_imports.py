"""The floor plan: what each room may import. A line that needs more than its room may have stands in the wrong room."""

import ast
import graphlib
import re
import sys
from pathlib import Path

import pytest
from harness import CHECKOUT

# Python 3.10 does not have the last one, and nothing is imported of it there.
STANDARD = {*sys.stdlib_module_names, "tomllib"}

# What each top-level room may import besides the standard library and itself. Between them are files and the wire.
LIBRARIES = {
    "export": {
        "torch", "transformers", "tokenizers", "safetensors", "onnx", "onnx_ir", "onnxruntime", "numpy", "rich",
        "google", "tritonclient", "jinja2", "nncf", "openvino", "openvino_genai", "tensorrt", "zlib_ng", "platformdirs",
        "PIL", "soundfile", "soxr", "huggingface_hub", "fsspec", "aiohttp", "tomli",
        "modelyard.exchange", "modelyard.free_memory", "modelyard.parser", "modelyard.recorded_answers",
        "modelyard.standard_streams",
    },
    "backends/openvino_generate": {"numpy", "openvino", "openvino_genai", "tokenizers", "triton_python_backend_utils"},
    "backends/python_preprocess": {"numpy", "tokenizers", "PIL", "soundfile", "soxr", "triton_python_backend_utils"},
    "backends/python_postprocess": {"numpy", "PIL", "triton_python_backend_utils"},
    "backends/onnxruntime": {"numpy", "onnxruntime", "triton_python_backend_utils"},
    # Made of what the steps of an ensemble are made of; their engines are imported where one is opened.
    "backends/python_lean": {
        "numpy", "onnxruntime", "triton_python_backend_utils", "answers", "compiled", "steps",
    },
    "backends/python_openvino": {"numpy", "openvino", "triton_python_backend_utils"},
    # h2 speaks gRPC where the threads of grpcio would be forked.
    "server": {
        "modelyard.exchange", "modelyard.free_memory", "modelyard.parser", "modelyard.recorded_answers",
        "modelyard.standard_streams",
        "platformdirs", "h2",
    },
    # aiohttp and grpc come with tritonclient, which raises their errors; PIL draws and pyarrow reads Parquet,
    # where they are installed.
    "client": {
        "modelyard.exchange", "modelyard.parser", "modelyard.standard_streams", "tritonclient", "aiohttp", "grpc",
        "numpy", "platformdirs", "PIL", "pyarrow",
    },
    # A caller as others are: it asks through the installed client, which type checkers know by its folder, and reads a
    # model's configuration as tritonclient describes it.
    "gateway": {
        "modelyard.client", "client", "fastapi", "starlette", "uvicorn", "httptools", "pydantic", "numpy", "orjson",
        "jinja2", "tokenizers", "prometheus_client", "google", "tritonclient",
    },
    "modelyard": set(),
    "demo": set(),
}  # fmt: skip

# A folder of `export/` or `server/` → the folders that it may import, and the modules beside them by name. Each line
# may name only lines above it, so the table is the order of the floors as well.
FLOORS = {
    "export/errors": (),
    "export/locations": (),
    "export/interruption": (),
    "export/progress": (),
    "export/artefacts": (),
    "export/file_limit": (),
    "export/signature": (),
    "export/option_kinds": (),
    "export/http_failures": ("errors",),
    "export/fetching": ("errors", "http_failures", "locations"),
    "export/targets": ("errors",),
    "export/serving_options": ("errors", "option_kinds"),
    "export/options_file": ("errors", "option_kinds"),
    "export/checkpoints": ("errors",),
    "export/consolidation": ("checkpoints", "errors", "file_limit"),
    "export/graph": ("errors", "signature", "targets"),
    "export/engines": ("errors", "graph", "locations", "signature", "targets"),
    "export/weights": ("checkpoints", "consolidation", "errors", "option_kinds"),
    "export/tasks": ("artefacts", "checkpoints", "errors", "option_kinds", "signature", "weights"),
    "export/options": (
        *("engines", "errors", "graph", "locations", "option_kinds", "options_file", "serving_options", "targets"),
        *("tasks", "weights"),
    ),
    "export/proof": ("artefacts", "engines", "errors", "graph", "signature", "targets", "tasks", "weights"),
    "export/repository": (
        *("artefacts", "engines", "errors", "file_limit", "proof", "serving_options", "signature", "targets"),
        *("tasks",),
    ),
    "export/tuning": ("engines", "errors", "repository"),
    "export/lint": ("engines", "errors", "option_kinds", "repository", "targets"),
    "export/identity": ("artefacts", "checkpoints", "errors", "options", "repository", "targets"),
    "export/foresight": (
        "checkpoints",
        "engines",
        "errors",
        "graph",
        "options",
        "repository",
        "targets",
        "tasks",
    ),
    "export/source": (
        "checkpoints",
        "errors",
        "foresight",
        "graph",
        "identity",
        "options",
        "progress",
        "proof",
        "repository",
        "signature",
        "tasks",
        "weights",
    ),
    "export/stages": ("artefacts", "engines", "graph", "progress", "proof", "targets", "tasks", "weights"),
    "export/subject": ("identity", "options", "proof", "repository", "source"),
    "export/pipeline": (
        *("artefacts", "engines", "errors", "file_limit", "graph", "identity", "options", "progress", "proof"),
        *("repository", "source", "stages", "subject", "targets", "tasks"),
    ),
    "export/commands": (
        *(
            "checkpoints",
            "consolidation",
            "engines",
            "errors",
            "fetching",
            "file_limit",
            "foresight",
            "graph",
            "identity",
            "interruption",
            "lint",
            "locations",
        ),
        *(
            "option_kinds",
            "options",
            "options_file",
            "pipeline",
            "progress",
            "proof",
            "repository",
            "signature",
            "stages",
            "targets",
            "tasks",
        ),
        "tuning",
        "weights",
    ),
    "export/checkpoints/remedies": (),
    "export/checkpoints/state_dict": (),
    "export/checkpoints/wrapper_names": (),
    "export/checkpoints/adapter_names": (),
    "export/checkpoints/storage": ("remedies",),
    "export/checkpoints/stored_checkpoint": ("state_dict", "storage"),
    "export/checkpoints/pickles": ("remedies", "storage"),
    "export/checkpoints/plain": (
        *("adapter_names", "pickles", "remedies", "storage", "stored_checkpoint", "wrapper_names"),
    ),
    "export/checkpoints/deepspeed": ("pickles", "plain", "remedies", "storage", "stored_checkpoint", "wrapper_names"),
    "export/checkpoints/fsdp": ("pickles", "plain", "remedies", "storage", "stored_checkpoint", "wrapper_names"),
    "export/checkpoints/megatron": ("deepspeed", "pickles", "remedies", "storage", "stored_checkpoint"),
    "server/errors": (),
    "server/command": (),
    "server/locations": (),
    "server/shortage": (),
    "server/endpoints": ("errors",),
    "server/limits": ("errors",),
    "server/log": ("errors",),
    "server/tritonserver": ("endpoints", "errors", "limits", "locations", "log", "shortage"),
    "server/following": ("errors", "limits", "locations", "tritonserver"),
    "server/status": ("following",),
    "server/status_port": ("errors", "status"),
    "server/healing": ("errors", "limits", "status", "tritonserver"),
    "server/draining": ("endpoints", "healing", "tritonserver"),
    "server/doctor": ("endpoints", "errors", "following", "limits", "locations", "tritonserver"),
    "server/announcement": ("endpoints", "following", "locations"),
    "server/run": ("errors", "healing", "log", "shortage", "status", "tritonserver"),
    "server/starting": ("errors", "run", "shortage", "tritonserver"),
    "server/watching": ("limits", "run", "status", "tritonserver"),
    "server/supervisor": (
        *("announcement", "draining", "errors", "following", "limits", "log", "run", "shortage", "starting", "status"),
        *("tritonserver", "watching"),
    ),
}


def find_rooms() -> dict[str, list[Path]]:
    return {room: sorted((CHECKOUT / room).rglob("*.py")) for room in LIBRARIES}


def imported_modules(path: Path) -> set[tuple[str, ...]]:
    """Return what a file imports, as parts of a module's full name; what is imported from a package counts as well."""
    package = path.relative_to(CHECKOUT).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = (*start, *(node.module.split(".") if node.module else ()))
            found |= {(*module, alias.name) for alias in node.names} if node.level else {module}
    return found


def find_file(module: tuple[str, ...]) -> Path | None:
    """Return the file of ours that an imported name lies in."""
    for parts in (module, module[:-1]):
        path = CHECKOUT.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if parts and file.is_file():
                return file
    return None


@pytest.mark.parametrize("room", LIBRARIES)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    files = find_rooms()[room]
    assert files
    own = {room.split("/")[0]} if "/" not in room else {path.stem for path in files}
    for path in files:
        # What every part has in common lies in `modelyard`, where the parts themselves are found as well.
        names = {".".join(name[:2] if name[0] == "modelyard" != room else name[:1]) for name in imported_modules(path)}
        foreign = names - STANDARD - own - LIBRARIES[room]
        assert not foreign, f"{path.relative_to(CHECKOUT)} imports {sorted(foreign)}"


def test_every_folder_with_code_is_a_known_room() -> None:
    folders = {path.relative_to(CHECKOUT).parts[0] for path in CHECKOUT.glob("*/**/*.py") if ".venv" not in path.parts}
    assert folders - {"build", ".cache"} == {room.split("/")[0] for room in LIBRARIES} | {"tests"}


def test_what_triton_loads_imports_nothing_relatively_and_our_packages_nothing_of_their_own_otherwise() -> None:
    # Inside Triton a backend's files are top-level modules; installed, `export` is `modelyard.export`.
    for room, files in find_rooms().items():
        for path in files:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.ImportFrom):
                    continue
                where = f"{path.relative_to(CHECKOUT)}:{node.lineno}"
                if room.startswith("backends/"):
                    assert node.level == 0, where
                # The demo is not part of what is installed.
                elif room != "demo":
                    assert node.level or (node.module or "").split(".")[0] != room, where


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_only_floors_below_it(floor: str) -> None:
    base = Path(floor).parent
    allowed = {(base / name).as_posix() for name in FLOORS[floor]}
    known = list(FLOORS)
    assert allowed <= set(known[: known.index(floor)]), "a line may name only lines above it"
    path = CHECKOUT / floor
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    used = set()
    for file in files:
        for module in imported_modules(file):
            target = find_file(module)
            inside = target and target.is_relative_to(CHECKOUT / base) and not target.is_relative_to(path)
            if target and inside and target != file and target != path.with_suffix(".py"):
                part = target.relative_to(CHECKOUT / base).parts[0]
                used.add((base / part).with_suffix("").as_posix())
    # A folder's face hands on what lies below it.
    used -= {(base / "__init__").as_posix()}
    assert used == allowed, f"{floor} imports {sorted(used)}"


def test_every_floor_is_in_the_table() -> None:
    free = {"__init__", "__main__", "__pycache__", "formats"}
    for folder in ("export", "export/checkpoints", "server"):
        there = {entry.stem for entry in (CHECKOUT / folder).iterdir()} - free
        assert {f"{folder}/{name}" for name in there} == {name for name in FLOORS if str(Path(name).parent) == folder}


def test_no_two_files_import_each_other_in_a_circle() -> None:
    graph = {}
    for files in find_rooms().values():
        for path in files:
            targets = {find_file(module) for module in imported_modules(path)}
            # A face may hand on the names of files that import another of them through it.
            graph[path] = {target for target in targets if target and target.name != "__init__.py"} - {path}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(("drawn", "folder"), [("export", "export"), ("checkpoints", "export/checkpoints")])
def test_the_floors_are_drawn_in_docs_architecture_as_the_code_imports_them(drawn: str, folder: str) -> None:
    page = (CHECKOUT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (drawing,) = re.findall(rf"^```text\n{drawn} (.*?)^```$", page, re.MULTILINE | re.DOTALL)
    row_of = {name: row for row, line in enumerate(drawing.splitlines()) for name in re.findall(r"\w+", line)}
    floors = {Path(floor).name: below for floor, below in FLOORS.items() if Path(floor).parent == Path(folder)}
    assert set(floors) <= set(row_of), f"not drawn: {sorted(set(floors) - set(row_of))}"
    for name, below in floors.items():
        misplaced = [other for other in below if row_of[other] <= row_of[name]]
        assert not misplaced, f"{name} imports {misplaced}, which must be drawn below it"


@pytest.mark.parametrize("path", sorted((CHECKOUT / "backends").glob("*/model.py")), ids=lambda path: path.parent.name)
def test_a_backend_has_imported_what_its_first_answer_would_wait_for(path: Path) -> None:
    # tritonserver 2.51 asks asyncio whether an answer is a coroutine, and imports it when the first one is there.
    assert "asyncio" in {
        alias.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import) for alias in node.names
    }
