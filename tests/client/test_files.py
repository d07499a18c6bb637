"""Files of many rows, through a model that answers at once: every row once, in order, whoever is killed meanwhile."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness import CHECKOUT, run
from instant import NAME, start_again, write_instant
from launcher import Running, running

from client import Client, ModelError, UsageError
from client.batch.files import CHUNK_LINES, answer_file
from client.batch.parquet import to_arrow

INFER = str(CHECKOUT / "client" / "infer.py")
ROWS = 20_000
TEXTS = [f"row number {number}, {'ü' * (number % 7)}" for number in range(ROWS)]


@pytest.fixture(scope="module")
def instant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    # Long enough for others to be killed meanwhile.
    with running(write_instant(tmp_path_factory.mktemp("instant"), pause_s=0.02)) as server:
        server.read_until("serving HTTP")
        server.follow()
        yield server


@pytest.fixture
def client(instant: Running) -> Iterator[Client]:
    with Client(f"127.0.0.1:{instant.http}", model=NAME) as client:
        yield client


def count_asked(server: Running) -> int:
    url = f"http://127.0.0.1:{server.http}/v2/models/{NAME}/stats"
    with urllib.request.urlopen(url) as answer:
        return int(json.load(answer)["model_stats"][0]["inference_count"])


def begin(server: Running, source: Path, target: Path, *more: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, INFER, "--url", f"127.0.0.1:{server.http}", "--model", NAME]
    return subprocess.Popen([*command, "--file", str(source), "--output", str(target), *more], cwd=CHECKOUT)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def check_rows(rows: list[dict[str, Any]]) -> None:
    assert [row["id"] for row in rows] == list(range(ROWS))
    assert [row["text"] for row in rows] == TEXTS
    assert [row["BACKWARDS"] for row in rows] == [[text[::-1]] for text in TEXTS]


def test_every_line_is_answered_once_whoever_is_killed(instant: Running, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = (json.dumps({"id": row, "text": text}) for row, text in enumerate(TEXTS))
    # Blank lines among lines of JSON are nothing.
    source.write_text("".join(line + "\n" * (1 + (row % 1000 == 7)) for row, line in enumerate(lines)) + "\n\n")
    before, kills = count_asked(instant), 2
    for part in range(kills):
        process = begin(instant, source, target)
        wait_for(lambda part=part: target.is_file() and target.stat().st_size > (1 + part) * 200_000)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert count_asked(instant) - before <= target.read_bytes().count(b"\n") + kills * CHUNK_LINES
    process = begin(instant, source, target)
    size = target.stat().st_size
    wait_for(lambda: target.stat().st_size > size)
    os.kill(instant.tritonserver, signal.SIGKILL)
    instant.process.kill()
    instant.finish()
    assert process.poll() is None
    start_again(instant)
    assert process.wait(timeout=120) == 0
    check_rows([json.loads(line) for line in target.read_text().splitlines()])


def test_parquet_is_written_in_parts_that_outlive_a_kill_and_are_joined(instant: Running, tmp_path: Path) -> None:
    source, target, parts = tmp_path / "in.parquet", tmp_path / "out.parquet", tmp_path / "out.parquet.parts"
    table = pa.table({"id": np.arange(ROWS), "body": TEXTS, "when": pa.array([0] * ROWS, pa.timestamp("s"))})
    pq.write_table(table, source, row_group_size=7000)
    before = count_asked(instant)
    process = begin(instant, source, target, "--column", "body")
    wait_for(lambda: len(list(parts.glob("*.parquet"))) > 2)
    process.send_signal(signal.SIGSTOP)
    with (
        Client(f"127.0.0.1:{instant.http}", model=NAME) as other,
        pytest.raises(UsageError, match="another process writes"),
    ):
        answer_file(other, source, target, columns=("body",))
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not target.exists()
    (parts / "000000999999.tmp").write_bytes(b"PAR1 of which no more was written")
    assert begin(instant, source, target, "--column", "body").wait(timeout=120) == 0
    assert count_asked(instant) - before <= ROWS + CHUNK_LINES
    assert not parts.exists()
    written = pq.read_table(target)
    assert written.schema.types[:3] == pq.read_schema(source).types
    assert written.schema.field("LENGTH").type == pa.list_(pa.float32())
    check_rows(written.rename_columns(["id", "text", *written.column_names[2:]]).to_pylist())
    assert pq.ParquetFile(target).num_row_groups < 5
    asked = ["--file", str(source), "--output", str(target), "--column", "body"]
    done = run(INFER, "--url", f"127.0.0.1:{instant.http}", "--model", NAME, *asked)
    assert (done.code, done.err) == (0, "") and f"{target}: {ROWS} lines, 0 asked now in" in done.out


def test_parquet_goes_into_lines_as_well(client: Client, tmp_path: Path) -> None:
    source, target = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    pq.write_table(pa.table({"id": [7, 8, 9], "text": pa.array(["one", "two", "one"]).dictionary_encode()}), source)
    assert answer_file(client, source, target, chunk_lines=2) == 3
    assert [json.loads(line) for line in target.read_text().splitlines()][2] == {
        "id": 9, "text": "one", "BACKWARDS": ["eno"], "LENGTH": [3.0, -3.0]
    }  # fmt: skip
    pq.write_table(pa.table({"id": [7, 8, 9, 1], "text": ["one", "two", "one", ""]}), source)
    assert answer_file(client, source, target) == 1
    empty, none = tmp_path / "empty.parquet", tmp_path / "none.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), empty)
    assert [answer_file(client, empty, none) for _ in range(2)] == [0, 0]
    assert (pq.read_table(none).num_rows, pq.read_table(none).column_names) == (0, ["text", "BACKWARDS", "LENGTH"])


def test_what_a_file_cannot_be_answered_for_is_refused_in_one_sentence(client: Client, tmp_path: Path) -> None:
    def write(name: str, **columns: Any) -> Path:
        pq.write_table(pa.table(columns), tmp_path / name)
        return tmp_path / name

    good, lines = write("good.parquet", text=["a", "b", "c"]), tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a", "LENGTH": 1}\n')
    (tmp_path / "broken.parquet").write_bytes(b"no footer")
    (tmp_path / "plain.txt").write_text("a\n")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    answer_file(client, write("short.parquet", text=["a", "b"]), tmp_path / "short_out.parquet")
    cases: list[tuple[str, Path, str, tuple[str, ...]]] = [
        ("has no column body: expected one that holds texts, got text; name it with --column.", good, "o.parquet",
         ("body",)),
        ("column text of .* holds no texts: expected strings, got int64", write("ids.parquet", text=[1]), "o.parquet",
         ()),
        ("row 2 of .* holds no text: expected a string in text, got null", write("null.parquet", text=["a", None]),
         "o.jsonl", ()),
        ("line 1 of .*deep.jsonl cannot be read: expected JSON, got 'maximum recursion", tmp_path / "deep.jsonl",
         "o.jsonl", ()),
        ("holds LENGTH already: expected other names", lines, "o.jsonl", ()),
        ("holds LENGTH already", write("both.parquet", text=["a"], LENGTH=[1]), "o.parquet", ()),
        ("expected --file called .parquet, whose columns have types, .*; write into a .jsonl", lines, "o.parquet", ()),
        ("cannot be read: expected a whole Parquet file, got 'Parquet", tmp_path / "broken.parquet", "o.jsonl", ()),
        ("--column has no effect: expected --file called", tmp_path / "plain.txt", "o.jsonl", ("text",)),
        ("--column takes the name of the text", good, "o.parquet", ("a", "b", "c")),
        ("line 1 of .* holds no second text: expected other in it", lines, "o.jsonl", ("text", "other")),
        ("cannot be written as JSON: expected .*; write into a .parquet", write("when.parquet", text=["a"], x=[b"x"]),
         "o.jsonl", ()),
        ("short_out.parquet is whole: expected a file of 2 rows", good, "short_out.parquet", ()),
        ("good.parquet is what is read", good, "good.parquet", ()),
    ]  # fmt: skip
    for sentence, source, target, columns in cases:
        with pytest.raises(UsageError, match=sentence):
            answer_file(client, source, tmp_path / target, columns=columns)
    assert not (tmp_path / "o.parquet").exists() and not (tmp_path / "o.jsonl").exists()
    (tmp_path / "no_rows.jsonl").write_text("")
    assert answer_file(client, tmp_path / "no_rows.jsonl", tmp_path / "none.jsonl") == 0
    assert (tmp_path / "none.jsonl").read_bytes() == b""
    with pytest.raises(ModelError, match="nothing"):
        answer_file(client, good, tmp_path / "p.parquet", model="nothing")
    assert not list(tmp_path.glob("[op].parquet*")), "nothing is left of what was refused"
    for sentence, words in {
        f"{good} holds more than texts: expected --output": ["--file", str(good)],
        "--column has no effect": ["--text", "a", "--column", "text"],
    }.items():
        done = run(INFER, *words)
        assert done.code == 1 and done.err.startswith(f"error: {sentence}")


def test_outputs_of_any_rank_are_lists_of_their_own_type() -> None:
    values = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    assert to_arrow(values).to_pylist() == values.tolist()
    assert to_arrow(values[:, :0]).to_pylist() == [[], []]
    assert to_arrow(values).type == pa.list_(pa.list_(pa.float32()))
    assert to_arrow(np.array([[b"a"], ["ü".encode()]], dtype=object)).to_pylist() == [["a"], ["ü"]]
