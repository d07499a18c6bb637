"""BentoML, whose endpoint takes what waits as one batch."""

import os

import bentoml
import numpy as np
from embedder import Embedder


@bentoml.service(workers=os.cpu_count(), traffic={"timeout": 60, "max_concurrency": 256})
class Embedding:
    def __init__(self) -> None:
        self.embedder = Embedder(threads=1)

    @bentoml.api(batchable=True, max_batch_size=8, max_latency_ms=60000)
    def embed(self, texts: list[str]) -> np.ndarray:
        return self.embedder.embed(texts)
