"""The reader of Megatron-DeepSpeed's GPT-2, on what DeepSpeed's pipeline engine saved of real tensor parallel ranks.

Every file is as the engine left it, or that with one thing changed, but for the test that says otherwise.
"""

from __future__ import annotations

import enum
import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import CHECKOUT
from nodes import spread_over_nodes
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from export.checkpoints import StoredCheckpoint, join_folders, open_checkpoint
from export.checkpoints.megatron.args import MegatronArgs
from export.checkpoints.megatron.parts import canonical_name, flatten, name_layers
from export.checkpoints.megatron.to_gpt2 import build_gpt2_config, convert_to_gpt2, expected_shapes
from export.checkpoints.pickles.torch_zip import open_torch_zip
from export.checkpoints.storage.byte_ranges import ByteRange
from export.checkpoints.storage.dtypes import FLOAT32
from export.checkpoints.storage.file_state import FileState
from export.checkpoints.storage.stored_tensor import ContiguousTensor, StoredTensor
from export.checkpoints.storage.zip_archive import StoredBlock
from export.consolidation.consolidate import consolidate
from export.errors import CheckpointError, ExportError

Truth = dict[str, torch.Tensor]

VOCABULARY = 53
HEADS = {"p2t2d2_bf16": 6}
NESTED = ("t2_nested_stage1", "t2_nested_bf16", "t2_nested_stage0", "t2_nested_bf16_stage0")
PIPELINED = (
    "t1_stage0",
    "t2_bf16",
    "p2_stage1",
    "p2_untied_bf16",
    "p2d2_bf16_stage0",
    "t2d2_stage1",
    "t4_stage0",
    "p2t2d2_bf16",
)
VARIANTS = (*PIPELINED, *NESTED)
# fp32 sums in another order: the trainer's model adds up tensor parallel parts, GPT-2's Conv1D multiplies transposed.
LOGIT_TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every variant, each with a tokenizer's vocabulary beside it that tells the padding."""
    out = tmp_path_factory.mktemp("megatron")
    script = CHECKOUT / "tests" / "trainers" / "train_megatron.py"
    subprocess.run(
        [sys.executable, script, out, ",".join(VARIANTS)], check=True, timeout=400, stdout=subprocess.DEVNULL
    )
    for name in VARIANTS:
        (out / name / "vocab.json").write_text(json.dumps({f"t{index}": index for index in range(VOCABULARY)}))
    return out


def test_the_folders_of_all_nodes_are_one_checkpoint(trained: Path, tmp_path: Path) -> None:
    whole = open_checkpoint(trained / "p2t2d2_bf16")
    joined = open_checkpoint(join_folders(spread_over_nodes(trained / "p2t2d2_bf16", tmp_path)))
    assert joined.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(joined.read(name), whole.read(name)) for name in whole.tensors)


@pytest.mark.parametrize("lost", ["*model_01*", "mp_rank_00*", "mp_rank_03*"])
def test_a_node_whose_folder_was_not_named_is_asked_for(trained: Path, tmp_path: Path, lost: str) -> None:
    folder = copy(trained / "p2t2d2_bf16", tmp_path / "run")
    for path in tag_folder(folder).glob(lost):
        path.unlink()
    assert "pass every node's folder as an argument of its own, or copy" in refusal(lambda: open_checkpoint(folder))


def read_truth(folder: Path) -> Truth:
    """Our plain names → unsplit fp32 weights of the live ranks."""
    live = torch.load(folder.parent / f"{folder.name}.truth.pt", weights_only=True)
    blocks = sorted({int(name.split(".")[0]) for name in live if "input_layernorm" in name})
    truth = {}
    for name, tensor in live.items():
        layer, _, rest = name.partition(".")
        if name.startswith("tied_modules."):
            truth[name.removeprefix("tied_modules.embed.")] = tensor
        elif int(layer) in blocks:
            truth[f"layers.{blocks.index(int(layer))}.{rest}"] = tensor
        elif rest == "lm_head.weight":
            truth[rest] = tensor
        else:
            truth[f"final_layernorm.{rest}"] = tensor
    return truth


