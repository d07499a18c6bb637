"""Concurrent clients that compare every answer with the verified one and keep every error."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from launcher import Running, read_golden_texts
from tritonclient.utils import InferenceServerException

# A request without an answer for this long hangs.
TIMEOUT_S = 10.0

# tritonclient's own for what the server says, and what it raises for a connection that breaks or is refused.
_TYPED = (InferenceServerException, OSError, HTTPException)

_PAUSE_AFTER_ERROR_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """One request: when it was sent and ended, monotonic, and what came of it ("answered" or "wrong" or an error)."""

    sent: float
    ended: float
    what: str
    error: Exception | None = None


@dataclass
class Load:
    """Clients over HTTP and gRPC that send one text after another until they are told to stop."""

    server: Running
    repository: Path
    clients: int = 8
    outcomes: list[Outcome] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._samples, self._tolerance = read_golden_texts(self.repository, "sentence_embedding")
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(number,)) for number in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def wait_for_answer(self, after: float, limit_s: float, streak: int = 8) -> float:
        """Wait until requests sent after the moment `after` are answered again, `streak` in a row; return how long."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            recent = sorted((item for item in list(self.outcomes) if item.sent > after), key=lambda item: item.ended)
            failures = [index for index, item in enumerate(recent) if item.error]
            first = failures[-1] + 1 if failures else 0
            if len(recent) - first >= streak:
                return recent[first].ended - after
            time.sleep(0.02)
        raise AssertionError(f"no answers again within {limit_s} s: {self.count()}")

    def count(self) -> Counter[str]:
        """Return how often each outcome was met."""
        return Counter(outcome.what for outcome in self.outcomes)

    def assert_sound(self) -> None:
        """No wrong answer, no hang, and every error one of those that a caller can tell apart."""
        assert self.outcomes
        for outcome in self.outcomes:
            assert outcome.what != "wrong"
            assert outcome.ended - outcome.sent < TIMEOUT_S
            assert outcome.error is None or isinstance(outcome.error, _TYPED), outcome

    def _send(self, number: int) -> None:
        library: Any = (tritonclient.http, tritonclient.grpc)[number % 2]
        url = f"127.0.0.1:{(self.server.http, self.server.grpc)[number % 2]}"
        if number % 2:
            # Or it would be the client that waits before it connects again.
            waits = ("grpc.initial_reconnect_backoff_ms", "grpc.max_reconnect_backoff_ms")
            options: dict[str, Any] = {"channel_args": [(wait, 200) for wait in waits]}
        else:
            options = {"connection_timeout": TIMEOUT_S, "network_timeout": TIMEOUT_S}
        client = library.InferenceServerClient(url, **options)
        index = number
        while not self._stopped.is_set():
            sample = self._samples[index % len(self._samples)]
            index += 1
            sent = time.monotonic()
            what, error = "answered", None
            try:
                if not self._ask(library, client, sample):
                    what = "wrong"
            except Exception as exc:
                what, error = f"{type(exc).__name__}: {exc}"[:200], exc
            self.outcomes.append(Outcome(sent, time.monotonic(), what, error))
            if error:
                time.sleep(_PAUSE_AFTER_ERROR_S)
        client.close()

    def _ask(self, library: Any, client: Any, sample: tuple[str, np.ndarray]) -> bool:
        text, expected = sample
        tensor = library.InferInput("TEXT", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[text]], dtype=np.object_))
        limit = {"client_timeout": TIMEOUT_S} if library is tritonclient.grpc else {}
        answer = client.infer("sentence_embedding", [tensor], **limit).as_numpy("EMBEDDING")
        return bool(np.abs(answer[0] - expected).max() <= self._tolerance)
