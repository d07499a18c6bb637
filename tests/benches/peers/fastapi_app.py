"""FastAPI and ONNX Runtime, a text a call: the script that most begin with."""

import os

from embedder import Embedder
from fastapi import FastAPI
from pydantic import BaseModel

embedder = Embedder(threads=int(os.environ.get("BENCH_THREADS", "0")))
app = FastAPI()


class Question(BaseModel):
    text: str


# Not `async`: FastAPI runs it in a pool of threads, and ONNX Runtime lets go of the interpreter while it computes.
@app.post("/embed")
def embed(question: Question) -> dict[str, list[float]]:
    return {"embedding": embedder.embed([question.text])[0].tolist()}
