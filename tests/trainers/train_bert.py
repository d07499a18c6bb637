"""Real ZeRO-3 training of a small sentence encoder on two CPU ranks, for the test of the whole line.

    python tests/trainers/train_bert.py CHECKPOINT OUT

Starts from the Hugging Face folder CHECKPOINT; leaves OUT/zero/ (what DeepSpeed saved, without config or tokenizer) and
OUT/truth/ (the live ranks' fp32 weights as a Hugging Face folder).
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

# First, for it sets up DeepSpeed's environment before DeepSpeed is imported.
from train_zero import Variant, gather_truth, join_ranks, make_deepspeed_config  # isort: skip

import deepspeed
import torch
from ranks import fork_ranks
from safetensors.torch import save_file
from transformers import AutoModel


def main() -> None:
    checkpoint, out = Path(sys.argv[1]), Path(sys.argv[2])

    def run(rank: int) -> None:
        join_ranks()
        engine = train(checkpoint, out / "zero")
        truth = gather_truth(engine, Variant(stage=3))
        if rank == 0:
            save_truth(truth, checkpoint, out / "truth")

    fork_ranks(2, run)


def train(checkpoint: Path, out: Path) -> Any:
    model = AutoModel.from_pretrained(checkpoint, add_pooling_layer=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = make_deepspeed_config(3) | {"train_micro_batch_size_per_gpu": 2}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    ids = torch.randint(1000, 2000, (2, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        engine.backward(engine(input_ids=ids).last_hidden_state.float().square().mean())
        engine.step()
    engine.save_checkpoint(str(out))
    return engine


def save_truth(truth: dict[str, torch.Tensor], checkpoint: Path, out: Path) -> None:
    shutil.copytree(checkpoint, out)
    save_file({name: tensor.contiguous() for name, tensor in truth.items()}, out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["model_type"] == "bert"


if __name__ == "__main__":
    main()
