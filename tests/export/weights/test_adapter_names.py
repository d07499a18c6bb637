"""Adapters and checkpoints that call a layer differently: each change gets to its place."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import TINY_LLAMA, check_as_trained, check_equal, merge_here, merge_with_peft, rewrite, train_adapter
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from export.errors import AdapterError

TINY_NEOX = {**TINY_LLAMA, "num_attention_heads": 2}

VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.mark.parametrize("naming", ["files", "transformers 5"])
@pytest.mark.parametrize("stored", ["files", "transformers 5"])
def test_layers_are_found_whose_names_another_release_changed(naming: str, stored: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = ViTConfig(**VIT, image_size=32, patch_size=8, num_labels=3)
    whole = ViTForImageClassification(config)
    whole.save_pretrained(tmp_path / "base")
    in_files = load_file(tmp_path / "base" / "model.safetensors")
    if stored != "files":
        save_file(whole.state_dict(), tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
        assert in_files.keys() != whole.state_dict().keys()

    def load() -> Any:
        return AutoModelForImageClassification.from_pretrained(tmp_path / "base")

    settings = {"r": 4, "target_modules": ["q_proj", "fc1"], "modules_to_save": ["classifier"]}
    train_adapter(load(), tmp_path / "adapter", **settings)
    wanted = merge_with_peft(load(), tmp_path / "adapter")
    if naming == "files":
        old = {
            "layers.": "encoder.layer.",
            "attention.q_proj": "attention.attention.query",
            "mlp.fc1": "intermediate.dense",
        }

        def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            for new, name in old.items():
                tensors = {each.replace(new, name): tensor for each, tensor in tensors.items()}
            return tensors

        rewrite(tmp_path / "adapter", rename)
    check_equal(merge_here(tmp_path / "base", AutoModelForImageClassification, tmp_path / "adapter"), wanted)


RENAMED = {
    "mixtral": (
        MixtralForCausalLM(MixtralConfig(**TINY_LLAMA, num_local_experts=2, initializer_range=0.5)),
        {"target_modules": ["q_proj"], "modules_to_save": ["gate"]},
    ),
    "gpt-neox": (
        GPTNeoXForCausalLM(GPTNeoXConfig(**TINY_NEOX, initializer_range=0.5)),
        {"target_modules": ["query_key_value"], "modules_to_save": ["lm_head", "embed_out"], "bias": "all"},
    ),
}


@pytest.mark.parametrize("kind", RENAMED)
def test_modules_that_were_trained_whole_are_found_under_the_names_of_files(kind: str, tmp_path: Path) -> None:
    model, settings = RENAMED[kind]
    model.save_pretrained(tmp_path / "base")
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    wanted = train_adapter(start, tmp_path / "adapter", r=4, **settings)
    check_as_trained(wanted, tmp_path / "base", AutoModelForCausalLM, tmp_path / "adapter")


def test_modules_that_files_hold_in_parts_are_not_put_beside_them(tmp_path: Path) -> None:
    model, _ = RENAMED["mixtral"]
    model.save_pretrained(tmp_path / "base")
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.endswith("experts.down_proj")}
    train_adapter(
        MixtralForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter", r=4, target_modules=["q_proj"]
    )
    rewrite(tmp_path / "adapter", lambda tensors: tensors | {f"base_model.model.{n}": t for n, t in whole.items()})
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"modules_to_save": ["experts"]}))
    with pytest.raises(AdapterError, match="experts.down_proj in .* cannot be put in its place"):
        merge_here(tmp_path / "base", AutoModelForCausalLM, tmp_path / "adapter")


# peft warns of layers for which it changes fan_in_fan_out.
