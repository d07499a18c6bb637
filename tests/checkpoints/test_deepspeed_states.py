"""Rank files whose pickles hold other things than DeepSpeed writes: refused or read, never anything else."""

import copy
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from trainers.zero_checkpoints import find_checkpoint

from export.checkpoints import open_checkpoint
from export.errors import CheckpointError

JUNK = (None, 0, -1, 1 << 70, 2.5, float("nan"), "text", b"bytes", [], {}, (), [None], {"a": 1}, torch.ones(3), True)


def find_places(value: Any, path: tuple[Any, ...] = (), depth: int = 0) -> list[tuple[Any, ...]]:
    """The way to every value inside `value`."""
    places = [path] if path else []
    if depth < 5 and isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            places += find_places(value[key], (*path, key), depth + 1)
    return places


def replace_one(rng: random.Random, content: Any) -> str:
    """Put junk in place of one value, or take it away; return where."""
    place = rng.choice(find_places(content))
    for key in place[:-1]:
        content = content[key]
    if rng.random() < 0.15:
        del content[place[-1]]
    else:
        content[place[-1]] = copy.deepcopy(rng.choice(JUNK))
    return ".".join(map(str, place))


@pytest.mark.parametrize(
    "variant",
    [
        "z1_bf16",
        "z3_bf16",
        "universal_z3_bf16",
        *(
            pytest.param(name, marks=pytest.mark.rarer)
            for name in ("z0_fp16", "z2_aligned", "moe_z2", "universal_z2_bf16")
        ),
    ],
)
def test_nonsense_in_place_of_any_value_is_refused_or_read(variant: str, tmp_path: Path) -> None:
    source = find_checkpoint(variant)
    folder = tmp_path / variant
    shutil.copytree(source, folder)
    files = sorted(path.relative_to(source) for path in source.rglob("*.pt"))
    contents = {path: torch.load(source / path, weights_only=False) for path in files}
    outcomes: Counter[str] = Counter()
    for number in range(100):
        rng = random.Random(f"{variant}/{number}")
        path = rng.choice(files)
        content = copy.deepcopy(contents[path])
        place = replace_one(rng, content) if isinstance(content, dict) else "bare"
        torch.save(content if isinstance(content, dict) else copy.deepcopy(rng.choice(JUNK)), folder / path)
        try:
            open_checkpoint(folder).verify()
            outcomes["read"] += 1
        except CheckpointError:
            outcomes["refused"] += 1
        except Exception as exc:
            raise AssertionError(f"{path} with nonsense at {place}") from exc
        shutil.copyfile(source / path, folder / path)
    assert outcomes.keys() == {"read", "refused"}
