import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import BPE, Model, Unigram, WordLevel, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from trainers.writers import BYTES, write_bpe
from transformers import (
    BertConfig,
    GPT2Tokenizer,
    OPTConfig,
    OPTForCausalLM,
)

from export.consolidation.vocabulary import refuse_other_ids
from export.errors import CheckpointError, VocabularyError
from export.options import ExportRequest
from export.progress import Progress
from export.source import load_source
from export.tasks.texts.encoding import Question, QuestionEncoder
from export.tasks.texts.text import read_verification_texts
from export.weights.tokenizer import (
    add_tokens,
    check_ids_have_rows,
    check_special_ids,
    hash_vocabulary,
    load_tokenizer,
    read_max_length,
    warn_of_padding,
)
from export.weights.vocabulary_options import AddedToken, VocabularyOptions

TABLE = "embeddings.word_embeddings.weight"
START = AddedToken(token="[ENT_START]", initializer="start of entity")
END = AddedToken(token="[ENT_END]", initializer="end of entity")


def test_a_token_that_exists_adds_no_row(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    assert add_tokens(tokenizer, [AddedToken(token="[SEP]", initializer="the end")]) == []
    assert add_tokens(tokenizer, [START]) == [START]
    assert add_tokens(tokenizer, [START]) == []
    assert add_tokens(tokenizer, [AddedToken(token="user", initializer="zeros", special=False)]) == []
    assert len(tokenizer) == 30523


def test_a_special_token_keeps_its_case_and_an_ordinary_one_does_not(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    add_tokens(tokenizer, [START, AddedToken(token="Qwxz", special=False)])
    assert tokenizer.tokenize("x[ENT_START]Y qwxz") == ["x", "[ENT_START]", "y", "qwxz"]
    assert tokenizer.encode("a QWXZ", add_special_tokens=False)[1] == 30523
    assert "[ENT_START]" not in tokenizer.tokenize("x[ent_start]y")


def test_a_description_without_any_known_word_is_refused(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    with pytest.raises(VocabularyError, match=r"the description of \[X\] has no known token"):
        add_tokens(tokenizer, [AddedToken(token="[X]", initializer="mean:\u1234\u4321\uffff")])
    with pytest.raises(VocabularyError, match=r"the token that \[X\] is to be a copy of does not exist"):
        add_tokens(tokenizer, [AddedToken(token="[X]", initializer="copy:[Y]")])


def test_a_tokenizer_that_reaches_beyond_the_table_is_refused_with_both_numbers(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    check_ids_have_rows(tokenizer, 30522, TABLE)
    with pytest.raises(VocabularyError) as refusal:
        check_ids_have_rows(tokenizer, 30521, TABLE)
    assert str(refusal.value) == (
        "the tokenizer reaches beyond embeddings.word_embeddings.weight: expected ids below its 30521 rows, "
        "got id 30521 for '##～'; use the tokenizer that the checkpoint was trained with."
    )


@pytest.mark.parametrize(
    ("known", "rows"),
    # Phi, Qwen, T5, Pythia, and what lies just within the bounds.
    [(50295, 51200), (151665, 152064), (32100, 32128), (50277, 50688), (640, 1664), (22892, 30522)],
)
def test_rows_that_pad_a_table_are_no_sign_of_another_tokenizer(known: int, rows: int) -> None:
    refuse_other_ids({str(index): index for index in range(known)}, rows, TABLE)


@pytest.mark.parametrize(("known", "rows"), [(640, 30522), (640, 1665), (22891, 30522)])
def test_a_tokenizer_with_far_fewer_ids_than_there_are_rows_is_refused(known: int, rows: int) -> None:
    ids = {str(index): index for index in range(known)}
    with pytest.raises(VocabularyError) as refusal:
        refuse_other_ids(ids, rows, TABLE)
    assert str(refusal.value).startswith(
        f"the tokenizer has far fewer ids than {TABLE} has rows: expected ids for most of its {rows} rows, got {known}"
        "; copy the tokenizer that the checkpoint was trained with, or pass its folder with --base; --allow-other-toke"
    )
    # Not the highest id counts, but how many there are.
    with pytest.raises(VocabularyError, match=f"got {known + 1};"):
        refuse_other_ids(ids | {"last": rows - 1}, rows + 4, TABLE)
    refuse_other_ids(ids, rows, TABLE, allow_other_tokenizer=True)


def test_a_small_tokenizer_beside_a_large_table_takes_an_option(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{index}" for index in range(635))]
    tokenizer = Tokenizer(WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    request = ExportRequest(checkpoint=folder, name="x", repository=tmp_path)
    progress = Progress(Console(quiet=True))
    with pytest.raises(VocabularyError, match="has rows: expected ids for most of its 30522 rows, got 640; copy"):
        load_source(request, progress)
    taken = load_source(replace(request, vocabulary=VocabularyOptions(allow_other_tokenizer=True)), progress)
    assert taken.rows is not None and (taken.rows.tokens, taken.rows.unused) == (640, 29882)


def test_a_tokenizer_of_another_model_is_refused_with_every_difference(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    check_special_ids(checkpoint, tokenizer)
    config = {
        "pad_token_id": 1,
        "sep_token_id": 5,
        "mask_token_id": 103,
        "vocabulary_sha256": hash_vocabulary(tokenizer),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(checkpoint / "tokenizer_config.json", tmp_path)
    with pytest.raises(VocabularyError) as refusal:
        check_special_ids(tmp_path, tokenizer)
    assert "got sep_token_id 102 where config.json says 5; copy the tokenizer" in str(refusal.value)
    (tmp_path / "config.json").write_text(json.dumps({"vocabulary_sha256": "0" * 64}))
    with pytest.raises(VocabularyError, match="a vocabulary of SHA-256 .* where config.json says 0000"):
        check_special_ids(tmp_path, tokenizer)


ROLES = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}


def write_tokenizer(folder: Path, own: list[str], **settings: object) -> Path:
    """Write a tokenizer whose `tokenizer.json` has the special tokens `own`, and settings that name others perhaps."""
    vocabulary = {token: index for index, token in enumerate([*own, *BYTES])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[("a", "b"), ("Ġ", "a")]))
    tokenizer.add_special_tokens(own)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32} | settings)
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "pad_token_id": 0}))
    return folder


def test_special_tokens_that_tokenizer_json_never_had_tell_the_tokenizer_of_another_model(tmp_path: Path) -> None:
    wrong = write_tokenizer(tmp_path / "wrong", ["<s>", "</s>"], **ROLES)
    tokenizer = load_tokenizer(wrong)
    with pytest.raises(VocabularyError) as refusal:
        check_special_ids(wrong, tokenizer)
    assert (
        f"got pad_token_id {tokenizer.pad_token_id} where config.json says 0 and no [CLS], [PAD], [SEP], [UNK] in"
        in (str(refusal.value))
    )
    right = write_tokenizer(tmp_path / "right", ["[PAD]", "[UNK]", "[SEP]", "[CLS]"], **ROLES)
    check_special_ids(right, load_tokenizer(right))
    assert warn_of_padding(right, load_tokenizer(right)) == ()


@pytest.mark.parametrize(
    ("own", "settings"),
    [
        # As users add one to a vocabulary, with and without saving `tokenizer.json`.
        (["<s>", "</s>", "[PAD]"], {"eos_token": "</s>", "pad_token": "[PAD]"}),
        (["<s>", "</s>"], {"eos_token": "</s>", "pad_token": "[PAD]"}),
        # As GPT-2 is padded.
        (["<s>", "</s>"], {"eos_token": "</s>", "pad_token": "</s>"}),
    ],
)
def test_another_padding_alone_is_a_warning(own: list[str], settings: dict[str, str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, own, **settings))
    check_special_ids(tmp_path, tokenizer)
    (warning,) = warn_of_padding(tmp_path, tokenizer)
    assert f"pad_token_id {tokenizer.pad_token_id} where config.json says 0" in warning
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "pad_token_id": None}))
    assert warn_of_padding(tmp_path, tokenizer) == ()


