"""The client for everyone else: the same questions, asked on an event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from . import answers, streams
from .answers import Answer, Entity, Label, Ranked
from .asynchronous import Asking
from .model import Model
from .outputs import Arrays
from .pieces import Text

T = TypeVar("T")


# Several threads may ask for the first time at once, and `cache` would then start a loop for each.
_starting = threading.Lock()


def _find_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all clients of this process: gRPC's asyncio wants no more than one."""
    with _starting:
        return _start_loop()


@cache
def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="modelyard-client", daemon=True).start()
    return loop


def wait_for(question: Coroutine[Any, Any, T]) -> T:
    """Return the answer to a question that is asked on the clients' loop; Ctrl-C cancels it."""
    future = asyncio.run_coroutine_threadsafe(question, _find_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def hear(pieces: AsyncGenerator[str, None]) -> Generator[str, None, None]:
    """Yield what comes on the clients' loop."""

    async def read() -> str | None:
        return await anext(pieces, None)

    try:
        while (piece := wait_for(read())) is not None:
            yield piece
    finally:
        wait_for(pieces.aclose())


class Client(Asking):
    """A server to be asked from any number of threads; `Options` has what it takes.

    Every call raises a `ClientError` where there is no answer. What is forked after the first call makes no client.
    """

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        wait_for(self._session.close())

    def embed(self, texts: Sequence[Text], *, model: str | None = None) -> npt.NDArray[np.float32]:
        """Return one vector a text, fp32 `[texts, hidden]`."""
        return wait_for(answers.embed(self._session, texts, model))

    def classify(
        self, texts: Sequence[Text], pairs: Sequence[Text] | None = None, *, model: str | None = None
    ) -> list[list[Label]]:
        """Return each text's labels, best first; `pairs` has the second text of each where the model takes pairs."""
        return wait_for(answers.classify(self._session, texts, pairs, model))

    def image(self, pictures: Sequence[bytes], *, model: str | None = None) -> list[list[Label]]:
        """Return the labels of each picture, best first; pictures are whole files, of JPEG or PNG say."""
        return wait_for(answers.image(self._session, pictures, model))

    def audio(self, sounds: Sequence[bytes], *, model: str | None = None) -> list[list[Label]]:
        """Return the labels of each sound, best first; sounds are whole files, of WAV or FLAC."""
        return wait_for(answers.audio(self._session, sounds, model))

    def entities(self, texts: Sequence[Text], *, model: str | None = None) -> list[list[Entity]]:
        """Return what each text names, in the order of the text."""
        return wait_for(answers.entities(self._session, texts, model))

    def answer(
        self, questions: Sequence[Text], contexts: Sequence[Text], *, model: str | None = None
    ) -> list[list[Answer]]:
        """Return the answers to each question in its context, best first."""
        return wait_for(answers.answer(self._session, questions, contexts, model))

    def rerank(
        self, query: Text, documents: Sequence[Text], *, label: str | None = None, model: str | None = None
    ) -> list[Ranked]:
        """Return the documents, best first, as `AsyncClient.rerank` does."""
        return wait_for(answers.rerank(self._session, query, documents, label, model))

    def generate(self, prompt: Text, *, model: str | None = None, **parameters: Any) -> Generator[str, None, None]:
        """Return what a model writes after a prompt, as `AsyncClient.generate` does; closed early, it is cancelled."""
        return hear(streams.generate(self._session, prompt, model, parameters))

    def ask(self, texts: Sequence[Text], pairs: Sequence[Text] | None = None, *, model: str | None = None) -> Arrays:
        """Return output name → values, one row a text, of a model of texts of any task; strings are bytes."""
        return wait_for(answers.ask(self._session, texts, pairs, model))

    def infer(
        self, inputs: Mapping[str, npt.ArrayLike], outputs: Sequence[str] | None = None, *, model: str | None = None
    ) -> Arrays:
        """Return output name → values of any model, as `AsyncClient.infer` does."""
        return wait_for(answers.infer(self._session, inputs, outputs, model))

    def describe(self, model: str | None = None) -> Model:
        """Return what a model takes and makes."""
        return wait_for(self._session.find_model(model))
