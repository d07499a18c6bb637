"""Real DeepSpeed training on CPU ranks, for the tests of the readers: checkpoints, and the live weights as truth.

    python tests/trainers/train_zero.py OUT VARIANT[,VARIANT...]

Each variant leaves OUT/<variant>/ (what DeepSpeed saved) and OUT/<variant>.truth.pt: {name: tensor}, gathered from the
live ranks just after saving.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed

# What every rank would load by itself; see `ranks`.
import deepspeed.runtime.zero.muon.muon_optimizer
import torch
from deepspeed.utils import safe_get_full_fp32_param
from ranks import fork_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One run: what is trained, and how."""

    stage: int
    dtype: str = "fp32"
    world_size: int = 2
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    # Parts of the model: "frozen", "tied", "buffers", "groups", "empty", "moe", "uneven", "reversed", "constant",
    # "sequence", "wrapped", "shared", "recomputed".
    parts: frozenset[str] = frozenset()
    steps: int = 2
    tag: str | None = None
    client_state: dict[str, Any] = field(default_factory=dict)
    save_16bit: bool = False
    exclude_frozen: bool = False
    # The universal checkpoint that it starts from.
    loads: str | None = None


ALL_PARTS = frozenset({"frozen", "tied", "buffers", "groups", "empty"})
_SHARED = frozenset({"frozen", "shared", "recomputed"})
_FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}

VARIANTS = {
    "z0_fp32": Variant(stage=0, parts=frozenset({"buffers", "tied"})),
    "z0_bf16": Variant(stage=0, dtype="bf16", parts=frozenset({"buffers", "frozen", "reversed"})),
    "z0_fp16": Variant(stage=0, dtype="fp16", parts=frozenset({"buffers", "tied", "groups"})),
    "z1_fp32": Variant(stage=1, parts=ALL_PARTS - {"empty"}),
    "z1_bf16": Variant(stage=1, dtype="bf16", parts=ALL_PARTS - {"empty"}),
    "z1_bf16_optimizer": Variant(stage=1, dtype="bf16", config=_FP32_ACCUMULATION, parts=frozenset({"groups"})),
    "z2_fp32": Variant(stage=2, parts=ALL_PARTS),
    "z2_bf16": Variant(stage=2, dtype="bf16", parts=ALL_PARTS),
    "z2_fp16": Variant(stage=2, dtype="fp16", parts=frozenset({"tied", "groups"})),
    "z2_round_robin": Variant(stage=2, zero={"round_robin_gradients": True}, parts=ALL_PARTS),
    "z2_round_robin_bf16": Variant(stage=2, dtype="bf16", zero={"round_robin_gradients": True}, parts=ALL_PARTS),
    "z2_aligned": Variant(stage=2, dtype="bf16", zero={"parameter_alignment": True}, parts=ALL_PARTS),
    "z3_fp32": Variant(stage=3, parts=ALL_PARTS),
    "z3_bf16": Variant(stage=3, dtype="bf16", parts=ALL_PARTS),
    "z3_gathered": Variant(stage=3, dtype="bf16", parts=ALL_PARTS - {"empty"}, save_16bit=True),
    "z3_constant": Variant(stage=3, dtype="bf16", steps=0, parts=frozenset({"constant"})),
    "z3_fp16": Variant(stage=3, dtype="fp16", parts=frozenset({"tied", "groups"})),
    "z3_sub_groups": Variant(stage=3, dtype="bf16", zero={"sub_group_size": 300}, parts=ALL_PARTS),
    "z3_hpz": Variant(stage=3, dtype="bf16", zero={"zero_hpz_partition_size": 2}, parts=ALL_PARTS),
    "z3_resumed": Variant(
        stage=3,
        dtype="bf16",
        zero={"sub_group_size": 200},
        config={"checkpoint": {"load_universal": True}},
        parts=ALL_PARTS,
        loads="universal_z3_bf16",
    ),
    "z3_sequence": Variant(stage=3, dtype="bf16", parts=frozenset({"sequence"})),
    "z2_world1": Variant(stage=2, dtype="bf16", world_size=1, parts=ALL_PARTS),
    "z3_world1": Variant(stage=3, dtype="bf16", world_size=1, parts=ALL_PARTS),
    "z2_world3": Variant(stage=2, dtype="bf16", world_size=3, parts=ALL_PARTS),
    "z3_world3": Variant(stage=3, dtype="bf16", world_size=3, parts=ALL_PARTS),
    "z2_world11": Variant(stage=2, dtype="bf16", world_size=11, parts=ALL_PARTS),
    "z3_world11": Variant(stage=3, dtype="bf16", world_size=11, parts=ALL_PARTS),
    "z2_wrapped": Variant(stage=2, dtype="bf16", parts=frozenset({"tied", "buffers", "wrapped"})),
    "z3_wrapped": Variant(stage=3, dtype="bf16", parts=frozenset({"tied", "buffers", "wrapped"})),
    "z1_shared": Variant(stage=1, parts=_SHARED),
    "z2_shared": Variant(stage=2, dtype="bf16", parts=_SHARED | {"empty"}),
    "z3_shared": Variant(stage=3, dtype="bf16", parts=_SHARED | {"empty"}),
    "z2_excluded": Variant(stage=2, dtype="bf16", parts=frozenset({"frozen", "shared"}), exclude_frozen=True),
    "z3_excluded": Variant(stage=3, dtype="bf16", parts=frozenset({"frozen", "shared"}), exclude_frozen=True),
    "moe_z1": Variant(stage=1, dtype="bf16", parts=frozenset({"moe"})),
    "moe_z2": Variant(stage=2, dtype="bf16", parts=frozenset({"moe"})),
    "moe_uneven": Variant(stage=2, dtype="bf16", parts=frozenset({"moe", "uneven"})),
    "moe_z2_fp32": Variant(stage=2, parts=frozenset({"moe"})),
    "moe_z2_world4": Variant(stage=2, dtype="bf16", world_size=4, parts=frozenset({"moe"})),
}

