"""The reader of Megatron-LM's GPT-2, on folders written as Megatron-LM documents them, of weights that GPT-2 has whole.

Megatron-LM itself is not run here: it needs CUDA's Apex or Transformer Engine for its layers.
"""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes import spread_over_nodes
from transformers import GPT2Config, GPT2LMHeadModel

from export.checkpoints import join_folders, open_checkpoint
from export.consolidation.consolidate import consolidate
from export.errors import CheckpointError, VocabularyError

LAYERS, HIDDEN, HEADS, VOCABULARY, PADDED, POSITIONS = 4, 24, 4, 53, 64, 16
ARGS = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "padded_vocab_size": PADDED,
    "bias_gelu_fusion": True,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "group_query_attention": False,
    "untie_embeddings_and_output_weights": False,
}
# GPT-2's part of a block → the legacy model's, and Megatron Core's as its layers without fused norms name it.
PARTS = {
    "ln_1": ("input_layernorm", "input_layernorm"),
    "attn.c_attn": ("self_attention.query_key_value", "self_attention.linear_qkv"),
    "attn.c_proj": ("self_attention.dense", "self_attention.linear_proj"),
    "ln_2": ("post_attention_layernorm", "pre_mlp_layernorm"),
    "mlp.c_fc": ("mlp.dense_h_to_4h", "mlp.linear_fc1"),
    "mlp.c_proj": ("mlp.dense_4h_to_h", "mlp.linear_fc2"),
}
# And as Transformer Engine's fused ones do.
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, bos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def split(part: str, tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """The parts of one of GPT-2's tensors on each tensor parallel rank, [out, in], heads together."""
    if tensor.dim() == 2:
        tensor = tensor.t()
    if part == "attn.c_attn":
        dim = HIDDEN // HEADS
        rows = tensor.reshape(3, HEADS, dim, *tensor.shape[1:]).transpose(0, 1)
        tensor = rows.reshape(3 * HIDDEN, *tensor.shape[1:])
    is_column = part in ("attn.c_attn", "mlp.c_fc")
    if not is_column and (tensor.dim() == 1 or part.startswith("ln")):
        return [tensor] * ranks
    return [piece.contiguous().clone() for piece in tensor.chunk(ranks, dim=0 if is_column else 1)]


def write(folder: Path, model: GPT2LMHeadModel, *, ranks: int, stages: int, core: bool, fused: bool = False) -> Path:
    """Write iteration 500 as Megatron-LM saves it (megatron/training/checkpointing.py, --ckpt-format torch)."""
    state = model.state_dict()
    padding = torch.zeros(PADDED - VOCABULARY, HIDDEN)
    tables = torch.cat([state["transformer.wte.weight"], padding]).chunk(ranks)
    for rank in range(ranks):
        for stage in range(stages):
            names: dict[str, Any] = {}
            if stage == 0:
                names["embedding.word_embeddings.weight"] = tables[rank].clone()
                names["embedding.position_embeddings.weight"] = state["transformer.wpe.weight"]
            body = "decoder" if core else "encoder"
            share = LAYERS // stages
            for local in range(share):
                for part, (legacy, new) in PARTS.items():
                    for kind in ("weight", "bias"):
                        tensor = state[f"transformer.h.{stage * share + local}.{part}.{kind}"]
                        name = f"{new if core else legacy}.{kind}"
                        for old, end in FUSED.items() if fused else ():
                            name = name.replace(old, end)
                        names[f"{body}.layers.{local}.{name}"] = split(part, tensor, ranks)[rank]
            if stage == stages - 1:
                for kind in ("weight", "bias"):
                    names[f"{body}.final_layernorm.{kind}"] = state[f"transformer.ln_f.{kind}"]
                if stages > 1:
                    names["output_layer.weight" if core else "word_embeddings_for_head.weight"] = tables[rank].clone()
            if fused:
                names["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
            content = {
                "args": Namespace(
                    **ARGS, tensor_model_parallel_size=ranks, pipeline_model_parallel_size=stages, rank=rank
                ),
                "checkpoint_version": 3.0,
                "iteration": 500,
                "model": names if core else {"language_model": nest(names)},
            }
            place = folder / "iter_0000500" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else ""))
            place.mkdir(parents=True)
            torch.save(content, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("500")
    (folder / "vocab.json").write_text(json.dumps({f"t{index}": index for index in range(VOCABULARY)}))
    return folder


def nest(names: dict[str, Any]) -> dict[str, Any]:
    """As the legacy model's own state dict: the embeddings and the transformer are dicts of their own."""
    nested: dict[str, Any] = {}
    for name, tensor in names.items():
        outer, _, rest = name.partition(".")
        nested.setdefault(outer, {})[rest] = tensor
    return nested


@pytest.mark.parametrize(
    "layout",
    [
        {"ranks": 1, "stages": 1, "core": False},
        {"ranks": 2, "stages": 2, "core": False},
        {"ranks": 2, "stages": 1, "core": True, "fused": True},
        {"ranks": 2, "stages": 4, "core": True},
    ],
    ids=["legacy", "legacy split", "core, fused norms", "core split"],
)
def test_every_weight_is_gpt2s_bit_for_bit(layout: dict[str, Any], model: GPT2LMHeadModel, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", model, **layout)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format_name == (
        f"Megatron-LM GPT-2, tensor parallel {layout['ranks']}, pipeline {layout['stages']}"
    )
    assert (checkpoint.facts.trainer, checkpoint.facts.step) == ("Megatron-LM", 500)
    truth = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert checkpoint.tensors.keys() == truth.keys()
    for name, tensor in truth.items():
        assert torch.equal(checkpoint.read(name), tensor), name
    assert open_checkpoint(folder / "iter_0000500").tensors.keys() == truth.keys()
    consolidate(folder, tmp_path / "out")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-6)
    if layout["stages"] == 4:
        assert any("order of the pipeline's inner stages" in line for line in checkpoint.facts.missing)


