"""What a client is told once, and how each of it is called where it is told."""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .errors import UsageError

# For whoever asks the same server again and again.
DEFAULT_URLS = {
    "http": os.environ.get("MODELYARD_URL", "localhost:8000"),
    "grpc": os.environ.get("MODELYARD_GRPC_URL", "localhost:8001"),
}

# What the reader types: a command where this was installed.
_SERVE = "modelyard serve" if __package__ == "modelyard.client" else "python -m server"

COMPRESSIONS = (None, "gzip", "deflate")


@dataclass(frozen=True, kw_only=True)
class Words:
    """What the reader of an error calls each option: keywords in Python, options on a command line."""

    url: str = "url"
    protocol: str = "protocol="
    timeout: str = "timeout_s"
    ca: str = "ca"
    token: str = "token"
    model: str = "model"
    text: str = "texts"
    pair: str = "pairs"
    serve: str = _SERVE


@dataclass(frozen=True, kw_only=True)
class Options:
    """Whom to ask, and how.

    Attributes:
        url: host:port, without a scheme.
        protocol: `http` or `grpc`.
        model: Whom to ask; None for the one ensemble that the server has.
        timeout_s: Seconds to wait for the answer to one request.
        retry_s: Seconds for which a request that may be repeated is sent again; 0 for never.
        in_flight: Requests that are on the way at the same time.
        tls: Whether to encrypt, and to refuse a server that cannot prove its name.
        ca: PEM file with the certificates to trust; None for those that this machine, or gRPC, trusts.
        headers: Headers of every request.
        compression: `gzip`, `deflate` or None, for requests and answers.
        words: What the reader of an error calls these options.
    """

    url: str
    protocol: str
    model: str | None = None
    timeout_s: float = 30.0
    retry_s: float = 10.0
    in_flight: int = 8
    tls: bool = False
    ca: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    compression: str | None = None
    words: Words = Words()

    def __post_init__(self) -> None:
        if self.protocol not in DEFAULT_URLS:
            raise UsageError("the protocol is not known", expected=" or ".join(DEFAULT_URLS), got=repr(self.protocol))
        if self.compression not in COMPRESSIONS:
            raise UsageError(
                "the compression is not known", expected="'gzip', 'deflate' or None", got=repr(self.compression)
            )
        for name, value, least in (("in_flight", self.in_flight, 1), ("retry_s", self.retry_s, 0)):
            if not value >= least:
                raise UsageError(f"{name} is too small", expected=f"{least} or more", got=f"{value}")
        if not self.timeout_s > 0:
            raise UsageError(f"{self.words.timeout} is too small", expected="more than 0", got=f"{self.timeout_s:g}")
        if self.ca:
            _check_certificates(self.ca, self.words.ca)


def make_options(
    url: str | None,
    *,
    protocol: str,
    model: str | None = None,
    timeout_s: float = 30.0,
    retry_s: float = 10.0,
    in_flight: int = 8,
    tls: bool = False,
    ca: Path | str | None = None,
    token: str | None = None,
    headers: Mapping[str, str] | None = None,
    compression: str | None = None,
    words: Words | None = None,
) -> Options:
    """Return what a client is told, `url` without its scheme and `token` as the header that carries it.

    Raises:
        UsageError: An option has a value that cannot be used.
    """
    address = url or DEFAULT_URLS.get(protocol, "")
    return Options(
        url=address.split("://", 1)[-1].rstrip("/"),
        protocol=protocol,
        model=model,
        timeout_s=timeout_s,
        retry_s=retry_s,
        in_flight=in_flight,
        tls=tls or address.startswith("https://"),
        ca=Path(ca) if ca else None,
        headers=dict(headers or {}) | ({"Authorization": f"Bearer {token}"} if token else {}),
        compression=compression,
        words=words or Words(),
    )


def _check_certificates(path: Path, word: str) -> None:
    """Refuse a file that holds no certificates, in a sentence; the two protocols fail over it in ways of their own."""
    try:
        ssl.create_default_context(cafile=path)
    except OSError as exc:
        raise UsageError(
            f"{path} cannot be used",
            expected="certificates in PEM",
            got=f"'{exc.strerror or exc}'",
            remedy=f"correct {word}",
        ) from exc
