import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from harness import run
from rich.console import Console
from safetensors.torch import load_file, save_file
from trainers.architectures import build_several
from transformers import CanineConfig, MarianConfig, MarianModel, NystromformerConfig, NystromformerModel

from export.checkpoints import open_checkpoint
from export.consolidation.consolidate import consolidate
from export.errors import CheckpointError, ModelError
from export.options import ExportRequest
from export.progress import Progress
from export.source import load_source
from export.weights.torch_model import (
    find_input_embedding,
    find_output_width,
    load_config,
    load_model,
    settle_quantization,
)


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


def change_config(directory: Path, **values: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(directory: Path, change: object) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)  # type: ignore[operator]
    save_file(weights, path, metadata={"format": "pt"})


def load(directory: Path) -> tuple[object, list[str]]:
    return load_model(load_config(directory), open_checkpoint(directory))


def test_every_weight_arrives_in_the_model(tiny_checkpoint: Path) -> None:
    model, unused = load(tiny_checkpoint)
    assert unused == []
    saved = load_file(tiny_checkpoint / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())  # type: ignore[attr-defined]


def test_a_missing_weight_is_refused_by_name(copy: Path) -> None:
    change_weights(copy, lambda weights: weights.pop("encoder.layer.1.output.dense.weight"))
    with pytest.raises(ModelError, match=r"lacks weights of BertModel: .*encoder\.layer\.1\.output\.dense\.weight"):
        load(copy)


def test_a_model_under_a_name_of_its_modules_own_is_refused_with_what_to_save(copy: Path, tmp_path: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    held = {f"net.{name}": tensor for name, tensor in weights.items()} | {"temperature": torch.ones(1)}
    change_weights(copy, lambda there: (there.clear(), there.update(held)))
    remedy = re.escape("save the model that the trained module holds, as by torch.save(module.net.state_dict(), ")
    with pytest.raises(ModelError, match=f"lacks weights of BertModel: .*; {remedy}"):
        load(copy)
    with pytest.raises(CheckpointError, match=f"config.json does not describe the weights: .*; {remedy}"):
        consolidate(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # As the sentence says.
    kept = [path for path in copy.iterdir() if path.suffix == ".json"]
    (tmp_path / "saved").mkdir()
    for path in kept:
        shutil.copy(path, tmp_path / "saved")
    torch.save(weights, tmp_path / "saved" / "model.pt")
    assert load(tmp_path / "saved")[1] == []


def test_a_checkpoint_with_more_layers_than_its_config_is_refused(copy: Path) -> None:
    change_config(copy, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"no place for: .*encoder\.layer\.1\.attention"):
        load(copy)


def test_a_weight_of_another_shape_is_refused_with_both_shapes(copy: Path) -> None:
    change_config(copy, intermediate_size=64)
    with pytest.raises(ModelError, match=r"intermediate\.dense\.bias \[32\] where \[64\] belongs"):
        load(copy)


def test_heads_of_other_tasks_are_left_out_and_named(copy: Path) -> None:
    change_weights(copy, lambda weights: weights.update({"cls.predictions.bias": torch.zeros(3)}))
    assert load(copy)[1] == ["cls.predictions.bias"]


def test_the_input_embedding_is_found_below_a_prefix(copy: Path) -> None:
    config = load_config(copy)
    specs = open_checkpoint(copy).specs()
    assert find_input_embedding(config, specs) == "embeddings.word_embeddings.weight"
    prefixed = {f"bert.{name}": spec for name, spec in specs.items()}
    assert find_input_embedding(config, prefixed) == "bert.embeddings.word_embeddings.weight"
    with pytest.raises(ModelError, match="input embedding cannot be determined"):
        find_input_embedding(config, {})


def test_a_model_without_a_table_of_tokens_is_refused_in_a_sentence() -> None:
    with pytest.raises(ModelError, match="type canine is not exported: expected an architecture with one table of tok"):
        find_input_embedding(CanineConfig(vocab_size=99), {})


@pytest.mark.parametrize("where", ["num_hidden_layers", "vision_config"])
def test_far_more_layers_than_tensors_are_refused_before_they_are_built(where: str, copy: Path, tmp_path: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    key = where if where in config else f"{where}.num_hidden_layers"
    config[where] = 10**7 if where in config else {"num_hidden_layers": 10**7}
    (copy / "config.json").write_text(json.dumps(config))
    told = f"{key} in .*config.json cannot be that of the weights: expected 1000 at most, .*, got 10000000; correct it"
    with pytest.raises(CheckpointError, match=told):
        consolidate(copy, tmp_path / "out")
    request = ExportRequest(checkpoint=copy, name="x", repository=tmp_path / "models")
    with pytest.raises(CheckpointError, match=told):
        load_source(request, Progress(Console(quiet=True)))


@pytest.mark.parametrize("kind", ["clip", "siglip", "llava", "encoder-decoder", "vision-encoder-decoder", "clap"])
def test_a_model_of_several_has_no_input_embedding(kind: str) -> None:
    config = build_several(kind)
    with pytest.raises(
        ModelError, match=f"{kind} as a whole is not served for texts: .* got {type(config).__name__}, of sev"
    ) as refused:
        find_input_embedding(config, {})
    # The pictures of those alone can be asked for by themselves, and the texts of one.
    assert ("--task image-embedding" in str(refused.value)) == (kind in ("clip", "siglip"))
    tower = {"clip": "CLIPTextModelWithProjection", "clap": "ClapTextModelWithProjection"}.get(kind)
    assert tower is None or f"such as {tower}, with its" in str(refused.value)
    assert ("if docs/architectures.md lists what it is" in str(refused.value)) == (tower is None)


def test_a_missing_damaged_or_unknown_config_is_refused(copy: Path) -> None:
    change_config(copy, model_type="no-such-model")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        load_config(copy)
    (copy / "config.json").write_text("{}", encoding="utf-8-sig")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: .* got a byte order mark in front; save"):
        load_config(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        load_config(copy)
    (copy / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_config(copy)


OWN_MODEL = {"auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Own"}}
OWN_TOKENIZER = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}


@pytest.mark.parametrize(
    ("verb", "file", "changes"),
    [
        ("run", "config.json", {"model_type": "own", **OWN_MODEL}),
        pytest.param("consolidate", "config.json", OWN_MODEL, marks=pytest.mark.rarer),
        pytest.param("run", "tokenizer_config.json", OWN_TOKENIZER, marks=pytest.mark.rarer),
    ],
)
def test_python_in_a_checkpoint_is_not_run_by_whoever_says_yes(
    copy: Path, tmp_path: Path, verb: str, file: str, changes: dict[str, object]
) -> None:
    seen = tmp_path / "seen"
    (copy / "own.py").write_text(f"open({str(seen)!r}, 'w')\nclass Own: pass\n")
    config = json.loads((copy / file).read_text()) if (copy / file).exists() else {}
    (copy / file).write_text(json.dumps(config | changes))
    words = {
        "run": ["--name", "own", "--repository", str(tmp_path / "models")],
        "consolidate": [str(tmp_path / "out"), "--add-token", "own=mean"],
    }[verb]
    done = run("-m", "export", verb, str(copy), *words, input="y\n" * 9)
    assert not seen.exists()
    assert "trust_remote_code" not in done.out + done.err and "[y/N]" not in done.out + done.err
    if "model_type" in changes:
        assert done.code == 1
        assert f"error: the architecture of {copy / 'config.json'} is Python in the checkpoint" in done.err


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"hidden_act": "swish9"},
            "the architecture cannot be built: .* got 'swish9', which it does not know; correct",
        ),
        (
            {"num_attention_heads": 0},
            "the architecture cannot be built: .*; correct that value in config.json, or",
        ),
        (
            {"layer_norm_eps": "1e-12x"},
            r"config\.json cannot be read: .* got Field 'layer_norm_eps' expected float, got",
        ),
        ({"hidden_size": "32"}, r"config\.json cannot be read: .* got Field 'hidden_size' expected int, got str"),
        ({"hidden_dropout_prob": "a"}, r"with value 'a' doesn't match any type in \(float, int\); correct that in con"),
        (
            {"architectures": [1]},
            r"architectures in .*config\.json cannot be used: expected a list of names, got \[1\]",
        ),
        ({"sliding_window": "x"}, "sliding_window in .* cannot be used: expected a number of tokens, got 'x'; correct"),
    ],
)
def test_a_value_of_a_wrong_type_in_a_config_is_refused_in_a_sentence(
    values: dict[str, object], sentence: str, copy: Path
) -> None:
    change_config(copy, **values)
    with pytest.raises((CheckpointError, ModelError), match=sentence) as refusal:
        load(copy)
    assert ". " not in str(refusal.value)


