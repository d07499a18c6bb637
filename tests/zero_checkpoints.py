"""The checkpoints of `train_zero`, made once for all tests of a run. Fails where DeepSpeed is not installed."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# By hand rather than imported from `train_zero`, which imports DeepSpeed; a test compares them.
ZERO_VARIANTS = (
    *("z0_fp32", "z0_bf16", "z1_fp32", "z1_bf16", "z1_bf16_optimizer"),
    *("z2_fp32", "z2_bf16", "z2_fp16", "z2_round_robin", "z2_round_robin_bf16", "z2_aligned"),
    *("z3_fp32", "z3_bf16", "z3_gathered", "z3_fp16", "z3_sub_groups", "z3_hpz"),
    *("z2_world1", "z3_world1", "z2_world3", "z3_world3", "z2_world11", "z3_world11"),
    *("moe_z1", "moe_z2", "moe_z2_fp32", "moe_z2_world4"),
)
UNIVERSAL_VARIANTS = ("universal_z1_fp32", "universal_z2_bf16", "universal_z2_round_robin", "universal_z3_bf16")
TRAINER_VARIANTS = ("trainer_z2", "trainer_z3", "accelerate_z2", "accelerate_z3")


@functools.cache
def make_checkpoints() -> Path:
    """Return the folder with every variant's checkpoint and truth; takes a minute the first time."""
    out = Path(tempfile.mkdtemp(prefix="zero-"))
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    script = Path(__file__).parent / "train_zero.py"
    names = ",".join((*ZERO_VARIANTS, *UNIVERSAL_VARIANTS, *TRAINER_VARIANTS))
    done = subprocess.run([sys.executable, str(script), str(out), names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{script.name} failed; is deepspeed installed?\n{done.stderr[-4000:]}"
    return out


def copy_checkpoint(name: str, to: Path) -> Path:
    """Return a copy of a variant's checkpoint that a test may damage."""
    return Path(shutil.copytree(make_checkpoints() / name, to / name))
