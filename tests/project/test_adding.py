"""The page docs/adding.md, followed to the letter on a copy of the code."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import CHECKOUT
from safetensors.torch import load_file

PAGE = (CHECKOUT / "docs" / "adding.md").read_text(encoding="utf-8")


def read_section(heading: str) -> str:
    """Return the text of one section of the page."""
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def read_code(heading: str) -> str:
    """Return the only module that a section shows."""
    (code,) = re.findall(r"^```text\n(.*?)^```$", read_section(heading), re.MULTILINE | re.DOTALL)
    assert isinstance(code, str)
    return code


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return a folder with a copy of `export/` to add to."""
    shutil.copytree(CHECKOUT / "export", tmp_path / "code" / "export", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "code"


def insert_line(path: Path, *, after: str, line: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(after) == 1
    path.write_text(text.replace(after, after + line), encoding="utf-8")


def run_export(code: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "export", *arguments], cwd=code, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_checkpoint_format_is_one_module_and_its_name_in_a_table(copied: Path, tmp_path: Path) -> None:
    checkpoints = copied / "export" / "checkpoints"
    (checkpoints / "plain" / "raw_weights.py").write_text(read_code("A checkpoint format"), encoding="utf-8")
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
    done = subprocess.run(
        [sys.executable, "-m", "export", "inspect", str(refused)],
        cwd=copied,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "weights.raw with weights.json" in done.stderr
