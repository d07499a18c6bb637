"""Text that a model writes, piece by piece: over gRPC in a stream, over HTTP as server-sent events."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp
import grpc
import numpy as np
import numpy.typing as npt
import tritonclient.grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from .errors import DeadlineError, GarbledError, ModelError, UsageError
from .faults import FAILURES, UnreadableError, explain, reading_answer
from .http_answer import BoundedResponse
from .pieces import Text, encode
from .session import Session, make_trust
from .ways import find_way

# What a model that generates text calls its input, and what it makes.
PROMPT, WRITTEN = "text_input", "text_output"

# A whole answer is one line.
_LINE_BYTES = 1 << 24
_REFUSAL_BYTES = 1 << 16

_JSON = {"Content-Type": "application/json"}

# An error within a stream is a sentence alone: the request is refused, unless that says something else.
_UNTOLD = "400"

Values = Mapping[str, npt.NDArray[Any]]
Answer = dict[str, list[Any]]


async def generate(
    session: Session, prompt: Text, model: str | None, parameters: Mapping[str, Any]
) -> AsyncGenerator[str, None]:
    """Yield what a model writes after a prompt, as `write` does.

    Args:
        session: The server.
        prompt: As it is: a chat's template is not applied.
        model: Whom to ask; None for the one that generates text.
        parameters: Such as `max_tokens` and `temperature`; docs/generation.md has them all.

    Raises:
        ClientError: The server refuses or does not answer, or the connection breaks.
    """
    check_parameters(parameters)
    texts = {PROMPT: encode([prompt]), "sampling_parameters": [json.dumps(parameters).encode()]}
    inputs = {name: np.array(values, dtype=np.object_) for name, values in texts.items()}
    pieces = write(session, await find_writer(session, model), inputs)
    try:
        async for piece in pieces:
            yield piece
    finally:
        await pieces.aclose()


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Refuse what asks for several answers: their pieces would come as one text.

    Raises:
        UsageError: It does.
    """
    if parameters.get("n", 1) not in (1, "1", None):
        raise UsageError(
            "n asks for several answers",
            expected="1, for what comes back is one text",
            got=str(parameters["n"])[:40],
            remedy="ask several times, or ask for the tensors themselves",
        )


async def write(session: Session, model: str, inputs: Values, *, is_streamed: bool = True) -> AsyncGenerator[str, None]:
    """Yield what a model writes, in pieces as they come, as `listen` does.

    Raises:
        ClientError: The server refuses or does not answer, or the connection breaks.
    """
    async with aclosing(listen(session, model, inputs, is_streamed=is_streamed)) as answers:
        async for answer in answers:
            with reading_answer(model):
                if len(texts := answer[WRITTEN]) != 1:
                    raise UnreadableError(f"{len(texts)} texts in one piece")
                # Half a character is none.
                piece = texts[0].encode("utf-8", errors="replace").decode()
            yield piece


async def listen(
    session: Session,
    model: str,
    inputs: Values,
    *,
    is_streamed: bool = True,
    headers: Mapping[str, str] | None = None,
) -> AsyncGenerator[Answer, None]:
    """Yield what a model answers to a prompt, as it comes; closed early, it cancels the request.

    It is asked again only until the first answer is there: another one would be another text.

    Args:
        session: The server.
        model: One that generates text.
        inputs: Name → its one value, as `text_input`.
        is_streamed: Whether there are several answers.
        headers: Of this request alone.

    Yields:
        Output name → its values: of `text_output` what is new of each of the texts that were asked for.

    Raises:
        ClientError: The server refuses or does not answer, or the connection breaks.
    """
    ask = {"http": _listen_http, "grpc": _listen_grpc}[session.options.protocol]
    asked = {**inputs, "stream": np.array([is_streamed])}

    async def begin(client: Any) -> tuple[AsyncGenerator[Answer, None], Answer | None]:
        answers = ask(session, client, model, asked, {**session.options.sent_headers, **(headers or {})})
        return answers, await anext(answers, None)

    answers, answer = await session.repeat(begin)
    if answer is None:
        raise GarbledError(
            f"{model} answers nothing",
            expected="an answer, if only an empty text",
            got="the end of the stream",
            remedy="look at the model, and at what stands in front of its server",
        )
    try:
        while answer is not None:
            yield answer
            answer = await anext(answers, None)
    # tritonserver 2.51 keeps a stream open whose backend process has died.
    except (asyncio.TimeoutError, TimeoutError) as exc:
        raise DeadlineError(
            f"the text of {model} breaks off",
            expected=f"another piece within {session.options.timeout_s:g} s",
            got="none",
            remedy=f"ask again, or raise {word}" if (word := session.options.words.timeout) else "ask again",
        ) from exc
    except FAILURES as exc:
        raise explain(exc, session.options) from exc
    finally:
        # Whoever has heard enough cancels the request with it.
        await answers.aclose()


async def find_writer(session: Session, name: str | None) -> str:
    """Return the name of the model that generates text: the one named, or the one there is.

    Raises:
        ClientError: There is none, or not exactly one, or the one that is named takes no prompt.
    """
    name = session.choose(name)
    if name is None:
        models = [await session.find_model(each) for each in await session.list_models()]
        writers = [model.name for model in models if PROMPT in model.inputs]
        if len(writers) == 1:
            return writers[0]
        raise ModelError(
            f"there is not exactly one model that generates text at {session.options.address}",
            expected="one",
            got=", ".join(writers) or "none",
            remedy=f"choose with {session.options.words.model}",
        )
    model = await session.find_model(name)
    if PROMPT not in model.inputs:
        raise ModelError(
            f"{name} generates no text",
            expected=f"an input {PROMPT}",
            got=", ".join(model.inputs),
            remedy=await find_way(session, model),
        )
    return name


