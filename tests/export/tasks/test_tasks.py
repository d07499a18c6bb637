import base64
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from harness import load_backend
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file
from task_sources import build_source
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from trainers.architectures import ARCHITECTURES, Architecture, build_several, save_model
from trainers.task_checkpoints import build_reward_model
from transformers import AutoImageProcessor, BertConfig, OPTConfig, OPTModel
from transformers.image_utils import load_image

from export.__main__ import main
from export.artefacts import Artefacts
from export.checkpoints import TensorSpec, open_checkpoint
from export.commands.summary import _describe_text
from export.consolidation.consolidate import consolidate
from export.errors import CheckpointError, GraphError, ModelError, VerificationError, VocabularyError
from export.graph.stateful_decoder import write_stateful_decoder
from export.options import ExportRequest
from export.progress import Progress
from export.source import load_source
from export.tasks.base import TaskSource
from export.tasks.building import build_task, find_task_name
from export.tasks.labels import choose_function, count_labels, read_labels
from export.tasks.texts.classification import Reward, check_padding, set_pad_token
from export.tasks.texts.encoding import Question
from export.tasks.texts.generation import find_cache_shapes
from export.tasks.texts.generation_settings import list_unfollowed, read_defaults, read_generation_config
from export.tasks.texts.spans import QuestionAnswering
from export.tasks.texts.text import read_verification_texts
from export.tasks.texts.text_generation import TextGeneration
from export.weights.tokenizer import load_tokenizer
from export.weights.torch_model import find_input_embedding, load_config
from export.weights.transforms import CastToFloat32


@pytest.mark.parametrize("hidden_size", [16, 32], ids=["opt", "opt-350m"])
@pytest.mark.parametrize("prefix", ["rwtransformer.", "rwtranrsformer."])
def test_a_reward_is_the_value_head_of_what_the_model_ends_in(
    prefix: str, hidden_size: int, checkpoint: Path, tmp_path: Path
) -> None:
    build_reward_model(tmp_path / "reward", checkpoint, prefix=prefix, hidden_size=hidden_size)
    task = build_task("reward", build_source(tmp_path / "reward"))
    assert isinstance(task, Reward) and task.unused_tensors == []
    saved = torch.load(tmp_path / "reward" / "pytorch_model.bin")
    base = OPTModel(OPTConfig.from_pretrained(tmp_path / "reward")).eval()
    base.load_state_dict({name.removeprefix(prefix): value for name, value in saved.items() if name.startswith("rw")})
    inputs = load_tokenizer(tmp_path / "reward")(["A cat sleeps."], return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        expected = base(**inputs).last_hidden_state[0, -1] @ saved["v_head.weight"][0]
    assert task.answer(Question(text="A cat sleeps."))["REWARD"] == pytest.approx([float(expected)], abs=1e-6)


def test_a_value_head_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = build_reward_model(tmp_path / "reward", checkpoint, hidden_size=32)
    saved = torch.load(folder / "pytorch_model.bin")
    torch.save(saved | {"v_head.weight": torch.ones(1, 32)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"v_head\.weight does not fit the model: expected \[1, 16\], got \[1, 32\]"):
        build_task("reward", build_source(folder))


def test_an_embedding_is_as_wide_as_what_the_model_ends_in(checkpoint: Path, tmp_path: Path) -> None:
    folder = build_reward_model(tmp_path / "opt", checkpoint, prefix="", hidden_size=32)
    task = build_task("feature-extraction", build_source(folder))
    assert [tensor.dims[-1] for tensor in task.signature.outputs] == [16]


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertForSequenceClassification", "text-classification"),
        ("RobertaForTokenClassification", "token-classification"),
        ("DistilBertForQuestionAnswering", "question-answering"),
        ("XLMRobertaForMaskedLM", "fill-mask"),
        ("MPNetModel", "feature-extraction"),
    ],
)
def test_the_task_is_told_from_the_class_that_was_trained(architecture: str, task: str, tmp_path: Path) -> None:
    assert find_task_name(tmp_path, BertConfig(architectures=[architecture]), {}) == task


