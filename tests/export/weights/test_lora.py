"""Adapters: what peft's own merge_and_unload gives, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import check_equal, merge_here, merge_with_peft, rewrite, train_adapter
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

from export.checkpoints import open_checkpoint
from export.errors import AdapterError, CheckpointError
from export.weights.peft_adapter import read_tensors

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
    others = {
        "kasa_config": {},
        "use_dora": True,
        "kind_of_a_later_peft": {"r": 4},
        "init_lora_weights": "pissa_niter_4",
    }
    for key, value in others.items():
        (folder / "adapter_config.json").write_text(json.dumps(settings | {key: value}))
        with pytest.raises(AdapterError, match=f"of a kind that is not merged: expected plain LoRA, got {key}"):
            merge_here(base, AutoModelForSequenceClassification, folder)


def test_an_adapter_that_acts_only_behind_certain_tokens_is_refused(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    model = AutoModelForSequenceClassification.from_pretrained(base)
    with pytest.warns(UserWarning, match="aLoRA"):
        train_adapter(model, folder, target_modules=["query"], task_type="SEQ_CLS", alora_invocation_tokens=[5, 6])
    with pytest.raises(AdapterError, match="expected plain LoRA, got alora_invocation_tokens; merge it"):
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