# Name of a universal checkpoint → the variant that it is converted from.
UNIVERSAL = {
    "universal_z1_fp32": "z1_fp32",
    "universal_z2_bf16": "z2_bf16",
    "universal_z2_round_robin": "z2_round_robin_bf16",
    "universal_z3_bf16": "z3_bf16",
}


def make_experts(number: int) -> nn.Module:
    """A layer of experts, over two expert-parallel ranks."""
    layer: nn.Module = deepspeed.moe.layer.MoE(
        hidden_size=10, expert=nn.Linear(10, 10), num_experts=number, ep_size=2, k=1, min_capacity=4
    )
    return layer


class Net(nn.Module):
    """Layers of odd sizes, so that every rule on padding is met. Takes ids [batch, seq] in 0..36."""

    def __init__(self, parts: frozenset[str]) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 10)
        self.frozen = nn.Linear(10, 7)
        self.inner = nn.Linear(10, 11)
        self.norm = nn.LayerNorm(11)
        self.outer = nn.Linear(11, 10, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.5])) if "groups" in parts else None
        self.odd = nn.Parameter(torch.randn(1))
        if "buffers" in parts:
            self.register_buffer("running_mean", torch.zeros(10))
            self.register_buffer("batches", torch.tensor(0))
            self.register_buffer("mask", torch.tensor([True, False, True]))
            self.register_buffer("table", torch.arange(6).reshape(2, 3))
            self.register_buffer("passing", torch.ones(4), persistent=False)
        if "empty" in parts:
            # In a module that is never called: DeepSpeed cannot gather it for a forward pass at stage 3.
            self.spare = nn.ParameterDict({"empty": nn.Parameter(torch.empty(0, 3))})
            if "shared" in parts:
                self.spare["other"] = nn.Parameter(torch.empty(5, 0))
        if "uneven" in parts:
            self.few = make_experts(2)
        if "moe" in parts:
            self.moe = make_experts(4)
        if "shared" in parts:
            # Two names of one parent for one module; two frozen parameters that begin in the same place, but are not
            # the same; two frozen ones that are.
            self.twice = nn.ModuleList([nn.Linear(10, 10, bias=False)] * 2)
            self.base = nn.Parameter(torch.randn(6, 4), requires_grad=False)
            self.part = nn.Parameter(self.base.data[:3], requires_grad=False)
            self.still = nn.Embedding(3, 10).requires_grad_(False)
            self.same = nn.Linear(10, 3, bias=False)
            self.same.weight = self.still.weight
        self.head = nn.Linear(10, 37, bias=False)
        if "tied" in parts:
            self.head.weight = self.embed.weight
        self.frozen.requires_grad_("frozen" not in parts)
        if "constant" in parts:
            for parameter in self.parameters():
                nn.init.zeros_(parameter)
            self.still = nn.LayerNorm(8).requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        hidden = hidden + self.frozen(hidden).mean() * self.odd
        hidden = hidden + self.outer(torch.relu(self.norm(self.inner(hidden))))
        if self.scale is not None:
            hidden = hidden * self.scale
        if hasattr(self, "batches"):
            self.running_mean.lerp_(hidden.detach().mean((0, 1)).to(self.running_mean.dtype), 0.1)
            self.batches += 1
        for name in ("few", "moe"):
            if hasattr(self, name):
                hidden = hidden + getattr(self, name)(hidden)[0]
        if hasattr(self, "twice"):
            hidden = hidden + self.twice[1](self.twice[0](hidden))
        return self.head(hidden)


