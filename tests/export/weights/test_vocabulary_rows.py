"""The resize matrix: what transformers' own resize_token_embeddings and the same assignment give, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from export.checkpoints import open_checkpoint
from export.errors import VocabularyError
from export.weights.torch_model import load_config, load_model
from export.weights.vocabulary_options import AddedToken, VocabularyOptions
from export.weights.vocabulary_rows import VocabularyRows, fit_vocabulary

WORDS = ["[PAD]", "[UNK]", "start", "of", "entity", "end", "cat", "dog"]


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")


def build_model(architecture: str, rows: int, tied: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    common = {"vocab_size": rows, "tie_word_embeddings": tied, "pad_token_id": 0}
    if architecture == "bert":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        model: PreTrainedModel = BertForMaskedLM(BertConfig(**common, **sizes))
        torch.nn.init.normal_(model.cls.predictions.bias)
        torch.nn.init.normal_(model.cls.predictions.decoder.bias)
    elif architecture == "opt":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32}
        model = OPTForCausalLM(OPTConfig(**common, **sizes, word_embed_proj_dim=16))
    else:
        model = GPT2LMHeadModel(GPT2Config(**common, n_embd=16, n_layer=1, n_head=2))
    return model.eval()


def fit(directory: Path, options: VocabularyOptions, **changes: Any) -> tuple[PreTrainedModel, VocabularyRows, Any]:
    checkpoint = open_checkpoint(directory)
    config = load_config(directory)
    for name, value in changes.items():
        setattr(config, name, value)
    tokenizer = build_tokenizer()
    weights, rows = fit_vocabulary(config, checkpoint, tokenizer, options)
    assert config.vocab_size == rows.after
    auto_class = AutoModelForMaskedLM if config.model_type == "bert" else AutoModelForCausalLM
    model, unused = load_model(config, weights, auto_class)
    assert unused == []
    return model, rows, tokenizer


def expected_rows(old: torch.Tensor, after: int, options: VocabularyOptions, seed: int) -> torch.Tensor:
    """Return the table that the user would assign by hand after `resize_token_embeddings`."""
    vocabulary = len(WORDS)
    known, generator = old[:vocabulary], torch.Generator().manual_seed(seed)
    made = {
        "zeros": lambda: torch.zeros_like(old[0]),
        "copy:cat": lambda: known[WORDS.index("cat")],
        "mean": lambda: known.mean(dim=0),
        "start of entity": lambda: known[[WORDS.index(word) for word in ("start", "of", "entity")]].mean(dim=0),
        "mean:end of entity": lambda: known[[WORDS.index(word) for word in ("end", "of", "entity")]].mean(dim=0),
        "random": lambda: (
            torch.empty_like(old[0]).normal_(0.0, 0.02, generator=generator)
            if old.dim() == 2
            else torch.zeros_like(old[0])
        ),
    }
    new = [made[item.initializer]() for item in options.added_tokens]
    table = torch.cat([old[:vocabulary], torch.stack(new), old[vocabulary + len(new) :]]) if new else old
    if after > len(table):
        table = torch.cat([table, known.mean(dim=0).expand(after - len(table), *old.shape[1:])])
    return table[:after]


def find_tables(model: PreTrainedModel, tied: bool) -> dict[str, torch.nn.Parameter]:
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    tables = {"input weight": inputs.weight} | ({} if tied else {"output weight": outputs.weight})
    bias = getattr(outputs, "bias", None)
    return tables if bias is None else tables | {"output bias": bias}


GROW = tuple(
    AddedToken(token=f"[T{index}]", initializer=initializer)
    for index, initializer in enumerate(
        ("zeros", "copy:cat", "mean", "start of entity", "mean:end of entity", "random")
    )
)
MATRIX = {
    "as it is": (8, VocabularyOptions()),
    "grow": (8, VocabularyOptions(added_tokens=GROW, seed=7)),
    "grow into padding": (16, VocabularyOptions(added_tokens=GROW[:3])),
    "shrink": (16, VocabularyOptions(unused_rows="cut")),
    "grow and shrink": (32, VocabularyOptions(added_tokens=GROW, unused_rows="cut")),
    "pad": (8, VocabularyOptions(pad_to_multiple_of=64)),
    "grow, shrink and pad": (40, VocabularyOptions(added_tokens=GROW, unused_rows="cut", pad_to_multiple_of=16)),
}


@pytest.mark.parametrize("case", MATRIX)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ["bert", "opt", "gpt2"])
def test_rows_are_those_of_resize_token_embeddings_and_the_same_assignment(
    architecture: str, tied: bool, case: str, tmp_path: Path
) -> None:
    rows, options = MATRIX[case]
    reference = build_model(architecture, rows, tied)
    reference.save_pretrained(tmp_path)
    model, fitted, tokenizer = fit(tmp_path, options)
    seeds = {"input weight": options.seed, "output weight": options.seed + (not tied), "output bias": options.seed}
    before = {name: value.detach().clone() for name, value in find_tables(reference, tied).items()}
    reference.resize_token_embeddings(fitted.after, mean_resizing=False)
    with torch.no_grad():
        for name, parameter in find_tables(reference, tied).items():
            parameter.copy_(expected_rows(before[name], fitted.after, options, seeds[name]))
    got, wanted = (dict(item.named_parameters(remove_duplicate=False)) for item in (model, reference))
    if architecture == "bert" and not tied:
        # The forward pass reads the decoder's bias; transformers makes the other name point to it when it resizes.
        del got["cls.predictions.bias"], wanted["cls.predictions.bias"]
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert fitted.after % options.pad_to_multiple_of == 0
    assert fitted.unused == fitted.after - len(tokenizer) >= 0


SEQ2SEQ = {
    "bart": (BartForConditionalGeneration, BartConfig),
    "mbart": (MBartForConditionalGeneration, MBartConfig),
    "marian": (MarianMTModel, MarianConfig),
}


@pytest.mark.parametrize("prefix", ["", "model."], ids=["with its head", "without"])
@pytest.mark.parametrize("case", ["grow", "shrink", "pad"])
@pytest.mark.parametrize("architecture", SEQ2SEQ)
def test_what_is_added_to_the_logits_of_bart_and_its_relatives_grows_in_step(
    architecture: str, case: str, prefix: str, tmp_path: Path
) -> None:
    rows, options = MATRIX[case]
    model_class, config_class = SEQ2SEQ[architecture]
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16, "vocab_size": rows}
    heads = {f"{half}_{what}": 2 for half in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim")}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    reference = model_class(config_class(**sizes, **heads, **special, forced_eos_token_id=None))
    bias = torch.randn(1, rows)
    reference.final_logits_bias.copy_(bias)
    reference.config.save_pretrained(tmp_path)
    # Every name of the tied table, as `.bin` files have them.
    state = {name.removeprefix(prefix): value for name, value in reference.state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    config = load_config(tmp_path)
    weights, fitted = fit_vocabulary(config, open_checkpoint(tmp_path), build_tokenizer(), options)
    if prefix:
        # The model within, as `save_pretrained` of it names its tables: those of its two halves as well.
        encoder, _ = load_model(config, weights, AutoModel, without=("lm_head", "final_logits_bias"))
        assert encoder.get_input_embeddings().weight.shape == (fitted.after, 16)
        return
    model, unused = load_model(config, weights, AutoModelForSeq2SeqLM)
    assert unused == [] and "final_logits_bias" in fitted.tables
    kept = min(rows, fitted.after)
    assert torch.equal(model.final_logits_bias[:, :kept], bias[:, :kept])
    assert torch.equal(model.final_logits_bias[:, kept:], torch.zeros(1, fitted.after - kept))
    assert torch.equal(model.get_input_embeddings().weight[:kept], reference.get_input_embeddings().weight[:kept])
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_the_vocabulary_of_marians_decoder_stays_as_it_is_where_it_is_another(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16}
    heads = {f"{half}_{what}": 2 for half in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim")}
    special = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = MarianConfig(
        vocab_size=8, decoder_vocab_size=8, share_encoder_decoder_embeddings=False, **sizes, **heads, **special
    )
    reference = MarianMTModel(config)
    config.save_pretrained(tmp_path)
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    config = load_config(tmp_path)
    weights, fitted = fit_vocabulary(config, open_checkpoint(tmp_path), build_tokenizer(), MATRIX["grow"][1])
    assert fitted.tables == ["model.encoder.embed_tokens.weight"]
    model, _ = load_model(config, weights, AutoModelForSeq2SeqLM)
    assert model.get_encoder().embed_tokens.weight.shape == (14, 16)
    assert torch.equal(model.get_output_embeddings().weight, reference.get_output_embeddings().weight)


def test_a_tied_head_that_was_saved_twice_stays_tied(tmp_path: Path) -> None:
    model = build_model("gpt2", 8, tied=True)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert "lm_head.weight" in weights
    model.config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fitted, rows, _ = fit(tmp_path, VocabularyOptions(added_tokens=GROW))
    assert rows.tables == ["transformer.wte.weight", "lm_head.weight"]
    assert fitted.lm_head.weight is fitted.transformer.wte.weight
    assert fitted.lm_head.weight.shape == (14, 16)


@pytest.mark.parametrize("recorded", [0, 5, 50265])
def test_a_vocabulary_size_of_0_or_stale_is_corrected_from_the_tensor(recorded: int, tmp_path: Path) -> None:
    reference = build_model("bert", 16, tied=True)
    reference.save_pretrained(tmp_path)
    model, rows, _ = fit(tmp_path, VocabularyOptions(), vocab_size=recorded)
    assert (rows.recorded, rows.before, rows.after, rows.unused) == (recorded, 16, 16, 8)
    assert torch.equal(model.get_input_embeddings().weight, reference.get_input_embeddings().weight)


def test_an_id_without_a_row_is_refused_and_not_given_one(tmp_path: Path) -> None:
    build_model("bert", 7, tied=True).save_pretrained(tmp_path)
    with pytest.raises(VocabularyError, match="expected ids below its 7 rows, got id 7 for 'dog'"):
        fit(tmp_path, VocabularyOptions(added_tokens=GROW))


def test_random_rows_are_the_same_for_the_same_seed_alone(tmp_path: Path) -> None:
    build_model("opt", 8, tied=True).save_pretrained(tmp_path)
    options = [VocabularyOptions(added_tokens=GROW[-1:], seed=seed) for seed in (1, 1, 2)]
    first, again, other = (fit(tmp_path, item)[0].get_input_embeddings().weight for item in options)
    assert torch.equal(first, again)
    assert torch.equal(first[:8], other[:8])
    assert not torch.equal(first[8], other[8])


@pytest.mark.parametrize(("rows", "warns"), [(16, False), (17, True)])
def test_a_table_that_is_mostly_beyond_the_tokenizer_is_a_warning(rows: int, warns: bool, tmp_path: Path) -> None:
    build_model("bert", rows, tied=True).save_pretrained(tmp_path)
    _, fitted, tokenizer = fit(tmp_path, VocabularyOptions())
    assert len(tokenizer) == 8
    told = (
        "the tokenizer has 8 tokens, and the embedding 17 rows: if it is not the one that the checkpoint was trained "
        "with, every answer is wrong; pass the folder of that one with --base.",
    )
    assert fitted.warnings == (told if warns else ())
