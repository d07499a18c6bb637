"""Decoders published for Triton's vLLM backend, written by vLLM on a GPU under the real tritonserver.

Wants a GPU, vLLM (tried with 0.22.1 and torch 2.11) and numpy below 2, which tritonserver 2.51's Python backend needs,
and room at /models, which `model.json` names.
"""

import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import CHECKOUT
from launcher import find_ports
from trainers.writers import train_bpe
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from export.__main__ import main
from export.engines.vllm_arguments import MOUNT
from export.tasks.texts.text import read_verification_texts
from server.tritonserver.installation import assemble_backends, build_environment, find_installation

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm", reason="needs vLLM")
if Path(MOUNT).exists():
    pytest.skip(f"needs {MOUNT} to be free", allow_module_level=True)

# Engine, its compilation and its CUDA graphs.
START_SECONDS = 180
OPTIONS = {
    "llama": [],
    "llama-bf16": ["--precision", "bf16"],
    "opt": ["--add-token", "[ORDER]=mean"],
    "gpt2": [],
}


def build_model(name: str, vocabulary: int) -> PreTrainedModel:
    """Return a model whose attention has heads of 64 values, which vLLM's kernels take."""
    torch.manual_seed(0)
    common = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**common, n_embd=256, n_layer=2, n_head=4, n_positions=1024))
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 1024}
    if name == "opt":
        return OPTForCausalLM(OPTConfig(**common, **sizes, ffn_dim=512, word_embed_proj_dim=256))
    return LlamaForCausalLM(LlamaConfig(**common, **sizes, intermediate_size=512, num_key_value_heads=2))


def save_trained(name: str, folder: Path) -> Path:
    """Save one that has learned the verification texts, as sure of the next token as a model of use is."""
    tokenizer = train_bpe()
    model = build_model(name, len(tokenizer))
    ids = torch.tensor([token for text in read_verification_texts() for token in tokenizer(text)["input_ids"]])
    rows = ids[: len(ids) // 64 * 64].view(-1, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    there = Path(MOUNT)
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    try:
        for name, options in OPTIONS.items():
            checkpoint = save_trained(name.partition("-")[0], checkpoints / name)
            asked = ["run", str(checkpoint), "--name", name, "--repository", str(there), "--engine", "vllm"]
            assert main([*asked, "--target", "25.09", *options]) == 0
        yield there
    finally:
        shutil.rmtree(there, ignore_errors=True)


@pytest.mark.parametrize("name", OPTIONS)
def test_vllm_writes_what_the_checkpoint_does(name: str, repository: Path, tmp_path: Path) -> None:
    http, grpc, metrics = find_ports(3)
    own, backends = tmp_path / "own", tmp_path / "backends"
    own.mkdir()
    backends.mkdir()
    (own / "vllm").symlink_to(CHECKOUT / "tests" / "gpu" / "vllm_backend")
    installation = find_installation()
    assemble_backends(installation, own, backends)
    options = [f"--model-repository={repository}", f"--backend-directory={backends}", "--model-control-mode=explicit"]
    options += [f"--load-model={name}", "--disable-auto-complete-config"]
    options += [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    environment = {**build_environment(installation), "VLLM_NO_USAGE_STATS": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([installation.executable, *options], env=environment, stdout=log, stderr=log)
    try:
        wait_until_ready(f"http://127.0.0.1:{http}/v2/models/{name}/ready", process, tmp_path / "log")
        # Over HTTP, its events and a stream of gRPC.
        golden = repository / name / "1" / "golden.json"
        urls = ["--url", f"localhost:{http}", "--grpc-url", f"localhost:{grpc}"]
        words = [sys.executable, "-m", "client.parity", "--golden", golden, *urls]
        done = subprocess.run(words, cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(1)
        else:
            return
    raise AssertionError(log.read_text())
