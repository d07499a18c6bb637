"""The client for asyncio."""

import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec

import numpy as np
import numpy.typing as npt

from . import answers, streams
from .answers import Answer, Entity, Label, Ranked
from .model import Model
from .options import Options
from .outputs import Arrays
from .pieces import Text
from .session import Session

P = ParamSpec("P")


def _tell(make: Callable[P, Options]) -> Callable[Concatenate["Asking", P], None]:
    """Return an `__init__` that takes what `make` takes."""

    def begin(self: "Asking", /, *args: P.args, **kwargs: P.kwargs) -> None:
        self._session = Session(make(*args, **kwargs))

    # What `help` and editors show.
    functools.update_wrapper(begin, make.__init__)
    begin.__doc__ = make.__doc__
    return begin


class Asking:
    """What both clients are told: the fields of `Options`, the url first and the others by name."""

    _session: Session

    __init__ = _tell(Options)


class AsyncClient(Asking):
    """A server to be asked from one event loop, by any number of tasks; `Options` has what it takes.

    Every call raises a `ClientError` where there is no answer.
    """

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def embed(self, texts: Sequence[Text], *, model: str | None = None) -> npt.NDArray[np.float32]:
        """Return one vector a text, fp32 `[texts, hidden]`."""
        return await answers.embed(self._session, texts, model)

    async def classify(
        self, texts: Sequence[Text], pairs: Sequence[Text] | None = None, *, model: str | None = None
    ) -> list[list[Label]]:
        """Return each text's labels, best first; `pairs` has the second text of each where the model takes pairs."""
        return await answers.classify(self._session, texts, pairs, model)

    async def image(self, pictures: Sequence[bytes], *, model: str | None = None) -> list[list[Label]]:
        """Return the labels of each picture, best first; pictures are whole files, of JPEG or PNG say."""
        return await answers.image(self._session, pictures, model)

    async def audio(self, sounds: Sequence[bytes], *, model: str | None = None) -> list[list[Label]]:
        """Return the labels of each sound, best first; sounds are whole files, of WAV or FLAC."""
        return await answers.audio(self._session, sounds, model)

    async def entities(self, texts: Sequence[Text], *, model: str | None = None) -> list[list[Entity]]:
        """Return what each text names, in the order of the text."""
        return await answers.entities(self._session, texts, model)

    async def answer(
        self, questions: Sequence[Text], contexts: Sequence[Text], *, model: str | None = None
    ) -> list[list[Answer]]:
        """Return the answers to each question in its context, best first."""
        return await answers.answer(self._session, questions, contexts, model)

    async def rerank(
        self, query: Text, documents: Sequence[Text], *, label: str | None = None, model: str | None = None
    ) -> list[Ranked]:
        """Return the documents, best first, by the score that a model of pairs gives them.

        Args:
            query: The first text of each pair.
            documents: The second ones.
            label: Whose score ranks; needed where the model has several.
            model: Whom to ask.
        """
        return await answers.rerank(self._session, query, documents, label, model)

    def generate(self, prompt: Text, *, model: str | None = None, **parameters: Any) -> AsyncGenerator[str, None]:
        """Return what a model writes after a prompt, piece by piece as it comes.

        Whoever stops early closes the iterator (`aclose`, or `contextlib.aclosing`): that cancels the request.

        Args:
            prompt: As it is: a chat's template is not applied.
            model: Whom to ask; needed where the client has none.
            **parameters: Such as `max_tokens` and `temperature`; docs/generation.md has them all.
        """
        return streams.generate(self._session, prompt, model, parameters)

    async def ask(
        self, texts: Sequence[Text], pairs: Sequence[Text] | None = None, *, model: str | None = None
    ) -> Arrays:
        """Return output name → values, one row a text, of a model of texts of any task; strings are bytes."""
        return await answers.ask(self._session, texts, pairs, model)

    async def infer(
        self, inputs: Mapping[str, npt.ArrayLike], outputs: Sequence[str] | None = None, *, model: str | None = None
    ) -> Arrays:
        """Return output name → values of any model.

        Args:
            inputs: Name → values of the model's own type, the batch first where it has one.
            outputs: Names of those that are wanted; None for all.
            model: Whom to ask.
        """
        return await answers.infer(self._session, inputs, outputs, model)

    async def describe(self, model: str | None = None) -> Model:
        """Return what a model takes and makes."""
        return await self._session.find_model(model)
