"""The pure half of the backend `python_postprocess`, against transformers' own pipeline without a server."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import load_backend
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from trainers.task_checkpoints import SENTENCES, build_entity_finder
from transformers import (
    AutoTokenizer,
    BertForTokenClassification,
    PreTrainedTokenizerFast,
    TokenClassificationPipeline,
)

from export.tasks.texts.encoding import QuestionEncoder

tokenization = load_backend("python_preprocess", "tokenization")
answers = load_backend("python_postprocess", "answers")

TEXTS = [
    *SENTENCES,
    "Grüße: Noetherian londoners, unaffable ZURICHers; ada-lovelace@london!",
    "😀 Ada Lovelace 😀 Paris 今日は London",
    "Ada " * 100,
    "x",
    # What hardly a tokenizer knows, within words, and what some call it.
    "Paris\nin 北in London\tAda in北 北 Zürich",
    "Ada<unk>Lovelace <unk> in<unk> London",
]


@pytest.fixture(scope="module")
def entity_finder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_entity_finder(tmp_path_factory.mktemp("answers") / "model", checkpoint)


def build_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Return one that knows hardly more than the letters of this module's sentences.

    Args:
        kind: `unigram` has a token for what it does not know, and its tokens of a word bear no mark; `bytes` knows
            everything, and what it calls unknown comes of a text that spells it out.
    """
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        learn: Any = trainers.UnigramTrainer(vocab_size=80, special_tokens=["<pad>", "<unk>"], unk_token="<unk>")
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        learn = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<pad>", "<unk>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    tokenizer.train_from_iterator([word for text in SENTENCES for word in text.split()], learn)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", model_max_length=64, padding_side="right"
    )


@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bytes"])
@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_entities_are_the_pipelines_for_every_aggregation(
    kind: str, aggregation: str, entity_finder: Path, tmp_path: Path
) -> None:
    own = AutoTokenizer.from_pretrained(entity_finder, model_max_length=64)
    tokenizer: Any = own if kind == "wordpiece" else build_tokenizer(kind)
    torch.manual_seed(9)
    model = BertForTokenClassification.from_pretrained(entity_finder).eval()
    model.resize_token_embeddings(len(tokenizer))
    # Untrained at the output, so that the tokens of a word disagree.
    torch.nn.init.normal_(model.classifier.weight)
    find: Any = TokenClassificationPipeline(
        model=model, tokenizer=tokenizer, device=torch.device("cpu"), aggregation_strategy=aggregation
    )
    QuestionEncoder(tokenizer, 64).build_server_tokenizer().save(str(tmp_path / "tokenizer.json"))
    names = ["input_ids", "attention_mask", "token_spans", "continues_word"]
    served = tokenization.TextTokenizer(tmp_path / "tokenizer.json", names, unknown_id=tokenizer.unk_token_id)
    tensors = dict(served.stack(served.encode([(text,) for text in TEXTS])))
    assert (tensors["input_ids"] == tokenizer.unk_token_id).any()
    with torch.no_grad():
        logits = model(torch.tensor(tensors["input_ids"]), torch.tensor(tensors["attention_mask"])).logits
    labels = [model.config.id2label[index] for index in range(5)]
    settings = {"answers": "entities", "labels": labels, "aggregation": aggregation, "ignored": ["O"]}
    got = answers.build_postprocess(settings)(tensors | {"logits": logits.numpy()})
    key = "entity" if aggregation == "none" else "entity_group"
    for row, text in enumerate(TEXTS):
        wanted = find(text)
        count = len(wanted)
        assert got["LABEL"][row].tolist() == [w[key] for w in wanted] + [""] * (got["LABEL"].shape[1] - count)
        assert got["START"][row, :count].tolist() == [w["start"] for w in wanted]
        assert got["END"][row, :count].tolist() == [w["end"] for w in wanted]
        assert np.allclose(got["SCORE"][row, :count], [w["score"] for w in wanted], atol=1e-5)
    assert got["LABEL"].shape[1] > 5


def test_the_file_of_a_tokenizer_names_what_it_does_not_know_where_its_model_has_it(
    entity_finder: Path, tmp_path: Path
) -> None:
    """A version of an older modelyard says nothing else."""
    path = tmp_path / "tokenizer.json"
    own = AutoTokenizer.from_pretrained(entity_finder, model_max_length=64)
    for tokenizer, found in ((own, own.unk_token_id), (build_tokenizer("unigram"), 1), (build_tokenizer("bytes"), -1)):
        QuestionEncoder(tokenizer, 64).build_server_tokenizer().save(str(path))
        assert tokenization.TextTokenizer(path, ["input_ids", "continues_word"]).unknown_id == found
    parameters = {"parameters": {"modelyard_unknown_id": {"string_value": "x"}}}
    with pytest.raises(ValueError, match="modelyard_unknown_id is wrong: expected a token's id, or -1, got 'x'"):
        tokenization.read_unknown_id(parameters)
    for text, found in (("-1", -1), ("3", 3)):
        assert tokenization.read_unknown_id({"parameters": {"modelyard_unknown_id": {"string_value": text}}}) == found
    assert tokenization.read_unknown_id({}) is None


def test_a_text_without_any_entity_is_answered_with_an_absent_one() -> None:
    tensors = {
        "logits": np.array([[[5.0, 0.0], [5.0, 0.0]]], dtype=np.float32),
        "token_spans": np.array([[[0, 1], [-1, -1]]]),
        "continues_word": np.zeros((1, 2), dtype=np.int64),
    }
    settings = {"answers": "entities", "labels": ["O", "X"], "aggregation": "simple", "ignored": ["O"]}
    got = answers.find_entities(tensors, settings)
    assert {name: array.tolist() for name, array in got.items()} == {
        "LABEL": [[""]],
        "SCORE": [[0.0]],
        "START": [[-1]],
        "END": [[-1]],
    }


def test_settings_that_name_no_answers_are_refused() -> None:
    with pytest.raises(ValueError, match="asks for poems: expected one of labels, entities, spans, masks"):
        answers.build_postprocess({"answers": "poems"})


def test_scores_without_a_function_are_the_logits_and_ties_keep_the_labels_order() -> None:
    settings = {"answers": "labels", "labels": ["a", "b", "c"], "function": "none", "top_k": 2}
    got = answers.rank_labels({"logits": np.array([[1.0, 3.0, 1.0]], dtype=np.float32)}, settings)
    assert got["LABEL"].tolist() == [["b", "a"]]
    assert got["SCORE"].tolist() == [[3.0, 1.0]]