def test_records_beside_the_architecture_come_first(tmp_path: Path) -> None:
    config = BertConfig(architectures=["BertForSequenceClassification"])
    head = {"v_head.weight": TensorSpec(shape=(1, 4), dtype=torch.float32)}
    assert find_task_name(tmp_path, config, head) == "reward"
    (tmp_path / "modules.json").write_text("[]")
    assert find_task_name(tmp_path, config, {}) == "feature-extraction"
    # Sentence-Transformers 6 lists a cross-encoder's modules as well.
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder"}))
    assert find_task_name(tmp_path, config, {}) == "text-pair-classification"


def test_one_architecture_may_stand_without_a_list(tmp_path: Path) -> None:
    config = BertConfig()
    config.architectures = "BertForSequenceClassification"
    assert find_task_name(tmp_path, config, {}) == "text-classification"


def test_a_task_that_cannot_be_told_is_asked_for(tmp_path: Path) -> None:
    for names, got in ((["BertForPreTraining"], "BertForPreTraining"), (None, "none in config.json")):
        with pytest.raises(
            ModelError, match=rf"cannot be determined: .*, got {got}; pass --task feature-extraction, text-"
        ):
            find_task_name(tmp_path, BertConfig(architectures=names), {})


def test_a_class_without_a_task_is_told_those_that_take_what_it_takes(tmp_path: Path) -> None:
    """Whisper's ends as those of texts do, and hears sounds."""
    for name, tasks in (
        ("WhisperForConditionalGeneration", "audio-feature-extraction"),
        ("ViTForMaskedImageModeling", "image-embedding, image-feature-extraction"),
    ):
        with pytest.raises(ModelError) as caught:
            find_task_name(tmp_path, BertConfig(architectures=[name]), {})
        said, got = str(caught.value).split(", got ")
        assert got == f"{name}; pass --task {tasks}."
        endings = said.split("an architecture that ends in ")[1].split(", ")
        assert not [ending for ending in endings if name.endswith(ending)]


def test_an_option_of_another_task_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="--top-k does not apply to feature-extraction: expected it with text-class"):
        build_task("feature-extraction", build_source(tiny_checkpoint, top_k=3))


def test_a_head_that_the_checkpoint_lacks_is_never_made_up(tiny_checkpoint: Path) -> None:
    for task, lacking in (
        ("text-classification", "classifier.bias"),
        ("token-classification", "classifier.bias"),
        ("question-answering", "qa_outputs.bias"),
        ("fill-mask", "cls.predictions"),
        ("reward", "classifier.bias"),
    ):
        with pytest.raises(ModelError, match=rf"the checkpoint lacks weights of Bert.*{lacking}.*pass the --task"):
            build_task(task, build_source(tiny_checkpoint))


@pytest.mark.parametrize("max_length", [4, 16])
def test_a_masked_word_is_one_that_is_read(max_length: int, tmp_path: Path) -> None:
    save_model(ARCHITECTURES["bert fill-mask"], tmp_path)
    task = build_task("fill-mask", replace(build_source(tmp_path), max_length=max_length))
    questions = task.build_questions(["word " * 400 + "end", "a b"])
    assert all(task.answer(question)["TOKEN"] for question in questions)


@pytest.mark.parametrize(
    ("architecture", "task", "passed"),
    [
        ("classification", "text-classification", ["TEXT"]),
        ("classification", "text-pair-classification", ["TEXT", "TEXT_PAIR"]),
        ("tokens", "token-classification", ["token_spans", "continues_word", "TEXT"]),
        ("question answering", "question-answering", ["answer_spans", "TEXT", "TEXT_PAIR"]),
        ("fill-mask", "fill-mask", ["TEXT"]),
    ],
)
def test_the_last_step_takes_what_that_of_every_version_before_takes(
    architecture: str, task: str, passed: list[str], tmp_path: Path
) -> None:
    """Else no version could follow upon one that was published with an older release."""
    save_model(ARCHITECTURES[f"bert {architecture}"], tmp_path)
    contract = build_task(task, build_source(tmp_path)).signature.contract
    assert contract and [tensor.name for tensor in contract.passed] == passed