class Wrapper(nn.Module):
    """Names the model within it as Lightning's `_LightningModuleWrapperBase` does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._forward_module = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._forward_module(ids)


class SequenceRanks:
    """Tells DeepSpeed, as an `mpu`, that all ranks share each sequence: one data-parallel rank."""

    def __init__(self) -> None:
        every = range(torch.distributed.get_world_size())
        alone = [torch.distributed.new_group([rank]) for rank in every][torch.distributed.get_rank()]
        self.get_sequence_parallel_group = self.get_sequence_data_parallel_group = lambda: torch.distributed.group.WORLD
        self.get_data_parallel_group = self.get_model_parallel_group = lambda: alone
        self.get_sequence_parallel_world_size = self.get_sequence_data_parallel_world_size = lambda: len(every)
        self.get_sequence_parallel_rank = self.get_sequence_data_parallel_rank = torch.distributed.get_rank
        self.get_data_parallel_world_size = self.get_model_parallel_world_size = lambda: 1
        self.get_data_parallel_rank = self.get_model_parallel_rank = lambda: 0


def make_groups(model: nn.Module, parts: frozenset[str]) -> list[dict[str, Any]]:
    """The optimizer's parameter groups: one, two (matrices, the rest), or with the experts apart."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if "moe" in parts:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        # By default, as much as no small model has. This cuts one expert, and leaves two layers in one group.
        limit = {"max_group_size": 215} if "uneven" in parts else {}
        groups = split_params_into_different_moe_groups_for_optimizer({"params": trained, "name": "all"}, **limit)
        return list(groups)
    if "reversed" in parts:
        return [{"params": trained[::-1]}]
    if "groups" not in parts:
        return [{"params": trained}]
    return [
        {"params": [parameter for parameter in trained if parameter.dim() > 1]},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]


def make_config(variant: Variant) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": variant.stage, **variant.zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **variant.config,
    }
    if variant.stage == 3:
        config["zero_optimization"] = {
            "stage3_param_persistence_threshold": 8,
            "stage3_gather_16bit_weights_on_model_save": variant.save_16bit,
            **config["zero_optimization"],
        }
    if variant.dtype != "fp32":
        config[variant.dtype] = {"enabled": True}
    if variant.dtype == "fp16":
        config["fp16"]["initial_scale_power"] = 4
    return config