async def _listen_grpc(
    session: Session, client: Any, model: str, inputs: Values, said: Mapping[str, str]
) -> AsyncGenerator[Answer, None]:
    options = session.options
    tensors = []
    for name, values in inputs.items():
        tensors.append(tritonclient.grpc.InferInput(name, [1], np_to_triton_dtype(values.dtype)))
        tensors[-1].set_data_from_numpy(values)

    async def ask() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": tensors}

    # Without `triton_grpc_error`, with which an error has a status: tritonserver 2.51 dies of one in some hundreds.
    headers = {name.lower(): value for name, value in said.items()}
    answers = client.stream_infer(ask(), headers=headers, compression_algorithm=options.compression)
    try:
        while True:
            # The answer takes as long as it takes; each piece has its time.
            try:
                result, error = await asyncio.wait_for(anext(answers), options.timeout_s)
            except StopAsyncIteration:
                return
            if error is not None:
                raise InferenceServerException(msg=error.message(), status=_UNTOLD)
            with reading_answer(model):
                piece = _read_piece(model, result)
            yield piece
    except grpc.RpcError as exc:
        raise InferenceServerException(msg=exc.details(), status=str(exc.code())) from exc
    finally:
        answers.cancel()


def _read_piece(model: str, result: Any) -> Answer:
    answer = result.get_response()
    _check_model(model, answer.model_name)
    return {
        tensor.name: [_to_text(value) for value in result.as_numpy(tensor.name).tolist()] for tensor in answer.outputs
    }


def _check_model(model: str, said: Any) -> None:
    """Refuse a piece of another model's.

    Raises:
        UnreadableError: It is one.
    """
    if said not in (None, model):
        raise UnreadableError(f"the answer of {said!r}")


async def _listen_http(
    session: Session, client: Any, model: str, inputs: Values, headers: Mapping[str, str]
) -> AsyncGenerator[Answer, None]:
    options = session.options
    # tritonclient has no such call.
    times = aiohttp.ClientTimeout(total=None, sock_connect=options.timeout_s, sock_read=options.timeout_s)
    asked = {
        name: _to_text(values[0]) if values.dtype == object else values[0].item() for name, values in inputs.items()
    }
    # Letters as they are: escaped, those of many languages take twice as much of what a proxy lets through.
    body = json.dumps(asked, ensure_ascii=False).encode(errors="surrogatepass")
    ending = "generate_stream" if asked["stream"] else "generate"
    url = f"{'https' if options.is_encrypted else 'http'}://{options.address}/v2/models/{quote(model)}/{ending}"
    connector = aiohttp.TCPConnector(ssl=make_trust(options))
    async with (
        aiohttp.ClientSession(
            connector=connector,
            timeout=times,
            headers=headers,
            read_bufsize=_LINE_BYTES,
            response_class=BoundedResponse,
        ) as connection,
        connection.post(url, data=body, headers=_JSON) as answer,
    ):
        if answer.status != 200:
            told = _read_error(await asyncio.wait_for(_read_start(answer), options.timeout_s))
            if answer.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                # No word of the server's, which has no such limit.
                told = f"what stands in front of it takes no JSON of {len(body)} bytes over HTTP; ask over gRPC"
            raise InferenceServerException(msg=told, status=str(answer.status))
        events = _read_events(answer) if asked["stream"] else _read_whole(answer)
        with reading_answer(model):
            # The answer takes as long as it takes; each piece has its time, whatever else comes meanwhile.
            while (text := await asyncio.wait_for(anext(events, None), options.timeout_s)) is not None:
                event = json.loads(text)
                _check_model(model, event.get("model_name"))
                # One value stands there without a list.
                said = {name: values if isinstance(values, list) else [values] for name, values in event.items()}
                if "error" in said:
                    raise InferenceServerException(msg=str(said["error"][0]), status=_UNTOLD)
                yield said


async def _read_events(answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Yield the data of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    data, count = [], 0
    async for line in answer.content:
        field, _, value = line.rstrip(b"\r\n").partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
            count += len(line)
            if count > _LINE_BYTES:
                raise UnreadableError(f"an event of more than {_LINE_BYTES >> 20} MB")
        elif field not in (b"", b"event", b"id", b"retry"):
            raise UnreadableError(f"no event: {line[:80].decode(errors='replace')}")
        # A line without anything ends an event; one without a field is a comment, as proxies send to be heard.
        if not line.strip() and data:
            yield b"\n".join(data)
            data, count = [], 0
    if data:
        yield b"\n".join(data)


async def _read_start(answer: aiohttp.ClientResponse) -> str:
    """Return as much of a refusal as anybody would read."""
    body = b""
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > _REFUSAL_BYTES:
            break
    return body[:_REFUSAL_BYTES].decode(errors="replace")


async def _read_whole(answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    yield await answer.read()


def _to_text(value: Any) -> Any:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value


def _read_error(body: str) -> str:
    try:
        # An event, even where the whole answer is refused.
        return str(json.loads(body.removeprefix("data: "))["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return " ".join(body.split())[:200]
