"""A model of one's own out of DeepSpeed's pipeline: all layers are read bit for bit, and served by --factory."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from harness import CHECKOUT
from torch import nn

from export.__main__ import main
from export.checkpoints import StoredCheckpoint, open_checkpoint
from export.errors import CheckpointError

VARIANTS = ("plain", "bf16_stage1")
STEP = "global_step2"

FACTORY = """
from torch import nn


def build():
    mix = nn.Linear(16, 16)
    pixels = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8, affine=False), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*pixels, nn.Linear(8 * 7 * 7, 16), mix, nn.Tanh(), mix, nn.Linear(16, 5))
"""
INPUTS = {"inputs": {"pixels": {"shape": ["batch", 3, 16, 16], "values": "normal"}}, "outputs": ["scores"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("own_pipeline")
    script = CHECKOUT / "tests" / "trainers" / "train_own_pipeline.py"
    subprocess.run([sys.executable, script, out], check=True, timeout=400, stdout=subprocess.DEVNULL)
    return out


def assert_equal(checkpoint: StoredCheckpoint, truth: dict[str, torch.Tensor]) -> None:
    assert checkpoint.tensors.keys() == truth.keys()
    for name, tensor in truth.items():
        assert torch.equal(checkpoint.read(name), tensor), name


@pytest.mark.parametrize("name", VARIANTS)
def test_all_layers_are_the_live_ranks_bit_for_bit(name: str, trained: Path) -> None:
    checkpoint = open_checkpoint(trained / name)
    assert_equal(checkpoint, torch.load(trained / f"{name}.truth.pt"))
    assert checkpoint.format_name == "DeepSpeed pipeline of 2 stages, 8 layers"
    assert (checkpoint.facts.world_size, checkpoint.facts.step) == (2, 2)
    # Without ZeRO no file names what was trained, so the last layers might be missing.
    assert [*checkpoint.facts.missing] == (
        [
            "the names of what was trained, which show that the files of all layers are there, and what a head that is "
            "a function of a tied layer has of its own"
        ]
        if name == "plain"
        else []
    )


@pytest.mark.parametrize(
    ("name", "lost", "told"),
    [
        ("bf16_stage1", "layer_04-*", "lacks files of layers: expected layer_04-model_states.pt"),
        ("plain", "layer_01-*", "lacks files of layers: expected layer_01-model_states.pt, got none for 1.num_batches"),
        ("bf16_stage1", "*mp_rank_01_optim*", "lacks the optimizer states that hold the fp32 weights of mp_rank_01"),
        (
            "plain",
            "*mp_rank_01_*",
            "lacks model states of model-parallel ranks: expected mp_rank_00 to mp_rank_01, got none",
        ),
        ("tokens", "*mp_rank_01_*", "lacks model states of model-parallel ranks: .* none for mp_rank_01"),
        ("plain", "mp_rank_00_*", "lacks model states of model-parallel ranks: .* none for mp_rank_00"),
    ],
)
def test_a_lost_file_is_named(name: str, lost: str, told: str, trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained / name, tmp_path / name))
    for path in (folder / STEP).glob(lost):
        path.unlink()
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(folder)


def test_two_layers_of_one_shape_that_each_stand_in_two_places_are_told_apart_by_their_weights(trained: Path) -> None:
    assert_equal(open_checkpoint(trained / "tied_twice"), torch.load(trained / "tied_twice.truth.pt"))


@pytest.mark.parametrize("name", ["tokens", "tokens_fp32", "tokens_more"])
def test_each_place_of_a_tied_layer_has_what_its_own_stage_trained(name: str, trained: Path) -> None:
    checkpoint = open_checkpoint(trained / name)
    truth = torch.load(trained / f"{name}.truth.pt")
    assert not torch.equal(truth["1.bias"], truth["4.bias"]) and torch.equal(truth["1.weight"], truth["4.weight"])
    assert_equal(checkpoint, truth)
    # The stage of the head has a table of positions, which no layer's file holds, and which only some heads use.
    told = "a layer for what stage 1 has of its own in tied_modules.embed: position; of layer 0 is given what that has"
    if name != "tokens_more":
        told = told.replace("position;", "what no gradient reached, position;")
    assert checkpoint.facts.missing == (told,)
    assert checkpoint.unfiled == ({"0.position"} if name == "tokens_more" else frozenset())


def test_a_head_of_another_class_has_its_own_bias_where_the_last_stage_has_nothing_else(trained: Path) -> None:
    checkpoint = open_checkpoint(trained / "tokens_decoded")
    truth = torch.load(trained / "tokens_decoded.truth.pt")
    assert truth["3.bias"].any() and torch.equal(truth["0.weight"], truth["3.weight"])
    assert_equal(checkpoint, truth)
    assert (checkpoint.facts.missing, checkpoint.unfiled) == ((), frozenset())


def test_buffers_of_a_head_that_is_a_function_are_never_taken_for_those_of_the_layer(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each stage has its own of what DeepSpeed does not tie, such as running statistics, and no file has the head's."""
    checkpoint = open_checkpoint(trained / "tokens_scaled")
    assert_equal(checkpoint, torch.load(trained / "tokens_scaled.truth.pt"))
    told = "a layer for what stage 1 has of its own in tied_modules.embed: buffers and frozen weights that it may use, "
    assert any(each.startswith(f"{told}scale; of layer 0") for each in checkpoint.facts.missing)
    buffer = """self.position = nn.Parameter(torch.empty(6, 16))
        self.register_buffer("scale", torch.empty(16))"""
    (tmp_path / "mine.py").write_text(TIED_FACTORY.replace("self.position = nn.Parameter(torch.empty(6, 16))", buffer))
    (tmp_path / "inputs.json").write_text(json.dumps(IDS))
    asked = ["--factory", f"{tmp_path / 'mine.py'}:build", "--inputs", str(tmp_path / "inputs.json")]
    where = ["--name", "mine", "--repository", str(tmp_path / "models")]
    assert main(["run", str(trained / "tokens_scaled"), *asked, *where]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "nothing tells whether 6.embeddings.scale of the module was trained as the tensor that it shares" in told
    # As the remedy says: a head that has the tied weight alone.
    text = (tmp_path / "mine.py").read_text().replace("self.embeddings = embeddings", "self.word = embeddings.word")
    (tmp_path / "mine.py").write_text(text.replace("self.embeddings.word", "self.word"))
    code = main(["run", str(trained / "tokens_scaled"), *asked, *where])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "buffers and frozen weights that it may use, scale; of layer 0" in " ".join(printed.out.split())


TIED_FACTORY = """
import torch
from torch import nn


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(13, 16)
        self.position = nn.Parameter(torch.empty(6, 16))

    def forward(self, ids):
        return self.word(ids) + self.position


class Mirror(nn.Module):
    def __init__(self):
        super().__init__()
        self.there, self.back = nn.Linear(16, 16), nn.Linear(16, 16)
        self.back.weight = self.there.weight

    def forward(self, hidden):
        return self.back(self.there(hidden).tanh())


class Head(nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings

    def forward(self, hidden):
        return hidden @ self.embeddings.word.weight.t()


def build():
    first = Embeddings()
    mix = [nn.Linear(16, 16), nn.Linear(16, 16)]
    mix[1].weight = mix[0].weight
    return nn.Sequential(first, mix[0], Mirror(), nn.Tanh(), mix[1], nn.LayerNorm(16), Head(first))
"""
IDS = {
    "inputs": {"ids": {"dtype": "int64", "shape": ["batch", 6], "values": {"integers": [0, 12]}}},
    "outputs": ["scores"],
}


@pytest.mark.parametrize(("name", "is_whole"), [("tokens_fp32", True), ("tokens_more", False)])
def test_a_head_of_a_tied_layer_has_what_it_uses_or_is_refused(
    name: str, is_whole: bool, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(TIED_FACTORY)
    (tmp_path / "inputs.json").write_text(json.dumps(IDS))
    asked = ["--factory", f"{tmp_path / 'mine.py'}:build", "--inputs", str(tmp_path / "inputs.json")]
    where = ["--name", "mine", "--repository", str(tmp_path / "models")]
    code = main(["run", str(trained / name), *asked, *where])
    told = " ".join(capsys.readouterr().err.split())
    if not is_whole:
        assert code == 1 and "lacks weights of a place of the model: expected those that it trained for itself" in told
        assert "as of the place that is given as 0.position, got no such file" in told
        return
    assert code == 0, told
    truth = torch.load(trained / f"{name}.truth.pt")
    first = truth["0.word.weight"]
    ids = torch.randint(0, 13, (3, 6))
    hidden = nn.functional.embedding(ids, first) + truth["0.position"]
    hidden = nn.functional.linear(hidden, truth["1.weight"], truth["1.bias"])
    for weight, bias, end in (("there", "there", torch.tanh), ("back", "back", torch.tanh)):
        hidden = end(nn.functional.linear(hidden, truth[f"2.{weight}.weight"], truth[f"2.{bias}.bias"]))
    hidden = nn.functional.linear(hidden, truth["4.weight"], truth["4.bias"])
    hidden = nn.functional.layer_norm(hidden, (16,), truth["5.weight"], truth["5.bias"])
    session = onnxruntime.InferenceSession(tmp_path / "models" / "mine" / "1" / "model.onnx")
    (scores,) = session.run(None, {"ids": ids.numpy()})
    torch.testing.assert_close(torch.from_numpy(scores), hidden @ first.t())


def test_a_head_is_not_taken_for_the_tied_layer_where_no_file_tells(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As without ZeRO in fp32: the names of what was trained are in no file.
    folder = Path(shutil.copytree(trained / "tokens_fp32", tmp_path / "unnamed"))
    for path in (folder / STEP).glob("*_optim_states.pt"):
        path.unlink()
    for path in (folder / STEP).glob("mp_rank_*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        state.pop("param_shapes")
        state["ds_config"]["zero_optimization"]["stage"] = 0
        torch.save(state, path)
    (tmp_path / "mine.py").write_text(TIED_FACTORY)
    (tmp_path / "inputs.json").write_text(json.dumps(IDS))
    asked = ["--factory", f"{tmp_path / 'mine.py'}:build", "--inputs", str(tmp_path / "inputs.json")]
    assert main(["run", str(folder), *asked, "--name", "mine", "--repository", str(tmp_path / "models")]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "nothing tells whether 6.embeddings.position, 6.embeddings.word.weight of the module was trained as" in told


def test_layers_that_their_weights_do_not_tell_apart_are_not_guessed(trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained / "tied_twice", tmp_path / "alike"))
    for path in (folder / STEP).glob("layer_0[5-9]-model_states.pt"):
        torch.save({name: torch.zeros_like(tensor) for name, tensor in torch.load(path).items()}, path)
    path = next((folder / STEP).glob("*mp_rank_01_optim_states.pt"))
    state = torch.load(path, weights_only=False)
    tiny = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    # Other than nothing, but nothing once cast as the layers are.
    for group in tiny:
        group.data.uniform_(1e-45, 1e-42)
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"cannot be told which layers in .*, got 5\.\w+, .*; gather"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["tied_twice", "plain"])
def test_swapped_files_of_layers_of_one_shape_are_refused(name: str, trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained / name, tmp_path / "swapped"))
    one, other = (folder / STEP / f"layer_0{layer}-model_states.pt" for layer in (5, 7))
    kept = one.rename(tmp_path / "kept.pt")
    other.rename(one)
    kept.rename(other)
    with pytest.raises(
        CheckpointError,
        match="layer_05-.* is the file of another layer: .* got what was saved as layer_07-model_states.pt; files of",
    ):
        open_checkpoint(folder)


def test_layers_of_another_run_are_refused_for_the_fp32_weights_tell(trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained / "bf16_stage1", tmp_path / "mixed"))
    path = folder / STEP / "layer_08-model_states.pt"
    state = torch.load(path)
    torch.save({name: tensor + 1 for name, tensor in state.items()}, path)
    with pytest.raises(CheckpointError, match=re.escape("8.")):
        open_checkpoint(folder).verify()


def test_layers_that_are_split_over_tensor_parallel_ranks_are_refused(trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained / "plain", tmp_path / "split"))
    for path in [*(folder / STEP).glob("layer_*")]:
        number = path.name.split("-")[0]
        shutil.copy(path, path.with_name(f"{number}-model_01-model_states.pt"))
        path.rename(path.with_name(f"{number}-model_00-model_states.pt"))
    with pytest.raises(
        CheckpointError, match="has no arguments of Megatron.*; other models with tensor parallelism are"
    ):
        open_checkpoint(folder)


def test_it_is_published_by_the_module_whose_layers_have_the_same_numbers(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FACTORY)
    (tmp_path / "inputs.json").write_text(json.dumps(INPUTS))
    asked = ["--factory", f"{tmp_path / 'model.py'}:build", "--inputs", str(tmp_path / "inputs.json")]
    repository = tmp_path / "models"
    assert main(["run", str(trained / "plain"), *asked, "--name", "seen", "--repository", str(repository)]) == 0
    namespace: dict[str, object] = {}
    exec(FACTORY, namespace)
    model = namespace["build"]()  # type: ignore[operator]
    assert isinstance(model, nn.Module)
    model.load_state_dict(torch.load(trained / "plain.truth.pt"))
    (golden,) = repository.glob("seen/1/golden.json")
    for sample in json.loads(golden.read_text())["samples"]:
        (sent,), (answered,) = sample["inputs"], sample["outputs"]
        with torch.no_grad():
            want = model.eval()(torch.tensor(sent["data"]).reshape(sent["shape"]))
        np.testing.assert_allclose(np.array(answered["data"]).reshape(want.shape), want, atol=1e-5)
