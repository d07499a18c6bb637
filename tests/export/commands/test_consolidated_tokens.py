"""`consolidate` with tokens to add and with another folder's tokenizer: what transformers then loads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordLevel, WordPiece
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
)

from export.__main__ import main
from export.checkpoints import open_checkpoint
from export.tasks.base import TaskSource
from export.tasks.texts.generation import Text2TextGeneration
from export.weights.torch_model import load_config

TABLE = "bert.embeddings.word_embeddings.weight"
ROWS = 30522


@pytest.fixture
def saved(checkpoint: Path, tmp_path: Path) -> Path:
    """A masked language model of 8 dimensions in bf16, head tied, as a trainer's `torch.save` leaves it."""
    folder = tmp_path / "saved"
    folder.mkdir()
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=ROWS,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        vocabulary_sha256="to be replaced",
    )
    model = BertForMaskedLM(config).to(torch.bfloat16)
    torch.save({"model": model.state_dict()}, folder / "checkpoint.pt")
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(checkpoint / name, folder)
    (folder / "added_tokens.json").write_text('{"[MASK]": 103}')
    return folder


def consolidate(*arguments: object) -> int:
    return main(["consolidate", *map(str, arguments)])


def test_added_tokens_come_with_rows_tokenizer_and_configuration(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ["--add-special-token", "[ENT_START]=start of entity", "[COPY]=copy:cat", "--add-token", "qwxz=zeros"]
    assert consolidate(saved, out, *asked, "--allow-other-tokenizer") == 0
    before = open_checkpoint(saved).read(TABLE)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.convert_tokens_to_ids(["[ENT_START]", "[COPY]", "qwxz"]) == [ROWS, ROWS + 1, ROWS + 2]
    assert tokenizer.tokenize("a [ENT_START] Qwxz") == ["a", "[ENT_START]", "qwxz"]
    model, loading = AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    table = model.get_input_embeddings().weight.detach()
    assert table.dtype == torch.bfloat16 and table.shape == (ROWS + 3, 8)
    assert torch.equal(table[:ROWS], before)
    described = tokenizer("start of entity", add_special_tokens=False)["input_ids"]
    assert torch.equal(table[ROWS], before[described].float().mean(dim=0).to(torch.bfloat16))
    assert torch.equal(table[ROWS + 1], before[tokenizer.convert_tokens_to_ids("cat")])
    assert not table[ROWS + 2].any()
    # The head is tied, in the file as well; its bias has grown in step.
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert model.get_output_embeddings().bias.shape == (ROWS + 3,)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata()["cls.predictions.decoder.weight"] == TABLE
        untouched = [name for name in file.keys() if file.get_slice(name).get_shape()[0] != ROWS + 3]  # noqa: SIM118
        original = open_checkpoint(saved)
        assert untouched and all(torch.equal(file.get_tensor(name), original.read(name)) for name in untouched)
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == ROWS + 3
    assert config["vocabulary_sha256"] != "to be replaced"
    assert not (out / "added_tokens.json").exists() and not (out / "vocab.txt").exists()
    assert not [path for path in out.rglob("*") if path.name.startswith(".") or path.name == "rows.safetensors"]
    # What was written is read again, and its tokenizer is told to be its own.
    assert consolidate(out, tmp_path / "again", "--add-token", "another=mean") == 0


def test_a_token_that_is_there_already_is_told(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--add-token", "cat=zeros", "qwxz=mean", "--add-special-token", "[SEP]=zeros", "--allow-other-tokenizer"]
    assert consolidate(saved, tmp_path / "out", *asked) == 0
    sentence = "the tokenizer has [SEP], cat already: each keeps the row that it has, whatever it was to start as."
    assert f"warning: {sentence}\n" in capsys.readouterr().out
    table = open_checkpoint(tmp_path / "out").read(TABLE)
    assert torch.equal(table[:ROWS], open_checkpoint(saved).read(TABLE)) and table.shape[0] == ROWS + 1
    assert consolidate(saved, tmp_path / "again", *asked, "--json") == 0
    assert sentence in json.loads(capsys.readouterr().out)["warnings"]


def test_one_tokenizer_is_left_where_tokens_were_added(saved: Path, tmp_path: Path) -> None:
    stale = (
        "vocab.json",
        "gpt2-vocab.json",
        "merges.txt",
        "gpt2-merges.txt",
        "spiece.model",
        "source.spm",
        "bpe.codes",
    )
    for name in (*stale, "special_tokens_map.json", "entity_vocab.json"):
        (saved / name).write_text("{}")
    out = tmp_path / "out"
    assert consolidate(saved, out, "--add-special-token", "[X]=mean", "--allow-other-tokenizer") == 0
    kept = {path.name for path in out.iterdir()}
    # LUKE's entities are no vocabulary of texts.
    assert kept == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "entity_vocab.json"}
    assert AutoTokenizer.from_pretrained(out).convert_tokens_to_ids("[X]") == ROWS
    assert consolidate(saved, tmp_path / "as_it_was") == 0
    assert {"vocab.txt", *stale} <= {path.name for path in (tmp_path / "as_it_was").iterdir()}


def test_rows_are_cut_and_padded_as_run_does_it(saved: Path, tmp_path: Path) -> None:
    options = ["--allow-other-tokenizer", "--pad-vocab-to-multiple-of", "64", "--dtype", "float32"]
    assert consolidate(saved, tmp_path / "out", *options) == 0
    table = open_checkpoint(tmp_path / "out").read(TABLE)
    before = open_checkpoint(saved).read(TABLE).float()
    assert table.shape == (30528, 8)
    assert torch.equal(table[:ROWS], before)
    # The mean, in the type that the table was stored in.
    assert torch.equal(table[ROWS], before.mean(dim=0).to(torch.bfloat16).float())


def test_configuration_and_tokenizer_come_from_another_folder(saved: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (saved / "checkpoint.pt").rename(weights / "checkpoint.pt")
    assert consolidate(weights, tmp_path / "bare") == 0
    assert not (tmp_path / "bare" / "config.json").exists()
    assert consolidate(weights, tmp_path / "out", "--base", saved) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (saved / "tokenizer.json").read_bytes()
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "out").config.vocab_size == ROWS


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--seed", "3"], "--seed has no effect alone: expected tokens to add, got none; leave it out"),
        (["--seed", "3", "--unused-rows", "cut"], "--seed has no effect alone: expected tokens to add, got none"),
        (["--add-token", "x=copy:[NOWHERE]"], "the token that x is to be a copy of does not exist"),
        (["--add-token", "x=mean"], "belongs to another model"),
        (["--base", "nowhere"], "nowhere is no folder: expected one with config.json and tokenizer, got none"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    accept = ["--allow-other-tokenizer"] if "copy" in options[-1] else []
    assert consolidate(saved, tmp_path / "out", *options, *accept) == 1
    assert sentence in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def write_vocabulary(folder: Path, size: int, file: str) -> None:
    """Give a folder a tokenizer of `size` tokens and no other, as transformers or an older release of it saves one."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{index}" for index in range(size - 5))]
    ids = {word: index for index, word in enumerate(words)}
    for path in folder.glob("*tok*.json"):
        path.unlink()
    (folder / "vocab.txt").unlink()
    if file == "tokenizer.json":
        Tokenizer(WordPiece(ids, unk_token="[UNK]")).save(str(folder / file))
    elif file == "unigram":
        Tokenizer(Unigram([(word, 0.0) for word in words], unk_id=1)).save(str(folder / "tokenizer.json"))
    else:
        (folder / file).write_text(json.dumps(ids) if file.endswith(".json") else "\n".join(words))


@pytest.mark.parametrize("file", ["tokenizer.json", "unigram", "vocab.json", "vocab.txt"])
def test_a_tokenizer_that_is_not_that_of_the_weights_is_not_carried(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    refused = f"error: the tokenizer in {saved} has far fewer ids than {TABLE} has rows: expected ids for most of its "
    write_vocabulary(saved, 640, file)
    assert consolidate(saved, tmp_path / "out") == 1
    assert capsys.readouterr().err.startswith(f"{refused}{ROWS} rows, got 640; copy the tokenizer")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert consolidate(saved, tmp_path / "taken", "--allow-other-tokenizer") == 0


def test_a_tokenizer_beyond_the_rows_is_not_carried(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.from_file(str(saved / "tokenizer.json"))
    tokenizer.add_special_tokens(["[ONE MORE]"])
    tokenizer.save(str(saved / "tokenizer.json"))
    for options in ([], ["--allow-other-tokenizer"], ["--allow-other-tokenizer", "--add-token", "x=mean"]):
        assert consolidate(saved, tmp_path / "out", *options) == 1
        assert f" reaches beyond {TABLE}: expected ids below its {ROWS} rows, got id {ROWS} for '[ONE MORE]'; use" in (
            capsys.readouterr().err
        )
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    # Of weights without an embedding nothing can be told.
    torch.save({"dense.weight": torch.ones(8, 8)}, saved / "checkpoint.pt")
    assert consolidate(saved, tmp_path / "out") == 0


def test_a_folder_without_a_tokenizer_gets_no_tokens(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (saved / name).unlink()
    assert consolidate(saved, tmp_path / "out", "--add-token", "x=mean") == 1
    assert "holds no tokenizer" in capsys.readouterr().err


def test_a_decoder_with_a_vocabulary_of_its_own_keeps_it_and_answers_in_it(tmp_path: Path) -> None:
    read, written = 12, 9
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16}
    heads = {f"{half}_{what}": 2 for half in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim")}
    special = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    two = {"vocab_size": read, "decoder_vocab_size": written, "share_encoder_decoder_embeddings": False}
    MarianMTModel(MarianConfig(**two, **sizes, **heads, **special)).save_pretrained(tmp_path / "saved")
    words = {"<pad>": 0, "<unk>": 1, "</s>": 2} | {f"word{index}": index for index in range(3, read)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="</s>",
    ).save_pretrained(tmp_path / "saved")

    assert consolidate(tmp_path / "saved", tmp_path / "out", "--add-token", "another=mean") == 0
    model, loading = MarianMTModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (read + 1, written)
    assert model.get_encoder().embed_tokens.weight.shape == (read + 1, 16)

    task = Text2TextGeneration(
        TaskSource(
            directory=tmp_path / "out",
            config=load_config(tmp_path / "out"),
            weights=open_checkpoint(tmp_path / "out"),
            tokenizer=None,
            max_length=16,
            options={},
        )
    )
    assert task.signature.outputs[0].dims[-1] == written
    assert (task.tensors.rules["input_ids"].high, task.tensors.rules["decoder_input_ids"].high) == (read + 1, written)