@pytest.mark.parametrize("positions", [3, 6, 7, 8])
def test_a_model_of_few_positions_is_tried_with_no_more(positions: int, tmp_path: Path) -> None:
    save_model(ARCHITECTURES["bert fill-mask"], tmp_path)
    task = build_task("feature-extraction", replace(build_source(tmp_path), max_length=positions))
    lengths = {len(row["input_ids"]) for case in task.build_cases() for row in case.rows}
    assert max(lengths) == positions
    assert f"5 of {min(positions, 7)} tokens, seed 1" in {case.name for case in task.build_cases()}


@pytest.mark.parametrize(
    ("settings", "function"),
    [
        ({"num_labels": 3}, "softmax"),
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "none"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        ({"num_labels": 3, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "softmax"),
    ],
)
def test_the_function_is_the_one_the_model_was_trained_with(settings: dict, function: str) -> None:
    assert choose_function(BertConfig(**settings)) == function


def test_the_function_of_a_cross_encoder_may_be_recorded_beside_its_configuration() -> None:
    # As Sentence-Transformers 6 does.
    recorded = {"activation_fn": "torch.nn.modules.linear.Identity"}
    assert choose_function(BertConfig(num_labels=1), recorded) == "none"
    assert choose_function(BertConfig(num_labels=3), recorded) == "softmax"


@pytest.mark.parametrize(("name", "reads_padding"), [("Bert", False), ("GPT2", True), ("Llama", True)])
def test_a_classifier_that_finds_the_last_token_by_another_padding_is_refused(
    name: str, reads_padding: bool, checkpoint: Path
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = getattr(transformers, f"{name}Config")(**sizes, vocab_size=64, pad_token_id=40)
    model = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    tokenizer = load_tokenizer(checkpoint)
    if reads_padding:
        with pytest.raises(VocabularyError, match=r"expected pad_token_id 40, as config.json says, got 0, '\[PAD\]';"):
            check_padding(model, tokenizer)
    else:
        check_padding(model, tokenizer)
    model.config.pad_token_id = 0
    check_padding(model, tokenizer)


def test_a_tokenizer_without_a_padding_takes_the_one_that_the_configuration_names(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.pad_token = None
    set_pad_token(tokenizer, BertConfig(pad_token_id=103))
    assert tokenizer.pad_token == "[MASK]"
    tokenizer.pad_token, tokenizer.eos_token = None, "[SEP]"
    config = BertConfig(pad_token_id=None)
    set_pad_token(tokenizer, config)
    assert tokenizer.pad_token == "[SEP]" and config.pad_token_id == tokenizer.pad_token_id


def test_labels_that_are_not_named_once_each_are_refused() -> None:
    assert read_labels(BertConfig(id2label={0: "no", 1: "yes"})) == ["no", "yes"]
    wrong = ({0: "same", 1: "same"}, {0: "a", 2: "b"}, {0: "a", 1: None}, {0: "a", 1: ""}, {0: "a", 1: ["b"]})
    for labels in (*wrong, {0: "a", 1: {"b": 1}}, {0: "a", 1: "\ud800"}):
        told = "does not name every label once: expected the ids .* each, a text that is not empty and no other's, got"
        with pytest.raises(ModelError, match=told):
            read_labels(BertConfig(id2label=labels))


def test_labels_whose_names_are_numbers_are_texts_everywhere(tmp_path: Path) -> None:
    """What is recorded for the server is compared with texts: a number there was a version that is never served."""
    BertConfig().save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"id2label": {"0": 7, "1": 1.5, "2": "x"}}))
    assert load_config(tmp_path).id2label == {0: "7", 1: "1.5", 2: "x"}


