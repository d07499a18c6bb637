"""A million lines through a model that answers at once, while client and server are killed: rows, memory, repeats.

    python -m benches.soak_lines [--lines 1000000] [--rolled 20000] [--quick]

The client is `client/infer.py`, in lines of JSON and then in Parquet, killed by SIGKILL and given the same command
again; the server is killed as well, and started again. Then lines go through a small model of which two versions are
activated in turns. It fails where a row is missing, doubled, out of order or of neither version, where more than one
chunk a kill was asked twice, or where the client's memory grows with what it has answered.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from benches.soak import say
from benches.soak_rollouts import NAME as ROLLED
from benches.soak_rollouts import NEAR, publish_two, serving, wait_until_served
from harness import CHECKOUT
from instant import NAME, start_again, write_instant
from launcher import Running

from client.files import CHUNK_LINES
from export.repository.activation import activate

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


def roll(folder: Path, lines: int) -> list[str]:
    """Answer lines while two versions of a small model take turns; return what was wrong."""
    repository = publish_two(folder)
    golden = [json.loads((repository / ROLLED / n / "golden.json").read_text())["samples"][0] for n in "12"]
    text = golden[0]["inputs"][0]["data"][0]
    expected = np.array([sample["outputs"][0]["data"] for sample in golden])
    source, target = folder / "rolled.jsonl", folder / "answers.jsonl"
    source.write_text("".join(json.dumps({"id": row, "text": text}) + "\n" for row in range(lines)))
    rollouts = 0
    with serving(repository) as server:
        process = begin(server, ROLLED, source, target)
        while process.poll() is None:
            activate(repository, ROLLED, 1 + rollouts % 2)
            wait_until_served(server, 1 + rollouts % 2)
            rollouts += 1
    if process.returncode != 0:
        return [f"the client ended with {process.returncode} while versions were rolled"]
    versions = [0, 0]
    number = -1
    for number, row in enumerate(read_rows(target)):
        near = np.abs(np.array(row["EMBEDDING"]) - expected).max(axis=1) < NEAR
        if row["id"] != number or near.sum() != 1:
            return [f"row {number} of {target.name} is row {row['id']}, and of neither version"]
        versions[int(near.argmax())] += 1
    say(f"{number + 1} lines during {rollouts} rollouts: {versions[0]} of version 1, {versions[1]} of version 2")
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
        with serving(write_instant(folder / "instant", pause_s=0.02 if options.quick else 0.0)) as server:
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
