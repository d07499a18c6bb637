"""The programs of docs/batch.md, run as they stand by a real Ray and a real Spark, while tritonserver is killed.

They run in an environment of their own: `make test-batch`.
"""

import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness import CHECKOUT
from launcher import Running, running

from client import Client

ROWS, FILES = 40_000, 8

PROGRAMS = {
    "ray" if "import ray" in code else "spark": code
    for code in re.findall(
        r"^```text\n(.*?)^```$", (CHECKOUT / "docs" / "batch.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
}


def kill_now_and_then(server: Running, ended: threading.Event) -> None:
    """Kill tritonserver whenever it has answered for three seconds."""
    while not ended.wait(3):
        os.kill(server.tritonserver, signal.SIGKILL)
        server.wait_for_line("answers again", 120)


@pytest.mark.skipif("MODELYARD_BATCH" not in os.environ, reason="runs Ray and Spark: `make test-batch`")
@pytest.mark.parametrize("name", ["ray", "spark"])
def test_every_row_is_answered_once_while_the_server_is_killed(name: str, two_versions: Path, tmp_path: Path) -> None:
    texts = [f"row {index} of a table" for index in range(ROWS)]
    (tmp_path / "texts").mkdir()
    for part in range(FILES):
        pq.write_table(pa.table({"text": texts[part::FILES]}), tmp_path / "texts" / f"{part}.parquet")
    with running(two_versions) as server:
        server.read_until("serving HTTP")
        server.follow()
        program = tmp_path / "program.py"
        program.write_text(PROGRAMS[name].replace("localhost:8001", f"127.0.0.1:{server.grpc}"))
        ended = threading.Event()
        killer = threading.Thread(target=kill_now_and_then, args=(server, ended))
        python = os.environ["MODELYARD_BATCH"]
        process = subprocess.Popen(
            [python, program],
            cwd=tmp_path,
            env=os.environ | {"PYSPARK_PYTHON": python},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        killer.start()
        try:
            said, _ = process.communicate(timeout=500)
        finally:
            process.kill()
            ended.set()
            killer.join()
        assert process.returncode == 0, said.decode()[-4000:]
        assert sum("starting it anew" in line for line in server.lines) >= 1, "nothing was killed"
        found = pq.read_table(tmp_path / "vectors").to_pydict()
        assert sorted(found["text"]) == sorted(texts)
        with Client(f"127.0.0.1:{server.grpc}", protocol="grpc", retry_s=60) as client:
            wanted = client.embed(found["text"])
        assert np.abs(np.array(found["embedding"]) - wanted).max() < 1e-5
