"""Adapters as peft trains and saves them, and what comes of merging them: in it, and here."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from export.checkpoints import open_checkpoint
from export.weights.lora import merge_adapters
from export.weights.torch_model import load_config, load_model
from export.weights.transforms import CastToFloat32

TINY_LLAMA = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
TINY_LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def train_adapter(
    model: Any, directory: Path, name: str = "default", seed: int = 1, tables: Any = "auto", **settings: Any
) -> Any:
    """Save an adapter whose factors and saved modules are anything but what they started as; return its model."""
    torch.manual_seed(seed)
    wrapped = get_peft_model(model, LoraConfig(**settings), adapter_name=name)
    with torch.no_grad():
        for parameter_name, parameter in wrapped.named_parameters():
            if "lora_" in parameter_name or "modules_to_save" in parameter_name:
                parameter.normal_(0.0, 0.5)
    wrapped.save_pretrained(directory, save_embedding_layers=tables)
    return wrapped.eval()


def merge_with_peft(model: Any, *adapters: Path) -> dict[str, torch.Tensor]:
    wrapped = PeftModel.from_pretrained(model, adapters[0], adapter_name="a0")
    for index, folder in enumerate(adapters[1:], 1):
        wrapped.load_adapter(folder, adapter_name=f"a{index}")
    names = [f"a{index}" for index in range(len(adapters))]
    return dict(wrapped.merge_and_unload(adapter_names=names).state_dict())


def merge_here(directory: Path, auto_class: Any, *adapters: Path, scaling: float | None = None) -> dict[str, Any]:
    config, checkpoint = load_config(directory), open_checkpoint(directory)
    config.num_labels = 3
    weights = merge_adapters(CastToFloat32(source=checkpoint), config, directory, adapters, scaling)
    model, _ = load_model(config, weights, auto_class)
    return dict(model.state_dict())


def check_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def check_as_trained(trained: Any, directory: Path, auto_class: Any, *adapters: Path, rows: int = 40) -> None:
    """Hold the logits of a checkpoint and adapters that are merged here against those of the model in training.

    Not against what peft loads again, which leaves out one of two tables that it tied, nor against its
    `merge_and_unload`, which changes both of tied ones.
    """
    config = load_config(directory)
    stored = CastToFloat32(source=open_checkpoint(directory))
    merged = merge_adapters(stored, config, directory, adapters, None)
    config.vocab_size = rows
    model, unused = load_model(config, merged, auto_class)
    ids = torch.arange(rows)[None, :]
    with torch.no_grad():
        wanted, got = trained(input_ids=ids).logits, model(input_ids=ids).logits
    assert (wanted - got).abs().max() <= 1e-5 * wanted.abs().max()
    assert not unused
