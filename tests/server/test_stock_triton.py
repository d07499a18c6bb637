"""The recipe of docs/serving.md for a Triton container as NVIDIA ships it: mounts, and tritonserver's own command."""

import ast
import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from harness import CHECKOUT, Published
from launcher import find_ports

from export.engines.table import ENGINES
from export.tasks.steps import POSTPROCESS_BACKEND, PREPROCESS_BACKEND
from server.tritonserver.installation import assemble_backends, build_environment, find_installation
from server.tritonserver.process import FORWARDED_HEADERS

# Backends that the image brings itself.
NATIVE = {"onnxruntime", "tensorrt"}
IMAGE_BACKENDS = "/opt/tritonserver/backends"


def read_recipe() -> list[str]:
    """Return the words of the command that starts the container."""
    section = (CHECKOUT / "docs" / "serving.md").read_text().split("\n### On a stock Triton container\n")[1]
    (block,) = re.findall(r"^\$ (docker run .*?)^```$", section.split("\n## ")[0], re.MULTILINE | re.DOTALL)
    return shlex.split(block.replace("\\\n", " ").replace("$PWD/", ""))


def read_mounts(words: list[str]) -> dict[str, str]:
    """Return path in the container → path beside the reader."""
    values = [words[index + 1] for index, word in enumerate(words) if word == "--volume"]
    return {inside: outside for outside, inside, _ in (value.split(":") for value in values)}


def test_every_backend_that_a_configuration_may_name_is_ours_or_the_images() -> None:
    # vLLM has an image of its own, in which nothing of ours runs.
    named = {PREPROCESS_BACKEND, POSTPROCESS_BACKEND} | {engine.backend for engine in ENGINES.values()} - {"vllm"}
    ours = {folder.name for folder in (CHECKOUT / "backends").iterdir() if (folder / "model.py").is_file()}
    assert named <= ours | NATIVE
    for name in ("Dockerfile", "Dockerfile.gpu", "Dockerfile.export", "tensorrt/Dockerfile"):
        lines = (CHECKOUT / "docker" / name).read_text().splitlines()
        # All of them, and by the wheel, which holds every folder beside its parts.
        assert "COPY backends /src/backends" in lines, name
        assert "COPY setup.py" in lines or any(line.startswith("COPY pyproject.toml setup.py") for line in lines), name


def test_what_the_backends_import_is_installed_beside_nvidias_image() -> None:
    files = list((CHECKOUT / "backends").rglob("*.py"))
    imported = {name for file in files for name in list_imports(ast.parse(file.read_text()))}
    # What triton_python_backend_utils is, the stub itself brings.
    wanted = imported - set(sys.stdlib_module_names) - {file.stem for file in files} - {"triton_python_backend_utils"}
    # `packages_distributions` of Python 3.10 knows only those that name their packages themselves.
    installed = {
        distribution.name: {file.parts[0].partition(".")[0] for file in distribution.files or ()}
        for distribution in importlib.metadata.distributions()
    }
    libraries = {library for library, packages in installed.items() if wanted & packages}
    assert wanted <= set().union(*installed.values()) and "onnxruntime" in libraries
    locked = re.findall(r"^([\w-]+)==", (CHECKOUT / "requirements" / "gpu.txt").read_text(), re.MULTILINE)
    assert {library.lower().replace("_", "-") for library in libraries} <= set(locked)


def list_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_the_mounts_of_the_recipe_serve_a_published_repository(published: Published, tmp_path: Path) -> None:
    words = read_recipe()
    mounts = read_mounts(words)
    steps = {Path(inside).name: outside for inside, outside in mounts.items() if inside.startswith(IMAGE_BACKENDS)}
    assert steps == {name: f"backends/{name}" for name in (PREPROCESS_BACKEND, POSTPROCESS_BACKEND)}
    # Of the image there is tritonserver itself, and our stand-in for its native backend.
    own, backends = tmp_path / "own", tmp_path / "backends"
    own.mkdir()
    backends.mkdir()
    for name, outside in {**steps, "onnxruntime": "backends/onnxruntime"}.items():
        (own / name).symlink_to(CHECKOUT / outside)
    installation = find_installation()
    assemble_backends(installation, own, backends)
    options = words[words.index("tritonserver") + 1 :]
    assert f"--http-header-forward-pattern={FORWARDED_HEADERS}" in options
    options = [option.replace("/models", str(published.repository)) for option in options]
    http, grpc, metrics = find_ports(3)
    options += [f"--backend-directory={backends}", f"--http-port={http}", f"--grpc-port={grpc}"]
    options += [f"--metrics-port={metrics}", f"--cache-directory={tmp_path}"]
    with (tmp_path / "log").open("w") as log:
        environment = build_environment(installation)
        process = subprocess.Popen([installation.executable, *options], env=environment, stdout=log, stderr=log)
    try:
        answer = ask(f"http://127.0.0.1:{http}/v2/models/sentence_embedding/infer", process, tmp_path / "log")
    finally:
        process.kill()
        process.wait()
    assert answer["outputs"][0]["shape"] == [1, 384]


def ask(url: str, process: "subprocess.Popen[bytes]", log: Path) -> dict:
    """Ask until there is an answer."""
    body = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["Hello"]}]}
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, data=json.dumps(body).encode(), timeout=30) as response:
                return json.load(response)
        except OSError:
            time.sleep(0.2)
    raise AssertionError(log.read_text())
