"""FastAPI, Pillow and ONNX Runtime, a picture a call: the script that most begin with.

BENCH_MODEL=model.onnx uvicorn fastapi_pictures:app
"""

import io
import os
from typing import Any

import numpy as np
import onnxruntime
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image

_MEAN, _STD = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])

session = onnxruntime.InferenceSession(os.environ["BENCH_MODEL"], providers=["CPUExecutionProvider"])
app = FastAPI()


def classify(content: bytes) -> list[dict[str, Any]]:
    image = Image.open(io.BytesIO(content)).convert("RGB")
    scale = 256 / min(image.size)
    image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = round((image.width - 224) / 2), round((image.height - 224) / 2)
    pixels = np.asarray(image.crop((left, top, left + 224, top + 224)), dtype=np.float32) / 255
    (logits,) = session.run(None, {"pixel_values": ((pixels - _MEAN) / _STD).transpose(2, 0, 1)[None]})
    powers = np.exp(logits[0] - logits[0].max())
    scores = powers / powers.sum()
    return [{"label": str(index), "score": float(scores[index])} for index in np.argsort(-scores)[:5]]


# ONNX Runtime and Pillow let go of the interpreter while they work, so a pool of threads serves.
@app.post("/classify")
async def answer(request: Request) -> list[dict[str, Any]]:
    return await run_in_threadpool(classify, await request.body())
