"""What the commands ask through: texts and tensors as bytes, on the clients' loop, in the words of a command line."""

from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from .. import answers
from ..model import Model
from ..options import Options, Words
from ..outputs import Arrays
from ..pieces import ask_texts
from ..session import Session
from ..streams import find_writer, write
from ..synchronous import hear, wait_for

COMMAND_WORDS = Words(
    url="--url",
    protocol="--protocol ",
    timeout="--timeout",
    tls="--tls, and https:// in --url",
    ca="--ca",
    token="--header",
    model="--model",
    text="--text",
    pair="--pair",
    prompt="--prompt",
)

# Of commands that ask over both protocols, each at an address of its own, and have none of the other options.
HTTP_WORDS = Words(url="--url", protocol="", timeout="", tls="https://", ca="", token="", model="--model")
GRPC_WORDS = replace(HTTP_WORDS, url="--grpc-url")


class Connection:
    """A server over HTTP or gRPC; each request is sent once."""

    def __init__(
        self,
        url: str,
        protocol: str,
        timeout_s: float,
        *,
        tls: bool = False,
        ca: Path | None = None,
        headers: Mapping[str, str] | None = None,
        words: Words = COMMAND_WORDS,
    ) -> None:
        """Prepare to ask; nothing is sent yet.

        Args:
            url: host:port; https:// in front of it asks for TLS.
            protocol: `http` or `grpc`.
            timeout_s: Seconds to wait for each answer.
            tls: Whether to encrypt, and to refuse a server that cannot prove its name.
            ca: PEM file with the certificates to trust; without it those that this machine, or gRPC, trusts.
            headers: Headers to send with every request, such as a token.
            words: What the options are called.

        Raises:
            ClientError: `ca` holds no certificates.
        """
        options = Options(
            url,
            protocol=protocol,
            timeout_s=timeout_s,
            retry_s=0,
            tls=tls,
            ca=ca,
            headers=headers,
            words=words,
        )
        self.url, self.protocol = options.address, protocol
        self._session = Session(options)

    def find_model(self, name: str | None) -> Model:
        """Return the model named, or the one ensemble there is, which takes a text or a pair of them.

        Raises:
            ClientError: There is no such model, or not exactly one ensemble, or the server does not answer, or the
                model takes something else.
        """
        return wait_for(answers.find_texts_model(self._session, name))

    def describe_model(self, name: str) -> Model:
        """Return the model of that name, whatever it takes.

        Raises:
            ClientError: There is no such model, or the server does not answer.
        """
        return wait_for(self._session.find_model(name))

    def infer(self, model: Model, texts: list[bytes], *, pairs: list[bytes] | None = None) -> Arrays:
        """Return output name → answers, one row a text, as `ask_texts` does."""
        return wait_for(ask_texts(self._session, model, texts, pairs or ()))

    def infer_tensors(self, model: Model, inputs: Mapping[str, npt.NDArray[Any]], *, binary: bool = True) -> Arrays:
        """Return output name → values, in one request, as `Session.infer` does."""
        return wait_for(self._session.infer(model, inputs, binary=binary)).arrays

    def find_writer(self, name: str | None) -> str:
        """Return the name of the model that generates text: the one named, or the one there is.

        Raises:
            ClientError: There is none, or not exactly one, or the one that is named takes no prompt.
        """
        return wait_for(find_writer(self._session, name))

    def write(
        self, name: str, inputs: Mapping[str, npt.NDArray[Any]], *, is_streamed: bool = True
    ) -> Generator[str, None, None]:
        """Yield what a model writes, in pieces as they come, as `streams.write` does."""
        return hear(write(self._session, name, inputs, is_streamed=is_streamed))