def merge_experts(truth: dict[str, torch.Tensor], rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The truth of all ranks in one: two expert-parallel ranks, each with experts that it counts from 0."""
    own = {}
    for name, tensor in truth.items():
        before, mark, after = name.partition("deepspeed_experts.")
        number, _, rest = after.partition(".")
        local_experts = sum(f"{before}{mark}{index}.{rest}" in truth for index in range(4))
        own[f"{before}{mark}{rank % 2 * local_experts + int(number)}.{rest}" if mark else name] = tensor
    every: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(every, own)
    return {name: tensor for part in reversed(every) for name, tensor in part.items()}


def read_round_robin(engine: Any, parameter: nn.Parameter) -> torch.Tensor:
    """The live fp32 value of a parameter out of the ranks' live pieces, in the order that the optimizer put it.

    DeepSpeed's own `safe_get_full_fp32_param` looks where the parameter would be without the permutation.
    """
    optimizer = engine.optimizer
    for group, members in enumerate(optimizer.round_robin_bit16_groups):
        position = 0
        for member in members:
            if member is parameter:
                piece = optimizer.single_partition_of_fp32_groups[group]
                pieces = [torch.empty_like(piece) for _ in range(torch.distributed.get_world_size())]
                torch.distributed.all_gather(pieces, piece)
                return torch.cat(pieces)[position : position + member.numel()].view_as(member)
            position += member.numel()
    raise LookupError("not a trained parameter")


def read_unfused(engine: Any, parameter: nn.Parameter) -> torch.Tensor:
    """What `safe_get_full_fp32_param` does not know without ZeRO: the fp32 tensor behind a 16-bit parameter."""
    for members, masters in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True):
        for member, master in zip(members, masters, strict=True):
            if member is parameter:
                return master.detach()
    raise LookupError("not a trained parameter")


def gather_truth(engine: Any, variant: Variant) -> dict[str, torch.Tensor]:
    """The live weights: fp32 where the optimizer keeps them, as trained elsewhere; persistent buffers as they are."""
    truth: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        # Stage 3 leaves placeholders of size 0 in the module; `ds_numel` is the size when gathered.
        trained = variant.stage and parameter.requires_grad and getattr(parameter, "ds_numel", parameter.numel())
        value = None
        if trained and variant.zero.get("round_robin_gradients"):
            value = read_round_robin(engine, parameter)
        elif trained:
            value = safe_get_full_fp32_param(parameter)
        elif variant.dtype != "fp32" and not variant.stage and parameter.requires_grad:
            value = read_unfused(engine, parameter)
        if value is None and variant.stage == 3:
            with deepspeed.zero.GatheredParameters([parameter]):
                value = parameter.detach().clone()
        truth[name] = (parameter.detach() if value is None else value).clone()
    persistent = engine.module.state_dict().keys()
    for name, buffer in engine.module.named_buffers():
        if name in persistent:
            truth[name] = buffer.clone()
    return truth


def train(variant: Variant, out: Path, name: str) -> None:
    """Train on this rank, save, and leave the truth beside the checkpoint."""
    torch.manual_seed(7)
    model: nn.Module = Net(variant.parts)
    if "wrapped" in variant.parts:
        # As Lightning's strategy does; with a part that is compiled, which stage 3 cannot train.
        if variant.stage < 3:
            model.inner = torch.compile(model.inner, backend="eager")
        model = Wrapper(model)
    if "recomputed" in variant.parts:
        model.inner = checkpoint_wrapper(model.inner)
    optimizer = torch.optim.AdamW(make_groups(model, variant.parts), lr=0.01)
    mpu = SequenceRanks() if "sequence" in variant.parts else None
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=make_config(variant), mpu=mpu)
    if variant.loads:
        engine.load_checkpoint(str(out / variant.loads), tag="global_step2_universal")
    for step in range(variant.steps):
        torch.manual_seed(100 * step + engine.global_rank)
        ids = torch.randint(0, 37, (2, 5))
        logits = engine(ids)
        engine.backward(nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()))
        engine.step()
    engine.save_checkpoint(
        str(out / name),
        tag=variant.tag,
        client_state={"note": "kept", **variant.client_state},
        exclude_frozen_parameters=variant.exclude_frozen,
    )
    if variant.save_16bit:
        engine.save_16bit_model(str(out / name))
    truth = gather_truth(engine, variant)
    if "wrapped" in variant.parts:
        truth = {name.replace("_forward_module.", "").replace("_orig_mod.", ""): truth[name] for name in truth}
    if "recomputed" in variant.parts:
        truth = {name.replace("_checkpoint_wrapped_module.", ""): truth[name] for name in truth}
    if "moe" in variant.parts:
        truth = merge_experts(truth, engine.global_rank, variant.world_size)
    if engine.global_rank == 0:
        torch.save(truth, out / f"{name}.truth.pt")


def join_ranks() -> None:
    """Make this process one rank of a gloo group, with DeepSpeed's help."""
    # DeepSpeed would compile an all-reduce over shared memory on first use; gloo needs no compiler. (The attribute
    # `deepspeed.comm.torch` is torch itself.)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", verbose=False)
    # DeepSpeed asks for fp16 instructions; torch computes fp16 on any CPU, only slower.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


def make_deepspeed_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    return GPT2LMHeadModel(GPT2Config(vocab_size=101, n_positions=16, n_embd=12, n_layer=2, n_head=2))


def train_by_trainer(out: Path, stage: int) -> Any:
    """transformers' Trainer leaves OUT/checkpoint-2/; returns the engine."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=str(out),
        max_steps=2,
        save_steps=2,
        per_device_train_batch_size=2,
        deepspeed=make_deepspeed_config(stage),
        bf16=True,
        use_cpu=True,
        optim="adamw_torch",
        report_to=[],
        disable_tqdm=True,
    )
    ids = [torch.arange(8) + index for index in range(16)]
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model=make_gpt2(), args=args, train_dataset=data)
    trainer.train()
    return trainer.model_wrapped


def train_by_accelerate(out: Path, stage: int) -> Any:
    """Accelerate's `save_state` leaves OUT/latest and OUT/pytorch_model/; returns the engine."""
    from accelerate import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=make_deepspeed_config(stage)))
    model = make_gpt2()
    engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    ids = torch.arange(16).reshape(2, 8)
    for _ in range(2):
        accelerator.backward(engine(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(out))
    return engine


# Name → (what trains, ZeRO stage).
TRAINERS = {
    "trainer_z2": (train_by_trainer, 2),
    "trainer_z3": (train_by_trainer, 3),
    "accelerate_z2": (train_by_accelerate, 2),
    "accelerate_z3": (train_by_accelerate, 3),
}


def run_trainer(out: Path, name: str) -> None:
    train_by, stage = TRAINERS[name]

    def run(rank: int) -> None:
        join_ranks()
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        truth = gather_truth(train_by(out / name, stage), Variant(stage=stage))
        if rank == 0:
            torch.save(truth, out / f"{name}.truth.pt")

    fork_ranks(2, run)


def convert(out: Path, name: str) -> None:
    """Make OUT/<name>/, the universal checkpoint of a variant that is there already, with DeepSpeed's own script."""
    from deepspeed.checkpoint import ds_to_universal

    (tag,) = out.joinpath(UNIVERSAL[name]).glob("global_step*")
    options = argparse.Namespace(
        input_folder=str(tag),
        output_folder=str(out / name / f"{tag.name}_universal"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=VARIANTS[UNIVERSAL[name]].stage < 3,
    )
    ds_to_universal.main(options)


def launch(out: Path, names: list[str]) -> None:
    """Run `names`, those of one world size together."""
    out.mkdir(parents=True, exist_ok=True)
    for world_size in sorted({VARIANTS[name].world_size for name in names}):
        chosen = [name for name in names if VARIANTS[name].world_size == world_size]

        def run(rank: int, chosen: list[str] = chosen) -> None:
            join_ranks()
            for name in chosen:
                train(VARIANTS[name], out, name)

        fork_ranks(world_size, run)


if __name__ == "__main__":
    chosen_variants = [name for name in sys.argv[2].split(",") if name in VARIANTS]
    launch(Path(sys.argv[1]), [name for name in chosen_variants if not VARIANTS[name].loads])
    for chosen_name in sys.argv[2].split(","):
        if chosen_name in UNIVERSAL:
            convert(Path(sys.argv[1]), chosen_name)
        elif chosen_name in TRAINERS:
            run_trainer(Path(sys.argv[1]), chosen_name)
    launch(Path(sys.argv[1]), [name for name in chosen_variants if VARIANTS[name].loads])
