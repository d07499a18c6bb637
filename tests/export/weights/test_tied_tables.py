"""Adapters that change a table which the model shares: it is changed where it was in training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import TINY_LLAMA, check_as_trained, check_equal, merge_here, merge_with_peft, rewrite, train_adapter
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from export.checkpoints import open_checkpoint
from export.errors import AdapterError
from export.weights.lora import merge_adapters
from export.weights.torch_model import load_config
from export.weights.transforms import CastToFloat32


def save_llamas(directory: Path, more: int, is_tied: bool) -> tuple[Path, Path]:
    """Save a model, and the same with more rows, and return where."""
    torch.manual_seed(0)
    base, grown = directory / "base", directory / "grown"
    LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, tie_word_embeddings=is_tied)).save_pretrained(base)
    model = LlamaForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(40 + more, mean_resizing=False)
    model.save_pretrained(grown)
    return base, grown


# peft warns that it saves tables as well.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("more", [0, 3])
def test_tables_that_peft_saves_beside_their_factors_take_the_place_of_the_checkpoints(
    more: int, tmp_path: Path
) -> None:
    base, grown = save_llamas(tmp_path, more, is_tied=False)
    targets = ["q_proj", "embed_tokens", "lm_head"]
    train_adapter(LlamaForCausalLM.from_pretrained(grown), tmp_path / "adapter", r=4, target_modules=targets)
    assert any(".base_layer." in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    wanted = merge_with_peft(LlamaForCausalLM.from_pretrained(grown), tmp_path / "adapter")
    stored = CastToFloat32(source=open_checkpoint(base))
    merged = merge_adapters(stored, load_config(base), base, [tmp_path / "adapter"], None)
    check_equal({name: merged.read(name) for name in merged.specs()}, {name: wanted[name] for name in merged.specs()})


TIED: dict[str, dict[str, Any]] = {
    "the input": {"target_modules": ["q_proj", "embed_tokens"]},
    "the output": {"target_modules": ["q_proj", "lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "both as one": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "the input whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "the output whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "both whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "the input whole, and every table saved": {"modules_to_save": ["embed_tokens"], "save_embedding_layers": True},
    "both whole, and every table saved": {
        "modules_to_save": ["embed_tokens", "lm_head"],
        "save_embedding_layers": True,
    },
    "both whole, as one": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
}


# peft warns that what is tied may not be merged, which is why it is not asked here.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("kind", TIED)
def test_a_tied_table_is_changed_where_it_was_in_training(kind: str, more: int, tmp_path: Path) -> None:
    base, grown = save_llamas(tmp_path, more, is_tied=True)
    settings = {"target_modules": ["q_proj"], **TIED[kind]}
    tables = settings.pop("save_embedding_layers", "auto")
    start = LlamaForCausalLM.from_pretrained(grown)
    trained = train_adapter(start, tmp_path / "adapter", tables=tables, r=4, **settings)
    # A table that the adapter does not hold is that of the model whose rows were grown.
    directory = base if "every table" in kind else grown
    check_as_trained(trained, directory, AutoModelForCausalLM, tmp_path / "adapter", rows=40 + more)


GPT = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 48}
ENCODER = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
ENCODER |= {"intermediate_size": 24, "max_position_embeddings": 64, "initializer_range": 0.5}
# BERT and RoBERTa tie a bias with their tables; peft ties no layer but those called embed_tokens and lm_head.
OTHERS_TIED = {
    "GPT-2, the input whole": (GPT2LMHeadModel(GPT2Config(**GPT)), {"modules_to_save": ["wte"]}),
    "GPT-2, the input": (GPT2LMHeadModel(GPT2Config(**GPT)), {"target_modules": ["c_attn", "wte"]}),
    "GPT-2, the output": (GPT2LMHeadModel(GPT2Config(**GPT)), {"target_modules": ["c_proj", "lm_head"]}),
    "BERT, the input": (BertForMaskedLM(BertConfig(**ENCODER)), {"target_modules": ["word_embeddings"]}),
    "BERT, the input whole": (BertForMaskedLM(BertConfig(**ENCODER)), {"modules_to_save": ["word_embeddings"]}),
    "BERT, the output": (BertForMaskedLM(BertConfig(**ENCODER)), {"target_modules": ["decoder"], "bias": "all"}),
    "RoBERTa, the output": (RobertaForMaskedLM(RobertaConfig(**ENCODER)), {"target_modules": ["lm_head.decoder"]}),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("kind", OTHERS_TIED)
def test_tied_tables_and_what_is_tied_with_them_are_as_in_training(kind: str, ties: bool, tmp_path: Path) -> None:
    model, settings = OTHERS_TIED[kind]
    auto_class = AutoModelForCausalLM if kind.startswith("GPT") else AutoModelForMaskedLM
    model.save_pretrained(tmp_path / "base")
    settings = {"target_modules": ["c_attn" if kind.startswith("GPT") else "query"], **settings}
    start = auto_class.from_pretrained(tmp_path / "base")
    wanted = train_adapter(start, tmp_path / "adapter", r=4, ensure_weight_tying=ties, **settings)
    check_as_trained(wanted, tmp_path / "base", auto_class, tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("architectures", [None, ["LlamaForCausalLM"]])
@pytest.mark.parametrize("kind", ["the input", "the output", "the input whole", "the output whole"])
def test_a_tied_table_of_an_adapter_inside_of_a_checkpoint_is_as_in_training(
    kind: str, architectures: list[str] | None, tmp_path: Path
) -> None:
    """As ZeRO's files hold it: peft's wrappers around every name, what is tied once, and perhaps no name of a class."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, tie_word_embeddings=True))
    trained = train_adapter(model, tmp_path / "inside", r=4, **{"target_modules": ["q_proj"], **TIED[kind]})
    (tmp_path / "inside" / "adapter_model.safetensors").unlink()
    held = {(tensor.data_ptr(), tensor.shape): name for name, tensor in reversed(trained.state_dict().items())}
    state = {name: trained.state_dict()[name].clone() for name in held.values()}
    save_file(state, tmp_path / "inside" / "model.safetensors")
    model.config.architectures = architectures
    model.config.save_pretrained(tmp_path / "inside")
    check_as_trained(trained, tmp_path / "inside", AutoModelForCausalLM)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoint_without_its_tied_head_has_it_all_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaModel(LlamaConfig(**TINY_LLAMA, tie_word_embeddings=True)).save_pretrained(tmp_path / "base")
    start = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    settings = {"target_modules": ["q_proj", "embed_tokens"], "task_type": "CAUSAL_LM"}
    trained = train_adapter(start, tmp_path / "adapter", r=4, **settings)
    check_as_trained(trained, tmp_path / "base", AutoModelForCausalLM, tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_adapters_that_change_one_table_each_are_merged_one_after_another(tmp_path: Path) -> None:
    base, _ = save_llamas(tmp_path, 0, is_tied=True)
    untied = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, tie_word_embeddings=False))
    untied.load_state_dict(LlamaForCausalLM.from_pretrained(base).state_dict())
    folders = [tmp_path / "first", tmp_path / "second"]
    for seed, (folder, table) in enumerate(zip(folders, ("embed_tokens", "lm_head"), strict=True)):
        start = LlamaForCausalLM.from_pretrained(base)
        train_adapter(start, folder, seed=seed, r=4, target_modules=["q_proj", table])
    merge_with_peft(untied, *folders)
    check_as_trained(untied, base, AutoModelForCausalLM, *folders)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_tied", [False, True])
