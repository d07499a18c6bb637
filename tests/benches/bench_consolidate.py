"""Time and memory of `consolidate` beside DeepSpeed's own script and `cp`, on real checkpoints.

    python -m benches.bench_consolidate [WORK_FOLDER] [--rounds 3] [--cold] [--disk 1]

Trains models of GPT-2 medium's shape (355M parameters) for a step or two on two CPU ranks in bf16: ZeRO stages 3 and 2,
and Megatron-DeepSpeed's tensor parallel layers. Then runs everything in turns, each in its own process, with a warm
page cache. DeepSpeed's script does not read Megatron's checkpoints. Memory is the peak of `VmHWM`, which counts mapped
files and libraries, and of `RssAnon` in /proc/PID/status, looked at every 2 ms. Nothing here asserts: it prints.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
HIDDEN, LAYERS, VOCABULARY, POSITIONS = 1024, 24, 50257, 1024

# `consolidate` without the rest of the command line, which may import what it does not need.
CONSOLIDATE = (
    "import sys, pathlib; from export.consolidation.consolidate import consolidate; "
    "consolidate(*map(pathlib.Path, sys.argv[1:]))"
)


def train_zero(out: Path, stage: int) -> None:
    """Save one ZeRO checkpoint of 355M parameters in `out`."""
    import deepspeed
    import torch
    import train_zero
    from ranks import fork_ranks
    from torch import nn

    class Block(nn.Module):
        """The parameters of one GPT-2 block; what it computes does not matter here."""

        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
            self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
            self.c_fc, self.c_out = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden = hidden + self.c_proj(self.c_attn(self.ln_1(hidden))[..., :HIDDEN])
            return hidden + self.c_out(torch.relu(self.c_fc(self.ln_2(hidden))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(POSITIONS, HIDDEN)
            self.h = nn.Sequential(*(Block() for _ in range(LAYERS)))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.h(self.wte(ids) + self.wpe(ids % POSITIONS))

    def run(rank: int) -> None:
        train_zero.join_ranks()
        torch.manual_seed(3)
        model = Model()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.backward(engine(torch.arange(4)[None]).float().square().mean())
        engine.step()
        engine.save_checkpoint(str(out))

    fork_ranks(2, run)


def train_megatron(out: Path) -> None:
    """Save one Megatron-DeepSpeed checkpoint of 355M parameters in `out`, split over two tensor parallel ranks."""
    import train_megatron
    from ranks import fork_ranks

    sizes = {"layers": LAYERS, "hidden": HIDDEN, "heads": 16, "vocabulary": VOCABULARY, "positions": POSITIONS}
    variant = train_megatron.Variant(tensor=2, dtype="bf16", **sizes)

    def run(rank: int) -> None:
        train_megatron.join_ranks()
        train_megatron.train(variant, out)

    fork_ranks(2, run)


def measure(command: list[str], env: dict[str, str], cold: bool) -> tuple[float, int, int]:
    """Run `command`; return its seconds, peak RSS and peak anonymous memory in bytes.

    With `cold` every byte is read from the disk and is on it at the end, as of a checkpoint that was copied here.
    """
    if cold:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    started = time.monotonic()
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    peak = anonymous = 0
    while process.poll() is None:
        status = read_status(process.pid)
        peak = max(peak, status.get("VmHWM", 0))
        anonymous = max(anonymous, status.get("RssAnon", 0))
        time.sleep(0.002)
    if cold:
        os.sync()
    seconds = time.monotonic() - started
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return seconds, peak, anonymous


@contextlib.contextmanager
def limit_disk(folder: Path, gigabytes: float) -> Iterator[None]:
    """Let the disk that `folder` lies on read and write at most so many GB a second; as it is where that is 0."""
    files = [Path(f"/sys/fs/cgroup/blkio/blkio.throttle.{verb}_bps_device") for verb in ("read", "write")]
    device = folder.stat().st_dev
    try:
        for file in files if gigabytes else ():
            file.write_text(f"{os.major(device)}:{os.minor(device)} {int(gigabytes * 1e9)}")
        yield
    finally:
        for file in files if gigabytes else ():
            file.write_text(f"{os.major(device)}:{os.minor(device)} 0")


def read_status(pid: int) -> dict[str, int]:
    """The memory fields of /proc/PID/status in bytes; empty once the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields}


def bench(work: Path, rounds: int, cold: bool) -> None:
    trainers = {"ZeRO-3": lambda out: train_zero(out, 3), "ZeRO-2": lambda out: train_zero(out, 2)}
    trainers["Megatron"] = train_megatron
    weights, out = work / "weights.safetensors", work / "out"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    runs: dict[str, list[str]] = {}
    for name, train in trainers.items():
        checkpoint = work / name
        if not (checkpoint / "latest").is_file():
            train(checkpoint)
        runs[f"consolidate, {name}"] = [sys.executable, "-c", CONSOLIDATE, str(checkpoint), str(out)]
        if name != "Megatron":
            script = checkpoint / "zero_to_fp32.py"
            runs[f"zero_to_fp32.py, {name}"] = [sys.executable, str(script), str(checkpoint), str(out)]
    runs["cp"] = ["cp", str(weights), str(out)]
    results: dict[str, list[Any]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, command in runs.items():
            shutil.rmtree(out, ignore_errors=True)
            if name == "cp":
                out.mkdir()
            results[name].append(measure(command, env, cold))
            if name.startswith("consolidate") and not weights.is_file():
                shutil.copyfile(out / "model.safetensors", weights)
    shards = ", ".join(f"{name} {count_bytes(work / name) / 1e9:.2f} GB" for name in trainers)
    sys.stdout.write(f"fp32 weights {weights.stat().st_size / 1e9:.2f} GB in {shards}; {os.cpu_count()} cores\n")
    sys.stdout.write(f"{'':24} best of {rounds}, s    ratio to cp    peak memory    of it anonymous\n")
    best_cp = min(seconds for seconds, _, _ in results["cp"])
    for name, found in results.items():
        best = min(seconds for seconds, _, _ in found)
        peak, anonymous = (max(result[index] for result in found) / 1e6 for index in (1, 2))
        sys.stdout.write(f"{name:24} {best:12.2f} {best / best_cp:14.2f} {peak:11.0f} MB {anonymous:15.0f} MB\n")


def count_bytes(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.rglob("*.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("work", nargs="?", type=Path, help="where to keep the checkpoint (default: a temporary folder)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="with nothing in the page cache (needs root)")
    parser.add_argument(
        "--disk", type=float, default=0, metavar="GB", help="with --cold: a disk of so many GB/s (cgroup v1's blkio)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with limit_disk(folder, options.disk):
            bench(folder, options.rounds, options.cold)