@pytest.mark.parametrize("task", ["image-classification", "image-embedding"])
def test_pictures_of_another_size_than_the_model_takes_are_refused_in_a_sentence(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(ARCHITECTURES["vit classification"], tmp_path / "vit")
    words = ["run", str(tmp_path / "vit"), "--task", task, "--preprocess", "imagenet", "--name", "seen"]
    assert main([*words, "--repository", str(tmp_path / "models")]) == 1
    refusal = capsys.readouterr().err
    assert "the model takes no pictures of 224 x 224, which the recipe imagenet makes: expected the size" in refusal
    assert "correct --preprocess, or the preprocessor_config.json beside the weights" in refusal
    assert not (tmp_path / "models").exists()


_TOWER = ARCHITECTURES["clip vision features"].options


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("CLIPVisionModelWithProjection", "image_embeds"),
        pytest.param("MetaClip2VisionModelWithProjection", "image_embeds", marks=pytest.mark.rarer),
        pytest.param("CLIPVisionModel", "pooler_output", marks=pytest.mark.rarer),
        ("SiglipVisionModel", "pooler_output"),
    ],
)
def test_a_tower_of_pictures_is_served_with_its_own_vector(name: str, output: str, tmp_path: Path) -> None:
    save_model(Architecture(name, _TOWER), tmp_path / "tower", projection_dim=48)
    words = ["run", str(tmp_path / "tower"), "--name", "seen", "--repository", str(tmp_path / "models"), "--json"]
    assert main(words) == 0
    model = getattr(transformers, name).from_pretrained(tmp_path / "tower").eval()
    processor = AutoImageProcessor.from_pretrained(tmp_path / "tower", backend="pil")
    (golden,) = (tmp_path / "models").glob("seen/1/golden.json")
    for sample in json.loads(golden.read_text())["samples"]:
        (sent,), (answered,) = sample["inputs"], sample["outputs"]
        image = load_image(Image.open(io.BytesIO(base64.b64decode(sent["data"][0]))))
        with torch.no_grad():
            want = model(**processor(images=image, return_tensors="pt"))[output]
        np.testing.assert_allclose(answered["data"], want[0], atol=1e-5)