def test_rows_for_added_tokens_that_peft_saves_by_itself_are_taken(is_tied: bool, tmp_path: Path) -> None:
    base, grown = save_llamas(tmp_path, 3, is_tied)
    train_adapter(LlamaForCausalLM.from_pretrained(grown), tmp_path / "adapter", r=4, target_modules=["q_proj"])
    # It does so where the name of the base says that rows were added; a folder that it does not find says nothing.
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    state = LlamaForCausalLM.from_pretrained(grown).state_dict()
    saved |= {f"base_model.model.{name}": state[name].clone() for name in tables}
    save_file(saved, tmp_path / "adapter" / "adapter_model.safetensors")
    wanted = merge_with_peft(LlamaForCausalLM.from_pretrained(grown), tmp_path / "adapter")
    stored = CastToFloat32(source=open_checkpoint(base))
    merged = merge_adapters(stored, load_config(base), base, [tmp_path / "adapter"], None)
    check_equal({name: merged.read(name) for name in merged.specs()}, {name: wanted[name] for name in merged.specs()})


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_for_added_tokens_in_one_table_alone_are_refused(tmp_path: Path) -> None:
    base, grown = save_llamas(tmp_path, 3, is_tied=False)
    train_adapter(LlamaForCausalLM.from_pretrained(grown), tmp_path / "adapter", r=4, target_modules=["embed_tokens"])
    rewrite(tmp_path / "adapter", lambda tensors: {n: t for n, t in tensors.items() if "lm_head" not in n})
    sentence = r"tokens in one table alone: .*, got model.embed_tokens.weight 43, lm_head.weight 40; save it again"
    with pytest.raises(AdapterError, match=sentence):
        merge_here(base, AutoModelForCausalLM, tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_table_that_is_used_in_several_places_is_not_changed_in_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 32}
    sizes |= {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim")}
    BartForConditionalGeneration(BartConfig(**sizes)).save_pretrained(tmp_path / "base")
    base = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base")
    train_adapter(base, tmp_path / "adapter", r=4, target_modules=["lm_head", "q_proj"])
    with pytest.raises(AdapterError, match="changes lm_head.weight alone: .*that it shares with .*shared.weight"):
        merge_here(tmp_path / "base", AutoModelForSeq2SeqLM, tmp_path / "adapter")
