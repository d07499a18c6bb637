"""LitServe, which joins what waits into batches of 8."""

import os

import litserve
from embedder import Embedder


class EmbeddingAPI(litserve.LitAPI):
    def setup(self, device):
        self.embedder = Embedder(threads=1)

    def decode_request(self, request):
        return request["text"]

    def predict(self, texts):
        return self.embedder.embed(texts)

    def encode_response(self, output):
        return {"embedding": output.tolist()}


if __name__ == "__main__":
    api = EmbeddingAPI(max_batch_size=8, batch_timeout=0.01, api_path="/embed")
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=os.cpu_count())
    server.run(host="127.0.0.1", port=int(os.environ["BENCH_PORT"]), log_level="warning", generate_client_file=False)
