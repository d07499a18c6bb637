"""The clients of others, as their own pages use them: what they are answered is what ours is."""

import json
import os
import subprocess

import numpy as np
import pytest
from harness import CHECKOUT
from pytriton.client import FuturesModelClient, ModelClient

from client import Client
from demo.serving import Addresses

TEXTS = ["A cat sleeps.", "A kitten naps."]


@pytest.fixture(scope="module")
def vectors(server: Addresses) -> np.ndarray:
    with Client(server.grpc, protocol="grpc") as client:
        return client.embed(TEXTS)


# Of its own default.
@pytest.mark.filterwarnings("ignore:tritonclient.grpc doesn't support timeout")
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_pytritons_clients_are_answered(server: Addresses, vectors: np.ndarray, protocol: str) -> None:
    url, texts = f"{protocol}://{getattr(server, protocol)}", np.array(TEXTS).astype(np.bytes_)[:, None]
    with ModelClient(url, "sentence_embedding") as client:
        (batch,) = client.infer_batch(texts).values()
        (named,) = client.infer_batch(TEXT=texts).values()
        (alone,) = client.infer_sample(texts[0]).values()
    for got, wanted in ((batch, vectors), (named, vectors), (alone, vectors[0])):
        assert np.abs(got - wanted).max() < 1e-5


def test_pytritons_client_of_many_threads_is_answered(server: Addresses, vectors: np.ndarray) -> None:
    texts = np.array(TEXTS).astype(np.bytes_)[:, None]
    # Over HTTP: of 0.7.0 some threads speak HTTP to the port of gRPC as well.
    with FuturesModelClient(f"http://{server.http}", "sentence_embedding", max_workers=8) as client:
        futures = [client.infer_batch(texts) for _ in range(16)]
        assert all(np.abs(next(iter(each.result().values())) - vectors).max() < 1e-5 for each in futures)


@pytest.mark.skipif("MODELYARD_DOORS" not in os.environ, reason="asks with KServe's clients: `make test-doors`")
def test_kserves_clients_are_answered(server: Addresses, vectors: np.ndarray) -> None:
    program = str(CHECKOUT / "tests" / "client" / "kserve_client.py")
    command = [os.environ["MODELYARD_DOORS"], program, f"http://{server.http}", server.grpc, "sentence_embedding"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    heard = json.loads(done.stdout)
    assert heard["ready"] == [True] * 2
    assert [np.abs(np.reshape(values, vectors.shape) - vectors).max() < 1e-5 for values in heard["vectors"]] == [
        True
    ] * 2
