"""Real training of a model of one's own in DeepSpeed's pipeline, for the reader's tests.

    python tests/trainers/train_own_pipeline.py OUT

Two stages on CPU ranks with gloo: a small network of pictures, or one of tokens, whose layers are numbered by the
pipeline. Each variant leaves OUT/<variant>/ (what DeepSpeed saved) and OUT/<variant>.truth.pt: the fp32 master weights
and the buffers of the live ranks under the names of the same layers in an `nn.Sequential`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param
from ranks import fork_ranks
from torch import nn
from train_megatron import join_ranks

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16_stage1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    # Two layers of one shape, each of which stands in two places: only their weights tell them apart.
    "tied_twice": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    # Tied layers in both stages, which train their own of what is not tied: a bias.
    "tokens": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "tokens_fp32": {"zero_optimization": {"stage": 1}},
    # And a head that uses more of the first layer than what is tied.
    "tokens_more": {"zero_optimization": {"stage": 1}},
    # And one that uses a buffer of it, of which each stage has its own.
    "tokens_scaled": {"zero_optimization": {"stage": 1}},
    # A table, and a head of another class that has its weight and a bias of its own; nothing else is in the last stage.
    "tokens_decoded": {"zero_optimization": {"stage": 1}},
}
WORDS = 13


class Embeddings(nn.Module):
    def __init__(self, *, scaled: bool = False) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, 16)
        self.position = nn.Parameter(torch.randn(6, 16))
        if scaled:
            self.register_buffer("scale", torch.rand(16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.word(ids) + self.position


class Mirror(nn.Module):
    """One weight under two names, which the optimizer has once."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(16, 16), nn.Linear(16, 16)
        self.back.weight = self.there.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor = self.back(self.there(hidden).tanh())
        return seen


def score(embeddings: Embeddings, hidden: torch.Tensor) -> torch.Tensor:
    """A head out of the first layer's words, of which DeepSpeed writes no file."""
    return hidden @ embeddings.word.weight.t()


def score_more(embeddings: Embeddings, hidden: torch.Tensor) -> torch.Tensor:
    """The same with the positions, of which the head's stage trains its own."""
    return score(embeddings, hidden + embeddings.position)


def score_scaled(embeddings: Embeddings, hidden: torch.Tensor) -> torch.Tensor:
    return score(embeddings, hidden * embeddings.scale)


def flatten(batch: torch.Tensor) -> torch.Tensor:
    """A layer without a state, which is a function."""
    return batch.flatten(1)


HEADS = {"tokens_more": score_more, "tokens_scaled": score_scaled}


def list_token_layers(head: Any) -> list[Any]:
    tied = ("embed", Embeddings)
    options = {"tied_weight_attr": ["word.weight"], "scaled": head is score_scaled}
    return [
        TiedLayerSpec(*tied, **options),
        TiedLayerSpec("mix", nn.Linear, 16, 16),
        LayerSpec(Mirror),
        nn.Tanh(),
        TiedLayerSpec("mix", nn.Linear, 16, 16),
        LayerSpec(nn.LayerNorm, 16),
        TiedLayerSpec(*tied, forward_fn=head, **options),
    ]


def list_decoded_layers() -> list[Any]:
    return [
        TiedLayerSpec("word", nn.Embedding, WORDS, 16),
        LayerSpec(nn.Linear, 16, 16),
        nn.Tanh(),
        TiedLayerSpec("word", nn.Linear, 16, WORDS),
    ]


def list_layers(dtype: torch.dtype, *, tied_twice: bool) -> list[Any]:
    # In bf16 on a CPU the one with buffers does not run.
    norm = LayerSpec(nn.BatchNorm2d, 8, affine=False) if dtype == torch.float32 else LayerSpec(nn.GroupNorm, 2, 8)
    return [
        LayerSpec(nn.Conv2d, 3, 8, 3, stride=2),
        norm,
        nn.ReLU(),
        flatten,
        LayerSpec(nn.Linear, 8 * 7 * 7, 16),
        TiedLayerSpec("mix", nn.Linear, 16, 16),
        nn.Tanh(),
        TiedLayerSpec("mix", nn.Linear, 16, 16),
        *([TiedLayerSpec("other", nn.Linear, 16, 16)] * 2 if tied_twice else []),
        LayerSpec(nn.Linear, 16, 5),
    ]


def score_tokens(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.float().flatten(0, 1), labels.flatten())


def make_batches(dtype: torch.dtype, *, are_tokens: bool) -> Any:
    torch.manual_seed(2)
    while True:
        if are_tokens:
            yield torch.randint(0, WORDS, (2, 6)), torch.randint(0, WORDS, (2, 6))
            continue
        yield torch.randn(2, 3, 16, 16).to(dtype), torch.randint(0, 5, (2,))


def list_places(module: Any, name: str) -> list[str]:
    """Return the names, by the layers' numbers, of what this stage has: several of a tied layer, none of a head."""
    if not name.startswith("tied_modules."):
        return [name]
    _, key, end = name.split(".", 2)
    specs = [(place, module._layer_specs[place]) for place in range(module._local_start, module._local_stop)]
    tied = [(place, spec) for place, spec in specs if isinstance(spec, TiedLayerSpec) and spec.key == key]
    return [f"{place}.{end}" for place, spec in tied if spec.forward_fn is None]


def gather_truth(module: Any) -> dict[str, torch.Tensor]:
    own = {name: value.detach().clone() for name, value in module.named_buffers()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        master = safe_get_full_fp32_param(parameter)
        own[name] = (parameter if master is None else master).detach().float().clone()
    own = {place: value for name, value in own.items() for place in list_places(module, name)}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    truth: dict[str, torch.Tensor] = {}
    for stage in gathered:
        truth |= stage
    return truth


def run_rank(out: Path) -> None:
    join_ranks()
    for name, settings in VARIANTS.items():
        torch.manual_seed(5)
        dtype = torch.bfloat16 if "bf16" in settings else torch.float32
        are_tokens = name.startswith("tokens")
        head = HEADS.get(name, score)
        layers = list_token_layers(head) if are_tokens else list_layers(dtype, tied_twice=name == "tied_twice")
        layers = list_decoded_layers() if name == "tokens_decoded" else layers
        loss = score_tokens if are_tokens else nn.CrossEntropyLoss()
        module = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform", base_seed=5)
        config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, **settings}
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        batches = make_batches(dtype, are_tokens=are_tokens)
        for _ in range(2):
            engine.train_batch(batches)
        engine.save_checkpoint(str(out / name))
        truth = gather_truth(module)
        if not dist.get_rank():
            torch.save(truth, out / f"{name}.truth.pt")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    fork_ranks(2, lambda _: run_rank(place))
