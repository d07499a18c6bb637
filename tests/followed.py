"""A repository with two versions of one model, how they are made active, and clients that ask for either."""

import contextlib
import http.client
import json
import os
import re
import shutil
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tritonclient.grpc
import tritonclient.http
from geventhttpclient.response import HTTPConnectionClosed
from harness import run
from launcher import Running, running
from nginx import Balancer
from transformers import AutoTokenizer, BertConfig, BertModel
from tritonclient.utils import InferenceServerException

NAME = "followed"
PARTS = (f"{NAME}_preprocess", f"{NAME}_model", NAME)


def publish_two(checkpoint: Path, folder: Path) -> None:
    """Publish two versions of one model, whose answers have nothing in common, in `models` of a folder."""
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=30522,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=64,
        )
        BertModel(config).save_pretrained(folder / str(seed))
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder / str(seed))
        options = ["--name", NAME, "--repository", str(folder / "models")]
        done = run("-m", "export", "run", str(folder / str(seed)), *options)
        assert done.code == 0, done.err


@contextlib.contextmanager
def serving_copy(repository: Path, copy: Path) -> Iterator[Running]:
    """Serve a copy of a repository that a test may change, at version 1."""
    with running(copy_at_first(repository, copy)) as server:
        server.read_until("serving HTTP")
        server.follow()
        yield server


def copy_at_first(repository: Path, copy: Path) -> Path:
    """Return a copy of a repository that a test may change, with version 1 active."""
    shutil.copytree(repository, copy)
    activate(copy, 1)
    return copy


def put_pipe(path: Path) -> None:
    """Put a pipe in the place of a file."""
    path.unlink()
    os.mkfifo(path)


def publish_half(copy: Path, staging: Path) -> str:
    """Publish the active version under another name as well, whole from the first moment on; return that name."""
    for name in PARTS:
        staged = shutil.copytree(copy / name, staging / f"half{name}")
        config = staged / "config.pbtxt"
        config.write_text(config.read_text().replace(f'"{NAME}', f'"half{NAME}'))
        for sums in staged.glob("*/SHA256SUMS"):
            content = sums.read_text().replace(f"../../{NAME}_", f"../../half{NAME}_")
            # Other versions may share its bytes.
            sums.unlink()
            sums.write_text(content)
        staged.rename(copy / f"half{name}")
    return f"half{NAME}"


def activate(repository: Path, version: int) -> None:
    """Make a version active as a publication does: steps first, the ensemble last, each config renamed into place."""
    for name in PARTS:
        path = repository / name / "config.pbtxt"
        text = re.sub(r"versions: \d+", f"versions: {version}", path.read_text())
        text = re.sub(r"model_version: \d+", f"model_version: {version}", text)
        staged = path.with_name("staging-config.pbtxt")
        staged.write_text(text)
        staged.replace(path)


def read_golden(repository: Path, version: int) -> dict[str, Any]:
    sample: dict[str, Any] = json.loads((repository / NAME / str(version) / "golden.json").read_text())["samples"][0]
    return sample


def read_following(server: Running) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.status}/versions", timeout=5) as response:
        models: dict[str, Any] = json.load(response)["models"]
    return models


def wait_for(server: Running, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        models = read_following(server)
        if condition(models):
            return models
        time.sleep(0.05)
    raise AssertionError(f"{models}\n" + "\n".join(server.lines))


class Callers:
    """Clients over HTTP and gRPC that ask as fast as they are answered, each over one connection that it keeps."""

    def __init__(self, server: Running | Balancer, repository: Path, count: int = 4) -> None:
        self.answers: Counter[int] = Counter()
        self.failures: list[str] = []
        self._server = server
        self._text = read_golden(repository, 1)["inputs"][0]["data"][0]
        vectors = {version: read_golden(repository, version)["outputs"][0]["data"] for version in (1, 2)}
        self._expected = {version: np.array(data) / np.linalg.norm(data) for version, data in vectors.items()}
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number % 2 == 0,)) for number in range(count)]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, over_http: bool) -> None:
        library = tritonclient.http if over_http else tritonclient.grpc
        port = self._server.http if over_http else self._server.grpc
        with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
            text = library.InferInput("TEXT", [1, 1], "BYTES")
            text.set_data_from_numpy(np.array([[self._text.encode()]], dtype=object))
            while not self._ended.is_set():
                try:
                    vector = client.infer(NAME, [text]).as_numpy("EMBEDDING")[0]
                except (InferenceServerException, OSError, HTTPConnectionClosed) as exc:
                    self.failures.append(str(exc))
                    continue
                vector = vector / np.linalg.norm(vector)
                whole = [n for n, expected in self._expected.items() if np.abs(vector - expected).max() < 1e-4]
                self.answers[whole[0] if whole else 0] += 1


def read_ready(server: Running) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.status, timeout=5)) as connection:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        return response.status, response.read().decode()
