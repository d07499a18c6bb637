"""Real ZeRO-3 training of a LoRA adapter on two CPU ranks, for the test of the whole line.

    python tests/trainers/train_lora.py CHECKPOINT OUT

Starts from the Hugging Face folder CHECKPOINT; leaves OUT/zero/ (what DeepSpeed saved, with adapter_config.json as
transformers' Trainer puts it there) and OUT/truth/ (what peft's merge_and_unload makes of the live fp32 weights).
"""

import shutil
import sys
from pathlib import Path
from typing import Any

# First, for it sets up DeepSpeed's environment before DeepSpeed is imported.
from train_zero import Variant, gather_truth, join_ranks, make_deepspeed_config  # isort: skip

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from ranks import fork_ranks
from transformers import AutoModel

SETTINGS = LoraConfig(r=4, lora_alpha=10, target_modules=["query", "value"], init_lora_weights=False)


def build(checkpoint: Path) -> Any:
    torch.manual_seed(3)
    return get_peft_model(AutoModel.from_pretrained(checkpoint, add_pooling_layer=False), SETTINGS)


def main() -> None:
    checkpoint, out = Path(sys.argv[1]), Path(sys.argv[2])

    def run(rank: int) -> None:
        join_ranks()
        engine = train(checkpoint, out / "zero")
        truth = gather_truth(engine, Variant(stage=3, parts=frozenset({"frozen"})))
        if rank == 0:
            SETTINGS.save_pretrained(out / "zero")
            save_truth(truth, checkpoint, out / "truth")

    fork_ranks(2, run)


def train(checkpoint: Path, out: Path) -> Any:
    model = build(checkpoint)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = make_deepspeed_config(3) | {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": False}}
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=0.01), config=config)[0]
    ids = torch.randint(1000, 2000, (2, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        engine.backward(engine(input_ids=ids).last_hidden_state.square().mean())
        engine.step()
    engine.save_checkpoint(str(out))
    return engine


def save_truth(truth: dict[str, torch.Tensor], checkpoint: Path, out: Path) -> None:
    # On a model of its own: the engine's is partitioned.
    model = build(checkpoint)
    missing, unexpected = model.load_state_dict(truth, strict=False)
    assert not unexpected and not [
        name for name in missing if "position_ids" not in name and "token_type_ids" not in name
    ]
    shutil.copytree(checkpoint, out)
    model.merge_and_unload().save_pretrained(out)


if __name__ == "__main__":
    main()