def test_the_ids_that_the_first_clip_has_in_its_configuration_are_no_sign(tmp_path: Path) -> None:
    # As openai/clip-vit-base-patch32 has them, whose tokenizer begins with 49406 and ends with 49407.
    ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    folder = write_tokenizer(tmp_path, ["<a>", "<b>"], bos_token="<s>", eos_token="</s>")
    tokenizer = load_tokenizer(folder)
    end = tokenizer.eos_token_id
    (folder / "config.json").write_text(json.dumps({"model_type": "clip_text_model"} | ids))
    check_special_ids(folder, tokenizer)
    assert warn_of_padding(folder, tokenizer) == ()
    (folder / "config.json").write_text(json.dumps({"model_type": "clip_text_model"} | ids | {"eos_token_id": 0}))
    with pytest.raises(VocabularyError, match=f"eos_token_id {end} where config.json says 0"):
        check_special_ids(folder, tokenizer)
    # Another model's begins with these.
    other = write_tokenizer(tmp_path / "other", ["<s>", "</s>"], bos_token="<s>", eos_token="</s>")
    (other / "config.json").write_text(json.dumps({"model_type": "clip_text_model"} | ids))
    with pytest.raises(VocabularyError, match="eos_token_id 1 where config.json says 2"):
        check_special_ids(other, load_tokenizer(other))


