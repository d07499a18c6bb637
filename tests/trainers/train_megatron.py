"""Real DeepSpeed pipeline and tensor parallel training of a GPT-2 with Megatron's layer names, for the reader's tests.

    python tests/trainers/train_megatron.py OUT VARIANT[,VARIANT...]

Megatron-DeepSpeed itself is in no package registry. What it puts on disk is what DeepSpeed's PipelineEngine saves of
layers with its names, in its order, with its arguments beside them; all that is done here, on CPU ranks with gloo. Its
tensor parallel layers are rebuilt as small ones that really train on several ranks: each holds its part of a matrix
and sums activations or gradients with the others.

Each variant leaves OUT/<variant>/ (what DeepSpeed saved) and OUT/<variant>.truth.pt: the fp32 master weights of the
live ranks, put together to the unsplit model under Megatron's names, as {"3.mlp.dense_h_to_4h.weight": tensor, ...}.
"""

from __future__ import annotations

import os
import sys
import warnings
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param
from ranks import fork_ranks
from torch import nn

# Megatron's default is 128.
PADDED_TO = 8


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One run: how it is split, and what is trained."""

    pipe: int = 1
    tensor: int = 1
    data: int = 1
    dtype: str = "fp32"
    stage: int = 1
    layers: int = 3
    hidden: int = 24
    heads: int = 4
    vocabulary: int = 53
    positions: int = 10
    args: dict[str, Any] = field(default_factory=dict)
    # What matrices and tables, but that of positions, are multiplied by before training.
    scale: float = 1.0
    # Whether the head has weights of its own.
    untied: bool = False
    # Whether PipelineEngine runs it; else DeepSpeed's plain engine, with Megatron's nested state dict.
    pipelined: bool = True

    @property
    def world_size(self) -> int:
        return self.pipe * self.tensor * self.data

    @property
    def padded_vocabulary(self) -> int:
        """As Megatron pads: to a multiple of `make_vocab_size_divisible_by` for each tensor parallel rank."""
        step = PADDED_TO * self.tensor
        return -(-self.vocabulary // step) * step


VARIANTS = {
    "t1_stage0": Variant(stage=0),
    "t2_bf16": Variant(tensor=2, dtype="bf16"),
    "p2_stage1": Variant(pipe=2, layers=4),
    "p2_untied_bf16": Variant(pipe=2, dtype="bf16", untied=True),
    "t2_nested_stage1": Variant(tensor=2, pipelined=False),
    "t2_nested_bf16": Variant(tensor=2, dtype="bf16", pipelined=False),
    "t2_nested_stage0": Variant(tensor=2, stage=0, pipelined=False),
    "t2_nested_bf16_stage0": Variant(tensor=2, stage=0, dtype="bf16", pipelined=False),
    "p2d2_bf16_stage0": Variant(pipe=2, data=2, stage=0, dtype="bf16"),
    "t2d2_stage1": Variant(tensor=2, data=2, hidden=32),
    "t4_stage0": Variant(tensor=4, stage=0),
    "p2t2d2_bf16": Variant(pipe=2, tensor=2, data=2, dtype="bf16", heads=6),
    # For whoever wants texts of it, which depend on all that stands before: left as small as the others, tokens would
    # depend on their positions alone.
    "p2t2_writer": Variant(pipe=2, tensor=2, layers=2, hidden=64, vocabulary=600, positions=4096, scale=4.0),
}


class _SumBackward(torch.autograd.Function):
    """The input of a column parallel layer: each rank's gradient is a part of the whole."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class _SumForward(torch.autograd.Function):
    """The output of a row parallel layer: each rank's product is a part of the whole."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        tensor = tensor.contiguous().clone()
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherLast(torch.autograd.Function):
    """The logits of all ranks side by side."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        context.group, context.width = group, tensor.shape[-1]
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        start = dist.get_rank(context.group) * context.width
        return gradient[..., start : start + context.width].contiguous(), None


def own_part(weight: torch.Tensor, dim: int, group: Any) -> nn.Parameter:
    """This rank's part of a weight, marked so that DeepSpeed counts it in the gradient's norm on every rank."""
    parameter = nn.Parameter(weight.chunk(dist.get_world_size(group), dim=dim)[dist.get_rank(group)].clone())
    parameter.model_parallel = True
    return parameter


