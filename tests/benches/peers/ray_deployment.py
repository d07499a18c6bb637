"""Ray Serve with `serve.batch`, a replica a core."""

import os
import signal
from pathlib import Path

import ray
from embedder import Embedder
from ray import serve
from starlette.requests import Request


@serve.deployment(num_replicas=os.cpu_count(), max_ongoing_requests=64, ray_actor_options={"num_cpus": 0.9})
class Embedding:
    def __init__(self) -> None:
        self.embedder = Embedder(threads=1)

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.01)
    async def embed(self, texts: list[str]) -> list[list[float]]:
        return self.embedder.embed(texts).tolist()

    async def __call__(self, request: Request) -> dict[str, list[float]]:
        return {"embedding": await self.embed((await request.json())["text"])}


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(Path.cwd())}})
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["BENCH_PORT"])})
    serve.run(Embedding.bind(), route_prefix="/embed")
    signal.signal(signal.SIGTERM, lambda *_: ray.shutdown())
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    ray.shutdown()
