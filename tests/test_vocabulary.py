import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertConfig

from export.checkpoints import open_checkpoint
from export.errors import CheckpointError, VocabularyError
from export.request import AddedToken
from export.verify import check_tokenizers_agree, read_verification_texts
from export.vocabulary import (
    add_special_tokens,
    assign_new_rows,
    build_server_tokenizer,
    check_ids_have_rows,
    load_tokenizer,
    read_max_length,
)

TABLE = "embeddings.word_embeddings.weight"
START = AddedToken(token="[ENT_START]", description="start of entity")
END = AddedToken(token="[ENT_END]", description="end of entity")


def test_new_tokens_get_the_mean_of_their_descriptions_and_all_other_rows_stay(checkpoint: Path) -> None:
    tokenizer, weights = load_tokenizer(checkpoint), open_checkpoint(checkpoint)
    new = add_special_tokens(tokenizer, [START, END])
    assert tokenizer.convert_tokens_to_ids(["[ENT_START]", "[ENT_END]"]) == [30522, 30523]
    before = weights.read(TABLE)
    after = assign_new_rows(weights, TABLE, tokenizer, new).read(TABLE)
    words = AutoTokenizer.from_pretrained(checkpoint).convert_tokens_to_ids(["start", "of", "entity"])
    assert after.shape == (30524, 384)
    assert torch.equal(after[:30522], before)
    assert torch.equal(after[30522], before[words].mean(dim=0))


def test_a_token_that_exists_adds_no_row(checkpoint: Path) -> None:
    tokenizer, weights = load_tokenizer(checkpoint), open_checkpoint(checkpoint)
    assert add_special_tokens(tokenizer, [AddedToken(token="[SEP]", description="the end")]) == []
    assert add_special_tokens(tokenizer, [START]) == [START]
    assert add_special_tokens(tokenizer, [START]) == []
    assert assign_new_rows(weights, TABLE, tokenizer, []) is weights


def test_an_added_token_keeps_its_case_and_is_never_split(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    add_special_tokens(tokenizer, [START])
    assert tokenizer.tokenize("x[ENT_START]Y") == ["x", "[ENT_START]", "y"]


def test_a_description_without_any_known_word_is_refused(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    with pytest.raises(VocabularyError, match=r"the description of \[X\] has no known token"):
        add_special_tokens(tokenizer, [AddedToken(token="[X]", description="\u1234\u4321\uffff")])


def test_a_tokenizer_that_reaches_beyond_the_table_is_refused_with_both_numbers(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    check_ids_have_rows(tokenizer, 30522, TABLE)
    with pytest.raises(VocabularyError) as refusal:
        check_ids_have_rows(tokenizer, 30521, TABLE)
    assert str(refusal.value) == (
        "the tokenizer reaches beyond embeddings.word_embeddings.weight: expected ids below its 30521 rows, "
        "got id 30521 for '##～'; use the tokenizer that the checkpoint was trained with."
    )


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
    add_special_tokens(tokenizer, [START, END])
    build_server_tokenizer(tokenizer, 256).save(str(tmp_path / "tokenizer.json"))
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
    check_tokenizers_agree(tokenizer, served, texts, 256)
    assert len(served.encode("word " * 999).ids) == 256
    assert served.padding["pad_id"] == 0


def test_a_folder_without_a_tokenizer_or_with_a_damaged_one_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    shutil.copy(checkpoint / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
