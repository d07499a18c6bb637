"""The HTTP application: each operation with its path, and around all of them keys, limits, counts and errors."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from . import bodies
from .bodies import Body, read_body
from .call import Call, Reply, read_tracing
from .completions import Writing
from .errors import ApiError, refuse_for_now
from .held import Bodies, Held
from .keys import Key, Keys
from .metrics import Metrics
from .texts import Texts, dump
from .upstream import Served, Upstream

# What anyone may see: whether it works, and how it is asked.
_OPEN = ("/health", "/docs", "/openapi.json")

# Paths of TEI's, whose errors are told in its words.
_TEI = ("/embed", "/rerank", "/predict", "/tokenize")

# Bytes of an answer that is written at once, and of each piece of a longer one.
_SHORT, _PIECE = 16 * 1024, 64 * 1024

_CANCEL_INTERVAL_S = 0.05

# nginx's, for a caller who left before the answer.
_LEFT = 499

_CALL = "modelyard.call"
_JSON = (b"content-type", b"application/json")
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

_DESCRIPTION = """
OpenAI's API, and TEI's, for the models of a modelyard server. What is not in these schemas is refused.
"""


@dataclass(frozen=True)
class Operation:
    """What is asked with POST.

    Attributes:
        path: Where.
        kind: What callers send.
        answer: What becomes of it.
        summary: One line for the page of operations.
    """

    path: str
    kind: type[Body]
    answer: Callable[[Call, Any], Awaitable[Reply]]
    summary: str


class Door:
    """The application, for any server of ASGI.

    Args:
        upstream: Who is asked.
        keys: Who may ask; None for everyone.
        matryoshka: Models whose vectors may be cut.
        max_body: Bytes that a request may have.
    """

    def __init__(self, upstream: Upstream, keys: Keys | None, matryoshka: tuple[str, ...], max_body: int) -> None:
        self._upstream, self._keys, self._max_body = upstream, keys, max_body
        self._metrics = Metrics()
        texts, writing = Texts(upstream, matryoshka), Writing(upstream)
        self._operations = (
            Operation("/v1/embeddings", bodies.Embeddings, texts.embeddings, "Vectors of texts"),
            Operation("/v1/completions", bodies.Completions, writing.complete, "Go on from a prompt"),
            Operation("/v1/chat/completions", bodies.Chat, writing.chat, "Go on with a conversation"),
            Operation("/v1/rerank", bodies.Rerank, texts.rerank, "Order documents by a query"),
            Operation("/embed", bodies.TeiEmbed, texts.tei_embed, "Vectors of texts (TEI)"),
            Operation("/rerank", bodies.TeiRerank, texts.tei_rerank, "Order texts by a query (TEI)"),
            Operation("/predict", bodies.TeiPredict, texts.tei_predict, "Labels of texts or pairs (TEI)"),
            Operation("/tokenize", bodies.TeiTokenize, texts.tei_tokenize, "Tokens of texts (TEI)"),
        )
        self._app = self._build()
        self._routes = {getattr(route, "path", "") for route in self._app.routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever becomes of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        is_model = path.startswith("/v1/models/")
        route = path if path in self._routes else "/v1/models/{name}" if is_model else "other"
        call = Call(route, caller=scope["client"][0] if scope["client"] else "")
        call.tracing = read_tracing(scope["headers"])
        scope[_CALL] = call
        self._metrics.in_flight.inc()
        has_begun = is_stream = False

        async def tell(message: Any) -> None:
            nonlocal has_begun, is_stream
            if message["type"] == "http.response.start":
                has_begun, is_stream = True, _EVENTS[0] in message["headers"]
                call.status = message["status"]
                said = {"x-request-id": call.id} | (call.key.describe() if call.key else {})
                own = [(name.encode(), value.encode()) for name, value in said.items()]
                message["headers"] = [*message["headers"], *own]
            for part in _cut(message):
                await send(part)

        try:
            if self._keys and path not in _OPEN:
                # Known before it is admitted: who is refused is told the limits as well.
                call.key = self._find_key(scope, self._keys)
                call.caller = call.key.name
                call.key.admit()
            await self._app(scope, receive, tell)
        except ApiError as exc:
            await _send_error(tell, path, exc)
        except asyncio.CancelledError:
            # uvicorn has waited for as long as it waits where it is told to stop.
            what = "the gateway is being stopped: expected time for an answer, got none; ask again later."
            # Of a caller who takes nothing it is told once more.
            with contextlib.suppress(asyncio.CancelledError):
                await _end(tell, path, refuse_for_now(what), has_begun=has_begun, is_stream=is_stream)
        finally:
            self._account(call)

    def _find_key(self, scope: Scope, keys: Keys) -> Key:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        return keys.find(given.decode("latin-1") if given else None)

    def _account(self, call: Call) -> None:
        metrics = self._metrics
        metrics.in_flight.dec()
        metrics.requests.labels(call.route, call.status).inc()
        metrics.seconds.labels(call.route).observe(time.perf_counter() - call.began)
        for (model, kind), tokens in call.used.items():
            metrics.tokens.labels(model, kind).inc(tokens)
        if call.key:
            call.key.charge(sum(call.used.values()))

    def _build(self) -> FastAPI:
        app = FastAPI(
            title="modelyard gateway",
            description=_DESCRIPTION,
            lifespan=self._live,
            redoc_url=None,
            exception_handlers={
                ApiError: _explain_refusal,
                HTTPException: _explain_status,
                Exception: _explain_failure,
            },
        )
        app.get("/v1/models", summary="Models that can be asked")(self._list_models)
        app.get("/v1/models/{name:path}", summary="One of them")(self._show_model)
        app.get("/health", summary="Whether there is a model to ask")(self._tell_health)
        app.head("/health", include_in_schema=False)(self._tell_health)
        app.get("/metrics", summary="What Prometheus reads")(self._show_metrics)
        held = Bodies(self._max_body)
        for operation in self._operations:
            # Not FastAPI's own: it would read a body twice as slowly, and tell its errors in its words.
            endpoint = _Endpoint(operation, held)
            app.router.routes.append(Route(operation.path, endpoint, methods=["POST"], include_in_schema=False))
        describe = app.openapi

        def describe_all() -> dict[str, Any]:
            if not app.openapi_schema:
                app.openapi_schema = _add_operations(describe(), self._operations, has_keys=self._keys is not None)
            return app.openapi_schema

        app.openapi = describe_all  # type: ignore[method-assign]
        return app

    @contextlib.asynccontextmanager
    async def _live(self, app: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(self._upstream.follow())
        try:
            yield
        finally:
            following.cancel()
            await self._upstream.close()

    async def _list_models(self) -> Response:
        return _answer({"object": "list", "data": [_describe(served) for served in self._upstream.models]})

    async def _show_model(self, name: str) -> Response:
        return _answer(_describe(self._upstream.find(name)))

    async def _tell_health(self) -> Response:
        problem = self._upstream.problem
        return _answer({"status": "not ready" if problem else "ready"}, 503 if problem else 200)

    async def _show_metrics(self) -> Response:
        self._metrics.ready.set(not self._upstream.problem)
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")


class _Endpoint:
    """An operation, as Starlette calls it."""

    def __init__(self, operation: Operation, bodies: Bodies) -> None:
        self._operation, self._bodies = operation, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope[_CALL]
        async with self._bodies.read(call.caller, scope, receive) as held:
            await self._answer_while_asked(call, held, receive, send)

    async def _answer_while_asked(self, call: Call, held: Held, receive: Receive, send: Send) -> None:
        # Nothing more comes of a caller but that it leaves, and then nobody needs the answer.
        leaving = asyncio.ensure_future(receive())
        # Where many wait, some have left by now: what they sent is not even looked at.
        await asyncio.sleep(0)
        if leaving.done():
            call.status = _LEFT
            return
        work = asyncio.ensure_future(self._answer(call, held, send))
        try:
            await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
            # Again and again: `asyncio.wait_for` of Python 3.11 forgets that it was cancelled where a piece just came.
            while leaving.done() and not work.done():
                work.cancel()
                await asyncio.wait((work,), timeout=_CANCEL_INTERVAL_S)
        finally:
            leaving.cancel()
            work.cancel()
        if work.cancelled():
            call.status = _LEFT
            return
        work.result()

    async def _answer(self, call: Call, held: Held, send: Send) -> None:
        call.hold = held.resize
        reply = await self._operation.answer(call, read_body(self._operation.kind, held.take_body()))
        if isinstance(reply, bytes):
            held.resize(len(reply))
            await _send(send, 200, [_JSON, (b"content-length", str(len(reply)).encode())], reply)
            return
        async with contextlib.aclosing(reply):
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            async for event in reply:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _describe(served: Served) -> dict[str, Any]:
    return {"id": served.name, "object": "model", "created": served.files.created, "owned_by": "modelyard"}


def _answer(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump(content), status, headers, media_type="application/json")


def _tell_error(path: str, exc: ApiError) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error, in the words of the API whose path was asked."""
    return exc.to_tei() if path in _TEI else exc.to_openai()


