"""The page docs/adding.md, followed to the letter on a copy of the code."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import warm
from harness import CHECKOUT, run
from launcher import Running, running
from onnx import numpy_helper
from safetensors.torch import load_file
from trainers.architectures import ARCHITECTURES, save_model

from export.repository.config_file import parse_config

PAGE = (CHECKOUT / "docs" / "adding.md").read_text(encoding="utf-8")


def read_section(heading: str) -> str:
    """Return the text of one section of the page."""
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def read_code(heading: str) -> list[str]:
    """Return what a section shows: a module first, then entries of a table."""
    return re.findall(r"^```text\n(.*?)^```$", read_section(heading), re.MULTILINE | re.DOTALL)


def read_task_entry(heading: str) -> str:
    return next(code for code in read_code(heading) if code.startswith("        TaskEntry("))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return a folder with a copy of `export/` to add to."""
    shutil.copytree(CHECKOUT / "export", tmp_path / "code" / "export", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "code"


def insert_line(path: Path, *, after: str, line: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(after) == 1
    path.write_text(text.replace(after, after + line), encoding="utf-8")


def try_export(code: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command, environment = warm.command(["export", *arguments]), os.environ | warm.keep_warm()
    return subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True, check=False)


def run_export(code: Path, *arguments: str) -> str:
    done = try_export(code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_checkpoint_format_is_one_module_and_its_name_in_a_table(copied: Path, tmp_path: Path) -> None:
    checkpoints = copied / "export" / "checkpoints"
    (checkpoints / "plain" / "raw_weights.py").write_text(read_code("A checkpoint format")[0], encoding="utf-8")
    insert_line(checkpoints / "formats.py", after="from .plain import huggingface, ", line="raw_weights, ")
    insert_line(
        checkpoints / "formats.py", after="_PLAIN: tuple[Reader, ...] = (huggingface, torch_file", line=", raw_weights"
    )
    truth = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4, dtype=torch.int64)}
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "weights.raw").write_bytes(b"".join(tensor.numpy().tobytes() for tensor in truth.values()))
    entries = {
        "a": {"dtype": "float32", "shape": [2, 3], "start": 0},
        "b": {"dtype": "int64", "shape": [4], "start": 24},
    }
    (folder / "weights.json").write_text(json.dumps(entries | {"tied": entries["a"]}))

    assert re.search(r"format +raw weights\n", run_export(copied, "inspect", str(folder)))
    run_export(copied, "consolidate", str(folder), str(tmp_path / "out"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in truth.items())
    refused = tmp_path / "empty"
    refused.mkdir()
    done = try_export(copied, "inspect", str(refused))
    assert done.returncode == 1 and "weights.raw with weights.json" in done.stderr


MODULE = """
import torch


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
"""
INPUTS = {"inputs": {"features": {"shape": ["batch", 8]}}, "outputs": ["scores"]}


def export_module(code: Path, folder: Path, *options: str) -> dict:
    """Export a small module with the code in `code` into `folder`, and return what `--json` says."""
    (folder / "model.py").write_text(MODULE, encoding="utf-8")
    (folder / "inputs.json").write_text(json.dumps(INPUTS), encoding="utf-8")
    what = ["--factory", f"{folder / 'model.py'}:build", "--inputs", str(folder / "inputs.json"), "--name", "scores"]
    return json.loads(run_export(code, "run", *what, "--repository", str(folder / "models"), "--json", *options))


@pytest.mark.rarer
def test_a_precision_is_one_module_and_its_entry_in_a_table(copied: Path, tmp_path: Path) -> None:
    graph = copied / "export" / "graph"
    module, entry = read_code("A precision")
    (graph / "fp24.py").write_text(module, encoding="utf-8")
    insert_line(graph / "precisions.py", after="        FP32,\n", line=entry)

    assert "fp24" in run_export(copied, "run", "--help")
    report = export_module(copied, tmp_path, "--precision", "fp24")["report"]
    assert report["passed"] and report["precision"]["precision"] == "fp24"
    assert report["tolerances"]["max_relative_error"] == pytest.approx(1e-3), "ten times that of fp32"
    assert report["precision"]["threshold"] == 0.99999
    weights = numpy_helper.to_array(onnx.load(tmp_path / "models" / "scores" / "1" / "model.onnx").graph.initializer[0])
    assert weights.ndim == 2 and not (weights.view(np.uint32) & 0xFF).any()


def test_an_engine_is_one_class_and_its_name_in_a_table_and_is_served(copied: Path, tmp_path: Path) -> None:
    engines = copied / "export" / "engines"
    (engines / "ort_engine.py").write_text(read_code("An engine")[0], encoding="utf-8")
    insert_line(
        engines / "table.py",
        after="from .onnxruntime_engine import OnnxRuntime\n",
        line="from .ort_engine import OrtFormat\n",
    )
    insert_line(engines / "table.py", after="for engine in (ONNXRUNTIME, ", line="OrtFormat(), ")

    assert "ort" in run_export(copied, "run", "--help")
    report = export_module(copied, tmp_path, "--engine", "ort")["report"]
    assert report["passed"] and "ort" in report["versions"]
    version = tmp_path / "models" / "scores" / "1"
    assert "model.ort" in report["sha256"] and (version / "model.ort").is_file()
    assert not (version / "model.onnx").exists()
    config = parse_config((version.parent / "config.pbtxt").read_text())
    assert (config.backend, config.default_model_filename) == ("onnxruntime", "model.ort")
    done = try_export(copied, "run", "x", "--name", "x", "--engine", "ort", "--precision", "fp16")
    assert done.stderr.startswith("error: ORT format does not serve fp16: expected one of fp32, got fp16; ")
    server = Running(tmp_path / "models")
    server.read_until("ready, answers as verified")
    server.read_until("serving HTTP")
    assert server.stop() == 0


LAST_TASK = """place="signals:AudioFeatureExtraction",
            inputs=SOUNDS,
            architectures=("Model",),
        ),
"""


def check_parity(golden: Path, server: Running) -> list[dict]:
    urls = ["--url", f"127.0.0.1:{server.http}", "--grpc-url", f"127.0.0.1:{server.grpc}"]
    done = run("-m", "client.parity", "--golden", str(golden), *urls, "--json")
    assert done.code == 0, done.out + done.err
    return json.loads(done.out)


def test_a_task_is_one_class_and_its_entry_in_a_table_and_is_served(
    copied: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    tasks = copied / "export" / "tasks"
    (tasks / "texts" / "text_norm.py").write_text(read_code("A task")[0], encoding="utf-8")
    insert_line(tasks / "table.py", after=LAST_TASK, line=read_task_entry("A task"))

    help_text = " ".join(run_export(copied, "run", "--help").split())
    assert "text-norm how long the mean vector of a text is" in help_text
    assert "--power N exponent of the length; for text-norm" in help_text
    options = tmp_path / "options.json"
    options.write_text('{"power": 2}')
    what = [str(tiny_checkpoint), "--name", "norm", "--repository", str(tmp_path / "models"), "--config", str(options)]
    result = json.loads(run_export(copied, "run", *what, "--task", "text-norm", "--json"))
    assert result["served_as"] == "the length of the mean vector to the power of 2"
    assert result["contract"] == {"inputs": ["TEXT"], "outputs": ["NORM"]}
    assert result["report"]["passed"] and result["report"]["texts_tokenized"] > 10
    refused = try_export(copied, "run", *what)
    sentence = "--power does not apply to feature-extraction: expected it with text-norm, got --task feature-extraction"
    assert refused.returncode == 1 and sentence in refused.stderr
    with running(tmp_path / "models") as server:
        server.read_until("ready, answers as verified")
        server.read_until("serving HTTP")
        assert len(check_parity(tmp_path / "models" / "norm" / "1" / "golden.json", server)) == 3


@pytest.mark.rarer
def test_a_modality_is_a_task_a_backend_and_an_entry_in_a_table_and_is_served(copied: Path, tmp_path: Path) -> None:
    task, backend, _ = read_code("A modality")
    (copied / "export" / "tasks" / "pictures" / "ppm.py").write_text(task, encoding="utf-8")
    insert_line(copied / "export" / "tasks" / "table.py", after=LAST_TASK, line=read_task_entry("A modality"))
    for part in ("server", "backends", "pyproject.toml"):
        copy = shutil.copytree if (CHECKOUT / part).is_dir() else shutil.copy
        copy(CHECKOUT / part, copied / part)
    (copied / "backends" / "ppm_preprocess").mkdir()
    (copied / "backends" / "ppm_preprocess" / "model.py").write_text(backend, encoding="utf-8")

    save_model(ARCHITECTURES["vit classification"], tmp_path / "vit")
    what = [str(tmp_path / "vit"), "--name", "pictures", "--repository", str(tmp_path / "models"), "--json"]
    result = json.loads(run_export(copied, "run", *what, "--task", "picture-classification"))
    assert result["contract"] == {"inputs": ["IMAGE"], "outputs": ["LABEL", "SCORE"]}
    assert result["report"]["passed"]
    names = ("pictures", "pictures_model", "pictures_postprocess", "pictures_preprocess")
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [*names]
    config = parse_config((tmp_path / "models" / "pictures_preprocess" / "config.pbtxt").read_text())
    assert (config.backend, [tensor.name for tensor in config.output]) == ("ppm_preprocess", ["pixel_values"])
    assert (tmp_path / "models" / "pictures_preprocess" / "1" / "image.json").is_file()
    golden = tmp_path / "models" / "pictures" / "1" / "golden.json"
    with running(tmp_path / "models", cwd=copied) as server:
        server.read_until("ready, answers as verified")
        server.read_until("serving HTTP")
        # JSON holds no pictures.
        assert [result["transport"] for result in check_parity(golden, server)] == ["HTTP binary", "gRPC"]
        content = json.loads(golden.read_text())
        (label,) = (tensor for tensor in content["samples"][0]["outputs"] if tensor["name"] == "LABEL")
        label["data"].reverse()
        (tmp_path / "golden.json").write_text(json.dumps(content))
        urls = ["--url", f"127.0.0.1:{server.http}", "--grpc-url", f"127.0.0.1:{server.grpc}"]
        done = run("-m", "client.parity", "--golden", str(tmp_path / "golden.json"), "--model", "pictures", *urls)
        assert (done.code, done.out.count("FAILED")) == (1, 2)
        (tmp_path / "no_picture").write_bytes(b"no picture")
        asked = run("client/infer.py", *urls[:2], "--image", str(tmp_path / "no_picture"), "--model", "pictures")
        assert "IMAGE is not a picture: expected a PPM file, got one that begins with b'no'" in asked.err
        assert server.stop() == 0


def test_the_tables_are_read_without_anything_heavy() -> None:
    code = (
        "import sys; from export.engines.table import ENGINES; from export.graph.precisions import PRECISIONS; "
        "from export.tasks.table import TASKS; "
        "print([entry.help for table in (ENGINES, PRECISIONS, TASKS) for entry in table.values()], "
        "sorted({'torch', 'transformers', 'onnx', 'onnx_ir', 'onnxruntime', 'numpy', 'tritonclient'} & {*sys.modules}))"
    )
    assert run("-c", code).out.endswith("[]\n")