def as_gpt2(truth: Truth, heads: int) -> Truth:
    """The same conversion by torch's own operations on whole tensors."""
    tensors = {
        "transformer.wte.weight": truth["word_embeddings.weight"][:VOCABULARY],
        "transformer.wpe.weight": truth["position_embeddings.weight"],
        "transformer.ln_f.weight": truth["final_layernorm.weight"],
        "transformer.ln_f.bias": truth["final_layernorm.bias"],
    }
    if "lm_head.weight" in truth:
        tensors["lm_head.weight"] = truth["lm_head.weight"][:VOCABULARY]
    for layer in range(sum(name.endswith("input_layernorm.bias") for name in truth)):
        for kind in ("weight", "bias"):
            part = {
                ours: truth[f"layers.{layer}.{theirs}.{kind}"]
                for ours, theirs in {
                    "ln_1": "input_layernorm",
                    "ln_2": "post_attention_layernorm",
                    "attn.c_attn": "self_attention.query_key_value",
                    "attn.c_proj": "self_attention.dense",
                    "mlp.c_fc": "mlp.dense_h_to_4h",
                    "mlp.c_proj": "mlp.dense_4h_to_h",
                }.items()
            }
            mixed = part["attn.c_attn"]
            part["attn.c_attn"] = mixed.unflatten(0, (heads, 3, -1)).transpose(0, 1).reshape(mixed.shape)
            for ours, tensor in part.items():
                tensors[f"transformer.h.{layer}.{ours}.{kind}"] = tensor.T if tensor.dim() == 2 else tensor
    return tensors


def run_unsplit(truth: Truth, heads: int, ids: torch.Tensor) -> torch.Tensor:
    """The trained model's forward pass on unsplit weights, as Megatron computes it: logits [batch, seq, padded]."""

    def linear(name: str, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, truth[f"{name}.weight"], truth[f"{name}.bias"])

    def norm(name: str, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(hidden, hidden.shape[-1:], truth[f"{name}.weight"], truth[f"{name}.bias"])

    hidden = truth["word_embeddings.weight"][ids] + truth["position_embeddings.weight"][: ids.shape[1]]
    for layer in range(sum(name.endswith("input_layernorm.bias") for name in truth)):
        block = f"layers.{layer}"
        mixed = linear(f"{block}.self_attention.query_key_value", norm(f"{block}.input_layernorm", hidden))
        query, key, value = mixed.unflatten(-1, (heads, 3, -1)).unbind(3)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
        future = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        context = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)
        hidden = hidden + linear(f"{block}.self_attention.dense", context.flatten(2))
        wide = linear(f"{block}.mlp.dense_h_to_4h", norm(f"{block}.post_attention_layernorm", hidden))
        hidden = hidden + linear(f"{block}.mlp.dense_4h_to_h", nn.functional.gelu(wide, approximate="tanh"))
    return norm("final_layernorm", hidden) @ truth.get("lm_head.weight", truth["word_embeddings.weight"]).T


def assert_equal(checkpoint: StoredCheckpoint, truth: Truth) -> None:
    assert sorted(checkpoint.specs()) == sorted(truth)
    for name, tensor in truth.items():
        found = checkpoint.read(name)
        assert found.dtype == torch.float32
        assert torch.equal(found, tensor), name


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(ExportError) as caught:
        action()
    return str(caught.value)


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def tag_folder(folder: Path) -> Path:
    return folder / "global_step2"


