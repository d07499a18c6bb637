"""A million lines through a model that answers at once, while client and server are killed: rows, memory, repeats.

    python -m benches.soak_lines [--lines 1000000] [--rolled 20000] [--quick]

The client is `client/infer.py`, in lines of JSON and then in Parquet, killed by SIGKILL and given the same command
again; the server is killed as well, and started again. Then lines of real text go through MiniLM, of which two versions
are activated in turns while client and tritonserver are killed. It fails where a row is missing, doubled, out of order
or of neither version, where more than one chunk a kill was asked twice, or where the client's memory grows with what it
has answered.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from benches.soak import say
from benches.soak_rollouts import NAME as ROLLED
from benches.soak_rollouts import NEAR, serving, wait_until_served
from harness import CHECKOUT, run
from instant import NAME, start_again, write_instant
from launcher import Running
from safetensors.torch import load_file, save_file

from client import Client
from client.batch.files import CHUNK_LINES
from demo.checkpoint import fetch_checkpoint
from export.repository.activation import activate
from export.tasks.texts.text import read_verification_texts

KILLS = 3
# What one chunk more or less, and the allocator, may make of it.
GROWTH_BYTES = 64 << 20


def text_of(row: int) -> str:
    return f"row number {row}, {'ü' * (row % 7)}"


def begin(server: Running, model: str, source: Path, target: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(CHECKOUT / "client" / "infer.py"), "--url", f"127.0.0.1:{server.http}"]
    return subprocess.Popen([*command, "--model", model, "--file", str(source), "--output", str(target)])


def read_resident(process: subprocess.Popen[bytes]) -> int:
    """Return its bytes of resident memory; 0 where it has ended."""
    try:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * 4096


def count_asked(server: Running, model: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http}/v2/models/{model}/stats") as answer:
        return int(json.load(answer)["model_stats"][0]["inference_count"])


def count_bytes(target: Path) -> int:
    parts = target.with_name(f"{target.name}.parts")
    return sum(path.stat().st_size for path in [target, *parts.glob("*")] if path.is_file())


def watch(process: subprocess.Popen[bytes]) -> list[int]:
    """Return its memory every half second, from the first one that it has settled at to its end."""
    time.sleep(5)
    seen = []
    while process.poll() is None:
        seen.append(read_resident(process))
        time.sleep(0.5)
    return [size for size in seen if size]


def kill_in_turns(server: Running, source: Path, target: Path, pause_s: float) -> list[str]:
    """Answer a file while the client, and at last the server, are killed; return what was wrong."""
    wrong, asked = [], count_asked(server, NAME)
    for _ in range(KILLS):
        process, size = begin(server, NAME, source, target), count_bytes(target)
        while count_bytes(target) <= size and process.poll() is None:
            time.sleep(0.05)
        time.sleep(pause_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
    process, size = begin(server, NAME, source, target), count_bytes(target)
    while count_bytes(target) <= size and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1)
    asked = count_asked(server, NAME) - asked
    done = count_rows(target)
    if asked > done + (KILLS + 1) * CHUNK_LINES:
        wrong.append(f"{asked} rows were asked for {done} answers")
    process.send_signal(signal.SIGCONT)
    say(f"  {KILLS} clients killed: {asked} rows asked for {done} answers")
    server.process.kill()
    server.process.wait()
    time.sleep(pause_s)
    start_again(server)
    seen = watch(process)
    if process.returncode != 0:
        wrong.append(f"the client ended with {process.returncode}")
    if seen:
        say(f"  the client's memory: {seen[0] / 1e6:.0f} MB at first, {max(seen) / 1e6:.0f} MB at most")
        if max(seen) > seen[0] + GROWTH_BYTES:
            wrong.append("the client's memory grew")
    return wrong


def count_rows(target: Path) -> int:
    if target.suffix == ".jsonl":
        with target.open("rb") as lines:
            return sum(1 for _ in lines)
    parts = target.with_name(f"{target.name}.parts").glob("*.parquet")
    return sum(pq.ParquetFile(path).metadata.num_rows for path in ([target] if target.is_file() else parts))


def read_rows(target: Path) -> Iterator[dict]:
    if target.suffix == ".jsonl":
        with target.open("rb") as lines:
            yield from map(json.loads, lines)
    else:
        for batch in pq.ParquetFile(target).iter_batches():
            yield from batch.to_pylist()


def compare(target: Path, lines: int) -> list[str]:
    """Return what is wrong with the answers of the model that answers at once."""
    number = -1
    for number, row in enumerate(read_rows(target)):
        if (row["id"], row["text"], row["BACKWARDS"]) != (number, text_of(number), [text_of(number)[::-1]]):
            return [f"row {number} of {target.name} holds {row}"]
    return [] if number + 1 == lines else [f"{target.name} holds {number + 1} rows, not {lines}"]


def write_sources(folder: Path, lines: int) -> list[Path]:
    with (folder / "in.jsonl").open("w") as written:
        written.writelines(json.dumps({"id": row, "text": text_of(row)}) + "\n" for row in range(lines))
    schema = pa.schema({"id": pa.int64(), "text": pa.string()})
    with pq.ParquetWriter(folder / "in.parquet", schema) as writer:
        for start in range(0, lines, 100_000):
            rows = range(start, min(start + 100_000, lines))
            writer.write_table(pa.table({"id": rows, "text": [text_of(row) for row in rows]}, schema))
    return [folder / "in.jsonl", folder / "in.parquet"]


def publish_trained(folder: Path) -> Path:
    """Publish MiniLM, and as a second version what lies a little beside it; return the repository."""
    other = Path(shutil.copytree(fetch_checkpoint(), folder / "other"))
    weights = load_file(other / "model.safetensors")
    # Each vector points elsewhere, by about a tenth of its length.
    noise = torch.Generator().manual_seed(0)
    last = weights["encoder.layer.5.output.LayerNorm.bias"]
    last += 0.1 * last.std() * torch.randn(last.shape, generator=noise)
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    for checkpoint in (fetch_checkpoint(), other):
        words = (str(checkpoint), "--name", ROLLED, "--repository", str(folder / "models"))
        done = run("-m", "export", "run", *words)
        assert done.code == 0, done.err
    return folder / "models"


def ask_both(repository: Path, texts: Sequence[str]) -> np.ndarray:
    """Return the vectors of both versions, [2, texts, hidden], each served alone."""
    found = []
    for version in (1, 2):
        activate(repository, ROLLED, version)
        with serving(repository, 1) as ((server,), _), Client(f"127.0.0.1:{server.grpc}", protocol="grpc") as client:
            found.append(client.embed(texts, model=ROLLED))
    return np.stack(found)


def roll(folder: Path, lines: int) -> list[str]:
    """Answer lines while two versions of MiniLM take turns, and are killed; return what was wrong."""
    repository = publish_trained(folder)
    texts = read_verification_texts()
    expected = ask_both(repository, texts)
    source, target = folder / "rolled.jsonl", folder / "answers.jsonl"
    rows = (json.dumps({"id": row, "text": texts[row % len(texts)]}) + "\n" for row in range(lines))
    source.write_text("".join(rows), encoding="utf-8")
    rollouts, deaths = 0, 0
    with serving(repository, 1) as ((server,), _):
        process = begin(server, ROLLED, source, target)
        while process.poll() is None:
            activate(repository, ROLLED, 1 + rollouts % 2)
            wait_until_served(server.status, 1 + rollouts % 2)
            rollouts += 1
            # The client, what computes, and tritonserver, one after every other rollout.
            victim = {1: process.pid, 3: server.find_stubs(f"{ROLLED}_model")[0].pid, 5: server.tritonserver}
            if rollouts % 6 in victim and process.poll() is None:
                os.kill(victim[rollouts % 6], signal.SIGKILL)
                deaths += 1
            if rollouts % 6 == 1 and process.wait() == -signal.SIGKILL:
                process = begin(server, ROLLED, source, target)
    if process.returncode != 0:
        return [f"the client ended with {process.returncode} while versions were rolled"]
    versions, number = [0, 0], -1
    for number, row in enumerate(read_rows(target)):
        near = np.abs(np.array(row["EMBEDDING"]) - expected[:, number % len(texts)]).max(axis=1) < NEAR
        if (row["id"], row["text"]) != (number, texts[number % len(texts)]) or near.sum() != 1:
            return [f"row {number} of {target.name} is row {row['id']}, and of {near.sum()} versions"]
        versions[int(near.argmax())] += 1
    say(f"{number + 1} lines during {rollouts} rollouts: {versions[0]} of version 1, {versions[1]} of version 2")
    say(f"  {deaths} of client, backend and tritonserver were killed")
    return [] if number + 1 == lines else [f"{target.name} holds {number + 1} rows, not {lines}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--rolled", type=int, default=20_000, help="lines while versions are rolled out")
    parser.add_argument("--quick", action="store_true", help="a twentieth of both, to see that it works")
    options = parser.parse_args()
    part = 20 if options.quick else 1
    folder, wrong = Path(tempfile.mkdtemp(prefix="modelyard-soak-")), []
    try:
        sources = write_sources(folder, options.lines // part)
        instant = write_instant(folder / "instant", pause_s=0.02 if options.quick else 0.0)
        with serving(instant, 1) as ((server,), _):
            for source in sources:
                target, start = folder / f"out{source.suffix}", time.monotonic()
                wrong += kill_in_turns(server, source, target, 0.2 if options.quick else 5.0)
                wrong += compare(target, options.lines // part)
                say(f"{options.lines // part} rows of {source.suffix}: {time.monotonic() - start:.0f} s, kills and all")
        wrong += roll(folder, options.rolled // part)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say("\n".join(wrong) or "every row once and in order")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