@pytest.mark.parametrize("kind", ["CLIP", "MetaClip2", "Clap"])
def test_a_tower_of_texts_is_served_with_the_vector_that_is_compared_with_pictures(
    kind: str, checkpoint: Path, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 101, "eos_token_id": 102, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}TextConfig")(
        vocab_size=30522, projection_dim=24, max_position_embeddings=32, **sizes, **ends
    )
    tower = getattr(transformers, f"{kind}TextModelWithProjection")
    tower(config).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint, model_max_length=32)
    tokenizer.save_pretrained(tmp_path)
    table = find_input_embedding(load_config(tmp_path), open_checkpoint(tmp_path).specs())
    assert open_checkpoint(tmp_path).specs()[table].shape == (30522, 16)
    task = build_task(find_task_name(tmp_path, load_config(tmp_path), {}), build_source(tmp_path))
    model = tower.from_pretrained(tmp_path).eval()
    texts = ["A cat sleeps.", "A longer text of a dog that runs along the river."]
    rows = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        want = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).text_embeds
        got = task.module(*(rows[tensor.name] for tensor in task.signature.inputs))
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
        answers = [task.answer(Question(text=text))["EMBEDDING"] for text in texts]
    np.testing.assert_allclose(answers, want, atol=1e-5)
    assert task.description == "pooling own (as the model projects it)" and task.warnings == ()
    asked = build_task("feature-extraction", build_source(tmp_path, pooling="cls", normalize=True))
    assert asked.signature.outputs[0].dims[-1] == config.hidden_size
    # Saved without its projection it is a model like others, whether `AutoModel` knows it or not.
    shutil.rmtree(tmp_path)
    getattr(transformers, f"{kind}TextModel")(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    plain = build_task("feature-extraction", build_source(tmp_path, pooling="mean", normalize=False))
    hidden = getattr(transformers, f"{kind}TextModel").from_pretrained(tmp_path).eval()
    with torch.no_grad():
        want = hidden(**tokenizer(texts[:1], return_tensors="pt", return_token_type_ids=False)).last_hidden_state.mean(
            1
        )
    np.testing.assert_allclose(plain.answer(Question(text=texts[0]))["EMBEDDING"], want[0], atol=1e-5)


@pytest.mark.parametrize(
    "name", ["T5EncoderModel", "MT5EncoderModel", "UMT5EncoderModel", "T5ForConditionalGeneration"]
)
def test_an_encoder_is_served_alone_however_it_was_saved(name: str, tmp_path: Path) -> None:
    saved, whole = tmp_path / "saved", ARCHITECTURES["t5 encoder"]
    save_model(replace(whole, model=name), saved)
    consolidate(saved, tmp_path / "consolidated")
    encoder = getattr(transformers, name if name.endswith("EncoderModel") else "T5EncoderModel")
    want = encoder.from_pretrained(saved)(**load_tokenizer(saved)(["A cat sleeps."], return_tensors="pt"))
    vector = want.last_hidden_state[0].mean(dim=0)
    for folder in (saved, tmp_path / "consolidated"):
        task = build_task("feature-extraction", build_source(folder))
        (got,) = task.answer(Question(text="A cat sleeps.")).values()
        assert torch.allclose(torch.tensor(got), vector / vector.norm(), atol=1e-6)


def test_a_tower_without_a_recipe_is_refused_with_a_task_that_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(Architecture("CLIPVisionModelWithProjection", _TOWER), tmp_path / "tower")
    (tmp_path / "tower" / "preprocessor_config.json").unlink()
    words = ["run", str(tmp_path / "tower"), "--name", "seen", "--repository", str(tmp_path / "models"), "--json"]
    assert main(words) == 1
    (task,) = re.findall(r"or --task ([a-z-]+)\.", capsys.readouterr().err)
    assert main([*words, "--task", task]) == 0


@pytest.mark.parametrize("task", ["image-feature-extraction", "audio-feature-extraction"])
def test_a_model_that_wants_texts_beside_its_pictures_is_refused(task: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config=sizes | {"vocab_size": 100}, vision_config=sizes | {"image_size": 32, "patch_size": 8}
    )
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    source = TaskSource(
        directory=tmp_path, config=load_config(tmp_path), weights=CastToFloat32(source=open_checkpoint(tmp_path)),
        tokenizer=None, max_length=0, options={},
    )  # fmt: skip
    with pytest.raises(
        ModelError,
        match="type clip as a whole is not served for pictures or sounds: .* such as CLIPVisionModel, and pass that "
        "folder, or serve the pictures with --task image-embedding",
    ):
        build_task(task, source)


@pytest.mark.parametrize("kind", ["llava", "encoder-decoder", "vision-encoder-decoder", "clap"])
@pytest.mark.parametrize("task", ["image-embedding", "image-feature-extraction", "audio-feature-extraction"])
def test_a_model_of_several_without_a_vector_for_pictures_is_refused_as_such(
    task: str, kind: str, tmp_path: Path
) -> None:
    config = build_several(kind)
    save_file({"stray": torch.zeros(1)}, tmp_path / "model.safetensors")
    weights = CastToFloat32(source=open_checkpoint(tmp_path / "model.safetensors"))
    source = TaskSource(directory=tmp_path, config=config, weights=weights, tokenizer=None, max_length=0, options={})
    with pytest.raises(ModelError) as refused:
        build_task(task, source)
    assert str(refused.value) == (
        f"a model of type {kind} as a whole is not served for pictures or sounds: expected one model, of pictures or "
        f"of sounds, got {type(config).__name__}, of several models; save the model of pictures or sounds in it by "
        "itself, and pass that folder."
    )


def test_a_model_of_texts_is_not_asked_to_take_pictures(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["bert features"], tmp_path)
    with pytest.raises(ModelError, match="BertModel is not served for pictures or sounds: .*; pass the --task it was"):
        build_task("image-feature-extraction", build_source(tmp_path))
    with pytest.raises(ModelError, match="type bert cannot be built for this task: .* got BertConfig; pass the --task"):
        build_task("image-classification-tensors", build_source(tmp_path))


@pytest.mark.parametrize("max_length", [128, 24, 16])
def test_questions_that_fill_most_of_a_window_are_read_as_the_server_reads_them(
    max_length: int, tmp_path: Path
) -> None:
    save_model(ARCHITECTURES["bert question answering"], tmp_path)
    task = build_task("question-answering", replace(build_source(tmp_path), max_length=max_length))
    assert isinstance(task, QuestionAnswering)
    questions, encoder = task.build_questions(read_verification_texts()), task.encoder
    assert any(encoder.find_stride(each) < task.stride for each in questions) == (max_length < 128)
    file = tmp_path / "served" / "tokenizer.json"
    file.parent.mkdir()
    encoder.build_server_tokenizer().save(str(file))
    encoder.check_agrees(Tokenizer.from_file(str(file)), questions)
    served = load_backend("python_preprocess", "tokenization").TextTokenizer(file, ["input_ids"], has_windows=True)
    rows = served.encode([(each.text, each.pair) for each in questions])
    for question, row in zip(questions, rows, strict=True):
        assert [window.ids for window in row.windows] == [window["input_ids"] for window in encoder.encode(question)]
    assert set(task.answer(questions[-1])) == {"ANSWER", "SCORE", "START", "END"}


def test_a_window_that_holds_no_question_is_refused(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["bert question answering"], tmp_path)
    task = build_task("question-answering", replace(build_source(tmp_path), max_length=4))
    with pytest.raises(ModelError, match="room for 1 tokens of the context beside a question of one letter, got 0 of"):
        task.build_example()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"eos_token_id": "a"}, "eos_token_id in .* cannot be used: expected a token's number, or a list of them, got"),
        ({"eos_token_id": [1, "a"]}, r"expected a token's number, or a list of them, got \[1, 'a'\]; correct it"),
        ({"do_sample": "a"}, "do_sample in .* cannot be used: expected true or false, got 'a'; correct it"),
        ({"max_length": True}, "max_length in .* cannot be used: expected a whole number, got True; correct it"),
        ({"repetition_penalty": "x"}, "repetition_penalty in .* cannot be used: expected a number, got 'x'; correct"),
        (
            {"repetition_penalty": 0.0},
            "repetition_penalty in .* cannot be used: expected 0.01 to 100, got 0.0; correct",
        ),
        ({"min_new_tokens": -1}, "min_new_tokens in .* cannot be used: expected 0 to 1073741824, got -1; corr"),
        (
            {"repetition_penalty": float("inf")},
            "repetition_penalty in .* cannot be used: expected 0.01 to 100, got inf",
        ),
        ({"do_sample": True, "top_p": 2.0}, "top_p in .* cannot be used: expected 1e-06 to 1, got 2.0; correct it"),
        ({"do_sample": True, "temperature": 0.0}, "temperature in .* cannot be used: expected 0.001 to 100, got 0.0"),
        ({"watermarking_config": "x"}, "generation_config.json cannot be read: .*; copy it again, or remove it"),
    ],
)
def test_a_value_that_cannot_be_used_in_a_generation_config_is_refused_in_a_sentence(
    values: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0} | values))
    with pytest.raises(ModelError, match=sentence):
        read_generation_config(tmp_path, transformers.GPT2Config())