class ColumnParallel(nn.Module):
    """This rank's rows of a weight [out, in]: its part of the outputs."""

    def __init__(self, inputs: int, outputs: int, group: Any) -> None:
        super().__init__()
        self.weight = own_part(torch.randn(outputs, inputs) * 0.1, 0, group)
        self.bias = own_part(torch.randn(outputs) * 0.1, 0, group)
        self.group = group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(_SumBackward.apply(hidden, self.group), self.weight, self.bias)


class RowParallel(nn.Module):
    """This rank's columns of a weight [out, in]: its part of the sums. The bias is whole."""

    def __init__(self, inputs: int, outputs: int, group: Any) -> None:
        super().__init__()
        self.weight = own_part(torch.randn(outputs, inputs) * 0.1, 1, group)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.1)
        self.group = group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _SumForward.apply(nn.functional.linear(hidden, self.weight), self.group) + self.bias


class Table(nn.Module):
    """This rank's rows of the word embeddings."""

    def __init__(self, variant: Variant, group: Any) -> None:
        super().__init__()
        self.weight = own_part(torch.randn(variant.padded_vocabulary, variant.hidden) * 0.1, 0, group)
        self.first = dist.get_rank(group) * self.weight.shape[0]
        self.group = group

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self.first
        own = (local >= 0) & (local < self.weight.shape[0])
        rows = nn.functional.embedding(local.clamp(0, self.weight.shape[0] - 1), self.weight)
        return _SumForward.apply(rows * own.unsqueeze(-1), self.group)


class Embedding(nn.Module):
    """Word and position embeddings, tied to the head by `word_embeddings_weight`."""

    def __init__(self, variant: Variant, group: Any) -> None:
        super().__init__()
        self.word_embeddings = Table(variant, group)
        self.position_embeddings = nn.Embedding(variant.positions, variant.hidden)

    @property
    def word_embeddings_weight(self) -> nn.Parameter:
        return self.word_embeddings.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1])
        return self.word_embeddings(ids) + self.position_embeddings(positions)


