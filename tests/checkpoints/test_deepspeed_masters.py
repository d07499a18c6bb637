"""The nameless fp32 weights of 16-bit training without ZeRO: named where their contents tell, else not taken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run
from trainers.zero_checkpoints import copy_checkpoint, find_checkpoint

from export.checkpoints import StoredCheckpoint, open_checkpoint
from export.errors import CheckpointError

Change = Callable[[dict[str, Any]], None]


def rewrite(tmp_path: Path, *changes: Change) -> StoredCheckpoint:
    """Open a copy of a real checkpoint after changes of its model states."""
    folder = copy_checkpoint("z0_fp16", tmp_path)
    (path,) = folder.glob("*/mp_rank_00_model_states.pt")
    content = torch.load(path, weights_only=False)
    with torch.no_grad():
        for change in changes:
            change(content)
    torch.save(content, path)
    return open_checkpoint(folder)


def flatten(content: dict[str, Any]) -> None:
    """As FP16_Optimizer saves them, which needs a GPU's fused Adam: one flat tensor for each group."""
    optimizer = content["optimizer"]
    groups = optimizer.pop("fp32_groups")
    optimizer["fp32_groups_flat"] = [torch.cat([tensor.flatten() for tensor in group]) for group in groups]


def read_truth() -> dict[str, torch.Tensor]:
    truth: dict[str, torch.Tensor] = torch.load(find_checkpoint("z0_fp16").with_name("z0_fp16.truth.pt"))
    return truth


def assert_fp32(checkpoint: StoredCheckpoint) -> None:
    truth = read_truth()
    assert checkpoint.facts.missing == ()
    for name, expected in truth.items():
        assert torch.equal(checkpoint.read(name), expected), name


def test_flat_masters_of_matrices_and_the_rest_are_the_live_ones(tmp_path: Path) -> None:
    assert_fp32(rewrite(tmp_path, flatten))


def test_flat_masters_of_one_group_are_the_live_ones(tmp_path: Path) -> None:
    truth = read_truth()
    names = [name for name in truth if name not in ("head.weight", "running_mean", "batches", "mask", "table")]

    def change(content: dict[str, Any]) -> None:
        del content["optimizer"]["fp32_groups"]
        content["optimizer"]["fp32_groups_flat"] = [torch.cat([truth[name].flatten() for name in names])]

    assert_fp32(rewrite(tmp_path, change))


def swap_groups(content: dict[str, Any]) -> None:
    optimizer = content["optimizer"]
    weights, rest = optimizer["fp32_groups"]
    optimizer["fp32_groups"] = [[rest[0], *weights], rest[1:]]


def reverse(content: dict[str, Any]) -> None:
    content["optimizer"]["fp32_groups"] = [group[::-1] for group in content["optimizer"]["fp32_groups"]]


@pytest.mark.parametrize("change", [swap_groups, reverse])
def test_masters_are_the_live_ones_whatever_their_groups_and_order(tmp_path: Path, change: Change) -> None:
    assert_fp32(rewrite(tmp_path, change))


def drop_one(content: dict[str, Any]) -> None:
    """As if outer.weight were frozen."""
    content["optimizer"]["fp32_groups"][0].pop()


def test_a_parameter_without_a_master_leaves_the_others_their_names(tmp_path: Path) -> None:
    checkpoint = rewrite(tmp_path, drop_one)
    assert checkpoint.facts.missing == ("fp32 weights of outer.weight: saved as float16 only",)
    assert torch.equal(checkpoint.read("inner.weight"), read_truth()["inner.weight"])


@pytest.mark.parametrize(
    ("element", "sentence"),
    [
        (
            0,
            r"holds fp32 weights of none of its parameters: expected each of them in float16 .* shapes \[11, 10\]; the",
        ),
        # Behind what is read to name it.
        (-1, "disagree with the float16 copy .* on inner.weight"),
    ],
)
def test_masters_that_another_model_left_are_refused(tmp_path: Path, element: int, sentence: str) -> None:
    def change(content: dict[str, Any]) -> None:
        content["optimizer"]["fp32_groups"][0][2].view(-1)[element] += 0.5

    with pytest.raises(CheckpointError, match=sentence):
        rewrite(tmp_path, change).read("inner.weight")


ALIKE = ("norm.weight", "norm.bias")


def make_alike(content: dict[str, Any]) -> None:
    """As norms are that have hardly moved: one and the same in fp16, and not in fp32."""
    masters = [master for master in content["optimizer"]["fp32_groups"][1] if master.shape == (11,)][1:]
    for number, (name, master) in enumerate(zip(ALIKE, masters, strict=True)):
        content["module"][name].fill_(1)
        master.copy_(torch.ones(11) + number * 1e-5)


def test_masters_of_equal_fp16_weights_are_named_by_the_order_of_the_others(tmp_path: Path) -> None:
    checkpoint = rewrite(tmp_path, make_alike)
    assert checkpoint.facts.missing == ()
    assert [float(checkpoint.read(name)[0]) for name in ALIKE] == [1, pytest.approx(1 + 1e-5, abs=1e-7)]


def part_alike(content: dict[str, Any]) -> None:
    """Into a group of their own, where nothing tells the order."""
    weights, rest = content["optimizer"]["fp32_groups"]
    alike = [master for master in rest if torch.all(master.half() == 1)]
    others = [master for master in rest if not torch.all(master.half() == 1)]
    content["optimizer"]["fp32_groups"] = [weights, others, alike]


def freeze_twin(content: dict[str, Any]) -> None:
    content["module"] = {"twin": torch.ones(11, dtype=torch.float16), **content["module"]}


def flatten_unevenly(content: dict[str, Any]) -> None:
    flatten(content)
    first, second = content["optimizer"]["fp32_groups_flat"]
    content["optimizer"]["fp32_groups_flat"] = [torch.cat([first, second[:1]]), second[1:]]


UNCERTAIN = [
    (make_alike, reverse),
    (make_alike, part_alike),
    (make_alike, freeze_twin),
    (make_alike, freeze_twin, flatten),
    (reverse, flatten),
    (flatten_unevenly,),
]


def name_changes(changes: tuple[Change, ...]) -> str:
    return "-".join(change.__name__ for change in changes)


@pytest.mark.parametrize("changes", UNCERTAIN, ids=name_changes)
def test_masters_whose_names_are_not_certain_are_not_taken_and_that_is_told(
    tmp_path: Path, changes: tuple[Change, ...]
) -> None:
    checkpoint = rewrite(tmp_path, *changes)
    assert checkpoint.tensors["inner.weight"].dtype.name == "float16"
    unnamed, low = checkpoint.facts.missing
    assert unnamed.startswith("names of the optimizer's fp32 weights")
    assert low.endswith("saved as float16 only")


def test_consolidate_tells_what_was_missing(tmp_path: Path) -> None:
    rewrite(tmp_path, flatten_unevenly)
    done = run("-m", "export", "consolidate", str(tmp_path / "z0_fp16"), str(tmp_path / "out"))
    assert done.code == 0
    assert [line.split(":")[0] for line in done.out.splitlines()[1:]] == ["missing", "missing", "warning"]
    assert "names of the optimizer's fp32 weights" in done.out
