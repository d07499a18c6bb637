"""Real training with PyTorch Lightning on the CPU: its own `.ckpt`, and the folders of its DeepSpeed and FSDP2.

    python tests/trainers/train_lightning.py OUT

Leaves OUT/plain/last.ckpt, OUT/zero3/last.ckpt/ and OUT/sharded/last.ckpt/ of two ranks, and beside each
OUT/<name>.truth.pt: {name: tensor}, the live weights without Lightning's names; those of `sharded` with them.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any, Optional

# First, for it sets up DeepSpeed's environment before DeepSpeed is imported.
from train_zero import Variant, gather_truth, join_ranks, make_gpt2  # isort: skip

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DeepSpeedStrategy, ModelParallelStrategy
from ranks import fork_ranks
from torch.distributed.fsdp import fully_shard


class Module(lightning.LightningModule):
    """A model as its own attribute, the usual way, with hyperparameters of every plain kind."""

    def __init__(self, learning_rate: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), tags: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = make_gpt2()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class CpuDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning lets DeepSpeed train on CUDA alone; everything that it saves is made here as well."""

    def setup_environment(self) -> None:
        self.set_world_ranks()

    @property
    def root_device(self) -> torch.device:
        # DeepSpeed asks for a number.
        return torch.device("cpu", 0)


def fit(out: Path, module_class: type[Module] = Module, **options: Any) -> lightning.Trainer:
    trainer = lightning.Trainer(
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(out, filename="last", every_n_train_steps=3)],
        **options,
    )
    ids = torch.arange(64).reshape(8, 8)
    kinds = [Any, dict[str, int], int | None, Optional[int]]  # noqa: UP045
    module = module_class(tags={"run": ["a", None, 1.5], "kinds": kinds})
    trainer.fit(module, torch.utils.data.DataLoader(ids, batch_size=2))
    return trainer


def train_plain(out: Path) -> None:
    trainer = fit(out / "plain", accelerator="cpu")
    torch.save(trainer.lightning_module.model.state_dict(), out / "plain.truth.pt")
    trainer.lightning_module.model.config.save_pretrained(out)


def train_zero3(out: Path, rank: int) -> None:
    join_ranks()
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    strategy = CpuDeepSpeedStrategy(stage=3)
    trainer = fit(out / "zero3", strategy=strategy, accelerator="cpu", devices=2, precision="bf16-true")
    truth = gather_truth(trainer.strategy.deepspeed_engine, Variant(stage=3))
    if rank == 0:
        names = {name: name.removeprefix("_forward_module.").removeprefix("model.") for name in truth}
        torch.save({names[name]: tensor for name, tensor in truth.items()}, out / "zero3.truth.pt")


class ShardedModule(Module):
    """The same, sharded by FSDP2 as Lightning's strategy for it asks."""

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


class CpuModelParallelStrategy(ModelParallelStrategy):
    """Lightning takes the accelerator of the rank's number; a CPU has none."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")


def train_sharded(out: Path, rank: int) -> None:
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    strategy = CpuModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    trainer = fit(out / "sharded", ShardedModule, strategy=strategy, accelerator="cpu", devices=2)
    truth = {name: tensor.full_tensor() for name, tensor in trainer.lightning_module.state_dict().items()}
    if rank == 0:
        torch.save(truth, out / "sharded.truth.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    chosen = Path(sys.argv[1])
    train_plain(chosen)
    fork_ranks(2, lambda rank: train_sharded(chosen, rank))
    fork_ranks(2, lambda rank: train_zero3(chosen, rank))
