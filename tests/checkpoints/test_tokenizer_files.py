"""The files that tokenizers lie in, as trainers and libraries leave them: halves, merges that were cut, pointers."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import ByteLevelBPETokenizer
from trainers.writers import write_bpe
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Model

from export.checkpoints.plain.tokenizer_files import check_merges
from export.commands.inspect_checkpoint import inspect_checkpoint
from export.consolidation.consolidate import consolidate
from export.errors import CheckpointError, VocabularyError
from export.options import ExportRequest
from export.progress import Progress
from export.source import load_source
from export.tasks.texts.text import read_verification_texts
from export.weights.tokenizer import load_tokenizer
from export.weights.torch_model import load_config


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("gpt2-vocab.json", "gpt2-merges.txt")])
def test_gpt2s_vocabulary_is_read_under_megatrons_names_as_well(names: tuple[str, str], tmp_path: Path) -> None:
    write_bpe(tmp_path, ["<|endoftext|>"], names)
    tokenizer = load_tokenizer(tmp_path, GPT2Config())
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer("ab a")["input_ids"]) == (12, 0, [10, 11])
    # Nothing tells the class without the model's configuration.
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*, or pass the folder of the model .* with --base"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_under_names_that_nobody_looks_for_is_warned_of(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=12, n_embd=8, n_layer=1, n_head=1, n_positions=16, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    request = ExportRequest(checkpoint=tmp_path, name="x")
    assert load_source(request, Progress(Console(quiet=True))).task.warnings == ()
    write_bpe(tmp_path, ["<|endoftext|>"], ("my-vocab.json", "my-merges.txt"))
    (warning,) = load_source(request, Progress(Console(quiet=True))).task.warnings
    assert warning == (
        "no tokenizer was found, but my-merges.txt, my-vocab.json may be one under another name; name it as "
        "transformers does (merges.txt, vocab.json), or pass the tokenizer's folder with --base."
    )


def test_what_is_consolidated_has_it_under_the_names_that_transformers_looks_for(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    GPT2Model(GPT2Config(vocab_size=12, n_embd=8, n_layer=1, n_head=1, n_positions=16)).save_pretrained(source)
    write_bpe(source, ["<|endoftext|>"], ("gpt2-vocab.json", "gpt2-merges.txt"))
    done = consolidate(source, out)
    assert {"vocab.json", "merges.txt"} <= {*done.files}
    assert not {"gpt2-vocab.json", "gpt2-merges.txt"} & {*done.files}
    assert AutoTokenizer.from_pretrained(out)("ab a")["input_ids"] == [10, 11]


def test_half_of_gpt2s_tokenizer_and_merges_of_another_are_refused(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    GPT2Model(GPT2Config(vocab_size=12, n_embd=8, n_layer=1, n_head=1, n_positions=16)).save_pretrained(source)
    write_bpe(source, ["<|endoftext|>"], ("gpt2-vocab.json", "gpt2-merges.txt"))
    merges = source / "gpt2-merges.txt"
    merges.write_text(merges.read_text() + "zq zq\n")
    with pytest.raises(VocabularyError, match="merges in gpt2-merges.txt of tokens that gpt2-vocab.json has, got .*zq"):
        consolidate(source, out)
    merges.unlink()
    for read in (lambda: consolidate(source, out), lambda: load_tokenizer(source, GPT2Config())):
        with pytest.raises(CheckpointError, match="one half of GPT-2's tokenizer: expected gpt2-merges.txt beside"):
            read()
    assert not out.exists()


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("gpt2-vocab.json", "gpt2-merges.txt")])
def test_merges_that_were_cut_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    source = tmp_path / "in"
    GPT2Model(GPT2Config(vocab_size=300, n_embd=8, n_layer=1, n_head=1, n_positions=16)).save_pretrained(source)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(read_verification_texts(), vocab_size=300, special_tokens=["<|endoftext|>"])
    tokenizer.save_model(str(source))
    for usual, name in zip(("vocab.json", "merges.txt"), names, strict=True):
        (source / usual).rename(source / name)
    whole = (source / names[1]).read_text()
    text = "The server answers."
    assert load_tokenizer(source, GPT2Config())(text)["input_ids"] == tokenizer.encode(text).ids
    # At half, all of them, the whole file, and the last one.
    last = whole.rstrip("\n").rindex("\n") + 1
    (source / names[1]).write_text("\ufeff" + whole)
    for read in (lambda: consolidate(source, tmp_path / "out"), lambda: load_tokenizer(source, GPT2Config())):
        with pytest.raises(CheckpointError, match=f"{names[1]} cannot be read: .* got a byte order mark in front"):
            read()
    for cut in (whole[: len(whole) // 2], whole[: whole.index("\n") + 1], "", whole[:last]):
        (source / names[1]).write_text(cut)
        for read in (lambda: consolidate(source, tmp_path / "out"), lambda: load_tokenizer(source, GPT2Config())):
            with pytest.raises(
                CheckpointError, match=f"{names[1]} does not belong to {names[0]}, or was cut: expected"
            ):
                read()
    # Unless it is one that was added.
    unmade = "".join(whole[last:].split())
    (source / "added_tokens.json").write_text(json.dumps({unmade: tokenizer.token_to_id(unmade)}))
    assert load_tokenizer(source, GPT2Config()) is not None


# As the slow tokenizers of XLM, CTRL and CLIP keep them: with a mark where a word ends, or where it goes on.
@pytest.mark.parametrize(
    ("tokens", "merges"),
    [
        (["<s>", "a", "b", "a</w>", "b</w>", "ab", "ab</w>", "aab</w>"], ["a b 7", "a b</w> 5", "a ab</w> 3"]),
        (["a", "b", "a@@", "b@@", "ab", "ab@@", "aab", "__unk__"], ["a b</w>", "a b", "a ab</w>"]),
        (["a", "b", "joe@@", "USER", "USER2", "joe@"], ["joe@ @", "joe @", "j oe", "o e", "jo e"]),
    ],
)
def test_merges_are_asked_for_every_token_of_every_kind(tokens: list[str], merges: list[str], tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (tmp_path / "special_tokens_map.json").write_text('{"additional_special_tokens": [{"content": "USER"}]}')
    (tmp_path / "tokenizer_config.json").write_text('{"extra_special_tokens": ["USER2"]}')
    (tmp_path / "merges.txt").write_text("\n".join(merges))
    check_merges(tmp_path)
    (tmp_path / "merges.txt").write_text("\n".join(merges[1:]))
    with pytest.raises(CheckpointError, match="expected a merge for each of . tokens, got none for 1: "):
        check_merges(tmp_path)


@pytest.mark.parametrize("name", ["merges.txt", "gpt2-merges.txt"])
def test_merges_without_their_vocabulary_are_no_missing_tokenizer(name: str, tmp_path: Path) -> None:
    GPT2Model(GPT2Config(vocab_size=12, n_embd=8, n_layer=1, n_head=1, n_positions=16)).save_pretrained(tmp_path)
    (tmp_path / name).write_text("#version: 0.2\na b\n")
    request = ExportRequest(checkpoint=tmp_path, name="x", repository=tmp_path)
    for read in (
        lambda: load_source(request, Progress(Console(quiet=True))),
        lambda: consolidate(tmp_path, tmp_path / "out"),
    ):
        with pytest.raises(
            CheckpointError, match=f"one half of GPT-2's tokenizer: expected .*vocab.json beside {name}"
        ):
            read()


def test_a_pointer_in_a_templates_place_is_not_what_every_question_is_answered_with(tmp_path: Path) -> None:
    write_bpe(tmp_path, ["<|endoftext|>"])
    GPT2Model(GPT2Config(vocab_size=12, n_embd=8, n_layer=1, n_head=1, n_positions=16)).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\n")
    request = ExportRequest(checkpoint=tmp_path, name="x", repository=tmp_path)
    for read in (
        lambda: load_source(request, Progress(Console(quiet=True))),
        lambda: consolidate(tmp_path, tmp_path / "out"),
        lambda: inspect_checkpoint(tmp_path),
    ):
        with pytest.raises(CheckpointError, match=r"chat_template\.jinja is a pointer of Git LFS"):
            read()
    (tmp_path / "chat_template.jinja").write_text("\ufeff{{ messages[0].content }}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read: .* got a byte order mark"):
        load_source(request, Progress(Console(quiet=True)))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "sentencepiece.bpe.model"])
def test_what_git_leaves_in_the_place_of_a_file_beside_the_weights_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n")
    load = load_config if name == "config.json" else load_tokenizer
    with pytest.raises(CheckpointError, match=rf"{name} is a pointer of Git LFS: expected the file that it points to"):
        load(tmp_path)
