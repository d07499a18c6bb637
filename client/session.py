"""One server, asked over HTTP or gRPC: a pool of connections, a bound on what is in flight, and what is sent again."""

import asyncio
import concurrent.futures
import contextlib
import random
import ssl
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import np_to_triton_dtype

from .errors import ClientError, CrashError, GarbledError, ModelError, UnreachableError, UsageError
from .faults import FAILURES, explain, reading, reading_answer
from .http_answer import BoundedResponse
from .model import Model, read_model
from .options import Options
from .outputs import Answered, read_outputs, read_version
from .ports import find_wrong_port

T = TypeVar("T")

# What tritonserver calls models that take what a person would send: an ensemble's steps in as many models, or in one.
_PLATFORMS = ("ensemble", "python_lean")

# Between two attempts: a random time up to a bound that doubles, so that many clients do not come back at once.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0

# A request that kills what computes it is handed to so many more processes, no faster than these are started anew.
_MOST_CRASHES, _CRASH_PAUSE_S = 3, 1.0

_CLOSE_TIMEOUT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class _Protocol:
    """What differs between the two clients of tritonclient.

    Attributes:
        library: Where its tensors are.
        open: Makes the client, with its pool of connections; inside of the event loop.
        ask_options: What each call takes beside its arguments.
        infer_options: What an inference takes beside these.
        has_json: Whether a tensor may travel inside of JSON.
    """

    library: ModuleType
    open: Callable[[Options], Any]
    ask_options: Callable[[Options], dict[str, Any]]
    infer_options: Callable[[Options], dict[str, Any]]
    has_json: bool


def _open_http(options: Options) -> Any:
    client = tritonclient.http.aio.InferenceServerClient(
        options.address,
        conn_limit=options.in_flight,
        conn_timeout=options.timeout_s,
        ssl=options.is_encrypted,
        ssl_context=make_trust(options),
    )
    # tritonclient passes nothing on to aiohttp's session.
    client._stub._response_class = BoundedResponse
    return client


def make_trust(options: Options) -> ssl.SSLContext | bool:
    """Return what aiohttp is to take for a server's proof of its name."""
    return ssl.create_default_context(cafile=options.ca) if options.is_encrypted else True


def _open_grpc(options: Options) -> Any:
    return tritonclient.grpc.aio.InferenceServerClient(
        options.address,
        ssl=options.is_encrypted,
        root_certificates=str(options.ca) if options.ca else None,
        channel_args=[
            ("grpc.max_send_message_length", tritonclient.grpc.MAX_GRPC_MESSAGE_SIZE),
            ("grpc.max_receive_message_length", tritonclient.grpc.MAX_GRPC_MESSAGE_SIZE),
            # Left alone, gRPC pauses up to two minutes before it looks again for a server that was not there.
            ("grpc.max_reconnect_backoff_ms", 1000),
        ],
    )


_PROTOCOLS = {
    "http": _Protocol(
        library=tritonclient.http,
        open=_open_http,
        ask_options=lambda options: {"headers": options.sent_headers},
        infer_options=lambda options: {
            "request_compression_algorithm": options.compression,
            "response_compression_algorithm": options.compression,
        },
        has_json=True,
    ),
    "grpc": _Protocol(
        library=tritonclient.grpc,
        open=_open_grpc,
        ask_options=lambda options: {
            # gRPC knows names in lower case alone.
            "headers": {name.lower(): value for name, value in options.sent_headers.items()},
            "client_timeout": options.timeout_s,
        },
        infer_options=lambda options: {"compression_algorithm": options.compression},
        has_json=False,
    ),
}


