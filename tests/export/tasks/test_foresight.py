"""What needs no model to be refused is refused before torch is imported, in the words of the later refusal."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness import Finished, run
from rich.console import Console
from safetensors.torch import save_file
from trainers.writers import save_writer
from transformers import AutoTokenizer, BertConfig

from export.__main__ import main
from export.checkpoints import open_checkpoint
from export.commands import run as run_verb
from export.errors import ModelError
from export.foresight import check_foreseen
from export.options import ExportRequest
from export.progress import Progress
from export.repository.model_config import build_configs, name_models
from export.source import load_source
from export.tasks.building import load_class
from export.tasks.foreseen import check_architecture, foresee_contract, foresee_tasks
from export.tasks.table import TASKS, list_task_options

FACTORY = "from torch import nn\n\n\ndef build():\n    raise SystemExit('it was run')\n"
INPUTS = {"inputs": {"pixels": {"shape": ["batch", 3, 8, 8]}}, "outputs": ["scores"]}


def save(name: str, folder: Path, tokenizer_source: Path, **changes: object) -> Path:
    """Save a small random BERT of the class `name`."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(**(sizes | {"max_position_embeddings": 64} | changes))
    getattr(transformers, name)(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_source).save_pretrained(folder)
    return folder


def save_sentence_model(folder: Path, tokenizer_source: Path) -> None:
    """Save a BERT of 16 values a token, and behind its pooling two `Dense` of which the second is for others."""
    save("BertModel", folder, tokenizer_source)
    kinds = ("Transformer", "Pooling", "Dense", "Dense")
    paths = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    modules = [
        {"idx": index, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    dense = {"activation_function": "torch.nn.modules.linear.Identity"}
    settings = (
        {"pooling_mode": "mean"},
        dense | {"in_features": 16, "out_features": 8},
        dense | {"in_features": 9, "out_features": 4},
    )
    for path, said in zip(paths[1:], settings, strict=True):
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(said))
        if "in_features" in said:
            weight = torch.zeros(said["out_features"], said["in_features"])
            save_file({"linear.weight": weight}, folder / path / "model.safetensors")


@pytest.fixture(scope="module")
def here(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints and a repository in which `vectors`, `lean` and `texts` are published."""
    folder = tmp_path_factory.mktemp("foresight")
    shutil.copytree(tiny_checkpoint, folder / "encoder")
    save("BertModel", folder / "wider", tiny_checkpoint, hidden_size=32)
    save("BertForSequenceClassification", folder / "classifier", tiny_checkpoint)
    save_writer("gpt2", folder / "writer")
    save_sentence_model(folder / "misfit", tiny_checkpoint)
    shutil.copytree(folder / "misfit", folder / "joined")
    (folder / "joined" / "1_Pooling" / "config.json").write_text('{"pooling_mode": ["cls", "mean"]}')
    (folder / "model.py").write_text(FACTORY)
    (folder / "inputs.json").write_text(json.dumps(INPUTS))
    (folder / "recipe.json").write_text('{"mode": "exact", "size": [8, 8], "sharpness": 2}')
    lean = ("--engine", "openvino", "--steps", "lean")
    for checkpoint, name, *more in (("encoder", "vectors"), ("encoder", "lean", *lean), ("writer", "texts")):
        words = ["--name", name, "--repository", str(folder / "models"), *more]
        assert main(["run", str(folder / checkpoint), *words]) == 0
    (folder / "models" / "taken_model" / "1").mkdir(parents=True)
    (folder / "models" / "linked_preprocess").symlink_to("away")
    return folder


REFUSED = {
    "contract": ("classifier", "--name vectors", "vectors is already published with another contract"),
    "width": ("wider", "--name vectors --task feature-extraction", "got TEXT STRING [1], EMBEDDING FP32 [32]"),
    "writer": ("writer", "--name vectors", "vectors is already published with another contract"),
    "engine": (
        "encoder",
        "--name vectors --engine openvino",
        "vectors_model is already published with another engine: expected ONNX Runtime, requests joined, got OpenVINO, "
        "requests joined; export it with --engine onnxruntime, or pass another --name",
    ),
    "steps": (
        "encoder",
        "--name vectors --steps lean",
        "vectors is already published with another engine: expected an ensemble, requests joined, got lean steps, "
        "requests joined; export it with --steps ensemble, or pass another --name",
    ),
    "lean steps": (
        "encoder",
        "--name lean",
        "lean is already published with another engine: expected lean steps in OpenVINO, requests joined, got an "
        "ensemble, requests joined; export it with --engine openvino --steps lean, or pass another --name",
    ),
    "a step by hand": (
        "encoder",
        "--name taken",
        "taken_model is not a part of the model taken: expected nothing there, or what was published as taken, got ",
    ),
    "a step that is a link": ("classifier", "--name linked", "linked_preprocess is not a part of the model linked"),
    "engine of writers": (
        "writer",
        "--name texts --engine vllm --target 25.09",
        "texts is already published with another contract",
    ),
    "vllm: release": ("writer", "--name x --engine vllm", "expected a release from 24.12 on, got 24.10"),
    "vllm: precision": ("writer", "--name x --engine vllm --target 25.09 --precision int8", "vLLM does not serve int8"),
    "vllm: architecture": ("classifier", "--name x --engine vllm --target 25.09", "vLLM does not serve this task"),
    "vllm: option": (
        "writer",
        "--name x --engine vllm --target 25.09 --instances 4 --response-cache",
        "--instances, --response-cache have no effect where vLLM runs the model",
    ),
    "writer: priorities": (
        "writer",
        "--name x --priority-levels 3",
        "--priority-levels has no effect where Triton joins no requests",
    ),
    "option of a task": (
        "encoder",
        "--name x --task feature-extraction --top-k 3",
        "--top-k does not apply to feature",
    ),
    "threads": ("encoder", "--name x --engine openvino --threads 2", "--threads has no effect where OpenVINO runs"),
    "warm-up": ("encoder", "--name x --steps lean --warmup 4", "--warmup has no effect with --steps lean"),
    "memory of texts": ("encoder", "--name x --kv-cache-mb 64", "--kv-cache-mb has no effect where no text is written"),
    "seats": (
        "writer",
        "--name x --engine vllm --target 25.09 --max-num-seqs 8",
        "--max-num-seqs has no effect where no text is written",
    ),
    "dense": (
        "misfit",
        "--name x",
        "3_Dense does not fit the vectors that it is given: expected in_features 8, as wide as they are, got "
        "in_features 9; copy the folder again",
    ),
    "pooling in front of a dense": (
        "joined",
        "--name x",
        "weightedmean, got cls, mean; export",
    ),
    "lean": ("writer", "--name x --steps lean", "--steps lean has no effect on text-generation"),
    "lengths": ("writer", "--name x --lengths 8 16", "--lengths has no effect on text-generation"),
    "factory: pictures": ("", "--name x --pictures pictures", "--pictures has no effect on"),
    "factory: steps": ("", "--name x --steps lean", "--steps lean has no effect on"),
    "factory: warm-up": ("", "--name x --warmup 4", "--warmup has no effect where the graph takes no tokens of texts"),
    "factory: int8": ("", "--name x --precision int8 --preprocess imagenet", "int8 is made for, and judged on, what"),
}


def list_words(case: str, here: Path) -> list[str]:
    checkpoint, options, _ = REFUSED[case]
    factory = ["--factory", str(here / "model.py:build"), "--inputs", str(here / "inputs.json")]
    source = [str(here / checkpoint)] if checkpoint else factory
    return ["run", *source, *options.split(), "--repository", str(here / "models")]


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_files_tell_is_refused_without_torch(case: str, here: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    done = run("-m", "export", *list_words(case, here), env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.code == 1
    assert done.err.startswith("error: ") and REFUSED[case][2] in done.err, done.err


@pytest.mark.parametrize("case", [case for case in REFUSED if not case.startswith("factory")])
def test_who_calls_the_pipeline_by_itself_is_told_the_same(
    case: str, here: Path, export_cli: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = export_cli(*list_words(case, here)).err
    monkeypatch.setattr(run_verb, "check_foreseen", lambda request, checkpoint: None)
    late = export_cli(*list_words(case, here)).err
    # Without a terminal the steps that were taken stand before it.
    assert late.endswith(told), late


def test_a_bad_recipe_is_refused_before_torch_and_before_the_users_own_code_is_run(here: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    words = [*list_words("factory: steps", here)[:5], "--name", "x", "--repository", str(here / "models")]
    words += ["--preprocess", str(here / "recipe.json")]
    refused = run("-m", "export", *words, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert refused.code == 1
    assert refused.err.startswith("error: ") and "sharpness" in refused.err, refused.err


def test_what_is_said_of_a_task_is_what_its_class_says() -> None:
    for entry in TASKS.values():
        kind = load_class(entry)
        assert (entry.has_lean, entry.has_lengths) == (kind.has_lean, kind.has_lengths), entry.name
        assert entry.has_lean == kind.is_ensemble, entry.name
        assert entry.must_read_text == (kind.tokenizer_use == "required"), entry.name
    # Those that `foresee_tasks` knows how to recognise.
    known = {"feature-extraction", "text-pair-classification", "reward"}
    assert {entry.name for entry in TASKS.values() if "recognises" in vars(load_class(entry))} == known


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("BertModel", {}),
        ("BertForSequenceClassification", {}),
        ("BertForSequenceClassification", {"num_labels": 5}),
        ("BertForSequenceClassification", {"num_labels": 5, "top_k": 2}),
        ("BertForSequenceClassification", {"task": "text-pair-classification", "num_labels": 3}),
        ("BertForSequenceClassification", {"task": "reward", "num_labels": 1}),
        ("BertForTokenClassification", {"num_labels": 4}),
        ("BertForQuestionAnswering", {}),
        ("BertForQuestionAnswering", {"top_k": 3}),
        ("BertForMaskedLM", {}),
        ("BertForMaskedLM", {"top_k": 2}),
        ("writer", {}),
    ],
)
def test_what_is_foreseen_is_what_becomes_of_it(
    name: str, options: Mapping[str, Any], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    labels = {"num_labels": options["num_labels"]} if "num_labels" in options else {}
    if name == "writer":
        save_writer("gpt2", tmp_path)
    else:
        save(name, tmp_path, tiny_checkpoint, **labels)
    asked = {option.name: options.get(option.name) for option in list_task_options()}
    request = ExportRequest(checkpoint=tmp_path, name="m", task=options.get("task"), task_options=asked)
    task = load_source(request, Progress(Console(quiet=True))).task
    config = json.loads((tmp_path / "config.json").read_text())
    assert options.get("task") or task.name in foresee_tasks(tmp_path, config, open_checkpoint(tmp_path).tensors)
    foreseen = foresee_contract(task.name, tmp_path, config, asked)
    assert foreseen
    public = build_configs(name_models("m", task.signature), task.signature, version=1, served=[1])["m"]
    kinds = [[(each.name, each.data_type, tuple(each.dims)) for each in side] for side in (public.input, public.output)]
    names = type(public).DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_name
    wanted = [[(each, names[f"TYPE_{kind}"].number, dims) for each, kind, dims in side] for side in foreseen]
    assert wanted == kinds


@pytest.mark.parametrize("model_type", ["longformer", "led", "xlnet"])
def test_an_architecture_that_cannot_be_exported_is_refused_before_torch_is_imported(
    model_type: str, here: Path, tmp_path: Path
) -> None:
    shutil.copytree(here / "classifier", tmp_path / "stock")
    (tmp_path / "stock" / "config.json").write_text(json.dumps({"model_type": model_type}))
    request = ExportRequest(checkpoint=tmp_path / "stock", name="x", repository=tmp_path)
    for refuse in (
        lambda: check_foreseen(request, open_checkpoint(tmp_path / "stock")),
        lambda: load_source(request, Progress(Console(quiet=True))),
    ):
        with pytest.raises(ModelError, match=f"cannot be exported: .* got {model_type}; train one of those for texts"):
            refuse()


@pytest.mark.parametrize("model_type", ["big_bird", "bigbird_pegasus"])
def test_attention_in_blocks_is_refused_and_what_the_refusal_names_is_not(model_type: str, tmp_path: Path) -> None:
    config = {"model_type": model_type, "block_size": 16, "num_random_blocks": 1}
    told = "attends to texts of more than 112 tokens in blocks.* got block_sparse, and positions for 4096 tokens"
    with pytest.raises(ModelError, match=told):
        check_architecture(tmp_path, config)
    with pytest.raises(ModelError, match="more than 704 tokens .* set attention_type in config.json to original_full"):
        check_architecture(tmp_path, {"model_type": model_type})
    check_architecture(tmp_path, config | {"attention_type": "original_full"})
    check_architecture(tmp_path, config | {"max_position_embeddings": 112})
    # Whoever sends tokens is bound by no tokenizer.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 112}))
    with pytest.raises(ModelError, match="attends to texts"):
        check_architecture(tmp_path, config)


def test_a_model_without_steps_lies_beside_what_is_called_like_one(here: Path) -> None:
    for checkpoint, options in (("writer", {}), ("encoder", {"steps": "lean"})):
        request = ExportRequest(checkpoint=here / checkpoint, name="taken", repository=here / "models", **options)
        check_foreseen(request, open_checkpoint(here / checkpoint))
