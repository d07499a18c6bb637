"""Classifiers that read the state at a text's last end token: no text changes the answer to another."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from trainers.architectures import ARCHITECTURES, save_model
from transformers import AutoModelForSequenceClassification, BartConfig, BartForSequenceClassification

from export.checkpoints import open_checkpoint
from export.engines.onnxruntime_process import open_runtime
from export.errors import VerificationError, VocabularyError
from export.proof.verify import verify
from export.stages import write_files
from export.targets import DEFAULT_TARGET
from export.tasks.base import HeadModule, TaskSource
from export.tasks.building import build_task
from export.tasks.cases import join_rows
from export.tasks.texts.last_end import LastEndModule, check_end
from export.tasks.texts.text import TextTask
from export.weights.tokenizer import load_tokenizer
from export.weights.torch_model import load_config
from export.weights.transforms import CastToFloat32

_LIKE_BART = {"encoder_layers": 1, "decoder_layers": 1}
SMALL = {
    "bart": ("bart classification", _LIKE_BART),
    "mbart": ("bart classification", _LIKE_BART),
    "plbart": ("bart classification", _LIKE_BART),
    "t5": ("t5 classification", {"num_layers": 1, "num_decoder_layers": 1}),
}
MODELS = {"mbart": "MBartForSequenceClassification", "plbart": "PLBartForSequenceClassification"}
# With one end, two and three: as many in all as would make equal parts.
TEXTS = ("the cat sleeps", "a kitten [SEP] naps", "[SEP] by the [SEP] window")


def build(name: str, directory: Path) -> TextTask:
    like, options = SMALL.get(name, (name, {}))
    known = ARCHITECTURES[like]
    architecture = replace(known, model=MODELS.get(name, known.model), options={**known.options, **options})
    save_model(architecture, directory)
    source = TaskSource(
        directory=directory,
        config=load_config(directory),
        weights=CastToFloat32(source=open_checkpoint(directory)),
        tokenizer=load_tokenizer(directory),
        max_length=64,
        options={},
    )
    task = build_task("text-classification", source)
    assert isinstance(task, TextTask)
    return task


@pytest.mark.parametrize(
    "name", [name if name in ("bart", "t5") else pytest.param(name, marks=pytest.mark.rarer) for name in SMALL]
)
def test_a_text_with_end_tokens_changes_no_answer_beside_it(name: str, tmp_path: Path) -> None:
    task = build(name, tmp_path / "model")
    assert isinstance(task.module, LastEndModule)
    files = write_files(task, tmp_path / "files", DEFAULT_TARGET)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    made = [task.tokenizer(text, return_tensors="pt", return_token_type_ids=False) for text in TEXTS]
    assert [int(row["input_ids"].eq(task.tokenizer.sep_token_id).sum()) for row in made] == [1, 2, 3]
    with torch.no_grad():
        expected = torch.cat([model(**row).logits for row in made])
    rows = [{name: values[0].numpy() for name, values in row.items()} for row in made]
    with open_runtime(DEFAULT_TARGET) as runtime:
        session = runtime.load(files.graph)
        for order in ([0, 1, 2], [2, 0, 1], [0, 1], [1], [2, 2, 0, 0]):
            batch = join_rows([rows[index] for index in order], task.signature, task.padding_values)
            (logits,) = session.run(["logits"], batch.feeds)
            torch.testing.assert_close(torch.from_numpy(logits), expected[order], atol=1e-5, rtol=1e-5)


@pytest.mark.rarer
def test_a_graph_that_cuts_the_states_at_all_ends_into_equal_parts_is_found_wrong(tmp_path: Path) -> None:
    task = build("bart", tmp_path / "model")
    assert isinstance(task.module, LastEndModule)
    task.module = HeadModule(task.module.model, task.module.input_names)
    files = write_files(task, tmp_path / "files", DEFAULT_TARGET)
    with pytest.raises(VerificationError, match="fails on the case 'special tokens in texts'"):
        verify(task=task, files=files, target=DEFAULT_TARGET)


def test_a_tokenizer_that_ends_no_text_with_the_token_that_is_read_is_refused(checkpoint: Path) -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartForSequenceClassification(BartConfig(**sizes, **heads, eos_token_id=40))
    tokenizer = load_tokenizer(checkpoint)
    with pytest.raises(VocabularyError, match="expected eos_token_id 40, as config.json says, got .* for the text 'a'"):
        check_end(model, tokenizer)
    model.config.eos_token_id = tokenizer.sep_token_id
    check_end(model, tokenizer)


def test_rows_that_are_tried_end_as_texts_do_where_a_language_stands_behind_the_end(tmp_path: Path) -> None:
    task = build("bert classification", tmp_path / "model")
    end, language = task.tokenizer.sep_token_id, task.tokenizer.mask_token_id
    task.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A [SEP] [MASK]", special_tokens=[("[SEP]", end), ("[MASK]", language)]
    )
    cases = {case.name: case.rows[0]["input_ids"].tolist() for case in task.build_cases()}
    assert cases["1 token"] == [end]
    assert cases["2 tokens"] == [end, language]
    assert cases["7 tokens"][-2:] == [end, language] and end not in cases["7 tokens"][:-2]
