"""What the folder of an adapter says beside its tensors is held against the checkpoint, and never left out."""

import json
from pathlib import Path

import pytest
from trainers.architectures import train_tokenizer
from transformers import BertConfig

from export.errors import AdapterError, VocabularyError
from export.weights.adapter_folder import check_adapter_task, check_adapter_tokenizer
from export.weights.tokenizer import load_tokenizer


def test_an_adapter_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(base)
    adapter.mkdir()
    known = load_tokenizer(base, BertConfig())
    # Without a tokenizer it says nothing of it, and with the same one nothing else.
    check_adapter_tokenizer(adapter, known, BertConfig(), base)
    tokenizer.save_pretrained(adapter)
    check_adapter_tokenizer(adapter, known, BertConfig(), base)
    grown = load_tokenizer(base, BertConfig())
    grown.add_tokens(["<x0>", "<x1>"])
    grown.save_pretrained(adapter)
    sentence = "another tokenizer than that of .*base: expected the same tokens, got <x0>, <x1> beyond it; copy"
    with pytest.raises(VocabularyError, match=sentence):
        check_adapter_tokenizer(adapter, known, BertConfig(), base)
    with pytest.raises(VocabularyError, match="got no <x0>, <x1>; "):
        check_adapter_tokenizer(base, grown, BertConfig(), adapter)


@pytest.mark.parametrize(
    ("said", "found", "is_one"),
    [
        ("SEQ_CLS", "text-classification", True),
        ("SEQ_CLS", "reward", True),
        ("SEQ_CLS", "feature-extraction", False),
        ("TOKEN_CLS", "fill-mask", False),
        ("CAUSAL_LM", "text-generation", True),
        (None, "feature-extraction", True),
        (5, "feature-extraction", True),
    ],
)
def test_an_adapter_that_was_trained_for_another_task_is_refused(
    said: object, found: str, is_one: bool, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"task_type": said}))
    if is_one:
        check_adapter_task(tmp_path, found)
        return
    with pytest.raises(
        AdapterError, match=f"got task_type {said}; pass --task .*, or --task {found} to leave its head"
    ):
        check_adapter_task(tmp_path, found)
