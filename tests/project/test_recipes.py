"""The recipes in docs/batches.md on the real Ray and the real Spark, as they stand there."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness import CHECKOUT
from launcher import Running, running

# An interpreter with requirements/recipes.txt, which `make test-recipes` makes.
PYTHON = os.environ.get("MODELYARD_RECIPES", "")

pytestmark = pytest.mark.skipif(not PYTHON, reason="Ray and Spark in an environment of their own; `make test-recipes`")

ROWS = 300

_WRITE = """
import pandas as pd
rows = pd.DataFrame({"id": range(ROWS), "text": [f"Row {n} tells of {'cats ' * (n % 7)}" for n in range(ROWS)]})
for part in range(3):
    rows[part::3].to_parquet(f"texts/{part}.parquet")
"""

_READ = """
import json, sys, pandas as pd
rows = pd.read_parquet(sys.argv[1]).sort_values("id")
print(json.dumps([rows["id"].tolist(), rows["text"].tolist(), [list(map(float, row)) for row in rows["embedding"]]]))
"""


@pytest.fixture(scope="module")
def server(two_versions: Path) -> Iterator[Running]:
    with running(two_versions) as server:
        server.read_until("serving HTTP")
        server.follow()
        yield server


def find_recipe(word: str) -> str:
    text = (CHECKOUT / "docs" / "batches.md").read_text(encoding="utf-8")
    (found,) = [code for code in re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if word in code]
    return found


def run_code(code: str, folder: Path, *arguments: str) -> str:
    # Workers import what a script defines from nowhere else.
    (folder / "recipe.py").write_text(code)
    environment = os.environ | {
        "PYTHONPATH": str(CHECKOUT),
        "PYSPARK_PYTHON": PYTHON,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    done = subprocess.run(
        [PYTHON, "recipe.py", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("word", "output"), [("import ray", "ray_embeddings"), ("SparkSession", "spark_embeddings")])
def test_every_row_is_embedded_once_and_as_if_alone(word: str, output: str, server: Running, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    run_code(f"ROWS = {ROWS}\n{_WRITE}", tmp_path)
    run_code(find_recipe(word).replace("localhost:8000", f"localhost:{server.http}"), tmp_path)
    ids, texts, embeddings = json.loads(run_code(_READ, tmp_path, output))
    assert ids == list(range(ROWS))
    alone = (
        "import json, sys\nfrom modelyard.client import Client\n"
        f"with Client('localhost:{server.http}') as client:\n"
        "    print(json.dumps([client.embed([text])[0].tolist() for text in json.loads(sys.argv[1])]))"
    )
    expected = np.array(json.loads(run_code(alone, tmp_path, json.dumps(texts[:20]))))
    np.testing.assert_allclose(np.array(embeddings)[:20], expected, atol=1e-4)
    assert np.array(embeddings).shape == (ROWS, expected.shape[1])
