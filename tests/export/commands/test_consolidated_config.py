"""What `consolidate` makes of a configuration and of weights that are, or are not, of one model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from harness import fingerprint
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    EsmConfig,
    EsmForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SiglipConfig,
    SiglipModel,
    ViTConfig,
    ViTModel,
)

from export.consolidation.consolidate import consolidate
from export.errors import CheckpointError

GPT2 = GPT2Config(vocab_size=40, n_positions=8, n_embd=12, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
BERT = BertConfig(vocab_size=40, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)


def save_run(folder: Path, model: nn.Module) -> Path:
    """What a trainer leaves that saves no configuration."""
    folder.mkdir()
    torch.save(model.state_dict(), folder / "model.pt")
    return folder


def save_base(folder: Path, model: PreTrainedModel, **changes: object) -> Path:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"n_layer": 1}, "transformer.h.1.attn.c_attn.*, .* more beyond it"),
        ({"n_layer": 3}, "none for transformer.h.2.attn.c_attn.bias, .*, \\+8 more"),
        ({"n_embd": 24}, r"lm_head.weight \[40, 12\] where \[40, 24\] belongs"),
        (
            {"n_layer": 1, "vocab_size": 32},
            r"lm_head.weight \[40, 12\] where \[32, 12\] belongs; transformer.h.1.attn.c_attn.*",
        ),
    ],
)
def test_a_base_that_describes_another_model_is_refused(changes: dict[str, object], got: str, tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2)
    run_folder, base = save_run(tmp_path / "run", model), save_base(tmp_path / "base", model, **changes)
    more = ", or save the checkpoint again with every parameter, frozen ones as well" if got[:4] == "none" else ""
    with pytest.raises(
        CheckpointError,
        match="base/config.json does not describe the weights: expected the names and shapes of GPT2LMHeadModel as it "
        rf"describes it, got {got}; pass the folder of the model that the checkpoint was trained from with --base"
        rf"{more}\.",
    ):
        consolidate(run_folder, tmp_path / "out", base=base)
    assert not (tmp_path / "out").exists()
    # Weights alone are written, and so are those of a class that nobody here knows.
    consolidate(run_folder, tmp_path / "alone")
    save_base(base, model, **changes, architectures=["TheirsForCausalLM"])
    consolidate(run_folder, tmp_path / "theirs", base=base)
    save_base(base, model, **changes, model_type="theirs")
    consolidate(run_folder, tmp_path / "unknown", base=base)


@pytest.mark.parametrize("recorded", [32, 64])
@pytest.mark.parametrize("is_beside", [False, True], ids=["--base", "beside the weights"])
def test_the_configuration_has_as_many_tokens_as_the_table(is_beside: bool, recorded: int, tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2)
    run_folder = save_run(tmp_path / "run", model)
    described = save_base(run_folder if is_beside else tmp_path / "base", model, vocab_size=recorded)
    done = consolidate(run_folder, tmp_path / "out", base=None if is_beside else described)
    assert done.warnings == (
        f"config.json of {described} has another size than the table of tokens: "
        "the one that is written has vocab_size 40.",
    )
    again, info = GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert torch.equal(again.transformer.wte.weight, model.transformer.wte.weight) and not any(info.values())
    # Where it contradicts them in more than that, it is refused.
    save_base(described, model, vocab_size=recorded, n_layer=1)
    with pytest.raises(CheckpointError, match="config.json does not describe the weights: "):
        consolidate(run_folder, tmp_path / "other", base=None if is_beside else described)


@pytest.mark.parametrize("is_sharded", [True, False])
def test_weights_of_another_width_than_their_own_configuration_are_refused(is_sharded: bool, tmp_path: Path) -> None:
    one, other = (BertModel(BertConfig(**{**BERT.to_dict(), "hidden_size": width})) for width in (12, 24))
    size = "20KB" if is_sharded else "1GB"
    for name, model in (("one", one), ("other", other)):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
    assert (tmp_path / "one" / "model.safetensors.index.json").exists() == is_sharded
    if is_sharded:
        # The last one is of another run, and holds what the index says.
        index = json.loads((tmp_path / "one" / "model.safetensors.index.json").read_text())["weight_map"]
        last, state = max(index.values()), other.state_dict()
        save_file({name: state[name].clone() for name, file in index.items() if file == last}, tmp_path / "one" / last)
    else:
        shutil.copy(tmp_path / "other" / "config.json", tmp_path / "one")
    with pytest.raises(CheckpointError, match="one/config.json does not describe the weights: "):
        consolidate(tmp_path / "one", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        # No number of heads that the width can be divided by, and none that transformers reads.
        *(
            ({"n_head": heads}, "transformers cannot build the GPT2LMHeadModel that it describes")
            for heads in (11, "two")
        ),
        # As `config.save_pretrained` writes one; a model's names may then begin with anything.
        (
            {"architectures": None},
            "it names no class of model under architectures, as the config.json of a whole saved model does",
        ),
    ],
)
def test_a_configuration_that_nothing_is_compared_with_is_told(
    changes: dict[str, object], why: str, tmp_path: Path
) -> None:
    model = GPT2LMHeadModel(GPT2)
    run_folder = save_run(tmp_path / "run", model)
    described = save_base(tmp_path / "base", model, **changes)
    assert consolidate(run_folder, tmp_path / "out", base=described).warnings == (
        f"config.json of {described} was not compared with the weights: {why}.",
    )


@pytest.mark.parametrize(
    ("model_class", "config"), [(GPT2LMHeadModel, GPT2), (GPT2Model, GPT2), (BertForMaskedLM, BERT)]
)
def test_a_model_behind_a_name_of_its_holders_is_refused_whatever_class_is_named(
    model_class: type[PreTrainedModel], config: PretrainedConfig, tmp_path: Path
) -> None:
    """Loaded from what would be written, transformers would start every weight at random."""
    model = model_class(config)
    holder = nn.Module()
    holder.add_module("net", model)
    run_folder = save_run(tmp_path / "run", holder)
    for architectures in ([model_class.__name__], None):
        described = save_base(tmp_path / "base", model, architectures=architectures)
        with pytest.raises(CheckpointError, match=r"save the model .* by torch\.save\(module\.net\.state_dict\(\)"):
            consolidate(run_folder, tmp_path / "out", base=described)
        # Laid beside what the trainer saved, it tells as little of how the trainer names a model.
        shutil.copy(described / "config.json", run_folder)
        with pytest.raises(CheckpointError, match=r"save the model .* by torch\.save\(module\.net\.state_dict\(\)"):
            consolidate(run_folder, tmp_path / "out")
        (run_folder / "config.json").unlink()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("front", ["", "rwtransformer."])
def test_an_adapters_factors_are_left_to_run_which_merges_them(front: str, tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    path = "transformer.h.0.mlp.c_proj"
    state |= {f"{path}.lora_right_weight": torch.ones(48, 2), f"{path}.lora_left_weight": torch.ones(2, 12)}
    if front:
        state = {name.replace("transformer.", front): tensor for name, tensor in state.items()}
        state["v_head.weight"] = torch.ones(1, 12)
    base = save_base(tmp_path / "base", model)
    torch.save(state, base / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="lora_left_weight, .* beyond it; export the checkpoint itself with"):
        consolidate(base, tmp_path / "out")


@pytest.mark.parametrize("front", ["rwtransformer", "rwtranrsformer"])
@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], ["GPT2Model"], None])
def test_a_reward_model_of_deepspeed_chat_is_compared_without_its_head_whatever_class_is_named(
    architectures: list[str] | None, front: str, tmp_path: Path
) -> None:
    """Its configuration is that of the model that it was trained from."""
    holder = nn.Module()
    holder.add_module(front, GPT2Model(GPT2))
    holder.add_module("v_head", nn.Linear(12, 1, bias=False))
    run_folder = save_base(save_run(tmp_path / "run", holder), GPT2Model(GPT2), architectures=architectures)
    (warning,) = consolidate(run_folder, tmp_path / "out").warnings
    assert warning.startswith(f"the weights are of a reward model, behind {front}.: `run` serves it, ")
    assert load_file(tmp_path / "out/model.safetensors").keys() == holder.state_dict().keys()
    described = save_base(tmp_path / "base", GPT2Model(GPT2), architectures=architectures, n_layer=3)
    with pytest.raises(CheckpointError, match="none for h.2.attn.c_attn.bias"):
        consolidate(run_folder, tmp_path / "other", base=described)
    (run_folder / "config.json").unlink()
    (warning,) = consolidate(run_folder, tmp_path / "bare").warnings
    assert warning.startswith("nothing says which model the weights are of: there is no config.json; ")


@pytest.mark.parametrize(
    ("trained", "described", "said"),
    [
        (
            BertForMaskedLM(BERT),
            BertForSequenceClassification(BERT),
            "names BertForSequenceClassification, whose bert.pooler.dense.bias, bert.pooler.dense.weight, "
            "classifier.bias, classifier.weight the weights do not have: transformers starts them at random; it has no "
            "place for cls.predictions.bias, cls.predictions.transform.LayerNorm.bias, "
            "cls.predictions.transform.LayerNorm.weight, cls.predictions.transform.dense.bias, +1 more.",
        ),
        (GPT2Model(GPT2), GPT2LMHeadModel(GPT2), ""),
        (GPT2LMHeadModel(GPT2), GPT2Model(GPT2), ""),
    ],
    ids=["another head", "head to come", "head not described"],
)
def test_a_base_with_another_head_is_no_other_model(
    trained: PreTrainedModel, described: PreTrainedModel, said: str, tmp_path: Path
) -> None:
    base = save_base(tmp_path / "base", described)
    done = consolidate(save_run(tmp_path / "run", trained), tmp_path / "out", base=base)
    assert done.warnings == ((f"config.json of {base} {said}",) if said else ())
    assert fingerprint(tmp_path / "out" / "config.json") == fingerprint(base / "config.json")


SIZES = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PICTURES = {**SIZES, "image_size": 8, "patch_size": 4}
TEXTS = {**SIZES, "vocab_size": 40, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
DECODER = {**TEXTS, "num_key_value_heads": 2}
# transformers renames or merges tensors of all of these while it loads them.
CONVERTED = {
    "mixtral": MixtralForCausalLM(MixtralConfig(**DECODER, num_local_experts=2)),
    "qwen2_moe": Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **DECODER, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8
        )
    ),
    "qwen3_moe": Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**DECODER, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, head_dim=6)
    ),
    "dinov2": Dinov2Model(Dinov2Config(**PICTURES)),
    "dinov2 swiglu": Dinov2Model(Dinov2Config(**PICTURES, use_swiglu_ffn=True)),
    "vit": ViTModel(ViTConfig(**PICTURES)),
    "clip": CLIPModel(CLIPConfig(text_config=TEXTS, vision_config=PICTURES, projection_dim=8)),
    "clip text": CLIPTextModel(CLIPTextConfig(**TEXTS)),
    "siglip": SiglipModel(SiglipConfig(text_config=TEXTS, vision_config=PICTURES)),
    "esm": EsmForMaskedLM(EsmConfig(**TEXTS, mask_token_id=4)),
}


@pytest.mark.parametrize("name", CONVERTED)
@pytest.mark.parametrize("is_saved", [False, True], ids=["named as the model has them", "as it is saved"])
def test_models_that_transformers_changes_as_it_loads_them_have_their_base(
    name: str, is_saved: bool, tmp_path: Path
) -> None:
    model = CONVERTED[name]
    base = save_base(tmp_path / "base", model)
    if is_saved:
        model.save_pretrained(tmp_path / "run")
    else:
        save_run(tmp_path / "run", model)
    assert consolidate(tmp_path / "run", tmp_path / "out", base=base).warnings == ()


@pytest.mark.parametrize(
    ("trained", "described", "changes", "got"),
    [
        ("mixtral", "mixtral", {"hidden_size": 24}, r"model.embed_tokens.weight \[40, 12\] where \[40, 24\] belongs"),
        ("gpt2", "mixtral", {}, "none for embed_tokens.weight"),
        ("vit", "mixtral", {}, "none for embed_tokens.weight"),
        ("mixtral", "mixtral", {"num_hidden_layers": 2}, "none for model.layers.1.input_layernorm.weight.*"),
        ("mixtral", "mixtral", {"num_attention_heads": 4}, r"model.layers.0.self_attn.\w+.weight .* belongs"),
        ("mixtral", "vit", {}, "model.embed_tokens.weight beyond it"),
        ("vit", "vit", {"hidden_size": 24}, r".* \[.*12.*\] where \[.*24.*\] belongs"),
        ("vit", "vit", {"intermediate_size": 24}, r".* \[16\] where \[24\] belongs"),
        ("vit", "vit", {"num_hidden_layers": 2}, "none for layers.1.*"),
        ("qwen2_moe", "qwen3_moe", {}, ".*layers.0.mlp.shared_expert.*beyond it; none for .*q_norm.*"),
        ("qwen3_moe", "qwen2_moe", {}, ".*q_norm.* beyond it; none for .*shared_expert.*"),
        ("dinov2", "dinov2 swiglu", {}, ".* beyond it; none for .*mlp.*"),
        ("dinov2 swiglu", "dinov2", {}, ".* beyond it; none for .*mlp.*"),
        ("clip text", "clip text", {"num_hidden_layers": 2}, "none for .*layers.1.*"),
        ("siglip", "vit", {}, "text_model.embeddings.token_embedding.weight beyond it"),
    ],
)
def test_a_base_of_another_architecture_is_refused_where_transformers_renames(
    trained: str, described: str, changes: dict[str, object], got: str, tmp_path: Path
) -> None:
    models = {**CONVERTED, "gpt2": GPT2LMHeadModel(GPT2)}
    run_folder = save_run(tmp_path / "run", models[trained])
    base = save_base(tmp_path / "base", models[described], **changes)
    with pytest.raises(CheckpointError, match=f"base/config.json does not describe the weights: .*, got {got}; pass"):
        consolidate(run_folder, tmp_path / "out", base=base)


def test_a_model_of_pictures_may_lie_beside_that_of_texts(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", CLIPVisionModel(CLIPVisionConfig(**PICTURES)))
    consolidate(save_run(tmp_path / "run", CONVERTED["clip"]), tmp_path / "out", base=base)


def test_weights_without_a_name_of_the_model_are_of_another(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    torch.save({"conv.kernel": torch.zeros(2, 2)}, tmp_path / "run" / "model.pt")
    base = save_base(tmp_path / "base", CONVERTED["vit"])
    with pytest.raises(
        CheckpointError, match="expected the names and shapes of ViTModel .*, got conv.kernel beyond it"
    ):
        consolidate(tmp_path / "run", tmp_path / "out", base=base)


@pytest.mark.parametrize("name", ["clip text", "siglip", "clip"])
def test_the_table_has_its_rows_in_a_model_that_transformers_changes_as_it_loads_it(name: str, tmp_path: Path) -> None:
    model = CONVERTED[name]
    sizes = {"vocab_size": 32}
    is_part = name != "clip text"
    inner = {"text_config": {**model.config.to_dict()["text_config"], **sizes}} if is_part else sizes
    base = save_base(tmp_path / "base", model, **inner)
    done = consolidate(save_run(tmp_path / "run", model), tmp_path / "out", base=base)
    assert done.warnings[0].endswith(f" has {'text_config.' if is_part else ''}vocab_size 40.")
    again, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert not any(info.values())