def change_models(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Rewrite every `mp_rank_*` file of a checkpoint."""
    for path in tag_folder(folder).glob("mp_rank_*"):
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_weights_are_the_live_ranks_master_weights_bit_for_bit(trained: Path, variant: str) -> None:
    heads = HEADS.get(variant, 4)
    assert_equal(open_checkpoint(trained / variant), as_gpt2(read_truth(trained / variant), heads))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_merged_model_answers_as_the_unsplit_one(trained: Path, tmp_path: Path, variant: str) -> None:
    consolidate(trained / variant, tmp_path / "out")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert model.config.vocab_size == VOCABULARY and model.config.dtype == torch.float32
    ids = torch.randint(0, VOCABULARY, (3, 10), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = run_unsplit(read_truth(trained / variant), HEADS.get(variant, 4), ids)[..., :VOCABULARY]
        assert torch.allclose(model(ids).logits, expected, atol=LOGIT_TOLERANCE, rtol=0)


def test_fp32_weights_that_cannot_be_named_are_told(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "t2_nested_bf16_stage0", tmp_path / "unnamed")

    def keep_half(content: dict[str, Any]) -> None:
        groups = content["optimizer"]["fp32_groups"]
        groups[:] = [group[::2] for group in groups]

    assert not any("fp32" in line for line in open_checkpoint(folder).facts.missing)
    missing = open_checkpoint(change_models(folder, keep_half)).facts.missing
    assert missing[-1] == "fp32 weights: in the optimizer's state without names, given in bfloat16"


def test_a_cast_is_told_in_the_derived_configuration(trained: Path, tmp_path: Path) -> None:
    consolidate(trained / "t4_stage0", tmp_path / "out", dtype="bfloat16")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["n_head"] == 4


def test_facts_and_configuration_come_from_the_arguments(trained: Path) -> None:
    found = open_checkpoint(trained / "p2t2d2_bf16")
    assert found.format_name == "Megatron-DeepSpeed GPT-2, tensor parallel 2, pipeline 2"
    assert (found.facts.world_size, found.facts.stage, found.facts.step) == (8, 1, 2)
    assert found.config is not None
    sizes = {name: found.config[name] for name in ("n_embd", "n_layer", "n_head", "n_positions", "vocab_size")}
    assert sizes == {"n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 10, "vocab_size": VOCABULARY}
    assert found.config["activation_function"] == "gelu_new" and found.config["tie_word_embeddings"] is True


def test_the_vocabularys_padding_is_kept_and_told_where_nothing_tells_its_size(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "t2_bf16", tmp_path / "unknown")
    (folder / "vocab.json").unlink()
    found = open_checkpoint(folder)
    assert found.tensors["transformer.wte.weight"].shape == (64, 24)
    assert "the vocabulary's true size: all 64 rows are kept" in found.facts.missing[0]
    (folder / "gpt2-vocab.json").write_text(json.dumps({f"t{index}": index for index in range(40)}))
    found = open_checkpoint(folder)
    assert found.tensors["transformer.wte.weight"].shape == (40, 24)
    assert found.config and found.config["eos_token_id"] is None
    # Megatron's tokenizer ends texts with it.
    (folder / "gpt2-vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 1}))
    config = open_checkpoint(folder).config
    assert config and (config["eos_token_id"], config["bos_token_id"]) == (0, 0)
    (folder / "gpt2-vocab.json").unlink()
    for ending in ('{"eos_token": "</s>"}', '{"eos_token": {"content": "</s>"}}'):
        (folder / "tokenizer_config.json").write_text(ending)
        (folder / "tokenizer.json").write_text(
            '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "</s>"}]}'
        )
        config = open_checkpoint(folder).config
        assert config and (config["eos_token_id"], config["bos_token_id"]) == (1, 1)
    (folder / "tokenizer.json").unlink()
    (folder / "gpt2-vocab.json").write_text(json.dumps({f"t{index}": index for index in range(40)}))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 50}}, "added_tokens": [{"id": 51}]}')
    assert open_checkpoint(folder).tensors["transformer.wte.weight"].shape == (52, 24)
    pieces = [[f"p{index}", -1.0] for index in range(54)]
    unigram = {"model": {"vocab": pieces}, "added_tokens": [{"id": 0, "content": "p0"}]}
    (folder / "tokenizer.json").write_text(json.dumps(unigram))
    assert open_checkpoint(folder).tensors["transformer.wte.weight"].shape == (54, 24)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 50}}, "added_tokens": [{"id": 51}]}')
    (folder / "config.json").write_text('{"vocab_size": 56}')
    assert open_checkpoint(folder).tensors["transformer.wte.weight"].shape == (56, 24)
    (folder / "config.json").write_text('{"vocab_size": 51}')
    assert "expected at least 52 tokens, as tokenizer.json has, got 51" in refusal(lambda: open_checkpoint(folder))
    (folder / "config.json").write_text('{"vocab_size": 65}')
    assert "expected 64 tokens at most, got 65" in refusal(lambda: open_checkpoint(folder))


@pytest.mark.parametrize(
    ("name", "content", "got"),
    [
        ("vocab.json", {"a": 0, "b": 1, "c": 1}, "got 1 for both 'b' and 'c'"),
        ("vocab.json", {"a": 0, "b": 1, "c": 3}, "got 3 of them up to 3"),
        ("vocab.json", {"a": 0, "b": "1"}, "got 1 for 'b'"),
        ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 0}}}, "got 0 for both 'a' and 'b'"),
        (
            "tokenizer.json",
            {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 0, "content": "b"}]},
            "got 1 and 0 for 'b'",
        ),
    ],
)
def test_damaged_ids_cut_no_rows(trained: Path, tmp_path: Path, name: str, content: Any, got: str) -> None:
    folder = copy(trained / "t2_bf16", tmp_path / "damaged")
    (folder / name).write_text(json.dumps(content))
    message = refusal(lambda: open_checkpoint(folder))
    assert f"{folder / name} has ids that are not a vocabulary's" in message and got in message


def test_a_vocabulary_that_is_no_file_is_refused(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "t2_bf16", tmp_path / "fifo")
    (folder / "vocab.json").unlink()
    os.mkfifo(folder / "vocab.json")
    assert "vocab.json is not a regular file: expected a file, got a FIFO" in refusal(lambda: open_checkpoint(folder))


def test_arguments_of_another_rank_must_agree(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "t2_bf16", tmp_path / "mixed")
    path = tag_folder(folder) / "mp_rank_01_model_states.pt"
    content = torch.load(path, weights_only=False)
    content["args"].hidden_size = 48
    content["args"].layernorm_epsilon = 1e-6
    content["args"].kv_channels = 12
    torch.save(content, path)
    message = refusal(lambda: open_checkpoint(folder))
    assert f"the arguments in {path} are of another model" in message
    assert "expected hidden 24, norm_epsilon 1e-05, got 48, 1e-06" in message
    content["args"].swiglu = True
    torch.save(content, path)
    assert "got swiglu=True" in refusal(lambda: open_checkpoint(folder))


def test_an_epsilon_that_is_no_number_is_refused(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "t2_bf16", tmp_path / "epsilon")
    change_models(folder, lambda content: setattr(content["args"], "layernorm_epsilon", float("nan")))
    assert "have a layernorm_epsilon that is none" in refusal(lambda: open_checkpoint(folder))


def test_other_rows_than_the_arguments_say_are_refused(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "t2_bf16", tmp_path / "rows")
    change_models(folder, lambda content: setattr(content["args"], "padded_vocab_size", 128))
    assert "got 10 positions and 64 rows of the vocabulary, not 10 and 128" in refusal(lambda: open_checkpoint(folder))


def test_dicts_within_each_other_many_times_over_are_refused(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "t2_nested_stage0", tmp_path / "shared")
    inner: dict[str, Any] = {}
    for _ in range(12):
        inner = {str(index): inner for index in range(8)}
    change_models(folder, lambda content: content.update(module=inner))
    assert "are nested beyond any model: expected at most 200000 entries" in refusal(lambda: open_checkpoint(folder))


def test_a_config_json_of_another_model_is_refused(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "t2_bf16", tmp_path / "other")
    (folder / "config.json").write_text('{"model_type": "gpt2", "n_embd": 24, "n_layer": 12, "vocab_size": 53}')
    assert "is not of the checkpoint: expected n_layer 3, got 12" in refusal(lambda: open_checkpoint(folder))


class PositionEmbeddingType(enum.Enum):
    rotary = 1
    absolute = 2
    alibi = 3


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("swiglu", True),
        ("use_rotary_position_embeddings", True),
        ("add_position_embedding", False),
        ("position_embedding_type", PositionEmbeddingType.alibi),
        ("normalization", "rmsnorm"),
        ("num_key_value_heads", 2),
        ("num_experts", [4]),
        ("kv_channels", 8),
        ("embed_layernorm", True),
        ("parallel_attn", True),
        ("window_size", (128, 0)),
        ("glu_activation", "geglu"),
        ("use_alibi_position_embeddings", True),
        ("scale_attn_by_inverse_layer_idx", True),
        ("apply_residual_connection_post_layernorm", True),
        ("softmax_type", "off-by-one"),
        ("qk_l2_norm", True),
        ("use_mup", True),
    ],
)
def test_other_architectures_are_refused_by_the_name_of_their_option(
    trained: Path, tmp_path: Path, setting: str, value: Any
) -> None:
    folder = copy(trained / "t2_bf16", tmp_path / "other")
    change_models(folder, lambda content: setattr(content["args"], setting, value))
    message = refusal(lambda: open_checkpoint(folder))
    assert "is of a Megatron architecture that is not proven" in message and f"got {setting}=" in message


def test_blooms_absolute_positions_are_gpt2s(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "t2_bf16", tmp_path / "absolute")
    absolute = PositionEmbeddingType.absolute
    change_models(folder, lambda content: setattr(content["args"], "position_embedding_type", absolute))
    assert open_checkpoint(folder).tensors


@pytest.mark.parametrize("version", [None, 0, 1.0, float("nan")])
def test_checkpoint_versions_below_two_are_refused(trained: Path, tmp_path: Path, version: Any) -> None:
    folder = copy(trained / "t2_bf16", tmp_path / "old")
    change_models(folder, lambda content: content.update(checkpoint_version=version))
    assert "is of a Megatron layout that is not proven: expected checkpoint_version 2.0" in refusal(
        lambda: open_checkpoint(folder)
    )


def test_models_without_megatrons_arguments_are_refused(trained: Path, tmp_path: Path) -> None:
    folder = change_models(copy(trained / "t2_bf16", tmp_path / "none"), lambda content: content.pop("args"))
    assert "has no arguments of Megatron-DeepSpeed" in refusal(lambda: open_checkpoint(folder))
    folder = copy(trained / "t2_bf16", tmp_path / "few")
    change_models(folder, lambda content: delattr(content["args"], "hidden_size"))
    assert "lack hidden_size" in refusal(lambda: open_checkpoint(folder))


@pytest.mark.parametrize(
    ("variant", "removed", "message"),
    [
        ("t2_bf16", "layer_04-model_01-model_states.pt", "got none for layer_04-model_01"),
        ("t4_stage0", "layer_04-*", "the layers in .* are not those of Megatron's GPT-2: .* got 2 of them"),
        ("t2_bf16", "mp_rank_00_model_states.pt", "lacks model states of model-parallel ranks"),
        ("t4_stage0", "mp_rank_03_model_states.pt", "4 tensor parallel ranks, 4 files mp_rank_.* got .* 3 files"),
        ("t2_bf16", "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "lacks the optimizer states .* mp_rank_01"),
        ("t2d2_stage1", "zero_pp_rank_1_mp_rank_01_optim_states.pt", "lacks optimizer states of 2 ranks"),
        ("t2_nested_bf16", "mp_rank_01_model_states.pt", "lacks model states of model-parallel ranks"),
        ("p2t2d2_bf16", "bf16_zero_pp_rank_*_mp_rank_*", "lacks the optimizer states .* mp_rank_00"),
    ],
)
def test_missing_files_are_each_named(trained: Path, tmp_path: Path, variant: str, removed: str, message: str) -> None:
    folder = copy(trained / variant, tmp_path / "cut")
    for path in tag_folder(folder).glob(removed):
        path.unlink()
    assert re.search(message, refusal(lambda: open_checkpoint(folder)))


def test_swapped_tensor_parallel_ranks_disagree_with_their_copies(trained: Path, tmp_path: Path) -> None:
    folder = tag_folder(copy(trained / "t2_bf16", tmp_path / "swapped"))
    first, second = (folder / f"layer_03-model_0{rank}-model_states.pt" for rank in (0, 1))
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    message = refusal(lambda: open_checkpoint(folder.parent).verify())
    assert "disagree with the bfloat16 copy" in message and "transformer.h.0.attn.c_attn.weight" in message


def test_without_zero_the_fragments_tell_swapped_ranks(trained: Path, tmp_path: Path) -> None:
    folder = tag_folder(copy(trained / "p2d2_bf16_stage0", tmp_path / "swapped"))
    first, second = (folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert "records fragments of parameters that do not follow" in refusal(lambda: open_checkpoint(folder.parent))


def test_fp32_pieces_that_nothing_names_are_refused(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "p2d2_bf16_stage0", tmp_path / "unnamed")
    path = tag_folder(folder) / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=False)
    del content["optimizer_state_dict"]["param_slice_mappings"]
    torch.save(content, path)
    assert f"nothing names the parameters in {path}" in refusal(lambda: open_checkpoint(folder))


@pytest.mark.parametrize(
    ("variant", "source", "target"),
    [
        ("t4_stage0", "layer_04-model_00-model_states.pt", "layer_04-model_01-model_states.pt"),
        ("t4_stage0", "layer_01-model_02-model_states.pt", "layer_01-model_01-model_states.pt"),
        ("t1_stage0", "layer_03-model_00-model_states.pt", "layer_05-model_00-model_states.pt"),
        ("t2_nested_stage0", "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"),
    ],
)
def test_a_file_copied_over_another_ranks_or_layers_is_named(
    trained: Path, tmp_path: Path, variant: str, source: str, target: str
) -> None:
    folder = tag_folder(copy(trained / variant, tmp_path / "doubled"))
    shutil.copy(folder / source, folder / target)
    message = refusal(lambda: open_checkpoint(folder.parent))
    assert source in message and target in message and "have the same contents" in message


def test_weights_that_are_all_zeros_are_no_copy_of_each_other(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "t1_stage0", tmp_path / "zeros")
    for layer in (3, 4):
        path = tag_folder(folder) / f"layer_{layer:02d}-model_00-model_states.pt"
        torch.save({name: torch.zeros_like(tensor) for name, tensor in torch.load(path).items()}, path)
    open_checkpoint(folder).verify()


@pytest.mark.parametrize(
    ("variant", "unproven"),
    [
        ("t1_stage0", ["the order of the 3 layers"]),
        ("t2_nested_stage0", ["the order of tensor parallel ranks 00, 01"]),
        ("t4_stage0", ["the order of tensor parallel ranks 00, 01, 02, 03", "the order of the 3 layers"]),
        ("p2t2d2_bf16", ["the order of tensor parallel ranks 00, 01"]),
        ("p2_stage1", []),
    ],
)
def test_what_only_the_names_of_files_say_is_told(trained: Path, variant: str, unproven: list[str]) -> None:
    reason = "their numbers are in the files' names alone"
    assert open_checkpoint(trained / variant).facts.missing == tuple(f"proof of {what}: {reason}" for what in unproven)


def test_replicas_that_drifted_apart_are_refused(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "t4_stage0", tmp_path / "drifted")
    path = tag_folder(folder) / "layer_03-model_02-model_states.pt"
    content = torch.load(path, weights_only=True)
    content["input_layernorm.weight"][0] += 1e-3
    torch.save(content, path)
    assert "transformer.h.0.ln_1.weight" in refusal(lambda: open_checkpoint(folder).verify())


def test_other_weights_than_the_arguments_describe_are_refused(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "t2_bf16", tmp_path / "wide")
    change_models(folder, lambda content: setattr(content["args"], "ffn_hidden_size", 48))
    assert "are not those that its arguments describe" in refusal(lambda: open_checkpoint(folder))


def test_a_bert_is_refused_by_the_name_of_its_architecture(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "t2_nested_stage0", tmp_path / "bert")
    pooler = {"pooler.dense.weight": torch.ones(24, 24)}
    change_models(folder, lambda content: content["module"].update(pooler))
    assert "is of Megatron-DeepSpeed BERT, which is not read: expected GPT-2, got pooler.dense.weight; " in refusal(
        lambda: open_checkpoint(folder)
    )


def nest(truth: Truth, rank: int, ranks: int, encoder: str, attention: str) -> dict[str, Any]:
    """The state dict that Megatron saves of one tensor parallel rank without a pipeline."""
    inner = {}
    for name, tensor in truth.items():
        if name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight")):
            tensor = tensor.chunk(ranks, dim=1)[rank]
        elif "query_key_value" in name or "dense_h_to_4h" in name or name == "word_embeddings.weight":
            tensor = tensor.chunk(ranks)[rank]
        inner[name.replace("self_attention", attention)] = tensor.clone()
    embedding = {
        "word_embeddings": {"weight": inner.pop("word_embeddings.weight")},
        "position_embeddings": {"weight": inner.pop("position_embeddings.weight")},
    }
    return {"language_model": {"embedding": embedding, encoder: inner}}


@pytest.mark.parametrize(
    ("ranks", "encoder", "attention"), [(1, "encoder", "self_attention"), (2, "transformer", "attention")]
)
def test_older_names_and_few_arguments_are_read(
    trained: Path, tmp_path: Path, ranks: int, encoder: str, attention: str
) -> None:
    # Put together here by `torch.save`: no version that wrote these names is to be had.
    truth = read_truth(trained / "t1_stage0")
    truth["word_embeddings.weight"] = torch.cat([truth["word_embeddings.weight"], torch.zeros(8, 24)])
    settings = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "max_position_embeddings": 10}
    folder = tmp_path / "nested"
    tag_folder(folder).mkdir(parents=True)
    shutil.copy(trained / "t1_stage0/vocab.json", folder)
    for rank in range(ranks):
        content = {
            "module": nest(truth, rank, ranks, encoder, attention),
            "args": Namespace(**settings, tensor_model_parallel_size=ranks),
            "checkpoint_version": 3.0,
            "global_steps": 2,
            "dp_world_size": 1,
            "ds_config": {},
        }
        torch.save(content, tag_folder(folder) / f"mp_rank_{rank:02d}_model_states.pt")
    found = open_checkpoint(folder)
    assert_equal(found, as_gpt2(truth, 4))
    assert "the activation" in found.facts.missing[-1]


def test_canonical_names_undo_wrappers_and_older_names() -> None:
    assert canonical_name("module.language_model.transformer.layers.0.attention.dense.bias") == (
        "layers.0.self_attention.dense.bias"
    )
    assert canonical_name("tied_modules.embed.word_embeddings.weight") == "word_embeddings.weight"
    assert canonical_name("language_model.output_layer.weight") == "lm_head.weight"


def test_layers_of_unknown_content_are_refused() -> None:
    layers = {1: ["word_embeddings.weight"], 3: ["input_layernorm.weight"], 9: ["router.weight"]}
    with pytest.raises(CheckpointError, match=r"got 9\.router\.weight"):
        name_layers(layers, 1, "x")


@pytest.mark.parametrize("swapped", [(1, 4), (4, 7)])
def test_layers_out_of_order_are_refused(trained: Path, tmp_path: Path, swapped: tuple[int, int]) -> None:
    folder = tag_folder(copy(trained / "t1_stage0", tmp_path / "swapped"))
    first, second = (folder / f"layer_{layer:02d}-model_00-model_states.pt" for layer in swapped)
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert "got another order, 1 " in refusal(lambda: open_checkpoint(folder.parent))


# Layers, width, heads, and rows of the padded vocabulary, of the sizes that GPT-2 was trained in with Megatron.
SIZES = {
    "345M": (24, 1024, 16, 50304),
    "1.3B": (24, 2048, 32, 50304),
    "2.7B": (32, 2560, 32, 50688),
    "3.7B": (30, 3136, 28, 51200),
}


@pytest.mark.parametrize("size", SIZES)
def test_the_key_tables_fit_transformers_model_of_every_size(size: str) -> None:
    layers, hidden, heads, rows = SIZES[size]
    args = MegatronArgs(
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn_hidden=4 * hidden,
        positions=1024,
        tensor_ranks=None,
        pipe_ranks=None,
        vocabulary=None,
        padded_vocabulary=None,
        vocabulary_step=None,
        activation="gelu_new",
        norm_epsilon=1e-5,
        tied=True,
    )
    megatron = {name: store_nothing(shape) for name, shape in expected_shapes(args, rows, 1024).items()}
    converted = convert_to_gpt2(megatron, heads=heads, vocab_size=50257)
    config = GPT2Config(
        **build_gpt2_config(args, vocab_size=50257, positions=1024, dtype_name="float32", end_of_text=None)
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert {name: tensor.shape for name, tensor in converted.items()} == expected


def store_nothing(shape: tuple[int, ...]) -> StoredTensor:
    """A tensor in a file that is never opened."""
    length = 4 * torch.Size(shape).numel()
    block = StoredBlock(
        path=Path("never opened"), name="x", offset=0, length=length, crc32=None, file_state=FileState(length, 0)
    )
    return ContiguousTensor(dtype=FLOAT32, shape=shape, ranges=(ByteRange(block, 0, length),))


def test_a_tensor_that_is_not_read_is_refused_however_deep_it_lies(tmp_path: Path) -> None:
    torch.save({"a": {"b": torch._neg_view(torch.ones(2)), "c": torch.ones(2)}}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"tensors that are not read: a\.b: .* got a view with the bit neg set"):
        flatten(tmp_path / "x.pt", open_torch_zip(tmp_path / "x.pt").content)