def settle(directory: Path) -> tuple[str, ...]:
    config = load_config(directory)
    warnings = settle_quantization(config, open_checkpoint(directory).specs(), directory)
    load_model(config, open_checkpoint(directory))
    return warnings


def test_plain_weights_that_are_said_to_be_quantized_are_read_as_they_are(copy: Path) -> None:
    assert settle(copy) == ()
    change_config(copy, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    (warning,) = settle(copy)
    assert "says that the weights are quantized by bitsandbytes, which they are not" in warning


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", None])
def test_quantized_weights_are_refused_in_a_sentence(copy: Path, method: str | None) -> None:
    if method:
        change_config(copy, quantization_config={"quant_method": method})
    name = "encoder.layer.0.output.dense.weight"
    packed = torch.int32 if method == "gptq" else torch.int8
    change_weights(copy, lambda weights: weights.update({name: weights[name].to(packed)}))
    with pytest.raises(ModelError) as refusal:
        settle(copy)
    assert f"are quantized{f' by {method}' if method else ''}: expected weights of 16 bits" in str(refusal.value)
    assert f"got {str(packed)[6:]} in {name}; export the checkpoint that was quantized" in str(refusal.value)


def test_what_is_odd_about_a_checkpoint_is_told_with_what_it_is_served_as(copy: Path) -> None:
    change_config(copy, pad_token_id=1, quantization_config={"load_in_8bit": True})
    request = ExportRequest(checkpoint=copy, name="x", repository=copy / "models")
    quantized, padding, pooling = load_source(request, Progress(Console(quiet=True))).task.warnings
    assert "says that the weights are quantized, which they are not" in quantized
    assert "the tokenizer has pad_token_id 0 where config.json says 1; the mask hides the padding" in padding
    assert "the pooling is a guess" in pooling


def test_a_model_that_wants_the_beginning_of_another_text_has_no_vectors_of_one() -> None:
    heads = {
        f"{half}_{what}": 2 for half in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim", "layers")
    }
    model = MarianModel(MarianConfig(vocab_size=8, d_model=16, pad_token_id=0, decoder_start_token_id=0, **heads))
    with pytest.raises(
        ModelError, match="MarianModel has no states of a text alone: .* save it with its head and pass"
    ):
        find_output_width(model)


def test_a_model_that_computes_no_text_of_one_token_is_refused() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = NystromformerModel(NystromformerConfig(**sizes, segment_means_seq_len=8, num_landmarks=4))
    with pytest.raises(ModelError, match=r"NystromformerModel computes nothing of a text of one token, .*; correct"):
        find_output_width(model)