def _answer_error(request: Request, exc: ApiError) -> Response:
    status, content = _tell_error(request.url.path, exc)
    return _answer(content, status, exc.headers)


async def _explain_refusal(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, ApiError)
    return _answer_error(request, exc)


async def _explain_status(request: Request, exc: Exception) -> Response:
    """Say that there is no such path, or not with this method."""
    assert isinstance(exc, HTTPException)
    what = {
        404: f"there is no {request.url.path[:100]}: expected one of the paths that /docs shows.",
        405: f"{request.url.path[:100]} is not asked with {request.method}: expected what /docs shows.",
    }.get(exc.status_code, str(exc.detail))
    return _answer_error(request, ApiError(exc.status_code, what, headers=exc.headers))


async def _explain_failure(request: Request, exc: Exception) -> Response:
    return _answer_error(request, ApiError(500, "the gateway failed on this request.", type="server_error"))


async def _send_error(send: Callable[[Any], Awaitable[None]], path: str, exc: ApiError) -> None:
    status, content = _tell_error(path, exc)
    headers = [_JSON, *((name.encode(), value.encode()) for name, value in exc.headers.items())]
    body = dump(content)
    await _send(send, status, [*headers, (b"content-length", str(len(body)).encode())], body)


async def _send(
    send: Callable[[Any], Awaitable[None]], status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _end(
    send: Callable[[Any], Awaitable[None]], path: str, exc: ApiError, *, has_begun: bool, is_stream: bool
) -> None:
    """Tell in an answer's own form why it does not come, or not to its end."""
    if not has_begun:
        await _send_error(send, path, exc)
    elif is_stream:
        await send({"type": "http.response.body", "body": b"data: " + dump(exc.to_openai()[1]) + b"\n\n"})


def _cut(message: Any) -> list[Any]:
    """Return the pieces in which a message is written, of which each waits for the caller to take the one before.

    The first is the odd one, and the end a piece of its own: so an answer is over once its caller has taken all of it.
    """
    body = memoryview(message.get("body", b""))
    if len(body) <= _SHORT:
        return [message]
    begins = [0, *range(len(body) % _PIECE or _PIECE, len(body), _PIECE), len(body)]
    pieces = [body[begin:end] for begin, end in pairwise(begins)]
    parts = [{"type": "http.response.body", "body": piece, "more_body": True} for piece in pieces]
    return [*parts, {**message, "body": b""}]


def _add_operations(schema: dict[str, Any], operations: tuple[Operation, ...], *, has_keys: bool) -> dict[str, Any]:
    """Return FastAPI's description of the application, with the operations that are not FastAPI's."""
    components = schema.setdefault("components", {})
    known = components.setdefault("schemas", {})
    for operation in operations:
        described = operation.kind.model_json_schema(ref_template="#/components/schemas/{model}")
        known |= described.pop("$defs", {})
        known[operation.kind.__name__] = described
        reference = {"$ref": f"#/components/schemas/{operation.kind.__name__}"}
        schema["paths"][operation.path] = {
            "post": {
                "summary": operation.summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
                "responses": {
                    "200": {"description": "The answer"},
                    "4XX": {"description": "What is wrong with the request, as OpenAI's API says it"},
                    "5XX": {"description": "Why there is no answer"},
                },
            }
        }
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
    return schema
