"""Adapters: what peft's own merge_and_unload gives, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    ViTConfig,
    ViTForImageClassification,
)

from export.checkpoints import open_checkpoint
from export.errors import AdapterError, CheckpointError
from export.weights.lora import merge_adapters
from export.weights.peft_adapter import read_tensors
from export.weights.torch_model import load_config, load_model
from export.weights.transforms import CastToFloat32

BERT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**BERT, num_labels=3)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


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


SETTINGS: dict[str, dict[str, Any]] = {
    "alpha and rank": {"r": 4, "lora_alpha": 10, "target_modules": ["query", "value"]},
    "rslora": {"r": 4, "lora_alpha": 10, "use_rslora": True, "target_modules": ["query", "dense"]},
    "patterns": {
        "r": 4,
        "target_modules": ["query", "key"],
        "rank_pattern": {"layer.0.attention.self.query": 2},
        "alpha_pattern": {"key": 3},
    },
    "an embedding": {"r": 4, "target_modules": ["word_embeddings", "query"]},
    "modules_to_save": {"r": 4, "target_modules": ["query"], "modules_to_save": ["classifier"]},
    "biases": {"r": 4, "target_modules": ["query"], "bias": "lora_only"},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_merged_adapter_is_pefts_to_the_bit(kind: str, base: Path, tmp_path: Path) -> None:
    def load() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(base)

    train_adapter(load(), tmp_path / "adapter", **SETTINGS[kind])
    before = load().state_dict()
    wanted = merge_with_peft(load(), tmp_path / "adapter")
    assert any(not torch.equal(before[name], wanted[name]) for name in before)
    check_equal(merge_here(base, AutoModelForSequenceClassification, tmp_path / "adapter"), wanted)


TINY_LLAMA = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
TINY_NEOX = {**TINY_LLAMA, "num_attention_heads": 2}
TINY_LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1}


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
    config = load_config(directory)
    stored = CastToFloat32(source=open_checkpoint(directory))
    merged = merge_adapters(stored, config, directory, [tmp_path / "adapter"], None)
    config.vocab_size = 40 + more
    model, unused = load_model(config, merged, AutoModelForCausalLM)
    ids = torch.arange(40 + more)[None, :]
    with torch.no_grad():
        wanted, got = trained(input_ids=ids).logits, model(input_ids=ids).logits
    assert (wanted - got).abs().max() <= 1e-5 * wanted.abs().max()
    assert not unused


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
    # Not what peft loads again: of tables that it tied it then leaves out one.
    wanted = train_adapter(start, tmp_path / "adapter", r=4, ensure_weight_tying=ties, **settings)
    config = load_config(tmp_path / "base")
    stored = CastToFloat32(source=open_checkpoint(tmp_path / "base"))
    merged = merge_adapters(stored, config, tmp_path / "base", [tmp_path / "adapter"], None)
    got, _ = load_model(config, merged, auto_class)
    ids = torch.arange(40)[None, :]
    with torch.no_grad():
        both = wanted(input_ids=ids).logits, got(input_ids=ids).logits
    assert (both[0] - both[1]).abs().max() <= 1e-5 * both[0].abs().max()


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
    config = load_config(tmp_path / "base")
    stored = CastToFloat32(source=open_checkpoint(tmp_path / "base"))
    merged = merge_adapters(stored, config, tmp_path / "base", [tmp_path / "adapter"], None)
    got, _ = load_model(config, merged, AutoModelForCausalLM)
    ids = torch.arange(40)[None, :]
    with torch.no_grad():
        both = wanted(input_ids=ids).logits, got(input_ids=ids).logits
    assert (both[0] - both[1]).abs().max() <= 1e-5 * both[0].abs().max()


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
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("targets", [["c_attn", "c_proj"], ["c_proj", "lm_head"]])
def test_transposed_weights_are_merged_transposed(targets: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=False)).save_pretrained(tmp_path / "base")

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base")

    # Square weights as well, whose shape does not tell.
    train_adapter(load(), tmp_path / "adapter", r=2, target_modules=targets)
    wanted = merge_with_peft(load(), tmp_path / "adapter")
    for said in (True, False):
        path = tmp_path / "adapter" / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"fan_in_fan_out": said}))
        check_equal(merge_here(tmp_path / "base", AutoModelForCausalLM, tmp_path / "adapter"), wanted)


def test_several_adapters_by_name_are_merged_one_after_another(base: Path, tmp_path: Path) -> None:
    def load() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(base)

    for seed, name in enumerate(("first", "second")):
        train_adapter(load(), tmp_path / "adapters", name, seed, r=4, lora_alpha=seed + 1, target_modules=["query"])
    folders = [tmp_path / "adapters" / name for name in ("first", "second")]
    wanted = merge_with_peft(load(), *folders)
    check_equal(merge_here(base, AutoModelForSequenceClassification, *folders), wanted)
    with pytest.raises(AdapterError, match=r"holds no adapter_config\.json: .*, got folders of first, second;"):
        merge_here(base, AutoModelForSequenceClassification, tmp_path / "adapters")


def test_a_head_that_only_the_adapter_has_is_put_on_a_model_without_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    BertModel(BertConfig(**BERT)).save_pretrained(tmp_path / "base")

    def load() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)

    train_adapter(load(), tmp_path / "adapter", r=4, target_modules=["query"], modules_to_save=["classifier"])
    wanted = merge_with_peft(load(), tmp_path / "adapter")
    check_equal(merge_here(tmp_path / "base", AutoModelForSequenceClassification, tmp_path / "adapter"), wanted)


def test_a_module_is_saved_whose_path_ends_as_peft_was_told(tmp_path: Path) -> None:
    """peft names `classifier` by itself, and DistilBERT has a `pre_classifier` too."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 32}
    DistilBertForSequenceClassification(DistilBertConfig(**sizes, num_labels=3)).save_pretrained(tmp_path / "base")

    def load() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")

    train_adapter(load(), tmp_path / "adapter", r=4, target_modules=["q_lin"], task_type="SEQ_CLS")
    wanted = merge_with_peft(load(), tmp_path / "adapter")
    assert not torch.equal(load().state_dict()["pre_classifier.weight"], wanted["pre_classifier.weight"])
    check_equal(merge_here(tmp_path / "base", AutoModelForSequenceClassification, tmp_path / "adapter"), wanted)


