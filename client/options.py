"""What a client is told once, and how each of it is called where it is told."""

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from .errors import UsageError

# For whoever asks the same server again and again.
_URLS = {"http": "MODELYARD_URL", "grpc": "MODELYARD_GRPC_URL"}
DEFAULT_URLS = {
    "http": os.environ.get(_URLS["http"], "localhost:8000"),
    "grpc": os.environ.get(_URLS["grpc"], "localhost:8001"),
}

# What the reader types: a command where this was installed.
_SERVE = "modelyard serve" if __package__ == "modelyard.client" else "python -m server"

# The libraries reckon in nanoseconds and with what the clock shows, and neither holds much more.
_LONGEST_S = 1_000_000

# The scheme, if any; a name or an address, those of IPv6 in brackets; a port; and over HTTP a path of a proxy's.
_ADDRESS = re.compile(
    r"(?:(?P<scheme>[^:/]*)://)?(?P<host>[^\W_][\w.-]*|\[[0-9A-Fa-f:.]+(?:%\w+)?\])(?::(?P<port>\d{1,5}))?(?P<path>/\S*)?"
)

_FRAMING = (
    *("connection", "content-encoding", "content-length", "content-type", "expect", "keep-alive", "te", "trailer"),
    *("transfer-encoding", "upgrade", "inference-header-content-length"),
)

COMPRESSIONS = (None, "gzip", "deflate")


@dataclass(frozen=True, kw_only=True)
class Words:
    """What the reader of an error calls each option: keywords in Python, options on a command line.

    Empty for what the reader has no option for.
    """

    url: str = "url"
    protocol: str = "protocol="
    timeout: str = "timeout_s"
    tls: str = "tls, and https:// in url"
    ca: str = "ca"
    token: str = "token"
    model: str = "model"
    text: str = "texts"
    pair: str = "pairs"
    prompt: str = "`generate`"
    serve: str = _SERVE


@dataclass(frozen=True)
class Options:
    """Whom to ask, and how: what both clients take, and the table of its defaults.

    Args:
        url: host:port; https:// in front of it asks for TLS. Without it `MODELYARD_URL` or `MODELYARD_GRPC_URL`, else
            this machine's usual port.
        protocol: `http` or `grpc`.
        model: Whom to ask where a call names nobody; without it the one ensemble that the server has.
        timeout_s: Seconds to wait for the answer to one request.
        retry_s: Seconds for which a request is sent again that found nobody, lost its connection, or was refused for
            now (503, UNAVAILABLE), and three times at most one whose process died; 0 for never. What took too long or
            is refused for good is not sent again.
        in_flight: Requests on the way at the same time, and connections of the pool over HTTP.
        tls: Whether to encrypt, and to refuse a server that cannot prove its name.
        ca: PEM file with the certificates to trust; without it those that this machine, or gRPC, trusts.
        token: Sent as `Authorization: Bearer TOKEN`.
        headers: Further headers of every request.
        compression: `gzip` or `deflate`, of requests and answers.
        words: What the reader of an error calls these options; without it their names here.

    Raises:
        UsageError: An option has a value that cannot be used.
    """

    url: str | None = None
    _: KW_ONLY
    protocol: str = "http"
    model: str | None = None
    timeout_s: float = 30.0
    retry_s: float = 10.0
    in_flight: int = 8
    tls: bool = False
    ca: Path | str | None = None
    token: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] | None = field(default=None, repr=False)
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
        if not 0 < self.timeout_s <= _LONGEST_S:
            raise UsageError(
                f"{self.words.timeout} is no time to wait",
                expected=f"more than 0 and at most {_LONGEST_S} seconds",
                got=f"{self.timeout_s:g}",
            )
        _check_address(self._target, self.protocol, self.words.url if self.url is not None else _URLS[self.protocol])
        for name in self.headers or ():
            _check_header(name, self.protocol)
        if self.ca:
            _check_certificates(Path(self.ca), self.words.ca)

    @property
    def address(self) -> str:
        """host:port, without a scheme."""
        return self._target.split("://", 1)[-1].rstrip("/")

    @property
    def is_encrypted(self) -> bool:
        """Whether TLS is asked for, in either way."""
        return self.tls or self._target.startswith("https://")

    @property
    def sent_headers(self) -> dict[str, str]:
        """Headers of every request, the token among them; a new dict, for tritonclient adds its own."""
        return dict(self.headers or {}) | ({"Authorization": f"Bearer {self.token}"} if self.token else {})

    @property
    def _target(self) -> str:
        return DEFAULT_URLS[self.protocol] if self.url is None else self.url


def _check_address(target: str, protocol: str, word: str) -> None:
    """Refuse what no server can listen at; the libraries take some of it for another one."""
    found = _ADDRESS.fullmatch(target)
    if found is None or not _can_be(found, protocol):
        raise UsageError(
            "this is no address of a server",
            expected="HOST:PORT, such as localhost:8000",
            got=repr(target),
            remedy=f"correct {word}",
        )


def _check_header(name: str, protocol: str) -> None:
    """Refuse a header that says how a request is written, which is the libraries' own to say."""
    known = name.lower()
    if known in _FRAMING or (protocol == "grpc" and (known.endswith("-bin") or known.startswith("grpc-"))):
        raise UsageError(
            f"the header {name} cannot be sent",
            expected="one for the server, or for what stands in front of it",
            got="one that says how a request is written",
            remedy="leave it out",
        )


def _can_be(found: re.Match[str], protocol: str) -> bool:
    try:
        found["host"].encode("idna")
    except UnicodeError:
        return False
    # The libraries take a number by itself for an address, as 0.0.85.240 may be written.
    if found["port"] is None and found["host"].isdecimal():
        return False
    is_scheme = found["scheme"] in (None, "http", "https", protocol)
    return is_scheme and 0 < int(found["port"] or 1) < 1 << 16 and (protocol == "http" or found["path"] in (None, "/"))


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
