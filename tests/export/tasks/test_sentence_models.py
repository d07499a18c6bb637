"""How Sentence-Transformers pools, and what it computes behind that: as it is recorded, and as it is exported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from task_sources import build_source
from tokenizers import Tokenizer, normalizers
from torch import nn
from trainers.task_checkpoints import BUILDERS
from transformers import BertConfig

from export.checkpoints import open_checkpoint
from export.commands.inspect_checkpoint import inspect_checkpoint
from export.consolidation.consolidate import consolidate
from export.errors import CheckpointError, ModelError
from export.options import ExportRequest
from export.progress import Progress
from export.source import load_source
from export.tasks.building import build_task, find_task_name
from export.tasks.foreseen import check_layers
from export.tasks.texts.classification import TextPairClassification
from export.tasks.texts.encoding import Question
from export.tasks.texts.pooling import PoolingSettings, SentenceEmbedding, read_pooling
from export.tasks.texts.sentence_layers import build_layers, load_dense
from export.tasks.texts.sentence_settings import check_transformer
from export.weights.tokenizer import load_tokenizer
from export.weights.torch_model import load_config, load_model
from export.weights.transforms import CastToFloat32

MODULES = "sentence_transformers.models"


def write_modules(directory: Path, kinds: list[str], **modes: object) -> None:
    modules = [{"idx": i, "path": f"{i}_{kind}", "type": f"{MODULES}.{kind}"} for i, kind in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(modes))


def test_pooling_is_read_as_sentence_transformers_recorded_it(checkpoint: Path, tmp_path: Path) -> None:
    assert read_pooling(checkpoint) == PoolingSettings(mode="mean", normalize=True, source="modules.json")
    write_modules(tmp_path, ["Transformer", "Pooling"], pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    assert read_pooling(tmp_path) == PoolingSettings(mode="cls", normalize=False, source="modules.json")


@pytest.mark.parametrize(
    ("recorded", "mode"),
    [("cls", "cls"), ("mean", "mean"), ("lasttoken", "last"), (["mean"], "mean"), ("weightedmean", "weightedmean")],
)
def test_pooling_is_read_as_sentence_transformers_6_records_it(recorded: object, mode: str, tmp_path: Path) -> None:
    write_modules(
        tmp_path, ["Transformer", "Pooling"], embedding_dimension=32, pooling_mode=recorded, include_prompt=True
    )
    assert read_pooling(tmp_path) == PoolingSettings(mode=mode, normalize=False, source="modules.json")


@pytest.mark.parametrize(
    ("recorded", "got"),
    [(["cls", "mean"], "cls, mean"), ("first", "first"), ([], "none"), (3, "3"), ([None], "None")],
)
def test_modes_of_sentence_transformers_6_that_are_not_exported_are_refused(
    recorded: object, got: str, tmp_path: Path
) -> None:
    write_modules(tmp_path, ["Transformer", "Pooling"], embedding_dimension=32, pooling_mode=recorded)
    with pytest.raises(ModelError, match=f"expected one of mean, cls, lasttoken, max, .*, got {got}; export"):
        read_pooling(tmp_path)


def test_a_pooling_whose_file_was_left_behind_is_never_guessed(checkpoint: Path, tmp_path: Path) -> None:
    # As a copy of a folder's files alone leaves it.
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    shutil.rmtree(folder / "1_Pooling")
    left = "1_Pooling/config.json, which says what the Pooling in modules.json does"
    assert inspect_checkpoint(folder).missing == [left]
    assert consolidate(folder, tmp_path / "out").missing == (left,)
    with pytest.raises(
        ModelError,
        match=r"1_Pooling/config.json, which modules.json names, does not say what it is for: .* got no such file;",
    ):
        read_pooling(folder)
    request = ExportRequest(checkpoint=folder, name="x", repository=tmp_path / "models")
    with pytest.raises(ModelError, match="got no such file"):
        load_source(request, Progress(Console(quiet=True)))


def test_a_pooling_whose_file_says_nothing_is_never_guessed(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "1_Pooling" / "config.json").write_text("{}")
    assert inspect_checkpoint(folder).missing == [
        "1_Pooling/config.json, which says what the Pooling in modules.json does"
    ]
    with pytest.raises(ModelError, match="got none of that; copy it from"):
        read_pooling(folder)


@pytest.mark.parametrize(("left", "is_told"), [("2_Dense", True), ("1_Pooling_first", False), ("checkpoint_1", False)])
def test_a_module_that_modules_json_does_not_name_is_told_of(
    left: str, is_told: bool, checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / left).mkdir()
    (folder / left / "config.json").write_text('{"in_features": 384, "out_features": 8}')
    missing = [f"modules.json's word on {left}, which lies there"] if is_told else []
    assert inspect_checkpoint(folder).missing == missing
    warnings = build_task("feature-extraction", build_source(folder)).warnings
    told = f"{left} lies beside modules.json, which does not name it, and is left out of what is served: "
    assert [warning.startswith(told) for warning in warnings] == [True] * len(missing)


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "tokenizer_config.json"])
def test_a_lost_limit_of_texts_is_told_of(name: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / name).unlink()
    assert inspect_checkpoint(folder).missing == [f"{name}, which says how long a text is read"]
    (warning,) = build_task("feature-extraction", build_source(folder)).warnings
    assert warning.startswith(
        f"{name}, which says how long a text is read, is missing: up to 64 tokens of one are, and"
    )


def test_a_prompt_that_the_pooling_leaves_out_is_refused_and_another_is_the_clients(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    record = {"model_type": "SentenceTransformer", "prompts": {"q": "query: "}, "default_prompt_name": "q"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(record))
    (warning,) = build_task("feature-extraction", build_source(folder)).warnings
    assert warning.startswith("Sentence-Transformers puts 'query: ' in front of every text for this model, ")
    settings = {"pooling_mode": "mean", "include_prompt": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="got include_prompt false, and the prompt 'query: '; export"):
        read_pooling(folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps(record | {"default_prompt_name": None}))
    assert read_pooling(folder).mode == "mean"


def test_prompts_whose_tokens_are_left_out_of_vectors_are_told_of(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    prompts = {"query": "query: ", "passage": ""}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    assert build_task("feature-extraction", build_source(folder)).warnings == ()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean", "include_prompt": false}')
    (warning,) = build_task("feature-extraction", build_source(folder)).warnings
    assert warning.startswith(
        "Sentence-Transformers leaves the tokens of this model's prompts (query) out of the vector"
    )


def test_a_reranker_whose_record_was_lost_is_refused_with_its_name(tmp_path: Path) -> None:
    write_modules(tmp_path, ["Transformer"])
    with pytest.raises(ModelError, match="got Transformer; of a CrossEncoder, copy config_sentence_transformers.json "):
        read_pooling(tmp_path)


@pytest.mark.parametrize(("recorded", "is_cut"), [(8, True), (384, False), (None, False), ("8", False)])
def test_vectors_that_sentence_transformers_cuts_are_told_of(
    recorded: object, is_cut: bool, checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": recorded}))
    warnings = build_task("feature-extraction", build_source(folder)).warnings
    told = "Sentence-Transformers cuts the 384 numbers of a vector of this model to the first 8 (truncate_dim), which"
    assert [warning.startswith(told) for warning in warnings] == ([True] if is_cut else [])


@pytest.mark.parametrize(
    ("module", "settings", "got"),
    [
        ("2_Dense", {"use_residual": True}, "use_residual true"),
        ("2_Dense", {"module_input_name": "token_embeddings"}, "module_input_name token_embeddings"),
        ("3_Normalize", {"module_output_name": "other"}, "module_output_name other"),
    ],
)
def test_a_module_that_is_wired_otherwise_is_refused(
    module: str, settings: dict[str, object], got: str, tmp_path: Path
) -> None:
    write_modules(tmp_path, ["Transformer", "Pooling", "Dense", "Normalize"], pooling_mode="cls")
    usual = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
    for name in ("2_Dense", "3_Normalize"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(usual))
    assert read_pooling(tmp_path).normalize
    (tmp_path / module / "config.json").write_text(json.dumps(usual | settings))
    with pytest.raises(ModelError, match=rf"{module} is not exported: expected .*, got {got}; export a checkpoint"):
        read_pooling(tmp_path)


WIRED = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}


@pytest.mark.parametrize(
    ("settings", "got"),
    [
        ({"transformer_task": "fill-mask"}, "transformer_task fill-mask"),
        ({"modality_config": {"text": {"method": "forward", "method_output_name": "x"}}}, "method_output_name x"),
        ({"modality_config": {"image": {}}}, "method none, method_output_name none"),
        ({"processing_kwargs": {"text": {"max_length": 8}}}, "text"),
    ],
)
def test_a_transformer_that_makes_something_else_of_a_text_is_refused(
    settings: dict[str, object], got: str, tmp_path: Path
) -> None:
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(WIRED | {"processing_kwargs": {"image": {"x": 1}}}))
    check_transformer(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(WIRED | settings))
    with pytest.raises(ModelError, match=f"got {got}; "):
        check_transformer(tmp_path)


@pytest.mark.parametrize("normalizer", [None, normalizers.BertNormalizer(lowercase=False)])
def test_texts_are_lowered_where_sentence_transformers_lowers_them(
    normalizer: normalizers.Normalizer | None, tmp_path: Path, checkpoint: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": true}')
    source = build_source(folder)
    source.tokenizer.backend_tokenizer.normalizer = normalizer
    task = build_task("feature-extraction", source)
    served = Tokenizer.from_str(next(iter(task.step_files.values()))["tokenizer.json"].decode())
    assert served.encode("TWO Words").tokens == served.encode("two words").tokens
    # As in release 6: a special token stays one, and accents stay where they were.
    assert "[MASK]" in served.encode("a [MASK]").tokens
    assert served.normalizer.normalize_str("ÉTÉ") == "été"


def test_without_a_record_the_mean_is_taken_and_said_to_be_the_default(tmp_path: Path) -> None:
    pooling = read_pooling(tmp_path)
    assert (pooling.mode, pooling.normalize) == ("mean", True)
    assert "default" in pooling.source


def test_a_guessed_pooling_is_a_warning_and_a_recorded_or_chosen_one_is_not(tiny_checkpoint: Path) -> None:
    (warning,) = build_task("feature-extraction", build_source(tiny_checkpoint)).warnings
    assert warning.startswith("the pooling is a guess (mean, normalised (default, because there is no modules.json)): ")
    assert "--pooling" in warning
    assert build_task("feature-extraction", build_source(tiny_checkpoint, pooling="cls")).warnings == ()


def test_modules_in_a_folder_beside_the_transformers_own_are_found(checkpoint: Path, tmp_path: Path) -> None:
    # As Sentence-Transformers saved before 2.0.
    write_modules(tmp_path, ["Transformer", "Pooling"], pooling_mode_cls_token=True)
    (tmp_path / "0_Transformer").mkdir()
    assert read_pooling(tmp_path / "0_Transformer").mode == "cls"
    assert find_task_name(tmp_path / "0_Transformer", BertConfig(architectures=None), {}) == "feature-extraction"
    (tmp_path / "2_Other").mkdir()
    assert read_pooling(tmp_path / "2_Other").is_default


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"type": "x.Transformer"}', r"modules\.json cannot be read: expected a list of modules, .*; copy the checkp"),
        ('[{"type": "x.Pooling", "path": "../.."}]', r"is a link that leads outside|leads outside"),
    ],
)
def test_a_list_of_modules_that_lies_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_pooling(tmp_path)


def test_modules_and_modes_that_are_not_exported_are_refused(tmp_path: Path) -> None:
    write_modules(tmp_path, ["Transformer", "Pooling", "CNN"], pooling_mode_mean_tokens=True)
    with pytest.raises(ModelError, match="Dense, LayerNorm, Dropout, Normalize behind .* Pooling, CNN"):
        read_pooling(tmp_path)
    write_modules_again = tmp_path / "again"
    write_modules_again.mkdir()
    both = {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}
    write_modules(write_modules_again, ["Transformer", "Pooling"], **both)
    with pytest.raises(ModelError, match="expected one of mean_tokens, cls_token, .*, got max_tokens, cls_token"):
        read_pooling(write_modules_again)


def test_the_mean_is_taken_where_no_mode_is_recorded(tmp_path: Path) -> None:
    write_modules(tmp_path, ["Transformer", "Pooling"], word_embedding_dimension=32, pooling_mode_max_tokens=False)
    assert read_pooling(tmp_path).mode == "mean"


# From sentence-transformers 6.2.0: SentenceTransformer(the same folder).encode(text)[:5], fp32.
SENTENCE_TRANSFORMERS = {
    "This is an example sentence": [0.06765695, 0.06349596, 0.04871309, 0.07930495, 0.03744801],
    "A cat sleeps on the warm windowsill.": [0.09800734, -0.01233978, -0.03948401, 0.14238003, -0.05486293],
}


@pytest.mark.parametrize("text", SENTENCE_TRANSFORMERS)
def test_the_module_gives_what_sentence_transformers_gives(text: str, checkpoint: Path) -> None:
    model, unused = load_model(load_config(checkpoint), CastToFloat32(source=open_checkpoint(checkpoint)))
    assert unused == []
    names = ("input_ids", "attention_mask", "token_type_ids")
    module = SentenceEmbedding(model, read_pooling(checkpoint), names)
    inputs = load_tokenizer(checkpoint)([text], return_tensors="pt")
    got = module(*(inputs[name] for name in names))[0, :5]
    assert torch.allclose(got, torch.tensor(SENTENCE_TRANSFORMERS[text]), atol=1e-6)


# The same of the first of them, by the mode of its pooling.
POOLED = {
    "mean": [0.34934536, 0.32785997, 0.25152966, 0.40948987, 0.19336231],
    "cls": [0.03656515, -0.01616155, 0.16824551, 0.11575679, 0.11960213],
    "last": [1.082412, 0.71403265, 0.39859265, 0.63391703, 0.24182922],
    "max": [1.082412, 0.71403265, 0.56069976, 0.63876069, 0.90601206],
    "mean_sqrt_len_tokens": [0.92428094, 0.86743599, 0.66548496, 1.08340836, 0.51158857],
    "weightedmean": [0.45197937, 0.40424258, 0.30638003, 0.49347395, 0.12731048],
}


@pytest.mark.parametrize("mode", POOLED)
def test_each_pooling_is_that_of_sentence_transformers_wherever_padding_stands(mode: str, checkpoint: Path) -> None:
    model, _ = load_model(load_config(checkpoint), CastToFloat32(source=open_checkpoint(checkpoint)))
    names = ("input_ids", "attention_mask", "position_ids")
    module = SentenceEmbedding(model, PoolingSettings(mode=mode, normalize=False, source="test"), names)
    ids = load_tokenizer(checkpoint)(["This is an example sentence"], return_tensors="pt")["input_ids"]
    places = torch.arange(ids.shape[1]).unsqueeze(0)
    rows = [
        torch.cat([nn.functional.pad(each, (before, 3 - before)) for before in (3, 1, 0)])
        for each in (ids, torch.ones_like(ids), places)
    ]
    rows = [torch.cat([each, torch.zeros_like(each[:1])]) for each in rows]
    with torch.no_grad():
        got = module(*rows)
    torch.testing.assert_close(got[:3, :5], torch.tensor([POOLED[mode]] * 3), atol=2e-6, rtol=0)
    # Of a row without tokens.
    assert not got[3].any()


def test_layers_behind_the_pooling_are_computed_in_their_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    kinds = ["Transformer", "Pooling", "Dropout", "LayerNorm", "Dense", "Normalize", "Dense"]
    write_modules(tmp_path, kinds, pooling_mode="max")
    norm, wide, narrow = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 2)
    nn.init.normal_(norm.weight)
    for place, layer, name, settings in (
        ("3_LayerNorm", norm, "norm", {"dimension": 4}),
        ("4_Dense", wide, "linear", {"in_features": 4, "out_features": 6}),
        ("6_Dense", narrow, "linear", {"in_features": 6, "out_features": 2}),
    ):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(json.dumps(settings))
        state = {f"{name}.{key}": value.detach() for key, value in layer.state_dict().items()}
        save_file(state, tmp_path / place / "model.safetensors")
    pooling = read_pooling(tmp_path)
    assert str(pooling) == "max, 1 Dropout, 1 LayerNorm, 2 Dense, 1 Normalize (modules.json)"
    vectors = torch.randn(3, 4)
    want = narrow(nn.functional.normalize(wide(norm(vectors)).tanh())).tanh()
    torch.testing.assert_close(build_layers(pooling.layers)(vectors), want)
    check_layers(tmp_path, 4)
    with pytest.raises(ModelError, match="3_LayerNorm does not fit .* expected dimension 5, .*, got dimension 4"):
        check_layers(tmp_path, 5)
    (tmp_path / "3_LayerNorm" / "config.json").write_text('{"dimension": 3}')
    with pytest.raises(ModelError, match=r"holds other weights than .* expected norm\.weight \[3\], got \[4\]"):
        build_layers(pooling.layers)


def test_pooling_can_be_asked_for(tiny_checkpoint: Path) -> None:
    task = build_task("feature-extraction", build_source(tiny_checkpoint, pooling="cls", normalize=False))
    assert task.description == "pooling cls (as asked for)"
    (vector,) = task.answer(Question(text="A cat.")).values()
    hidden = task.module.model(**task.tokenizer("A cat.", return_tensors="pt")).last_hidden_state
    assert torch.allclose(torch.tensor(vector), hidden[0, 0], atol=1e-6)


def test_a_dense_layer_with_an_unknown_activation_or_other_weights_is_refused(tmp_path: Path) -> None:
    def write(**settings: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"in_features": 4, "out_features": 2} | settings))

    torch.save({"linear.weight": torch.randn(2, 4)}, tmp_path / "pytorch_model.bin")
    write(activation_function="torch.nn.modules.linear.Identity")
    assert load_dense(tmp_path)(torch.ones(1, 4)).shape == (1, 2)
    write(activation_function="my.own.Swish")
    with pytest.raises(ModelError, match="the activation in .* is not exported: expected one of .*, got my.own.Swish"):
        load_dense(tmp_path)
    write(out_features=3)
    with pytest.raises(ModelError, match=r"expected linear.weight \[3, 4\], got \[2, 4\]"):
        load_dense(tmp_path)


def test_a_cross_encoder_of_sentence_transformers_6_is_served_with_the_function_it_records(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = BUILDERS["text-pair-classification"](tmp_path / "scorer", checkpoint)
    config = json.loads((folder / "config.json").read_text())
    config.pop("sentence_transformers", None)
    (folder / "config.json").write_text(json.dumps(config))
    write_modules(folder, ["Transformer"])
    record = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(record))
    name = find_task_name(folder, load_config(folder), open_checkpoint(folder).specs())
    assert name == "text-pair-classification"
    task = build_task(name, build_source(folder))
    assert isinstance(task, TextPairClassification) and task.function == "none"
