"""Stands in for Triton's vLLM backend, which is in NVIDIA's image alone: reads and answers what that one does.

Its source, as of release 26.07: github.com/triton-inference-server/vllm_backend, `src/model.py` and `src/utils`.
Without adapters, pictures, embeddings and metrics, which are not published.
"""

import asyncio
import json
import threading
import traceback
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """One engine, which batches by itself."""

    def initialize(self, args: dict[str, str]) -> None:
        """Make the engine of what `model.json` says, as it is."""
        config = json.loads(args["model_config"])
        assert pb_utils.using_decoupled_model_transaction_policy(config)
        arguments = json.loads((Path(pb_utils.get_model_dir()) / "model.json").read_text())
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

        async def make() -> AsyncLLM:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        self.engine = asyncio.run_coroutine_threadsafe(make(), self.loop).result()

    def execute(self, requests: list[Any]) -> None:
        """Answer each request when it is done, in as many pieces as it asks for."""
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._answer(request), self.loop)

    def finalize(self) -> None:
        """End the engine."""
        self.engine.shutdown()

    async def _answer(self, request: Any) -> None:
        sender = request.get_response_sender()
        try:
            await self._write(request, sender)
        except Exception as exc:
            pb_utils.Logger.log_error(traceback.format_exc())
            error = pb_utils.TritonError(f"Error generating stream: {exc}")
            sender.send(pb_utils.InferenceResponse(error=error), FINAL)

    async def _write(self, request: Any, sender: Any) -> None:
        prompt = _read(request, "text_input", b"").decode()
        stream = bool(_read(request, "stream", False))
        exclude = _read(request, "exclude_input_in_output", stream)
        parameters = json.loads(_read(request, "sampling_parameters", None) or request.parameters())
        sampling = SamplingParams(**{name: value for name, value in parameters.items() if value is not None})
        sent_characters = sent_tokens = 0
        async for made in self.engine.generate(prompt, sampling, uuid.uuid4().hex):
            if not stream and not made.finished:
                continue
            text, tokens = made.outputs[0].text, len(made.outputs[0].token_ids)
            begin = prompt if not exclude and not stream else ""
            answer = _build_answer(request, made, begin + text[sent_characters:], tokens - sent_tokens)
            sender.send(answer, FINAL if made.finished else 0)
            sent_characters, sent_tokens = len(text), tokens


def _read(request: Any, name: str, default: Any) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy()[0]


def _build_answer(request: Any, made: Any, text: str, tokens: int) -> Any:
    wanted = {
        "finish_reason": np.asarray([str(made.outputs[0].finish_reason)], dtype=np.object_),
        "num_input_tokens": np.asarray([len(made.prompt_token_ids)], dtype=np.uint32),
        "num_output_tokens": np.asarray([tokens], dtype=np.uint32),
    }
    tensors = [pb_utils.Tensor("text_output", np.asarray([text.encode()], dtype=np.object_))]
    tensors += [
        pb_utils.Tensor(name, values) for name, values in wanted.items() if _read(request, f"return_{name}", False)
    ]
    return pb_utils.InferenceResponse(output_tensors=tensors)