class Session:
    """A server; it belongs to the event loop in which it was first asked."""

    def __init__(self, options: Options) -> None:
        """Prepare to ask; nothing is sent yet."""
        self.options = options
        self._protocol = _PROTOCOLS[options.protocol]
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._models: dict[str | None, Model] = {}

    async def close(self) -> None:
        """Close the connections; whoever asks again opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            self._forget.detach()
            await client.close()

    async def find_model(self, name: str | None = None) -> Model:
        """Return the model named, that of the options, or the one ensemble there is; asked for once.

        Raises:
            ClientError: There is no such model, or not exactly one ensemble, or no answer.
        """
        name = self.choose(name)
        self._open()
        # Many tasks that begin at the same time ask once.
        async with self._finding:
            if name not in self._models:
                self._models[name] = await self.describe(await self._find_ensemble() if name is None else name)
            return self._models[name]

    def choose(self, name: str | None) -> str | None:
        """Return the model named, that of the options, or None.

        Raises:
            UsageError: Its name is empty, as a variable of a shell may be that is not set, or a path.
        """
        name = self.options.model if name is None else name
        if name == "":
            raise UsageError(
                f"{self.options.words.model} is empty",
                expected="the name of a model",
                got="''",
                remedy="leave it out to ask the one there is",
            )
        # Over HTTP a path would lead to another model, or to what is none.
        if name is not None and ("/" in name or name in (".", "..")):
            raise UsageError(
                f"{self.options.words.model} is a path",
                expected="the name of a model, which is that of a folder",
                got=repr(name),
                remedy="correct it",
            )
        return name

    async def list_models(self) -> list[str]:
        """Return the names of all models that the server has loaded, steps included.

        Raises:
            ClientError: The server does not answer.
        """
        return sorted({name for name, _ in await self.list_versions()})

    async def list_versions(self) -> set[tuple[str, str]]:
        """Return name and version of all models that the server has loaded, steps included.

        Raises:
            ClientError: The server does not answer.
        """
        answer = await self._describe("get_inference_statistics")
        with reading(self.options):
            # gRPC leaves out an empty list.
            statistics = answer["model_stats"] if self._protocol.has_json else answer.get("model_stats", [])
            return {(str(entry["name"]), str(entry["version"])) for entry in statistics}

    async def describe(self, name: str) -> Model:
        """Return a model as the server describes it now.

        Raises:
            ClientError: There is no such model, or no answer.
        """
        metadata, config = await gather(
            [self._describe("get_model_metadata", name), self._describe("get_model_config", name)]
        )
        with reading(self.options):
            return read_model(name, metadata, config)

    async def infer(
        self,
        model: Model,
        inputs: Mapping[str, npt.NDArray[Any]],
        outputs: Iterable[str] | None = None,
        *,
        binary: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> Answered:
        """Return what a model answers to one request.

        Args:
            model: Whom to ask: its active version, which may change from one request to the next.
            inputs: Name → values; strings as objects.
            outputs: Names of those that are wanted; None for all.
            binary: Over HTTP, whether tensors travel as bytes behind the JSON or inside it.
            headers: Of this request alone, beside those of the options.

        Raises:
            ClientError: The server refuses or does not answer, or the model answers in pieces.
        """
        if model.is_decoupled:
            prompt = self.options.words.prompt
            raise ModelError(
                f"{model.name} answers in pieces",
                expected="a model with one answer to a request",
                got="a decoupled one",
                remedy=f"ask it with {prompt} where it takes one, else with `stream_infer` of tritonclient.grpc",
            )
        library = self._protocol.library
        encoding = {"binary_data": binary} if self._protocol.has_json else {}
        names = tuple(outputs or model.outputs)

        async def ask(client: Any) -> Answered:
            # Made anew for each attempt: they are as large as the request.
            tensors = []
            for name, values in inputs.items():
                tensor = library.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
                tensor.set_data_from_numpy(np.ascontiguousarray(values), **encoding)
                tensors.append(tensor)
            asked = self._protocol.ask_options(self.options)
            asked["headers"].update(headers or {})
            with reading_answer(model.name):
                result = await client.infer(
                    model.name,
                    tensors,
                    outputs=[library.InferRequestedOutput(name, **encoding) for name in names],
                    **asked,
                    **self._protocol.infer_options(self.options),
                )
                arrays = read_outputs(model, result, names, rows=next(map(len, inputs.values()), 0))
                return Answered(read_version(result), arrays)

        return await self.repeat(ask)

    async def _describe(self, method: str, *arguments: str) -> dict[str, Any]:
        as_json = {} if self._protocol.has_json else {"as_json": True}

        async def ask(client: Any) -> dict[str, Any]:
            answer: dict[str, Any] = await getattr(client, method)(
                *arguments, **self._protocol.ask_options(self.options), **as_json
            )
            return answer

        return await self.repeat(ask)

    async def _find_ensemble(self) -> str:
        names = await self.list_models()
        metadata = await gather([self._describe("get_model_metadata", name) for name in names])
        with reading(self.options):
            ensembles = [name for name, one in zip(names, metadata, strict=True) if one["platform"] in _PLATFORMS]
        if len(ensembles) == 1:
            return ensembles[0]
        raise ModelError(
            f"there is not exactly one ensemble at {self.options.address}",
            expected="one",
            got=", ".join(ensembles) or "none",
            remedy=f"choose with {self.options.words.model}",
        )

    async def repeat(self, ask: Callable[[Any], Awaitable[T]]) -> T:
        """Ask, and ask again what may be repeated while there is time for it; a pause keeps its place in flight."""
        client = self._open()
        loop = asyncio.get_running_loop()
        deadline, bound, crashes = loop.time() + self.options.retry_s, _FIRST_PAUSE_S, 0
        async with self._slots:
            while True:
                try:
                    return await ask(client)
                except FAILURES as exc:
                    error = explain(exc, self.options)
                    # Before the first pause: the wrong port does not become the right one.
                    if bound == _FIRST_PAUSE_S:
                        error = await self._look_closer(error)
                    pause = random.uniform(0, bound)
                    if isinstance(error, CrashError):
                        crashes += 1
                        pause += _CRASH_PAUSE_S
                    if not error.may_repeat or crashes > _MOST_CRASHES or loop.time() + pause > deadline:
                        raise error from exc
                await asyncio.sleep(pause)
                bound = min(2 * bound, _LONGEST_PAUSE_S)

    async def _look_closer(self, error: ClientError) -> ClientError:
        """Return what is wrong with the address where an answer made no sense, else the error itself."""
        if isinstance(error, (UnreachableError, GarbledError)):
            return await asyncio.to_thread(find_wrong_port, self.options) or error
        return error

    def _open(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._client is None:
            self._client, self._loop = self._protocol.open(self.options), loop
            self._slots, self._finding = asyncio.Semaphore(self.options.in_flight), asyncio.Lock()
            # Whoever forgets to close it, as scripts do, would get a complaint of aiohttp's at the end.
            self._forget = weakref.finalize(self, _close_forgotten, self._client, loop)
        if self._loop is not loop:
            raise UsageError(
                f"the client of {self.options.address} is asked in another event loop than before",
                expected="the one that it was first asked in",
                got="another",
                remedy="make a client for each loop, or close it in between",
            )
        return self._client


def _close_forgotten(client: Any, loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_running():
        return
    closed = asyncio.run_coroutine_threadsafe(client.close(), loop)
    with contextlib.suppress(RuntimeError):
        # Inside of the loop it cannot be waited for.
        if asyncio.get_running_loop() is loop:
            return
    with contextlib.suppress(concurrent.futures.TimeoutError):
        closed.result(_CLOSE_TIMEOUT_S)


async def gather(questions: Iterable[Awaitable[T]]) -> list[T]:
    """Return all answers in order, asked at the same time; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(question) for question in questions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