@pytest.mark.parametrize(
    ("values", "told"),
    [
        # What generate does by itself, whatever file says it, and what is followed.
        ({"num_beams": 1, "guidance_scale": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None}, []),
        ({"repetition_penalty": 1.3, "min_new_tokens": 2, "max_new_tokens": 5, "max_length": 9, "do_sample": True}, []),
        # What changes no text.
        ({"pad_token_id": 3, "use_cache": False, "output_scores": True, "length_penalty": 2.0, "typical_p": 0.5}, []),
        ({"typical_p": 0.5, "do_sample": True}, ["typical_p 0.5"]),
        ({"guidance_scale": 0.0, "forced_eos_token_id": 0}, ["forced_eos_token_id 0", "guidance_scale 0.0"]),
        ({"stop_strings": ["."], "min_length": 3}, ["min_length 3", "stop_strings ['.']"]),
        ({"exponential_decay_length_penalty": [3, 1.5]}, ["exponential_decay_length_penalty [3, 1.5]"]),
        ({"begin_suppress_tokens": [*range(40)]}, [f"begin_suppress_tokens {str([*range(40)])[:60]}..."]),
        # Prompt and answer together: the context holds no more either.
        ({"max_length": 64}, []),
        ({"max_length": 63}, ["max_length 63"]),
        # Of another release, or of code that comes with the checkpoint.
        ({"chat_format": "chatml", "sampling_of_tomorrow": 0.5}, ["chat_format chatml", "sampling_of_tomorrow 0.5"]),
    ],
)
def test_what_is_not_followed_of_a_generation_config_is_told(
    values: dict[str, object], told: list[str], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0} | values))
    assert list_unfollowed(read_generation_config(tmp_path, transformers.GPT2Config()), 64) == told


