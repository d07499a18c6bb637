"""What PyTorch Lightning itself saves: its `.ckpt`, and the folder of that name that its DeepSpeed strategy makes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import CHECKOUT
from transformers import GPT2LMHeadModel

from export.checkpoints import open_checkpoint
from export.consolidation.consolidate import consolidate
from export.errors import CheckpointError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lightning")
    script = CHECKOUT / "tests" / "trainers" / "train_lightning.py"
    done = subprocess.run([sys.executable, script, out], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.parametrize(
    ("name", "kind", "trainer"),
    [
        ("plain", "torch file last.ckpt, under state_dict, without prefix model.", "Lightning 2."),
        ("zero3", "DeepSpeed ZeRO stage 3, 2 ranks", "Lightning 2."),
    ],
)
def test_it_is_the_live_model_bit_for_bit_and_loads_by_from_pretrained(
    trained: Path, tmp_path: Path, name: str, kind: str, trainer: str
) -> None:
    truth = torch.load(trained / f"{name}.truth.pt")
    folder = tmp_path / "in"
    shutil.copytree(trained / name / "last.ckpt" if name == "zero3" else trained / name, folder)
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.format_name, checkpoint.facts.step) == (kind, 3)
    assert checkpoint.facts.trainer is not None and checkpoint.facts.trainer.startswith(trainer)
    assert checkpoint.specs().keys() == truth.keys()
    for key, tensor in truth.items():
        assert torch.equal(checkpoint.read(key), tensor), key
    shutil.copyfile(trained / "config.json", folder / "config.json")
    consolidate(folder, tmp_path / "out")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, truth[key]) for key, tensor in model.state_dict().items())


def test_a_sharded_folder_keeps_lightnings_names_and_tells_its_step(trained: Path) -> None:
    truth = torch.load(trained / "sharded.truth.pt")
    checkpoint = open_checkpoint(trained / "sharded/last.ckpt")
    assert checkpoint.format_name == "torch.distributed.checkpoint, 2 files"
    assert (checkpoint.facts.world_size, checkpoint.facts.step) == (2, 3)
    assert checkpoint.facts.trainer is not None and checkpoint.facts.trainer.startswith("Lightning 2.")
    assert checkpoint.specs().keys() == truth.keys()
    for key, tensor in truth.items():
        assert torch.equal(checkpoint.read(key), tensor), key


def test_a_folder_named_like_a_file_is_told_to_be_passed_itself(trained: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no checkpoint: .* got last\.ckpt/; pass one of last\.ckpt/"):
        open_checkpoint(trained / "zero3")
