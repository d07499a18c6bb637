import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import BertConfig

from export.errors import CheckpointError, VocabularyError
from export.tasks.encoding import Question, QuestionEncoder
from export.tasks.text import read_verification_texts
from export.weights.tokenizer import (
    add_tokens,
    check_ids_have_rows,
    check_special_ids,
    hash_vocabulary,
    load_tokenizer,
    read_max_length,
)
from export.weights.vocabulary_options import AddedToken

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
    with pytest.raises(VocabularyError) as refusal:
        check_special_ids(tmp_path, tokenizer)
    assert "got sep_token_id 102 where config.json says 5; copy the tokenizer" in str(refusal.value)
    (tmp_path / "config.json").write_text(json.dumps({"vocabulary_sha256": "0" * 64}))
    with pytest.raises(VocabularyError, match="a vocabulary of SHA-256 .* where config.json says 0000"):
        check_special_ids(tmp_path, tokenizer)


def test_the_smallest_of_the_recorded_limits_is_the_maximum_length(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    config = BertConfig(max_position_embeddings=512)
    assert read_max_length(checkpoint, tokenizer, config) == 256
    assert read_max_length(tmp_path, tokenizer, config) == 512
    tokenizer.model_max_length = int(1e30)
    assert read_max_length(tmp_path, tokenizer, BertConfig(max_position_embeddings=64)) == 64
    with pytest.raises(CheckpointError, match="nothing in .* says how long a sequence may be"):
        read_max_length(tmp_path, tokenizer, BertConfig(max_position_embeddings=0))


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