def test_an_adapter_that_was_saved_inside_the_checkpoint_is_merged(base: Path, tmp_path: Path) -> None:
    """As ZeRO's files hold it: peft's wrappers around every name."""
    torch.manual_seed(1)
    settings = LoraConfig(r=4, target_modules=["query"], modules_to_save=["classifier"])
    wrapped = get_peft_model(AutoModelForSequenceClassification.from_pretrained(base), settings)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_()
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file({name: t.clone() for name, t in wrapped.state_dict().items()}, inside / "model.safetensors")
    wrapped.base_model.model.config.save_pretrained(inside)
    settings.save_pretrained(inside)
    check_equal(merge_here(inside, AutoModelForSequenceClassification), dict(wrapped.merge_and_unload().state_dict()))


def test_deepspeed_chats_factors_are_merged_with_the_scaling_asked_for(base: Path, tmp_path: Path) -> None:
    weights = load_file(base / "model.safetensors")
    torch.manual_seed(2)
    path = "bert.encoder.layer.1.intermediate.dense"
    right, left = torch.randn(16, 4), torch.randn(4, 32)
    wanted = AutoModelForSequenceClassification.from_pretrained(base).state_dict()
    # DeepSpeed-Chat, fuse_lora_weight.
    wanted[f"{path}.weight"] += 2.0 / 4 * torch.matmul(left.t(), right.t())
    factors = {f"{path}.lora_right_weight": right, f"{path}.lora_left_weight": left}
    save_file(weights | factors, base / "model.safetensors", metadata={"format": "pt"})
    got = merge_here(base, AutoModelForSequenceClassification, scaling=2.0)
    assert got.keys() == wanted.keys()
    assert max(float((got[name] - wanted[name]).abs().max()) for name in wanted) <= 1e-6
    with pytest.raises(AdapterError, match="holds 1 low-rank updates of DeepSpeed-Chat.*; pass --lora-scaling"):
        merge_here(base, AutoModelForSequenceClassification)


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def test_an_adapter_that_is_empty_is_refused(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    train_adapter(AutoModel.from_pretrained(base), folder, r=4, target_modules=["query"])
    whole = load_file(folder / "adapter_model.safetensors")
    cases = {
        "size 0 for .*lora_A.weight.*; it was saved under ZeRO-3": {name: torch.zeros(0) for name in whole},
        "nothing but zeros in every lora_B": {n: t * 0 if "lora_B" in n else t for n, t in whole.items()},
        "is an empty adapter: expected pairs of factors, got no tensor": {},
        "is not whole: expected lora_A and lora_B, got A": {n: t for n, t in whole.items() if "lora_A" in n},
    }
    for sentence, tensors in cases.items():
        rewrite(folder, lambda _, tensors=tensors: tensors)
        with pytest.raises(AdapterError, match=sentence):
            merge_here(base, AutoModelForSequenceClassification, folder)


def test_an_adapter_of_another_model_or_kind_is_refused(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    train_adapter(AutoModel.from_pretrained(base), folder, r=4, target_modules=["query"])
    whole = load_file(folder / "adapter_model.safetensors")
    rewrite(folder, lambda tensors: {n.replace("layer.1", "layer.9"): t for n, t in tensors.items()})
    with pytest.raises(AdapterError, match=r"one tensor named encoder\.layer\.9\.attention\.self\.query\.weight"):
        merge_here(base, AutoModelForSequenceClassification, folder)
    rewrite(folder, lambda _: {n: torch.cat([t, t]) if "lora_B" in n else t for n, t in whole.items()})
    with pytest.raises(AdapterError, match=r"query\.weight \[32, 16\] where \[16, 16\] belongs"):
        merge_here(base, AutoModelForSequenceClassification, folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(AdapterError, match="of a kind that is not merged: expected plain LoRA, got use_dora"):
        merge_here(base, AutoModelForSequenceClassification, folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lora_alpha": "x"}, "lora_alpha in .* is not what peft writes: expected a number, got 'x'"),
        ({"lora_alpha": None}, "lora_alpha in .* got None"),
        ({"alpha_pattern": [1]}, r"alpha_pattern in .* expected patterns and numbers, got \[1\]"),
        ({"alpha_pattern": {"query": "x"}}, "alpha_pattern in .* got {'query': 'x'}"),
        ({"modules_to_save": 7}, "modules_to_save in .* expected names, got 7"),
        ({"use_rslora": "no"}, "use_rslora in .* expected true or false, got 'no'"),
        ({"r": 0}, "r in .* expected a rank of 1 or more, got 0"),
        ({"r": "4"}, "r in .* got '4'"),
        ({"r": 8}, r"another rank than adapter_config\.json says: expected 8, got 4"),
        ({"rank_pattern": {"query": 2}}, "expected 2, got 4"),
        ({"lora_alpha": 10**400}, "lora_alpha in .* expected a number, got 1000"),
        ({"alpha_pattern": {"(?i)query": 3}}, "a pattern in .* cannot be followed"),
        ({"alpha_pattern": {"[": 3}}, r"a pattern in .* cannot be followed: .* got '\['"),
        ({"alpha_pattern": {"(([a-z.0-9_]+)+)+X": 3}}, "a pattern in .* cannot be followed"),
        ({"rank_pattern": {".*.*.*.*.*X": 4}}, "a pattern in .* cannot be followed"),
    ],
)
def test_settings_that_peft_does_not_write_are_refused(
    changes: dict[str, Any], sentence: str, base: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    train_adapter(AutoModel.from_pretrained(base), folder, r=4, target_modules=["query"])
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(AdapterError, match=sentence):
        merge_here(base, AutoModelForSequenceClassification, folder)


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("executed",)


def test_a_pickled_adapter_is_read_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {
        "base_model.model.x.lora_A.weight": torch.randn(2, 3),
        "base_model.model.x.lora_B.weight": torch.ones(3, 2),
    }
    torch.save(tensors, tmp_path / "adapter_model.bin")
    read = read_tensors(tmp_path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    torch.save({"x": Hostile()}, tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin would call or keep builtins\.print"):
        read_tensors(tmp_path)
    assert "executed" not in capsys.readouterr().out
    (tmp_path / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is a pointer of Git LFS"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_adapters_tensors_alone_are_told_from_a_model_with_them(tmp_path: Path, is_whole: bool) -> None:
    wrapped = get_peft_model(BertModel(BertConfig(**BERT)), LoraConfig(target_modules=["query", "word_embeddings"]))
    state = wrapped.state_dict() if is_whole else get_peft_model_state_dict(wrapped)
    torch.save(state, tmp_path / "x.pt")
    prefix = "base_model.model."
    paths = f"{prefix}embeddings.word_embeddings, " + ", ".join(
        f"{prefix}encoder.layer.{layer}.attention.self.query" for layer in range(2)
    )
    words = f"the weights that an adapter's factors change, of {paths}: this is not a whole model"
    assert open_checkpoint(tmp_path).facts.missing == (() if is_whole else (words,))
