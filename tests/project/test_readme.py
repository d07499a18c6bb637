"""Every recipe of README and of the pages in docs/, run as a reader would run it, and every link followed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from harness import CHECKOUT, Published, run
from trainers.architectures import ARCHITECTURES, save_model
from trainers.task_checkpoints import build_adapted

from demo.checkpoint import fetch_checkpoint
from demo.serving import Addresses

PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (page.name, language, code) for page in PAGES for language, code in FENCE.findall(page.read_text(encoding="utf-8"))
]

# What runs is `bash` or `python`; a command that would not end, or needs what no test has, is `console`.
RUN = ("bash", "python")
SHOWN = ("console", "text")

# A block that stands on two pages runs once. `make demo` and `make serve` have a test of their own.
RECIPES = {code: (page, kind) for page, kind, code in BLOCKS if kind in RUN and not code.startswith("make ")}

# Hosts that a page may name: where what we keep to is written down.
SPECIFICATIONS = {"kserve.github.io"}

# What a recipe must have printed, by a word of its text.
PRINTS = {
    "--name tickets": "published  tickets in my_models, version 1, new",
    "--name trained": "DeepSpeed ZeRO stage 3, 2 ranks",
    "modelyard inspect": "ZeRO stage   3",
    "with_tokens": "from DeepSpeed ZeRO stage 3",
    "--name sentiment": "served as  text-classification: 3 labels, softmax, best 2",
    "my_vit --name image_classification": "labels, softmax, best 2; pictures by ViTImageProcessor at 32 x 32",
    "my_wav2vec2 --name audio_classification": "softmax, best 2; sounds by Wav2Vec2FeatureExtractor at 16000 Hz",
    "--factory model.py:build": "published  scores in my_models, version 1, new",
    "--precision int8": "times as fast on CPU",
    "--name brisk": "OpenVINO 2026.4.1 against torch",
    "--name lean": "published  lean in my_models, version 1, new",
    "--name packed": "together  requests of any lengths",
    "--name entities": "30524 rows (30522 before; added [ENT_START], [ENT_END])",
    "--name configured": "added [ENT_START], [USER], modelyard",
    '"A kitten naps." --json': '"results": [{"text": "A cat sleeps.", "EMBEDDING": [',
    '--text "Hello" --json': '"results": [{"text": "Hello", "EMBEDDING": [',
    "Grüße aus Köln": '"shape":[2,384]',
    "Inference-Header": '"shape":[1,384]',
    "sentence_embedding/generate": '"EMBEDDING":[',
    "sentence_embedding/ready": 'nv_inference_count{model="sentence_embedding",version="1"}',
    "tritonclient.http as": "[[1.    0.714]",
    "with Client(": "[[1.    0.714]",
    "asyncio": "(3, 384)",
    "FastAPI": "[[1.0, 0.714], [0.714, 1.0]]\n422",
    "--output answers.jsonl": "answers.jsonl: 5 lines, 5 asked now in",
    "modelyard parity": "HTTP binary",
    "repository/index": '"state":"READY"',
    "versions diff": "model.onnx ",
    "--wait localhost": "served by localhost:",
    "modelyard promote": "1 version: every file is as it was published",
    "modelyard check": "sentence_embedding answers as verified within",
    "grep -v '^#'": "modelyard_tritonserver_restarts_total 0",
    "modelyard bench": "texts/s",
    "/versions": '"state": "served"',
}


# The command, but for what loads torch: that runs in a process that has loaded it.
_COMMAND = f"""#!/bin/sh
case "$1" in
    run | inspect | consolidate) exec {shlex.join(warm.command(["modelyard"]))} "$@" ;;
    *) exec {shlex.quote(sys.executable)} -m modelyard "$@" ;;