def test_ranks_of_several_nodes_are_one_checkpoint(model: GPT2LMHeadModel, tmp_path: Path) -> None:
    write(tmp_path / "run", model, ranks=2, stages=2, core=False)
    first, second = spread_over_nodes(tmp_path / "run", tmp_path)
    for entry in (*(first / "iter_0000500").glob("*_00_*"), *(second / "iter_0000500").glob("*_01_*")):
        shutil.rmtree(entry)
    assert torch.equal(
        open_checkpoint(join_folders([first, second])).read("transformer.wpe.weight"), model.transformer.wpe.weight
    )


@pytest.mark.parametrize("own", ["*_01_*", "*_000", "*_001"])
def test_a_node_whose_folder_was_not_named_is_asked_for(own: str, model: GPT2LMHeadModel, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", model, ranks=2, stages=2, core=False)
    for entry in (folder / "iter_0000500").glob(own):
        shutil.rmtree(entry)
    with pytest.raises(
        CheckpointError, match=r"has not the files .*: pass every node's folder as an argument of its own"
    ):
        open_checkpoint(folder)


def save_base(folder: Path, model: GPT2LMHeadModel, tokens: int = VOCABULARY) -> Path:
    """The folder that a training started from: configuration and tokenizer, without weights."""
    model.config.save_pretrained(folder)
    vocabulary = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(tokens)}}}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    return folder