@pytest.mark.parametrize(
    ("values", "top_k"),
    [({"do_sample": True}, 50), ({"do_sample": True, "top_k": None}, 50), ({"do_sample": True, "top_k": 7}, 7),
     ({"do_sample": True, "top_k": 0}, None), ({}, None)],
)  # fmt: skip
def test_a_checkpoint_that_draws_does_so_from_as_many_as_in_transformers(
    values: dict[str, object], top_k: int | None, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0} | values))
    assert read_defaults(read_generation_config(tmp_path, transformers.GPT2Config())).get("top_k") == top_k
    # Which transformers does where it is not told.
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=99, n_embd=8, n_layer=1, n_head=1))
    model.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path)
    made = model.generate(
        torch.tensor([[1]]), max_new_tokens=1, pad_token_id=0, output_scores=True, return_dict_in_generate=True
    )
    assert int(made.scores[0].isfinite().sum()) == (top_k or 99)


def test_a_falcon_with_alibi_is_refused_in_a_sentence(tmp_path: Path) -> None:
    config = transformers.FalconConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, alibi=True
    )
    model = transformers.FalconForCausalLM(config)
    with pytest.raises(GraphError, match="FalconForCausalLM with ALiBi cannot be converted for OpenVINO: expected"):
        write_stateful_decoder(model, [(1, 4)], tmp_path / "model.xml")


def test_a_decoder_without_keys_and_values_is_refused_in_a_sentence() -> None:
    config = transformers.MambaConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, state_size=2)
    with pytest.raises(ModelError, match="the cache of MambaForCausalLM is not exported: expected keys and values"):
        find_cache_shapes(transformers.MambaForCausalLM(config))


# What a task reads, what transformers looks for by itself, and what nothing reads of such a model.
@pytest.mark.parametrize(
    "name",
    [
        "modules.json",
        "sentence_bert_config.json",
        "added_tokens.json",
        "chat_template.jinja",
        "generation_config.json",
        "preprocessor_config.json",
    ],
)
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("gone")])
def test_what_bears_the_name_of_a_file_and_is_none_does_not_pass_for_absent(
    make: Callable[[Path], object], name: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "in"))
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    request = ExportRequest(checkpoint=folder, name="x", repository=tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"{name} (is not a regular file|cannot be opened): expected a file, got"
    ):
        load_source(request, Progress(Console(quiet=True)))


