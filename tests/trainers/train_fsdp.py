"""Real FSDP, FSDP2 and Accelerate training on CPU ranks, for the tests of the readers: checkpoints and the truth.

    python tests/trainers/train_fsdp.py OUT WORLD_SIZE

Each variant leaves OUT/<variant>/ and OUT/<variant>.truth.pt: {name: tensor}, gathered from the live ranks.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["ACCELERATE_USE_CPU"] = "true"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from ranks import fork_ranks
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
)


class Net(nn.Module):
    """Layers whose sides divide by no number of ranks, or are smaller than it. Takes ids [batch, seq] in 0..36."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 10)
        self.inner = nn.Linear(10, 13)
        self.norm = nn.LayerNorm(13)
        self.outer = nn.Linear(13, 10)
        self.scale = nn.Linear(10, 1)
        self.head = nn.Linear(10, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("running_mean", torch.zeros(10))
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("passing", torch.ones(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        hidden = hidden + self.outer(torch.relu(self.norm(self.inner(hidden))))
        self.batches += 1
        return self.head(hidden * self.scale(hidden))


class Normed(nn.Module):
    """Statistics that every rank keeps for itself, a layer for FSDP to ignore, and a state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.ignored = nn.Linear(6, 3)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.ignored(self.norm(self.inner(numbers)))

    def get_extra_state(self) -> bytes:
        return b"no tensor"

    def set_extra_state(self, state: bytes) -> None:
        assert state == b"no tensor"


class Holder(nn.Module):
    """A model as the one attribute of another module, which is a name of its own and no wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_gpt2()

    def forward(self, ids: torch.Tensor) -> Any:
        return self.model(ids)


def make_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    sizes = {"vocab_size": 31, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, architectures=["GPT2LMHeadModel"]))


def gather(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The live state dict, every tensor whole."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def step(model: nn.Module, optimizer: Any) -> None:
    for index in range(2):
        torch.manual_seed(100 * index + dist.get_rank())
        ids = torch.randint(0, 31, (2, 5))
        output = model(ids)
        logits = getattr(output, "logits", output)
        nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def keep_truth(out: Path, names: list[str], truth: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        for name in names:
            (out / name).mkdir(parents=True, exist_ok=True)
            torch.save(truth, out / f"{name}.truth.pt")
    dist.barrier()


def shard(model: Any, mesh: Any) -> Any:
    for layer in (model.inner, model.outer):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def save_fsdp2(out: Path) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = shard(Net(), init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    state, optimizer_state = get_state_dict(model, optimizer)
    truth = gather(state)
    keep_truth(
        out,
        ["dcp_raw", "dcp_app", "dcp_ema", "dcp_opt", "dcp_moments", "dcp_alone", "dcp_files", "rank_files", "verl"],
        truth,
    )
    # The safetensors writer refuses tied names, so its users leave the second one out.
    untied = {name: value for name, value in state.items() if name != "head.weight"}
    keep_truth(out, ["dcp_hf", "dcp_hf_files"], gather(untied))
    dcp.save(state, checkpoint_id=out / "dcp_raw")
    dcp.save({"app": {"model": state, "optim": optimizer_state}, "step": 2}, checkpoint_id=out / "dcp_app")
    dcp.save({"model": state, "ema": state, "step": 2}, checkpoint_id=out / "dcp_ema")
    dcp.save({"model": state, "optimizer": optimizer_state, "rng": torch.ones(3)}, checkpoint_id=out / "dcp_opt")
    dcp.save({"optimizer": optimizer_state}, checkpoint_id=out / "dcp_moments")
    dcp.save(untied, storage_writer=HuggingFaceStorageWriter(str(out / "dcp_hf"), save_distributed=True))
    files = {name: 1 + index % 2 for index, name in enumerate(untied)}
    dcp.save(untied, storage_writer=HuggingFaceStorageWriter(str(out / "dcp_hf_files"), files, save_distributed=True))
    dcp.save(state, checkpoint_id=out / "dcp_alone", use_collectives=False)
    # A file for each tensor, so that the two names of a tied one lie apart.
    dcp.save(state, storage_writer=dcp.FileSystemWriter(out / "dcp_files", single_file_per_rank=False))
    torch.save(state, out / "rank_files" / f"pytorch_model_fsdp_0_rank{rank}.bin")
    torch.save(state, out / "verl" / f"model_world_size_{world_size}_rank_{rank}.pt")


def save_normed(out: Path) -> None:
    """Rank files with plain tensors: equal on every rank but for statistics, then with different weights as well."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    model = Normed()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), ignored_params=set(model.ignored.parameters()))
    torch.manual_seed(rank)
    loss = model(torch.randn(4, 5)).sum()
    keep_truth(out, ["statistics", "ignored"], gather(model.state_dict()))
    torch.save(model.state_dict(), out / "statistics" / f"pytorch_model_fsdp_0_rank{rank}.bin")
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1)).step()
    torch.save(model.state_dict(), out / "ignored" / f"pytorch_model_fsdp_0_rank{rank}.bin")


def save_compiled(out: Path) -> None:
    """torch.compile of one block, as torchtitan does it; it is never called, so nothing is compiled."""
    torch.manual_seed(12)
    model = shard(Net(), init_device_mesh("cpu", (dist.get_world_size(),)))
    truth = gather(model.state_dict())
    model.inner = torch.compile(model.inner)
    state = model.state_dict()
    keep_truth(out, ["compiled_dcp", "compiled_rank_files"], truth)
    dcp.save({"model": state}, checkpoint_id=out / "compiled_dcp")
    torch.save(state, out / "compiled_rank_files" / f"pytorch_model_fsdp_0_rank{dist.get_rank()}.bin")


def save_bf16(out: Path) -> None:
    torch.manual_seed(8)
    model = shard(Net().to(torch.bfloat16), init_device_mesh("cpu", (dist.get_world_size(),)))
    step(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    state = model.state_dict()
    keep_truth(out, ["bf16_dcp", "bf16_rank_files"], gather(state))
    untied = {name: value for name, value in state.items() if name != "head.weight"}
    keep_truth(out, ["bf16_hf"], gather(untied))
    dcp.save(state, checkpoint_id=out / "bf16_dcp")
    dcp.save(untied, storage_writer=HuggingFaceStorageWriter(str(out / "bf16_hf"), save_distributed=True))
    torch.save(state, out / "bf16_rank_files" / f"pytorch_model_fsdp_0_rank{dist.get_rank()}.bin")


def save_columns(out: Path) -> None:
    """Tensor parallelism: matrices sharded along their second dimension, over all ranks or half of a mesh."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    mesh = init_device_mesh("cpu", (world_size,))
    weights = {
        "wide": torch.randn(5, 11),
        "cube": torch.randn(3, 7, 4),
        "few": torch.randn(1),
        "table": torch.randn(9, 2),
    }
    state = {
        name: distribute_tensor(weight, mesh, [Shard(min(1, weight.dim() - 1))]) for name, weight in weights.items()
    }
    keep_truth(out, ["columns_dcp", "columns_rank_files"], weights)
    dcp.save(state, checkpoint_id=out / "columns_dcp")
    torch.save(state, out / "columns_rank_files" / f"pytorch_model_fsdp_0_rank{rank}.bin")


def save_hybrid(out: Path) -> None:
    """HSDP: two replicas of two shards each; and a mesh of both kinds of sharding."""
    torch.manual_seed(10)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(Net(), mesh)
    step(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    state = model.state_dict()
    keep_truth(out, ["hybrid_dcp", "hybrid_lowest", "hybrid_rank_files"], gather(state))
    dcp.save(state, checkpoint_id=out / "hybrid_dcp")
    # The second replica has nothing to save then, and leaves empty files.
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp.save(state, checkpoint_id=out / "hybrid_lowest", planner=planner)
    torch.save(state, out / "hybrid_rank_files" / f"pytorch_model_fsdp_0_rank{dist.get_rank()}.bin")
    weights = {"grid": torch.randn(7, 5), "rows": torch.randn(9, 3)}
    placements = {"grid": [Shard(0), Shard(1)], "rows": [Shard(0), Shard(0)]}
    both = {name: distribute_tensor(weight, mesh, placements[name]) for name, weight in weights.items()}
    keep_truth(out, ["grid_dcp", "grid_rank_files"], weights)
    dcp.save(both, checkpoint_id=out / "grid_dcp")
    torch.save(both, out / "grid_rank_files" / f"pytorch_model_fsdp_0_rank{dist.get_rank()}.bin")


def wrap_fsdp1(model: Any, use_orig_params: bool) -> FullyShardedDataParallel:
    device = torch.device("cpu")
    inner = getattr(model, "transformer", None)
    if inner is not None:
        inner.h[0] = FullyShardedDataParallel(inner.h[0], use_orig_params=use_orig_params, device_id=device)
    return FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=device)


def save_fsdp1(out: Path) -> None:
    """FSDP1. Its full state dict crashes on CPU, so the truth is gathered through the sharded one."""
    rank = dist.get_rank()
    model = wrap_fsdp1(make_gpt2(), use_orig_params=True)
    step(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
    truth = {}
    for name, value in state.items():
        whole = torch.zeros(value.size())
        value.gather(0, whole if rank == 0 else None)
        truth[name] = whole
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        local = model.state_dict()
    keep_truth(out, ["fsdp1_dcp", "fsdp1_rank_files", "local", "local_flat", "local_buffers"], truth)
    keep_truth(out, ["local_untied"], {name: tensor for name, tensor in truth.items() if name != "lm_head.weight"})
    if rank == 0:
        make_gpt2().config.save_pretrained(out / "local")
        make_gpt2().config.save_pretrained(out / "local_untied")
    dcp.save({"model": state}, checkpoint_id=out / "fsdp1_dcp")
    torch.save(state, out / "fsdp1_rank_files" / f"pytorch_model_fsdp_0_rank{rank}.bin")
    torch.save(local, out / "local" / f"pytorch_model_fsdp_rank{rank}.bin")
    untied = {name: value for name, value in local.items() if name != "lm_head.weight"}
    torch.save(untied, out / "local_untied" / f"pytorch_model_fsdp_rank{rank}.bin")
    save_flat(make_gpt2(), out / "local_flat")
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}
    resnet = ResNetForImageClassification(ResNetConfig(**sizes, architectures=["ResNetForImageClassification"]))
    if rank == 0:
        resnet.config.save_pretrained(out / "local_buffers")
    save_flat(resnet, out / "local_buffers")


def save_flat(model: nn.Module, folder: Path) -> None:
    """Leave the LOCAL state dict without use_orig_params: flat parameters, and buffers under their names."""
    flat = wrap_fsdp1(model, use_orig_params=False)
    with FullyShardedDataParallel.state_dict_type(flat, StateDictType.LOCAL_STATE_DICT):
        torch.save(flat.state_dict(), folder / f"pytorch_model_fsdp_rank{dist.get_rank()}.bin")


def make_plugin(state_dict_type: str) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=state_dict_type)


def turn_fsdp_on(accelerator: Accelerator, state_dict_type: str) -> None:
    """Accelerate turns FSDP on for accelerators only; what it does then is the same on gloo ranks."""
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = make_plugin(state_dict_type)


def reset_accelerate() -> None:
    for state in (PartialState, GradientState):
        state._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


def save_accelerate(
    out: Path, name: str, state_dict_type: str | None, make_model: Callable[[], nn.Module] = make_gpt2
) -> None:
    reset_accelerate()
    accelerator = Accelerator(cpu=True)
    if state_dict_type is not None:
        turn_fsdp_on(accelerator, state_dict_type)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    step(model, optimizer)
    state = accelerator.unwrap_model(model).state_dict() if state_dict_type is None else model.state_dict()
    keep_truth(out, [name], gather(state))
    accelerator.save_state(str(out / name))


def save_two_models(out: Path) -> None:
    reset_accelerate()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(3, 4), nn.Linear(4, 5))
    accelerator.save_state(str(out / "accelerate_two"))


class FsdpTrainer(Trainer):
    """transformers' Trainer, with FSDP on the CPU."""

    state_dict_type = ""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        turn_fsdp_on(self.accelerator, self.state_dict_type)
        self.is_fsdp_enabled = True


def save_by_trainer(out: Path, name: str, state_dict_type: str) -> None:
    """The Trainer leaves OUT/NAME/checkpoint-2/."""
    reset_accelerate()
    FsdpTrainer.state_dict_type = state_dict_type
    options = {"per_device_train_batch_size": 2, "optim": "adamw_torch", "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(out / name), max_steps=2, save_steps=2, use_cpu=True, **options)
    data = [{"input_ids": torch.arange(8) + index, "labels": torch.arange(8) + index} for index in range(16)]
    trainer = FsdpTrainer(model=make_gpt2(), args=arguments, train_dataset=data)
    trainer.train()
    keep_truth(out, [name], gather(trainer.model_wrapped.state_dict()))


def run_rank(world_size: int, out: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    save_fsdp2(out)
    save_columns(out)
    save_normed(out)
    if world_size == 4:
        save_hybrid(out)
    else:
        save_bf16(out)
        save_compiled(out)
        save_fsdp1(out)
        for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            suffix = kind.partition("_")[0].lower()
            save_accelerate(out, f"accelerate_{suffix}", kind)
            save_accelerate(out, f"holder_{suffix}", kind, Holder)
            save_by_trainer(out, f"trainer_{suffix}", kind)
        save_accelerate(out, "accelerate_ddp", None)
        save_two_models(out)


def launch(out: Path, world_size: int) -> None:
    """Train and save every variant of `world_size`, each rank in a forked process."""
    out.mkdir(parents=True, exist_ok=True)
    fork_ranks(world_size, lambda _: run_rank(world_size, out))


if __name__ == "__main__":
    launch(Path(sys.argv[1]), int(sys.argv[2]))
