"""MLServer with a runtime of one's own, and its adaptive batching."""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from embedder import Embedder
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse


class EmbeddingModel(MLModel):
    async def load(self) -> bool:
        self.embedder = Embedder(threads=1)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        texts = StringCodec.decode_input(payload.inputs[0])
        vectors = self.embedder.embed(texts)
        output = NumpyCodec.encode_output(name="EMBEDDING", payload=np.asarray(vectors))
        return InferenceResponse(model_name=self.name, outputs=[output])


def main() -> None:
    """Write the settings that `mlserver start` reads, and become it."""
    folder = Path(tempfile.mkdtemp(prefix="bench-mlserver-", dir=os.environ["BENCH_COUNTS"]))
    port = int(os.environ["BENCH_PORT"])
    settings = {
        "host": "127.0.0.1",
        "http_port": port,
        "grpc_port": int(os.environ["BENCH_SECOND_PORT"]),
        "metrics_port": int(os.environ["BENCH_THIRD_PORT"]),
        "parallel_workers": os.cpu_count(),
        "debug": False,
    }
    model = {
        "name": "embed",
        "implementation": "mlserver_runtime.EmbeddingModel",
        "max_batch_size": 8,
        "max_batch_time": 0.01,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "model-settings.json").write_text(json.dumps(model))
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    program = Path(sys.executable).with_name("mlserver")
    os.execv(program, [str(program), "start", str(folder)])


if __name__ == "__main__":
    main()
