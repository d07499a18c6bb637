"""What an export and an instance hold in memory, by engine and precision: `make memory`.

    python -m benches.measure_memory [--sizes 6x384 12x768@128 24x1024] [--ways onnxruntime:fp32 openvino:int8]
        [--family bert]

Random BERTs, or encoders of another family, of the layers, widths and longest texts that are asked for, with the
vocabulary of the demo's checkpoint, and GPT-2s for the engine that generates. Of an export all processes are counted
together, at most; of a server the process of the one instance, once it is ready and has answered what was verified.
Both are resident memory, in MB. At the end stand base and shares that fit each way best, of the weights in fp32 and,
where longest texts differ, of the largest activations of one: where that is off by little, it is a formula for
`inspect`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from harness import CHECKOUT
from launcher import running
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    T5EncoderModel,
)

from demo.checkpoint import fetch_checkpoint
from export.commands.inspect_checkpoint import inspect_checkpoint
from export.commands.memory_estimates import count_row
from server.tritonserver.processes import list_children, read_arguments

WAYS = (
    "onnxruntime:fp32",
    "onnxruntime:fp16",
    "onnxruntime:bf16",
    "onnxruntime:int8",
    "openvino:fp32",
    "openvino:bf16",
    "openvino:int8",
    "openvino-genai:fp32",
    "openvino-genai:bf16",
    "openvino-genai:int8",
)
FAMILIES = ("bert", "roberta", "mpnet", "electra", "distilbert", "deberta-v2", "t5")
# Engine → the task that is served by it.
_TASKS = {"openvino-genai": "text-generation"}
_LOOK_S = 0.02


@dataclass(frozen=True)
class Held:
    """What one way of one size held, in bytes.

    Attributes:
        weights: Of the weights in fp32.
        table: Of those, what belongs to the table of tokens.
        row: Of the largest activations of the longest text.
        export: All processes of the export together, at most.
        instance: One instance, ready.
    """

    weights: int
    table: int
    row: int
    export: int
    instance: int


def read_size(size: str) -> tuple[int, int, int]:
    """Return layers, width and the tokens of the longest text, 512 where that is not said."""
    shape, _, tokens = size.partition("@")
    layers, width = map(int, shape.split("x"))
    return layers, width, int(tokens or 512)


def configure(family: str, layers: int, width: int, tokens: int) -> PreTrainedConfig:
    """Return the configuration of an encoder, with heads of 64 and four times the width between its two layers."""
    usual = {
        "vocab_size": BertConfig.from_pretrained(fetch_checkpoint()).vocab_size,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": width // 64,
        "max_position_embeddings": tokens,
    }
    # Theirs begin behind the padding's.
    if family in ("roberta", "mpnet"):
        usual |= {"max_position_embeddings": tokens + 2, "pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102}
    if family == "distilbert":
        usual |= {"hidden_dim": 4 * width}
    if family == "deberta-v2":
        usual |= {"relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm"}
        usual |= {"pos_att_type": ["p2c", "c2p"], "share_att_key": True, "position_biased_input": False}
    if family == "t5":
        usual |= {"d_ff": 4 * width, "d_kv": 64, "architectures": ["T5EncoderModel"]}
    return AutoConfig.for_model(family, **usual)


def build_checkpoint(family: str, size: str, folder: Path) -> Path:
    """Save a random encoder of `LAYERSxWIDTH` or `LAYERSxWIDTH@TOKENS` in `folder`."""
    source, config = fetch_checkpoint(), configure(family, *read_size(size))
    torch.manual_seed(0)
    (T5EncoderModel(config) if family == "t5" else AutoModel.from_config(config)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        if (source / name).is_file():
            shutil.copy(source / name, folder)
    # Where no number of positions says it.
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": read_size(size)[2]}))
    return folder


def build_decoder(_: str, size: str, folder: Path) -> Path:
    """Save a random GPT-2 of `LAYERSxWIDTH` in `folder`, whose tokenizer has a word for each token."""
    layers, width, _ = read_size(size)
    words = 30_522
    config = GPT2Config(
        vocab_size=words, n_layer=layers, n_embd=width, n_head=width // 64, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(words)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"eos_token": "t0", "bos_token": "t0", "unk_token": "t0"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


# Task → what makes a checkpoint for it.
_BUILDERS = {"feature-extraction": build_checkpoint, "text-generation": build_decoder}


def measure(checkpoint: Path, way: str, repository: Path) -> Held:
    """Export and serve a checkpoint in one way."""
    engine, precision = way.split(":")
    command = [sys.executable, "-m", "export", "run", str(checkpoint), "--name", "m", "--repository", str(repository)]
    command += ["--engine", engine, "--precision", precision, "--task", find_task(way), "--json"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=CHECKOUT, stdout=log, stderr=log)
        most = 0
        while process.poll() is None:
            most = max(most, sum(map(read_resident, list_tree(process.pid))))
            time.sleep(_LOOK_S)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{way} of {checkpoint.name} failed: {log.read().decode()[-2000:]}")
    with running(repository) as server:
        server.read_until("serving HTTP")
        (stub,) = (server.find_stubs("m_model") or server.find_stubs("m"))[:1]
        instance = read_resident(stub.pid)
    weights = inspect_checkpoint(checkpoint).parameters * 4
    config = AutoConfig.from_pretrained(checkpoint)
    table, row = config.vocab_size * config.hidden_size * 4, count_row(config.to_dict(), checkpoint)
    return Held(weights, table, row, most, instance)


def find_task(way: str) -> str:
    """Return what a way serves."""
    return _TASKS.get(way.split(":")[0], "feature-extraction")


def list_tree(pid: int) -> list[int]:
    """Return a process and all below it, but for a child that is about to become another program.

    Until then it has its parent's memory for its own, which is there once.
    """
    arguments = read_arguments(pid)
    children = [child for child in list_children(pid) if read_arguments(child) != arguments]
    return [pid, *(below for child in children for below in list_tree(child))]


def read_resident(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 of one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def describe(size: str, way: str, held: Held) -> str:
    """Return a line of what was measured."""
    return f"{way:18} {size:11} {held.weights / 1e6:8.0f} {held.export / 1e6:8.0f} {held.instance / 1e6:8.0f}"


def fit(held: list[int], **parts: list[int]) -> str:
    """Return the sum of a base and shares of parts that is nearest to what was held, by the squares of its errors."""
    # Of relative errors: each equation is divided by what was held.
    matrix = np.array([np.ones(len(held)), *parts.values()], dtype=float).T / np.array(held)[:, None]
    shares, *_ = np.linalg.lstsq(matrix, np.ones(len(held)), rcond=None)
    worst = np.abs(matrix @ shares - 1).max()
    told = [f"{share:.2f} x {name}" for name, share in zip(parts, shares[1:], strict=True)]
    return f"{' + '.join([f'{shares[0] / 1e6:.0f} MB', *told])}, off by at most {worst:.0%}"


def main() -> None:
    """Measure, and print as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", default=["6x384", "12x768", "24x1024"], help="layers x width, @ the longest text"
    )
    parser.add_argument("--ways", nargs="+", default=WAYS, help="engine:precision")
    parser.add_argument("--family", choices=FAMILIES, default="bert", help="of encoders (default: bert)")
    args = parser.parse_args()
    sys.stdout.write(f"{'':30} {'weights':>8} {'export':>8} {'instance':>8}\n")
    found: dict[str, list[Held]] = {way: [] for way in args.ways}
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            for way in args.ways:
                checkpoint = Path(folder, find_task(way), size)
                if not checkpoint.exists():
                    _BUILDERS[find_task(way)](args.family, size, checkpoint)
                held = measure(checkpoint, way, Path(folder, way.replace(":", "_")))
                found[way].append(held)
                sys.stdout.write(describe(size, way, held) + "\n")
                sys.stdout.flush()
    for way, several in found.items():
        if len(several) > 2:
            parts = {"weights": [held.weights for held in several]}
            if len({read_size(size)[2] for size in args.sizes}) > 1:
                parts["row"] = [held.row for held in several]
            sys.stdout.write(f"{way:18} export   {fit([held.export for held in several], **parts)}\n")
            rest = [held.weights - held.table for held in several]
            line = fit([held.instance for held in several], weights=rest)
            sys.stdout.write(f"{'':18} instance {line} without the table of tokens\n")


if __name__ == "__main__":
    main()