class Attention(nn.Module):
    """Causal attention; rows of `query_key_value` are [head, 3, dim] as from checkpoint version 2 on."""

    def __init__(self, hidden: int, heads: int, group: Any) -> None:
        super().__init__()
        self.heads, self.dim = heads // dist.get_world_size(group), hidden // heads
        self.query_key_value = ColumnParallel(hidden, 3 * hidden, group)
        self.dense = RowParallel(hidden, hidden, group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        mixed = self.query_key_value(hidden).view(batch, length, self.heads, 3, self.dim)
        query, key, value = (part.transpose(1, 2) for part in mixed.unbind(3))
        context = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dense(context.transpose(1, 2).reshape(batch, length, self.heads * self.dim))


class Feedforward(nn.Module):
    def __init__(self, hidden: int, group: Any) -> None:
        super().__init__()
        self.dense_h_to_4h = ColumnParallel(hidden, 4 * hidden, group)
        self.dense_4h_to_h = RowParallel(4 * hidden, hidden, group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dense_4h_to_h(nn.functional.gelu(self.dense_h_to_4h(hidden), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, group: Any) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden)
        self.self_attention = Attention(hidden, heads, group)
        self.post_attention_layernorm = nn.LayerNorm(hidden)
        self.mlp = Feedforward(hidden, group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attention(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def compute_logits(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    group = embedding.word_embeddings.group
    logits = nn.functional.linear(_SumBackward.apply(hidden, group), embedding.word_embeddings_weight)
    return _GatherLast.apply(logits, group)


class Head(nn.Module):
    """A head that is not tied: this rank's rows."""

    def __init__(self, variant: Variant, group: Any) -> None:
        super().__init__()
        self.lm_head = Table(variant, group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        group = self.lm_head.group
        return _GatherLast.apply(nn.functional.linear(_SumBackward.apply(hidden, group), self.lm_head.weight), group)


class Nested(nn.Module):
    """The model without a pipeline, under the names of Megatron's modules."""

    def __init__(self, variant: Variant, group: Any) -> None:
        super().__init__()
        self.language_model = nn.Module()
        self.language_model.embedding = Embedding(variant, group)
        encoder = self.language_model.encoder = nn.Module()
        encoder.layers = nn.ModuleList(Block(variant.hidden, variant.heads, group) for _ in range(variant.layers))
        encoder.final_layernorm = nn.LayerNorm(variant.hidden)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        embedding, encoder = self.language_model.embedding, self.language_model.encoder
        hidden = embedding(ids)
        for layer in encoder.layers:
            hidden = layer(hidden)
        return compute_loss(compute_logits(embedding, encoder.final_layernorm(hidden)), labels)

    def nested_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """What Megatron saves in place of the plain one (`state_dict_for_save_checkpoint`)."""
        embedding = self.language_model.embedding
        tables = {
            "word_embeddings": embedding.word_embeddings.state_dict(),
            "position_embeddings": embedding.position_embeddings.state_dict(),
        }
        return {"language_model": {"embedding": tables, "encoder": self.language_model.encoder.state_dict()}}


def compute_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def pass_on(hidden: torch.Tensor) -> torch.Tensor:
    """Where Megatron casts or transposes: a layer without weights, which takes a number and leaves no file."""
    return hidden


def make_specs(variant: Variant, group: Any) -> list[Any]:
    """Megatron's order: a function, embeddings, a function, blocks, a function, the last norm, the tied head."""
    tied = {"tied_weight_attr": "word_embeddings_weight"}
    first = TiedLayerSpec("embed", Embedding, variant, group, **tied)
    last = TiedLayerSpec("embed", Embedding, variant, group, forward_fn=compute_logits, **tied)
    if variant.untied:
        first, last = LayerSpec(Embedding, variant, group), LayerSpec(Head, variant, group)
    return [
        pass_on,
        first,
        pass_on,
        *(LayerSpec(Block, variant.hidden, variant.heads, group) for _ in range(variant.layers)),
        pass_on,
        LayerSpec(nn.LayerNorm, variant.hidden),
        last,
    ]


def make_args(variant: Variant) -> Namespace:
    """The arguments that Megatron-DeepSpeed stores and that describe the architecture."""
    settings = {
        "num_layers": variant.layers,
        "hidden_size": variant.hidden,
        "ffn_hidden_size": 4 * variant.hidden,
        "num_attention_heads": variant.heads,
        "num_key_value_heads": variant.heads,
        "kv_channels": variant.hidden // variant.heads,
        "max_position_embeddings": variant.positions,
        "padded_vocab_size": variant.padded_vocabulary,
        "make_vocab_size_divisible_by": PADDED_TO,
        "tensor_model_parallel_size": variant.tensor,
        "pipeline_model_parallel_size": variant.pipe,
        "layernorm_epsilon": 1e-5,
        "bias_gelu_fusion": True,
        "openai_gelu": False,
        "swiglu": False,
        "normalization": "layernorm",
        "use_rotary_position_embeddings": False,
        "add_position_embedding": True,
        "untie_embeddings_and_output_weights": variant.untied,
        "apply_residual_connection_post_layernorm": False,
        "num_experts": [1],
        "params_dtype": torch.float32,
    }
    return Namespace(**{**settings, **variant.args})


def make_config(variant: Variant) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": variant.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if variant.dtype != "fp32":
        config[variant.dtype] = {"enabled": True}
    if variant.dtype != "fp32" and variant.stage:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def make_batches(variant: Variant, data_rank: int) -> Any:
    torch.manual_seed(11 + data_rank)
    while True:
        ids = torch.randint(0, variant.vocabulary, (2, 11))
        yield ids[:, :-1], ids[:, 1:]


def gather_truth(engine: Any, variant: Variant) -> dict[str, torch.Tensor] | None:
    """The fp32 master weights of all ranks as one unsplit model, on rank 0."""
    own = {}
    # What a 16-bit optimizer keeps where PipelineEngine does not take BF16_Optimizer.
    groups = zip(*(getattr(engine.optimizer, name, ()) for name in ("fp16_groups", "fp32_groups")), strict=True)
    masters = {id(low): master for group in groups for low, master in zip(*group, strict=True)}
    for name, parameter in engine.module.named_parameters():
        value = masters.get(id(parameter), parameter)
        if not masters and (variant.stage or variant.dtype != "fp32"):
            value = safe_get_full_fp32_param(parameter)
        own[name_as_in_pipeline(name, variant)] = value.detach().float().clone()
    coordinate = engine.mpu._topo.get_coord(dist.get_rank())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (coordinate.pipe, coordinate.model, coordinate.data, own))
    if dist.get_rank():
        return None
    truth: dict[str, list[torch.Tensor]] = {}
    for pipe in range(variant.pipe):
        for tensor in range(variant.tensor):
            state = next(s for p, t, d, s in gathered if (p, t, d) == (pipe, tensor, 0))
            for name, value in state.items():
                # The last stage's copy of the embeddings: its words are kept equal, its positions are not trained.
                if name.startswith("tied_modules.") and pipe:
                    continue
                truth.setdefault(name, []).append(value)
    return {name: join_parts(name, parts) for name, parts in truth.items()}


def name_as_in_pipeline(name: str, variant: Variant) -> str:
    """One set of names for the truth of all variants: that of the pipeline with tied embeddings."""
    if variant.pipelined:
        return name.replace("1.word_embeddings.", "tied_modules.embed.word_embeddings.").replace(
            "1.position_embeddings.", "tied_modules.embed.position_embeddings."
        )
    name = name.removeprefix("language_model.").replace("embedding.", "tied_modules.embed.", 1)
    name = name.replace("encoder.final_layernorm", str(4 + variant.layers))
    if name.startswith("encoder.layers."):
        layer, _, rest = name.removeprefix("encoder.layers.").partition(".")
        name = f"{3 + int(layer)}.{rest}"
    return name


def join_parts(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight")):
        return torch.cat(parts, dim=1)
    if "query_key_value" in name or "dense_h_to_4h" in name or "word_embeddings" in name or "lm_head" in name:
        return torch.cat(parts)
    assert all(torch.equal(part, parts[0]) for part in parts), name
    return parts[0]


def train_pipeline(variant: Variant, topology: Any, group: Any, batches: Any) -> Any:
    module = PipelineModule(
        make_specs(variant, group), topology=topology, loss_fn=compute_loss, partition_method="type:Block", base_seed=5
    )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1 and "position" not in name:
                parameter.mul_(variant.scale)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=make_config(variant))
    for _ in range(2):
        engine.train_batch(batches)
    return engine


def train_nested(variant: Variant, topology: Any, group: Any, batches: Any) -> Any:
    module = Nested(variant, group)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    config = {**make_config(variant), "gradient_accumulation_steps": 1}
    grid = PipelineParallelGrid(topology)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, mpu=grid)
    for _ in range(2):
        engine.backward(engine(*next(batches)))
        engine.step()
    engine.module.state_dict = module.nested_state_dict
    return engine


def train(variant: Variant, out: Path) -> Any:
    """Train on this rank, save to `out`, and return the engine."""
    topology = PipeModelDataParallelTopology(num_pp=variant.pipe, num_mp=variant.tensor, num_dp=variant.data)
    own = None
    for ranks in topology.get_axis_comm_lists("model") or [[rank] for rank in range(variant.world_size)]:
        group = dist.new_group(ranks)
        own = group if dist.get_rank() in ranks else own
    torch.manual_seed(5)
    batches = make_batches(variant, topology.get_coord(dist.get_rank()).data)
    engine = (train_pipeline if variant.pipelined else train_nested)(variant, topology, own, batches)
    state = {"args": make_args(variant), "iteration": 2, "checkpoint_version": 3.0, "tokens": 80}
    engine.save_checkpoint(str(out), client_state=state)
    return engine


def join_ranks() -> None:
    """Make this process one rank of a gloo group, with DeepSpeed's help."""
    warnings.simplefilter("ignore")
    # DeepSpeed would compile a shared memory all-reduce in C++ first, for half a minute; gloo adds up the same.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", verbose=False)


def run_rank(out: Path, names: list[str]) -> None:
    """Train each variant, and leave the truth beside its checkpoint."""
    join_ranks()
    for name in names:
        truth = gather_truth(train(VARIANTS[name], out / name), VARIANTS[name])
        if truth is not None:
            torch.save(truth, out / f"{name}.truth.pt")


def launch(out: Path, names: list[str]) -> None:
    """Run `names`, those of one world size together."""
    out.mkdir(parents=True, exist_ok=True)
    for world_size in sorted({VARIANTS[name].world_size for name in names}):
        chosen = [name for name in names if VARIANTS[name].world_size == world_size]
        fork_ranks(world_size, lambda _, chosen=chosen: run_rank(out, chosen))


if __name__ == "__main__":
    launch(Path(sys.argv[1]), sys.argv[2].split(","))