def test_a_model_that_scores_no_token_is_refused(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["gpt2"], tmp_path)
    source = build_source(tmp_path)
    task = build_task("text-generation", source)
    assert isinstance(task, TextGeneration)
    with torch.no_grad():
        next(task.model.parameters()).fill_(float("nan"))
    with pytest.raises(ModelError, match="the checkpoint scores no token: expected scores that are finite, got none"):
        task.write_reference()


def test_a_tokenizer_that_writes_otherwise_in_the_server_is_refused(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["gpt2"], tmp_path)
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "it": 1, "'": 2, "s": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", clean_up_tokenization_spaces=True
    )
    saved.save_pretrained(tmp_path)
    task = build_task("text-generation", build_source(tmp_path))
    for name, content in task.model_files.items():
        (tmp_path / name).write_bytes(content)
    files = Artefacts(model=(tmp_path / "tokenizer.json",))
    with pytest.raises(VerificationError, match=r"writes the same tokens differently .*; say false for clean_up_tok"):
        task.check_files(files)


@pytest.mark.parametrize(("left_out", "read"), [("[^a-z]+", 17), ("[^0-9]+", 5)])
def test_texts_that_a_tokenizer_makes_nothing_of_are_no_cases(left_out: str, read: int, tmp_path: Path) -> None:
    save_model(ARCHITECTURES["bert classification"], tmp_path)
    save_tokenizer_without(left_out, tmp_path)
    task = build_task("text-classification", build_source(tmp_path))
    cases = {case.name: case for case in task.build_cases()}
    assert len(cases["sentences one by one"].rows) == read
    assert all(len(row["input_ids"]) for case in cases.values() for row in case.rows)
    assert len(task.build_golden()["samples"]) == min(read, 16)


def test_a_tokenizer_that_makes_nothing_of_any_text_is_refused(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["bert classification"], tmp_path)
    save_tokenizer_without(".+", tmp_path)
    task = build_task("text-classification", build_source(tmp_path))
    with pytest.raises(CheckpointError, match=r"makes no token of 22 of the 22 texts .*; correct the normalizer and"):
        next(task.build_cases())


def save_tokenizer_without(left_out: str, folder: Path) -> None:
    """Write a tokenizer that puts no token around a text, and reads nothing of what the pattern finds."""
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "the": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(left_out), "removed")
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    saved.save_pretrained(folder)


def test_a_sound_model_that_cannot_run_is_refused(tmp_path: Path) -> None:
    config = transformers.Wav2Vec2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, conv_dim=(8,), conv_kernel=(10,), conv_stride=(5,), num_feat_extract_layers=1,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)  # fmt: skip
    transformers.Wav2Vec2ForSequenceClassification(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"conv_stride": [0]}))
    source = TaskSource(
        directory=tmp_path, config=load_config(tmp_path), weights=CastToFloat32(source=open_checkpoint(tmp_path)),
        tokenizer=None, max_length=0, options={},
    )  # fmt: skip
    with pytest.raises(ModelError, match="the model does not run: .* got non-positive stride is not supported; use"):
        build_task("audio-classification-tensors", source)


def test_the_summary_says_how_a_long_text_is_read(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["bert question answering"], tmp_path)
    task = build_task("question-answering", replace(build_source(tmp_path), max_length=64))
    assert _describe_text(task.signature).startswith("question and context in windows of up to 64 tokens, however long")
    save_model(ARCHITECTURES["bert features"], tmp_path / "plain")
    task = build_task("feature-extraction", replace(build_source(tmp_path / "plain"), max_length=64))
    assert _describe_text(task.signature) == "up to 64 tokens, longer is truncated"


def test_one_label_is_one() -> None:
    assert [count_labels(number) for number in (1, 2)] == ["1 label", "2 labels"]