def test_the_folder_of_the_base_tells_the_padding(model: GPT2LMHeadModel, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", model, ranks=2, stages=1, core=True)
    (folder / "vocab.json").unlink()
    base = save_base(tmp_path / "base", model)
    done = consolidate(folder, tmp_path / "out", base=base)
    assert not any("true size" in line for line in done.missing)
    again, info = GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert torch.equal(again.transformer.wte.weight, model.transformer.wte.weight)
    assert not any(info.values())
    (base / "config.json").unlink()
    assert open_checkpoint(folder, base=base).tensors["transformer.wte.weight"].shape == (VOCABULARY, HIDDEN)
    # Where it tells nothing, what lies beside the checkpoint still does.
    (base / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps({f"t{index}": index for index in range(60)}))
    assert open_checkpoint(folder, base=base).tensors["transformer.wte.weight"].shape == (60, HIDDEN)


def test_a_vocabulary_whose_padding_is_not_the_tables_is_doubted(model: GPT2LMHeadModel, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", model, ranks=2, stages=1, core=True)
    (folder / "vocab.json").unlink()
    base = save_base(tmp_path / "base", model, 40)
    (base / "config.json").unlink()

    def doubts(**settings: object) -> list[str]:
        for rank in ("mp_rank_00", "mp_rank_01"):
            change(rank, lambda content: vars(content["args"]).update(settings))(folder)
        missing = open_checkpoint(folder, base=base).facts.missing
        return [line for line in missing if line.startswith("proof that the vocabulary")]

    # Nothing is known of the padding where the arguments do not tell it.
    assert doubts() == []
    assert doubts(make_vocab_size_divisible_by=8) == [
        "proof that the vocabulary in tokenizer.json is the one that it was trained with: 40 tokens, padded to a "
        "multiple of 16 as the arguments say, are not 64 rows, of which the last 24 are left out"
    ]
    assert doubts(pad_vocab_size_to=64) == [] and doubts(pad_vocab_size_to=None) != []
    save_base(base, model)
    assert doubts() == []


def test_a_base_of_another_model_is_refused(model: GPT2LMHeadModel, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", model, ranks=1, stages=1, core=True)
    base = save_base(tmp_path / "base", model)
    for name, value in (("n_head", 6), ("n_layer", 2)):
        (base / "config.json").write_text(json.dumps({**model.config.to_dict(), name: value}))
        with pytest.raises(
            CheckpointError, match=rf"base/config.json is not of the checkpoint: expected {name} 4, got"
        ):
            open_checkpoint(folder, base=base)
    model.config.save_pretrained(base)
    save_base(base, model, PADDED + 1)
    (base / "config.json").unlink()
    with pytest.raises(VocabularyError, match=r"tokenizer.json in .*base has more tokens than .* 64 tokens .* got 65"):
        open_checkpoint(folder, base=base)


def test_a_base_with_a_head_of_its_own_is_refused_where_the_checkpoint_is_tied(
    model: GPT2LMHeadModel, tmp_path: Path
) -> None:
    folder = write(tmp_path / "run", model, ranks=1, stages=1, core=True)
    base = save_base(tmp_path / "base", model)
    (base / "config.json").write_text(json.dumps({**model.config.to_dict(), "tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match="not of the checkpoint: expected tie_word_embeddings True, got False; "):
        consolidate(folder, tmp_path / "out", base=base)


def change(path: str, edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        place = folder / "iter_0000500" / path / "model_optim_rng.pt"
        content = torch.load(place, weights_only=False)
        edit(content)
        torch.save(content, place)

    return apply


def make_distributed(folder: Path) -> None:
    shutil.rmtree(folder / "iter_0000500")
    (folder / "iter_0000500").mkdir()
    (folder / "iter_0000500" / "common.pt").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            change("mp_rank_01_000", lambda c: c.update(iteration=400)),
            "are from different iterations: expected one",
        ),
        (lambda f: shutil.rmtree(f / "iter_0000500/mp_rank_01_001"), "got none for mp_rank_01_001; "),
        (
            lambda f: (f / "latest_checkpointed_iteration.txt").write_text("600"),
            "expected iter_0000600, got iter_",
        ),
        (make_distributed, "distributed format, which is not read: expected mp_rank_.* --ckpt-convert-format torch"),
        (
            change("mp_rank_00_000", lambda c: setattr(c["args"], "swiglu", True)),
            "is of a Megatron architecture that is not proven: .* got swiglu=True",
        ),
        (
            change("mp_rank_00_000", lambda c: c.update(model0=c.pop("model"))),
            "holds no model of Megatron-LM that is read: .* got the parts of an interleaved pipeline",
        ),
        (
            lambda f: shutil.copytree(f / "iter_0000500/mp_rank_00_000", f / "iter_0000500/mp_rank_00_000_001"),
            "is of a Megatron layout that is not proven: expected tensor and pipeline parallel ranks, got experts",
        ),
    ],
    ids=["step", "lost rank", "latest", "distributed", "architecture", "interleaved", "experts"],
)
def test_what_is_not_whole_or_not_proven_is_refused_by_name(
    damage: Callable[[Path], object], sentence: str, model: GPT2LMHeadModel, tmp_path: Path
) -> None:
    folder = write(tmp_path / "run", model, ranks=2, stages=2, core=False)
    damage(folder)
    with pytest.raises(CheckpointError, match=sentence):
        open_checkpoint(folder)


def test_a_last_stage_whose_embeddings_are_another_is_refused(model: GPT2LMHeadModel, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", model, ranks=1, stages=2, core=True)
    change("mp_rank_00_001", lambda content: content["model"]["output_layer.weight"].add_(1))(folder)
    with pytest.raises(CheckpointError, match="disagree"):
        open_checkpoint(folder).verify()


def add_bert(folder: Path) -> None:
    """What the first and the last stage of a legacy BERT hold beside GPT-2's parts, with the head that tells pairs."""
    body, heads = {"tokentype_embeddings": {"weight": torch.ones(2, HIDDEN)}}, {"weight": torch.ones(2, HIDDEN)}
    change("mp_rank_00_000", lambda content: content["model"]["language_model"]["embedding"].update(body))(folder)
    change("mp_rank_00_001", lambda content: content["model"].update(binary_head=heads))(folder)


def add_head_of_words(folder: Path) -> None:
    head = {"dense.weight": torch.ones(HIDDEN, HIDDEN), "bias": torch.ones(PADDED)}
    change("mp_rank_01_001", lambda content: content["model"].update(lm_head=head))(folder)


def add_decoder(folder: Path) -> None:
    name = "layers.0.inter_attention.query.weight"
    decoder = {"decoder": {name: torch.ones(HIDDEN, HIDDEN)}}
    change("mp_rank_01_001", lambda content: content["model"]["language_model"].update(decoder))(folder)


def add_encoder_of_core(folder: Path) -> None:
    name = "encoder.layers.0.self_attention.linear_qkv.weight"
    change("mp_rank_00_000", lambda content: content["model"].update({name: torch.ones(3 * HIDDEN, HIDDEN)}))(folder)


@pytest.mark.parametrize(
    ("add", "core", "told"),
    [
        (add_bert, False, "BERT, .* got binary_head.weight, embedding.tokentype_embeddings.weight; "),
        (add_head_of_words, False, "BERT, .* got lm_head.dense.weight; "),
        (add_decoder, False, r"T5, .* got decoder.layers.0.inter_attention.query.weight, encoder.layers.0.\S+; "),
        (add_encoder_of_core, True, r"T5, .* got decoder.layers.0.\S+, encoder.layers.0.self_attention.\S+; "),
    ],
    ids=["BERT", "BERT without pairs", "T5", "T5 of Core"],
)
def test_berts_and_t5s_are_refused_by_the_name_of_their_architecture(
    add: Callable[[Path], object], core: bool, told: str, model: GPT2LMHeadModel, tmp_path: Path
) -> None:
    folder = write(tmp_path / "run", model, ranks=2, stages=2, core=core)
    add(folder)
    # A mistake that another check would tell first.
    change("mp_rank_01_000", lambda content: content.update(iteration=400))(folder)
    with pytest.raises(CheckpointError, match=f"is of Megatron-LM {told}convert it with the trainer's own"):
        open_checkpoint(folder)


def test_what_is_there_and_what_is_not_are_told_apart(model: GPT2LMHeadModel, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", model, ranks=1, stages=1, core=True)
    names = ("decoder.final_layernorm.bias", "decoder.final_layernorm.scale")
    change("mp_rank_00", lambda content: content["model"].update({names[1]: content["model"].pop(names[0])}))(folder)
    with pytest.raises(CheckpointError, match="got final_layernorm.scale, no final_layernorm.bias; "):
        open_checkpoint(folder)
