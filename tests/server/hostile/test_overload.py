"""More than it can answer: refused at once and in words, the accepted answered in time, and all well afterwards."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from harness import Published
from launcher import Running, running
from tritonclient.utils import InferenceServerException

from export.repository.model_config import MAX_QUEUE_SIZE

QUEUE = 4
CLIENTS = 24
SECONDS = 4.0

# With at most QUEUE waiting in each step, an accepted request has a known number of batches in front of it, which takes
# far less than this even where other work has the cores; without a bound, it would wait for all that were sent.
ACCEPTED_WITHIN_S = 30.0
REFUSED_WITHIN_S = 10.0

TEXTS = np.array([["a sentence of some length to be embedded " * 8]] * 8, dtype=np.object_)


@pytest.fixture(scope="module")
def server(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serve the published model with queues so short that a few clients overflow them."""
    repository = Path(shutil.copytree(published.repository, tmp_path_factory.mktemp("overload") / "models"))
    for step in ("preprocess", "model"):
        config = repository / f"sentence_embedding_{step}" / "config.pbtxt"
        text = config.read_text()
        assert f"max_queue_size: {MAX_QUEUE_SIZE}" in text
        # One request fills a batch, so the queue cannot empty into one large execution.
        text = text.replace(f"max_queue_size: {MAX_QUEUE_SIZE}", f"max_queue_size: {QUEUE}")
        config.write_text(text.replace("max_batch_size: 32", "max_batch_size: 8"))
    ensemble = repository / "sentence_embedding" / "config.pbtxt"
    ensemble.write_text(ensemble.read_text().replace("max_batch_size: 32", "max_batch_size: 8"))
    with running(repository) as server:
        server.read_until("serving HTTP")
        yield server


def ask(server: Running, protocol: str, timeout_s: float = 30.0) -> None:
    library = tritonclient.http if protocol == "http" else tritonclient.grpc
    tensor = library.InferInput("TEXT", list(TEXTS.shape), "BYTES")
    tensor.set_data_from_numpy(TEXTS)
    if protocol == "http":
        options, url = {"network_timeout": timeout_s, "connection_timeout": timeout_s}, f"127.0.0.1:{server.http}"
    else:
        options, url = {}, f"127.0.0.1:{server.grpc}"
    limit = {} if protocol == "http" else {"client_timeout": timeout_s}
    with library.InferenceServerClient(url, **options) as client:
        answer = client.infer("sentence_embedding", [tensor], **limit).as_numpy("EMBEDDING")
    assert answer.shape == (8, 384)


def test_a_full_queue_refuses_at_once_and_the_rest_is_answered_in_time(server: Running) -> None:
    accepted: list[float] = []
    refused: list[tuple[float, str]] = []
    end = time.monotonic() + SECONDS

    def send(protocol: str) -> None:
        while time.monotonic() < end:
            start = time.monotonic()
            try:
                ask(server, protocol)
                accepted.append(time.monotonic() - start)
            except InferenceServerException as exc:
                refused.append((time.monotonic() - start, f"{exc.status()} {exc.message()}"))
                time.sleep(0.02)

    threads = [threading.Thread(target=send, args=(("http", "grpc")[n % 2],)) for n in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert accepted and refused
    assert max(accepted) < ACCEPTED_WITHIN_S
    # Refused by the first step at once; by the second after the first has done its work.
    assert sorted(took for took, _ in refused)[len(refused) // 2] < REFUSED_WITHIN_S
    statuses = {text.split()[0] for _, text in refused}
    assert statuses == {"503", "StatusCode.UNAVAILABLE"}
    assert all("Exceeds maximum queue size" in text for _, text in refused)


def test_it_recovers_by_itself(server: Running) -> None:
    start = time.monotonic()
    for protocol in ("http", "grpc"):
        ask(server, protocol)
    assert time.monotonic() - start < ACCEPTED_WITHIN_S


def test_a_callers_deadline_is_kept_and_frees_the_queue(server: Running) -> None:
    start = time.monotonic()
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        ask(server, "grpc", timeout_s=0.005)
    with pytest.raises((InferenceServerException, TimeoutError)):
        ask(server, "http", timeout_s=0.005)
    assert time.monotonic() - start < REFUSED_WITHIN_S
    ask(server, "grpc")
