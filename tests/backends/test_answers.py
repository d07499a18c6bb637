"""The pure half of the backend `python_postprocess`, against transformers' own pipeline without a server."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import load_backend
from trainers.task_checkpoints import SENTENCES, build_entity_finder
from transformers import AutoTokenizer, BertForTokenClassification, TokenClassificationPipeline

from export.tasks.texts.encoding import QuestionEncoder

tokenization = load_backend("python_preprocess", "tokenization")
answers = load_backend("python_postprocess", "answers")

TEXTS = [
    *SENTENCES,
    "Grüße: Noetherian londoners, unaffable ZURICHers; ada-lovelace@london!",
    "😀 Ada Lovelace 😀 Paris 今日は London",
    "Ada " * 100,
    "x",
]


@pytest.fixture(scope="module")
def entity_finder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_entity_finder(tmp_path_factory.mktemp("answers") / "model", checkpoint)


@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
def test_entities_are_the_pipelines_for_every_aggregation(
    aggregation: str, entity_finder: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(entity_finder, model_max_length=64)
    model = BertForTokenClassification.from_pretrained(entity_finder).eval()
    # Untrained at the output, so that the tokens of a word disagree.
    torch.manual_seed(9)
    torch.nn.init.normal_(model.classifier.weight)
    find: Any = TokenClassificationPipeline(
        model=model, tokenizer=tokenizer, device=torch.device("cpu"), aggregation_strategy=aggregation
    )
    QuestionEncoder(tokenizer, 64).build_server_tokenizer().save(str(tmp_path / "tokenizer.json"))
    names = ["input_ids", "attention_mask", "token_spans", "continues_word"]
    served = tokenization.TextTokenizer(tmp_path / "tokenizer.json", names)
    tensors = dict(served.stack(served.encode([(text,) for text in TEXTS])))
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
