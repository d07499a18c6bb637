"""Files that somebody saves over while they are read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from export.checkpoints import open_checkpoint
from export.errors import CheckpointError

WRITTEN = "was written while it was read: expected the file that was opened"

Save = Callable[[dict[str, torch.Tensor], Path, int], None]


def save_safetensors(weights: dict[str, torch.Tensor], path: Path, step: int) -> None:
    # What is said of a step moves every tensor in the file by its length.
    save_file(weights, path, {"format": "pt", "step": "1" * step})


def save_torch(weights: dict[str, torch.Tensor], path: Path, step: int) -> None:
    torch.save({"step": "1" * step, "state_dict": weights}, path)


@pytest.fixture(
    params=[("model.safetensors", save_safetensors), ("model.pt", save_torch)], ids=["safetensors", "torch"]
)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Save, dict[str, torch.Tensor]]:
    name, save = request.param
    weights = {"a": torch.arange(4096.0), "b": torch.ones(300, 7)}
    (tmp_path / "folder").mkdir()
    save(weights, tmp_path / "folder" / name, 1)
    return tmp_path / "folder" / name, save, weights


def test_a_file_in_whose_place_another_was_put_is_not_read_on(
    saved: tuple[Path, Save, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    path, save, weights = saved
    checkpoint = open_checkpoint(path.parent)
    # As a careful trainer does, with the same weights.
    save(weights, tmp_path / "beside", 900)
    (tmp_path / "beside").replace(path)
    with pytest.raises(CheckpointError, match=WRITTEN):
        checkpoint.verify()
    assert torch.equal(open_checkpoint(path.parent).read("a"), weights["a"])


def test_a_file_that_is_written_over_in_its_place_is_not_read_on(
    saved: tuple[Path, Save, dict[str, torch.Tensor]],
) -> None:
    path, save, weights = saved
    checkpoint = open_checkpoint(path.parent)
    checkpoint.verify()
    size = path.stat().st_size
    save({"a": weights["a"] + 1, "b": weights["b"]}, path, 1)
    assert path.stat().st_size == size
    with pytest.raises(CheckpointError, match=f"{WRITTEN}, of {size} bytes, got other bytes"):
        checkpoint.read("a")


def test_a_shard_that_is_saved_again_after_it_was_read_is_told_at_the_end(tmp_path: Path) -> None:
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, file in files.items():
        save_file({name: torch.ones(4)}, tmp_path / file, {"format": "pt"})
    index = json.dumps({"metadata": {}, "weight_map": files})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    checkpoint = open_checkpoint(tmp_path)

    def save_the_other(name: str, position: int, part: memoryview) -> None:
        (other,) = {*files} - {name}
        save_file({other: torch.zeros(4)}, tmp_path / files[other], {"format": "pt"})

    with pytest.raises(CheckpointError, match=WRITTEN):
        checkpoint.stream(save_the_other)