def test_the_vocabulary_that_deepspeed_chat_saves_is_refused_with_the_remedy_that_works(tmp_path: Path) -> None:
    # OPT's: GPT-2's class, but texts begin with </s>. DeepSpeed-Chat saves the model and `save_vocabulary`'s two files.
    base = write_bpe(tmp_path / "base", ["<s>", "<pad>", "</s>", "<unk>"])
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32}
    config = OPTConfig(vocab_size=15, **sizes, word_embed_proj_dim=16, max_position_embeddings=32)
    names = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = GPT2Tokenizer.from_pretrained(base, **names)
    chat = write_bpe(tmp_path / "chat", ["<s>", "<pad>", "</s>", "<unk>"])
    config.save_pretrained(chat)
    torch.save(OPTForCausalLM(config).state_dict(), chat / "pytorch_model.bin")
    shutil.rmtree(base)
    tokenizer.save_pretrained(base)
    config.save_pretrained(base)
    request = ExportRequest(checkpoint=chat, name="x", repository=tmp_path, task="text-generation-logits")
    progress = Progress(Console(quiet=True))
    with pytest.raises(VocabularyError) as refusal:
        load_source(request, progress)
    assert "got bos_token_id 15 where config.json says 2; eos_token_id 15 where" in str(refusal.value)
    assert "--base" in str(refusal.value) and "--allow-other-tokenizer" not in str(refusal.value)
    source = load_source(replace(request, base=base), progress)
    assert source.rows is not None and source.rows.after == 15


