"""Every recipe of the README, run as a reader would run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import CHECKOUT, Published, run
from trainers.task_checkpoints import build_adapted

from demo.checkpoint import fetch_checkpoint
from demo.serving import Addresses

BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", (CHECKOUT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
RECIPES = [(kind, code) for kind, code in BLOCKS if not code.startswith("make ")]

# What a recipe must have printed, by a word of its text.
PRINTS = {
    "--name tickets": "published  tickets in my_models, version 1, new",
    "--name trained": "DeepSpeed ZeRO stage 3, 2 ranks",
    "export inspect": "ZeRO stage   3",
    "--name sentiment": "served as  text-classification: 3 labels, softmax, best 2",
    "--factory model.py:build": "published  scores in my_models, version 1, new",
    "--precision int8": "times as fast on CPU",
    "--name entities": "30524 rows (30522 before; added [ENT_START], [ENT_END])",
    "client/infer.py": '"results": [{"text": "Hello", "EMBEDDING": [',
    "Grüße aus Köln": '"shape":[2,384]',
    "Inference-Header": '"shape":[1,384]',
    "sentence_embedding/ready": 'nv_inference_count{model="sentence_embedding",version="1"}',
    "tritonclient.http as": "[[1.    0.714]",
    "asyncio": "(3, 384)",
    "client.parity": "HTTP binary",
    "repository/index": '"state":"READY"',
    "grep -v '^#'": "modelyard_tritonserver_restarts_total 0",
    "client.bench": "texts/s",
}


@pytest.fixture(scope="module")
def checkout_copy(published: Published, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that looks like the checkout after `make demo`, and takes whatever a recipe writes."""
    directory = tmp_path_factory.mktemp("readme")
    for name in ("client", "demo", "export", "server", "backends"):
        (directory / name).symlink_to(CHECKOUT / name)
    (directory / ".cache").mkdir()
    (directory / ".cache" / "control.key").symlink_to(CHECKOUT / ".cache" / "control.key")
    (directory / ".cache" / "all-MiniLM-L6-v2").symlink_to(fetch_checkpoint())
    (directory / "model_repository").symlink_to(published.repository)
    (directory / "my_base").symlink_to(tiny_checkpoint)
    build_adapted(directory / "my_classifier", fetch_checkpoint())
    (directory / "my_adapter").symlink_to(directory / "my_classifier" / "adapter")
    trained = run(
        str(CHECKOUT / "tests" / "trainers" / "train_bert.py"), str(tiny_checkpoint), str(directory / "training")
    )
    assert trained.code == 0, trained.err
    (directory / "my_run").symlink_to(directory / "training" / "zero")
    return directory


@pytest.mark.parametrize(("kind", "code"), RECIPES, ids=[code.splitlines()[0][:50] for _, code in RECIPES])
def test_a_recipe_runs_and_prints_what_it_promises(
    kind: str, code: str, server: Addresses, checkout_copy: Path
) -> None:
    for port, address in (
        ("8000", server.http),
        ("8001", server.grpc),
        ("8002", server.metrics),
        ("8003", server.status),
    ):
        code = code.replace(f"localhost:{port}", address)
    command = ["bash", "-euo", "pipefail", "-c", code] if kind == "bash" else [sys.executable, "-c", code]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=checkout_copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (expected,) = [text for word, text in PRINTS.items() if word in code]
    assert expected in done.stdout


def test_the_two_commands_are_what_the_page_begins_with() -> None:
    assert [code for _, code in BLOCKS[:2]] == ["make demo\n", "make serve\n"]


def test_the_page_names_no_path_of_a_machine() -> None:
    text = (CHECKOUT / "README.md").read_text()
    assert not re.search(r"/(root|home|work|tmp)/", text)
