"""The resize matrix: what transformers' own resize_token_embeddings and the same assignment give, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
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
    model, left_out = load_model(config, weights, auto_class)
    assert left_out == []
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
