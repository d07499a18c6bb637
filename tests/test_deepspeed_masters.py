"""The nameless fp32 weights of fp16 training without ZeRO: named where the shapes tell, else not taken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run
from zero_checkpoints import copy_checkpoint, find_checkpoint

from export.checkpoints import StoredCheckpoint, open_checkpoint
from export.errors import CheckpointError

Change = Callable[[dict[str, Any]], None]


def rewrite(tmp_path: Path, change: Change) -> StoredCheckpoint:
    """Open a copy of a real checkpoint after `change` of its optimizer's state."""
    folder = copy_checkpoint("z0_fp16", tmp_path)
    (path,) = folder.glob("*/mp_rank_00_model_states.pt")
    content = torch.load(path, weights_only=False)
    change(content["optimizer"])
    torch.save(content, path)
    return open_checkpoint(folder)


def flatten(optimizer: dict[str, Any]) -> None:
    """As FP16_Optimizer saves them, which needs a GPU's fused Adam: one flat tensor for each group."""
    groups = optimizer.pop("fp32_groups")
    optimizer["fp32_groups_flat"] = [torch.cat([tensor.flatten() for tensor in group]) for group in groups]


def assert_fp32(checkpoint: StoredCheckpoint) -> None:
    truth = torch.load(find_checkpoint("z0_fp16").with_name("z0_fp16.truth.pt"))
    assert checkpoint.facts.missing == ()
    for name, expected in truth.items():
        assert torch.equal(checkpoint.read(name), expected), name


def test_flat_masters_of_matrices_and_the_rest_are_the_live_ones(tmp_path: Path) -> None:
    assert_fp32(rewrite(tmp_path, flatten))


def test_flat_masters_of_one_group_are_the_live_ones(tmp_path: Path) -> None:
    truth = torch.load(find_checkpoint("z0_fp16").with_name("z0_fp16.truth.pt"))
    names = [name for name in truth if name not in ("head.weight", "running_mean", "batches", "mask", "table")]

    def change(optimizer: dict[str, Any]) -> None:
        del optimizer["fp32_groups"]
        optimizer["fp32_groups_flat"] = [torch.cat([truth[name].flatten() for name in names])]

    assert_fp32(rewrite(tmp_path, change))


def test_masters_that_another_model_left_are_refused(tmp_path: Path) -> None:
    def change(optimizer: dict[str, Any]) -> None:
        optimizer["fp32_groups"][0][2].data.add_(0.5)

    with pytest.raises(CheckpointError, match="disagree with the float16 copy .* on inner.weight"):
        rewrite(tmp_path, change).read("inner.weight")


def swap_groups(optimizer: dict[str, Any]) -> None:
    """Two groups that begin alike: each of their first tensors may be the first parameter of that shape."""
    weights, rest = optimizer["fp32_groups"]
    optimizer["fp32_groups"] = [[rest[0], *weights], rest[1:]]


def drop_one(optimizer: dict[str, Any]) -> None:
    optimizer["fp32_groups"][0].pop()


def flatten_unevenly(optimizer: dict[str, Any]) -> None:
    flatten(optimizer)
    first, second = optimizer["fp32_groups_flat"]
    optimizer["fp32_groups_flat"] = [torch.cat([first, second[:1]]), second[1:]]


def test_consolidate_tells_what_was_missing(tmp_path: Path) -> None:
    rewrite(tmp_path, drop_one)
    done = run("-m", "export", "consolidate", str(tmp_path / "z0_fp16"), str(tmp_path / "out"))
    assert done.code == 0
    assert [line.split(":")[0] for line in done.out.splitlines()[1:]] == ["missing"] * 2
    assert "names of the optimizer's fp32 weights" in done.out


@pytest.mark.parametrize("change", [swap_groups, drop_one, flatten_unevenly])
def test_masters_whose_names_are_not_certain_are_not_taken_and_that_is_told(tmp_path: Path, change: Change) -> None:
    checkpoint = rewrite(tmp_path, change)
    assert checkpoint.tensors["inner.weight"].dtype.name == "float16"
    unnamed, low = checkpoint.facts.missing
    assert unnamed.startswith("names of the optimizer's fp32 weights")
    assert low.endswith("saved as float16 only")
