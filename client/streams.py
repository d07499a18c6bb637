"""Text that a model writes, piece by piece: over gRPC in a stream, over HTTP as server-sent events."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
import grpc
import numpy as np
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from .errors import ModelError
from .faults import FAILURES, explain
from .pieces import Text, encode
from .session import Session, make_trust

_PROMPT, _WRITTEN = "text_input", "text_output"


async def generate(
    session: Session, prompt: Text, model: str | None, parameters: Mapping[str, Any]
) -> AsyncGenerator[str, None]:
    """Yield what a model writes after a prompt, as it comes.

    It is asked again only until the first piece is there: another answer would be another text.

    Args:
        session: The server.
        prompt: As it is: a chat's template is not applied.
        model: Whom to ask.
        parameters: Such as `max_tokens` and `temperature`; docs/generation.md has them all.

    Raises:
        ClientError: The server refuses or does not answer, or the connection breaks.
    """
    name = model or session.options.model
    if name is None:
        raise ModelError(
            "no model is named", expected="one that writes text", remedy=f"choose with {session.options.words.model}"
        )
    listen = {"http": _listen_http, "grpc": _listen_grpc}[session.options.protocol]

    async def begin(client: Any) -> tuple[AsyncGenerator[str, None], str | None]:
        pieces = listen(session, client, name, encode([prompt])[0], parameters)
        return pieces, await anext(pieces, None)

    pieces, piece = await session.repeat(begin)
    try:
        while piece is not None:
            yield piece
            piece = await anext(pieces, None)
    except FAILURES as exc:
        raise explain(exc, session.options) from exc
    finally:
        # Whoever has heard enough cancels the request with it.
        await pieces.aclose()


async def _listen_grpc(
    session: Session, client: Any, model: str, prompt: bytes, parameters: Mapping[str, Any]
) -> AsyncGenerator[str, None]:
    values = {
        _PROMPT: np.array([prompt], dtype=np.object_),
        "stream": np.array([True]),
        "sampling_parameters": np.array([json.dumps(parameters).encode()], dtype=np.object_),
    }
    tensors = []
    for name, value in values.items():
        tensors.append(tritonclient.grpc.InferInput(name, [1], "BOOL" if name == "stream" else "BYTES"))
        tensors[-1].set_data_from_numpy(value)

    async def ask() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": tensors}

    # With that header an error has a status; without it, a sentence alone.
    headers = {name.lower(): value for name, value in session.options.headers.items()} | {"triton_grpc_error": "true"}
    answers = client.stream_infer(ask(), headers=headers, compression_algorithm=session.options.compression)
    try:
        async for result, error in answers:
            if error is not None:
                raise error
            yield result.as_numpy(_WRITTEN)[0].decode()
    except grpc.RpcError as exc:
        raise InferenceServerException(msg=exc.details(), status=str(exc.code())) from exc
    finally:
        answers.cancel()


async def _listen_http(
    session: Session, client: Any, model: str, prompt: bytes, parameters: Mapping[str, Any]
) -> AsyncGenerator[str, None]:
    options = session.options
    # tritonclient has no such call. The answer takes as long as it takes; each piece has its time.
    times = aiohttp.ClientTimeout(total=None, sock_connect=options.timeout_s, sock_read=options.timeout_s)
    body = {_PROMPT: prompt.decode(), "stream": True, **parameters}
    url = f"{'https' if options.tls else 'http'}://{options.url}/v2/models/{quote(model)}/generate_stream"
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=make_trust(options)), timeout=times, headers=options.headers
        ) as connection,
        connection.post(url, json=body) as answer,
    ):
        if answer.status != 200:
            raise InferenceServerException(msg=_read_error(await answer.text()), status=str(answer.status))
        async for line in answer.content:
            if line.startswith(b"data:"):
                event = json.loads(line[5:])
                if "error" in event:
                    raise InferenceServerException(msg=event["error"], status="400")
                yield event[_WRITTEN]


def _read_error(body: str) -> str:
    try:
        # An event, even where the whole answer is refused.
        return str(json.loads(body.removeprefix("data: "))["error"])
    except (ValueError, KeyError, TypeError):
        return " ".join(body.split())[:200]