esac
"""


@pytest.fixture(scope="module")
def checkout_copy(published: Published, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that looks like the checkout after `make demo`, and takes whatever a recipe writes."""
    directory = tmp_path_factory.mktemp("readme")
    (directory / "bin").mkdir()
    command = directory / "bin" / "modelyard"
    command.write_text(_COMMAND)
    command.chmod(0o755)
    (directory / "demo").symlink_to(CHECKOUT / "demo")
    (directory / ".cache").mkdir()
    (directory / ".cache" / "control.key").symlink_to(CHECKOUT / ".cache" / "control.key")
    # The small one, with the same tokenizer: a page's export takes seconds then, and `make demo` exports the real one.
    (directory / ".cache" / "all-MiniLM-L6-v2").symlink_to(tiny_checkpoint)
    (directory / "model_repository").symlink_to(published.repository)
    (directory / "my_base").symlink_to(tiny_checkpoint)
    build_adapted(directory / "my_classifier", fetch_checkpoint())
    save_model(ARCHITECTURES["vit classification"], directory / "my_vit")
    save_model(ARCHITECTURES["wav2vec2 sounds"], directory / "my_wav2vec2")
    (directory / "my_adapter").symlink_to(directory / "my_classifier" / "adapter")
    trained = run(
        str(CHECKOUT / "tests" / "trainers" / "train_bert.py"), str(tiny_checkpoint), str(directory / "training")
    )
    assert trained.code == 0, trained.err
    (directory / "my_run").symlink_to(directory / "training" / "zero")
    return directory


@pytest.mark.parametrize(
    ("kind", "code"),
    [(kind, code) for code, (_, kind) in RECIPES.items()],
    ids=[f"{page}: {code.splitlines()[0][:50]}" for code, (page, _) in RECIPES.items()],
)
def test_a_recipe_runs_and_prints_what_it_promises(
    kind: str, code: str, server: Addresses, checkout_copy: Path
) -> None:
    ports = {"8000": server.http, "8001": server.grpc, "8002": server.metrics, "8003": server.status}
    for port, address in ports.items():
        code = code.replace(f"localhost:{port}", address).replace(f"-port {port}", f"-port {address.split(':')[1]}")
    command = ["bash", "-euo", "pipefail", "-c", code] if kind == "bash" else [sys.executable, "-c", code]
    path = os.pathsep.join([str(checkout_copy / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | warm.keep_warm() | {"PATH": path, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, cwd=checkout_copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (expected,) = [text for word, text in PRINTS.items() if word in code]
    assert expected in done.stdout + done.stderr


def test_every_block_is_run_or_says_that_it_is_only_shown() -> None:
    unknown = {(page, language) for page, language, _ in BLOCKS if language not in RUN + SHOWN}
    assert not unknown, "a fence is one of " + ", ".join(RUN + SHOWN)


def test_every_promise_belongs_to_a_recipe() -> None:
    assert not [word for word in PRINTS if not any(word in code for code in RECIPES)]


def test_the_two_commands_are_what_the_page_begins_with() -> None:
    commands = [code for page, kind, code in BLOCKS if page == "README.md" and kind in RUN]
    assert commands[:2] == ["make demo\n", "make serve\n"]


def test_the_first_page_is_short() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 200


def anchors(page: Path) -> set[str]:
    """Return the fragments that lead to a page's headings, by the rule that GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    """Return where a page's links lead to."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in links(page):
        name, _, fragment = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert file.is_relative_to(CHECKOUT), target
        if fragment:
            assert fragment in anchors(file), target


def test_every_page_can_be_reached_from_the_first() -> None:
    reached, waiting = set(), [PAGES[0]]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        targets = {(page.parent / target.partition("#")[0]).resolve() for target in links(page)}
        waiting += [file for file in targets if file.suffix == ".md" and file.is_file() and file not in reached]
    assert not set(PAGES) - reached


@pytest.mark.parametrize("page", [*PAGES, CHECKOUT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_a_page_names_no_path_of_a_machine_and_no_host(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"/(root|home|work|tmp|Users)/", text)
    hosts = set(re.findall(r"\b(?:[a-z0-9-]+\.)+(?:com|org|net|io|ai|dev|cloud|internal|local|lan)\b", text))
    assert not hosts - SPECIFICATIONS
