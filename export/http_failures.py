"""What went wrong where a checkpoint was to be fetched over HTTP, in one sentence. Imports aiohttp."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from .errors import CheckpointError

# Seconds until a server is given up that takes no connection, or sends nothing more. No file has a limit of its own:
# aiohttp's 5 minutes are less than some need.
_CONNECT_S, _SILENCE_S = 30, 120

_BY_HAND = "fetch the folder by other means and name it"


def build_session(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of aiohttp's session: `given`, and the machine's proxies and `~/.netrc` besides."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
    return {"timeout": timeout, "trust_env": True, **given}


def explain(exc: BaseException, address: str) -> CheckpointError | None:
    """Return what to tell of an error, or None of one that is no server's.

    Args:
        exc: What was raised.
        address: What was to be fetched, without what lets somebody in.
    """
    host = urlsplit(address).netloc
    for cause in _list_causes(exc):
        if isinstance(cause, aiohttp.ClientResponseError):
            return _explain_status(cause.status, address, host)
        # A server without TLS may close the connection at the first word of it.
        if isinstance(cause, aiohttp.ClientConnectorError) and (
            isinstance(cause, aiohttp.ClientSSLError)
            or (address.startswith("https:") and isinstance(cause.os_error, ConnectionResetError))
        ):
            return _explain_tls(cause, address, host)
        if isinstance(cause, aiohttp.ClientConnectorError | aiohttp.InvalidURL | TimeoutError | asyncio.TimeoutError):
            return CheckpointError(
                f"{address} cannot be fetched",
                expected=f"a server that answers at {host}",
                got=_quote(getattr(cause, "os_error", cause)),
                remedy="correct the address or start the server; where only a proxy leads to it, name that in "
                f"{urlsplit(address).scheme.upper()}_PROXY",
            )
        if isinstance(cause, aiohttp.ClientError):
            return CheckpointError(
                f"{address} cannot be fetched",
                expected="a whole answer",
                got=_quote(cause),
                remedy=f"try again, or {_BY_HAND}",
            )
    # A status of 404 is a missing file to fsspec.
    return _explain_status(404, address, host) if isinstance(exc, FileNotFoundError) else None


def refuse_page(address: str) -> CheckpointError:
    """Return what to tell of a page that lists no file of a checkpoint."""
    return CheckpointError(
        f"the page at {address} lists no files of a checkpoint",
        expected="the server's own list of a folder, with a link to each file, or the address of one file",
        got="a page without them",
        remedy=f"have the server list its folders, or {_BY_HAND}",
    )


def _list_causes(exc: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = exc
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _explain_status(status: int, address: str, host: str) -> CheckpointError:
    phrase = next((each.phrase for each in HTTPStatus if each == status), "")
    got = f"{status} {phrase}".rstrip()
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
        return CheckpointError(
            f"there is nothing at {address}",
            expected="a folder with a checkpoint",
            got=got,
            remedy="correct the address",
        )
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED):
        return CheckpointError(
            f"{address} may not be read",
            expected="leave to read it",
            got=got,
            remedy=f"write `machine {urlsplit(address).hostname} login USER password PASSWORD` into ~/.netrc, or set "
            """FSSPEC_HTTP='{"headers": {"Authorization": "Bearer TOKEN"}}'""",
        )
    return CheckpointError(
        f"{address} cannot be fetched",
        expected=f"an answer of {host}",
        got=got,
        remedy=f"try again once the server is well, or {_BY_HAND}",
    )


def _explain_tls(cause: aiohttp.ClientConnectorError, address: str, host: str) -> CheckpointError:
    if isinstance(cause, aiohttp.ClientConnectorCertificateError):
        return CheckpointError(
            f"{address} cannot be fetched",
            expected=f"a certificate for {host} that this machine trusts",
            got=_quote(cause.certificate_error),
            remedy="set SSL_CERT_FILE to the file with the certificate of who signed it",
        )
    return CheckpointError(
        f"{address} cannot be fetched",
        expected=f"TLS at {host}",
        got=_quote(cause.os_error),
        remedy="write http:// where that server has no TLS, or correct the port",
    )


def _quote(exc: BaseException) -> str:
    return f"'{' '.join(str(exc).split()) or type(exc).__name__}'"
