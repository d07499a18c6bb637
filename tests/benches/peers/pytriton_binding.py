"""PyTriton: a function bound to a model of Triton, whose dynamic batcher joins what waits."""

import os

import numpy as np
from embedder import Embedder
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def build_function():
    """Return the function of one instance: PyTriton runs each in a process of its own."""
    embedder = Embedder(threads=1)

    @batch
    def embed(TEXT):  # noqa: N803
        return {"EMBEDDING": embedder.embed([text.decode() for text in TEXT[:, 0]])}

    return embed


if __name__ == "__main__":
    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=int(os.environ["BENCH_PORT"]),
        grpc_port=int(os.environ["BENCH_SECOND_PORT"]),
        metrics_port=int(os.environ["BENCH_THIRD_PORT"]),
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name="embed",
            infer_func=[build_function() for _ in range(os.cpu_count() or 1)],
            inputs=[Tensor(name="TEXT", dtype=bytes, shape=(1,))],
            outputs=[Tensor(name="EMBEDDING", dtype=np.float32, shape=(-1,))],
            config=ModelConfig(max_batch_size=8, batcher=DynamicBatcher(max_queue_delay_microseconds=10_000)),
        )
        triton.serve()
