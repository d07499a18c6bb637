"""KServe's own clients, asked as its pages show; prints the vectors that they were answered as JSON.

.cache/doors/bin/python tests/client/kserve_client.py http://localhost:8000 localhost:8001 sentence_embedding
"""

import asyncio
import json
import sys

from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

TEXTS = ["A cat sleeps.", "A kitten naps."]


async def main(http: str, grpc: str, model: str) -> None:
    texts = InferInput(name="TEXT", shape=[2, 1], datatype="BYTES", data=[text.encode() for text in TEXTS])
    plain = InferInput(name="TEXT", shape=[2, 1], datatype="BYTES", data=TEXTS)
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    remote = InferenceGRPCClient(url=grpc)
    # Over REST it reads a JSON body there, which tritonserver does not send.
    ready = [await remote.is_server_ready(), await remote.is_model_ready(model_name=model)]
    answers = [
        await rest.infer(http, InferRequest(model_name=model, infer_inputs=[plain]), model_name=model),
        await remote.infer(InferRequest(model_name=model, infer_inputs=[texts])),
    ]
    vectors = [answer.outputs[0].as_numpy().tolist() for answer in answers]
    sys.stdout.write(json.dumps({"ready": ready, "vectors": vectors}))
    await rest.close()
    await remote.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