def test_the_smallest_of_the_recorded_limits_is_the_maximum_length(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    config = BertConfig(max_position_embeddings=512)
    assert read_max_length(checkpoint, tokenizer, config) == 256
    assert read_max_length(tmp_path, tokenizer, config) == 512
    tokenizer.model_max_length = int(1e30)
    assert read_max_length(tmp_path, tokenizer, BertConfig(max_position_embeddings=64)) == 64
    with pytest.raises(CheckpointError, match="nothing in .* says how long a sequence may be"):
        read_max_length(tmp_path, tokenizer, BertConfig(max_position_embeddings=0))


def test_the_length_is_read_from_the_file_that_sentence_transformers_reads(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer, config = load_tokenizer(checkpoint), BertConfig(max_position_embeddings=512)
    # As releases before 3 named it, after the model's type.
    (tmp_path / "sentence_roberta_config.json").write_text('{"max_seq_length": 100}')
    assert read_max_length(tmp_path, tokenizer, config) == 100
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 200}')
    assert read_max_length(tmp_path, tokenizer, config) == 200


@pytest.mark.parametrize("recorded", ['"x"', '"128"', "0", "-1", "true", "12.5", "[128]"])
def test_a_recorded_length_that_is_none_is_refused(recorded: str, checkpoint: Path, tmp_path: Path) -> None:
    tokenizer, config = load_tokenizer(checkpoint), BertConfig(max_position_embeddings=512)
    (tmp_path / "sentence_bert_config.json").write_text(f'{{"max_seq_length": {recorded}}}')
    with pytest.raises(
        CheckpointError, match=f"max_seq_length in what .* recorded in {tmp_path} cannot be used: expected a number of"
    ):
        read_max_length(tmp_path, tokenizer, config)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": null}')
    assert read_max_length(tmp_path, tokenizer, config) == 512


def test_the_servers_tokenizer_makes_the_same_ids_as_transformers(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    add_tokens(tokenizer, [START, END])
    encoder = QuestionEncoder(tokenizer, 256)
    encoder.build_server_tokenizer().save(str(tmp_path / "tokenizer.json"))
    served = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = [
        *read_verification_texts(),
        "",
        " ",
        "a\x00b",
        "[ENT_START]x[ENT_END]",
        "[ent_start]",
        "word " * 999,
        "𝕏🏳️‍🌈",
    ]
    encoder.check_agrees(served, [Question(text=text) for text in texts])
    assert len(served.encode("word " * 999).ids) == 256
    assert served.padding["pad_id"] == 0


def test_a_folder_without_a_tokenizer_or_with_a_damaged_one_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    shutil.copy(checkpoint / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.txt"])
def test_a_tokenizer_that_is_no_regular_file_is_refused_as_that(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} is not a regular file: expected a file, got a FIFO; put"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["own.Own", None]}, ["own.Own", None]])
def test_a_tokenizer_that_is_python_in_the_checkpoint_is_refused_as_that(auto_map: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\na\nb\n")
    (tmp_path / "own.py").write_text("raise AssertionError")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": auto_map}))
    with pytest.raises(CheckpointError, match="is Python in the checkpoint, which is never run: .*'own.Own', None"):
        load_tokenizer(tmp_path)


def test_special_tokens_alone_are_no_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    """As transformers makes one of a class's name, where its vocabulary was not copied."""
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, tmp_path)
    with pytest.raises(CheckpointError, match="has no vocabulary: .* got special tokens alone"):
        load_tokenizer(tmp_path)
    # A file that is not of its kind helps nobody.
    (tmp_path / "spiece.model").write_bytes(b"x")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no vocabulary|cannot be loaded"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("model", "key", "token"),
    [
        (Unigram([("<pad>", 0.0), ("a", -1.0)]), "unk_id", 0),
        (WordLevel({"<pad>": 0, "a": 1}, unk_token="<unk>"), "unk_token", "<pad>"),
        (WordPiece({"<pad>": 0, "a": 1}, unk_token="[UNK]"), "unk_token", "<pad>"),
    ],
    ids=["Unigram", "WordLevel", "WordPiece"],
)
def test_a_tokenizer_that_fails_at_what_it_does_not_know_is_refused(
    model: Model, key: str, token: object, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer(model).save(str(path))
    # Of pairs it is asked as well.
    (tmp_path / "config.json").write_text('{"model_type": "bert", "type_vocab_size": 2}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(
        VocabularyError, match=r"fails at a text with characters that it does not .* set unk_id, of a Uni"
    ):
        load_tokenizer(tmp_path)
    # As the refusal says.
    content = json.loads(path.read_text())
    content["model"][key] = token
    path.write_text(json.dumps(content))
    assert load_tokenizer(tmp_path)(["b"])["input_ids"] == [[0]]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        *(
            (
                {"model_max_length": length},
                f"model_max_length in .* cannot be used: expected a number .*, got {length}; corr",
            )
            for length in (0, -1, 32.5)
        ),
        (
            {"model_max_length": "x"},
            "model_max_length in .* cannot be used: expected a number of tokens, got 'x'; corr",
        ),
        (
            {"model_input_names": [5]},
            r"model_input_names in .* cannot be used: expected a list of names, got \[5\]; corr",
        ),
        (
            {"split_special_tokens": True},
            "split_special_tokens in .* cannot be used: expected false, .* got True; correct it, or leave it out",
        ),
    ],
)
def test_a_setting_of_a_wrong_type_is_refused_by_name(
    values: dict[str, object], sentence: str, checkpoint: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint / name, tmp_path / name)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(CheckpointError, match=sentence):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"])
def test_a_byte_order_mark_in_a_file_of_the_tokenizer_is_refused_by_name(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / each, tmp_path)
    plain = (tmp_path / name).read_text() if (tmp_path / name).exists() else "{}"
    (tmp_path / name).write_text(plain, encoding="utf-8-sig")
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: .* got a byte order mark in front; save it as"):
        load_tokenizer(tmp_path)
