"""The checkpoints of `train_zero`, made once for all tests of a run. Fails where DeepSpeed is not installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import make_once

# By hand rather than imported from `train_zero`, which imports DeepSpeed; a test compares them.
SMALL_ZERO = (
    *("z0_fp32", "z0_bf16", "z0_fp16", "z1_fp32", "z1_bf16", "z1_bf16_optimizer", "z1_shared"),
    *("z2_fp32", "z2_bf16", "z2_round_robin_bf16", "z2_aligned", "z2_shared", "z3_shared"),
    *("z2_fp16", "z3_fp16", "z3_bf16", "z3_gathered", "z3_constant", "z3_resumed", "z3_world3", "z3_world11"),
    *("moe_z2", "moe_uneven"),
)
MATRIX_ZERO = (
    *("z2_round_robin", "z3_fp32", "z3_sub_groups", "z3_hpz"),
    *("z2_world1", "z3_world1", "z2_world3", "z2_world11", "z2_wrapped", "z3_wrapped"),
    *("moe_z1", "moe_z2_fp32", "moe_z2_world4"),
)
# Without their frozen parameters.
EXCLUDED_ZERO = ("z2_excluded", "z3_excluded")
# Not read: tests see them refused.
REFUSED_ZERO = ("z3_sequence",)
UNIVERSAL = ("universal_z1_fp32", "universal_z2_bf16", "universal_z2_round_robin", "universal_z3_bf16")
TRAINERS = ("trainer_z2", "trainer_z3", "accelerate_z2", "accelerate_z3")

_SMALL = (*SMALL_ZERO, *EXCLUDED_ZERO, *REFUSED_ZERO, *UNIVERSAL, "trainer_z3")
_MATRIX = tuple(name for name in (*MATRIX_ZERO, *TRAINERS) if name not in _SMALL)


def mark_matrix(*names: str) -> list[object]:
    """The names as test parameters, those that are not trained in every run under the marker `matrix`."""
    return [pytest.param(name, marks=[pytest.mark.matrix] if name in _MATRIX else []) for name in names]


def find_checkpoint(name: str) -> Path:
    """Return the folder of a checkpoint, trained with all of its set the first time, which takes half a minute."""
    return _make_set(_SMALL if name in _SMALL else _MATRIX) / name


def copy_checkpoint(name: str, to: Path) -> Path:
    """Return a copy of a checkpoint that a test may damage."""
    return Path(shutil.copytree(find_checkpoint(name), to / name))


def _make_set(names: tuple[str, ...]) -> Path:
    def train(out: Path) -> None:
        command = [sys.executable, str(Path(__file__).parent / "train_zero.py"), str(out), ",".join(names)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"train_zero.py failed; is deepspeed installed?\n{done.stderr[-4000:]}"

    return make_once("zero-small" if names == _SMALL else "zero-matrix", train)
