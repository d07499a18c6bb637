"""Every way in which tritonclient, aiohttp and gRPC fail, as an error of ours."""

import asyncio
import contextlib
import gzip
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial

import aiohttp
from tritonclient.utils import InferenceServerException

from .errors import (
    AccessError,
    ClientError,
    CrashError,
    DeadlineError,
    ForeignError,
    GarbledError,
    ModelError,
    RefusedError,
    UnavailableError,
    UnreachableError,
    UntrustedError,
)
from .options import Options

# What a call may raise beside InferenceServerException. ValueError: the answer is not JSON; RecursionError: it is
# brackets within brackets.
FAILURES = (InferenceServerException, aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError, RecursionError)

# What an answer may be that cannot be read as KServe's.
_UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    EOFError,
    struct.error,
    zlib.error,
    gzip.BadGzipFile,
    # A line of more than was agreed on.
    aiohttp.http_exceptions.BadHttpMessage,
)

# 502: a proxy could not reach the server, or lost it.
_FOR_NOW = ("502", "503", "StatusCode.UNAVAILABLE")
# A model that is loaded again, or a server that drains: NOT_FOUND, as for a name that it never had.
_NOT_READY = re.compile("has no available versions|is not at ready state")
# What a full queue is called within a stream, where errors have no status.
_BUSY = re.compile("Exceeds maximum queue size|ask again later|Request timeout expired")
# What tritonserver says of requests that a backend process held when it died, and of those until another is there.
_CRASHED = re.compile("Stub process .*is not healthy")
_CONTENT = ("400", "StatusCode.INVALID_ARGUMENT")

# What another program says, where nothing more is known of it.
_ANOTHER = "another answer than KServe's"
_NO_ACCESS = ("401", "403", "StatusCode.UNAUTHENTICATED", "StatusCode.PERMISSION_DENIED")


# Characters of a refusal that are told.
_MOST_SAID = 2000
# Characters of what another program said, or a library did.
_MOST_QUOTED = 200


class FloodError(aiohttp.ClientError):
    """An answer that is larger than anybody would send."""


class UnreadableError(ValueError):
    """What an answer is that cannot be read, in words."""


class RedirectError(aiohttp.ClientError):
    """An answer that leads elsewhere: what was asked may hold a token that is meant for this server alone."""


def explain(exc: Exception, options: Options) -> ClientError:
    """Return one of `FAILURES` as an error of ours."""
    # It was found as the answer was read, and is said already.
    if isinstance(exc, ClientError):
        return exc
    if isinstance(exc, InferenceServerException):
        return _explain_refusal(exc, options)
    if isinstance(exc, (asyncio.TimeoutError, TimeoutError)):
        return _explain_deadline(options)
    if isinstance(exc, aiohttp.ClientConnectorCertificateError):
        reason = exc.certificate_error
        return _explain_distrust(getattr(reason, "verify_message", str(reason)), options)
    if isinstance(exc, aiohttp.ClientPayloadError):
        return UnreachableError(
            f"the answer of {options.address} broke off", expected="a whole one", got="half of one", remedy="ask again"
        )
    if isinstance(exc, (OSError, aiohttp.ServerDisconnectedError)):
        return _explain_unreachable(_read_reason(exc), options)
    if isinstance(exc, (FloodError, RedirectError)):
        return _explain_foreign(str(exc), options)
    # The peer speaks no HTTP, or what it says is no JSON.
    return _explain_foreign(_ANOTHER, options)


def reading(options: Options) -> contextlib.AbstractContextManager[None]:
    """Read what a server says of itself; what KServe's protocol never says is another program's.

    Raises:
        ForeignError: It cannot be read as KServe's.
    """
    return _reading(lambda exc: _explain_foreign(str(exc) if isinstance(exc, UnreadableError) else _ANOTHER, options))


def reading_answer(model: str) -> contextlib.AbstractContextManager[None]:
    """Read what a model answers, of which the server has told before that it is there.

    Raises:
        GarbledError: It cannot be read as KServe's.
    """
    return _reading(partial(_explain_garbled, model))


@contextlib.contextmanager
def _reading(explain_it: Callable[[Exception], ClientError]) -> Iterator[None]:
    try:
        yield
    except InferenceServerException as exc:
        # What a server refuses has a status; this is tritonclient's own word on an answer.
        if exc.status() is not None:
            raise
        raise explain_it(exc) from exc
    except _UNREADABLE as exc:
        raise explain_it(exc) from exc


def _explain_garbled(model: str, exc: Exception) -> GarbledError:
    if isinstance(exc, InferenceServerException):
        said = str(exc.message()).split(". ", 1)[0]
    else:
        # What Python misses in it says nothing to whoever has not written this.
        said = "" if isinstance(exc, (AttributeError, LookupError, TypeError)) else str(exc)
    return GarbledError(
        f"the answer of {model} cannot be read",
        expected="one in KServe's protocol",
        got=f"'{' '.join(said.split())[:_MOST_QUOTED]}'" if said else "another",
        remedy="look at the model, and at what stands in front of its server",
    )


def _explain_foreign(got: str, options: Options) -> ClientError:
    return ForeignError(
        f"what answers at {options.address} over {options.protocol} is no server that can be read",
        expected="KServe's protocol",
        got=f"'{got}'",
        remedy=f"look at what listens there, or correct {_name_address(options)}",
    )


def _name_address(options: Options) -> str:
    return " and ".join(filter(None, (options.words.url, options.words.protocol.strip(" ="))))


def _read_reason(exc: Exception) -> str:
    if isinstance(exc, OSError):
        # asyncio writes its own text, with the address in it; the resolver's numbers are not the system's.
        return os.strerror(exc.errno) if exc.errno and exc.errno > 0 else exc.strerror or str(exc)
    # It tells what it has read so far.
    return "the end of the connection"


def _explain_refusal(exc: InferenceServerException, options: Options) -> ClientError:
    said = exc.message()
    # A gateway, or another API, which has more to say of an error than a sentence.
    if not isinstance(said, str):
        said = str(said.get("message", _ANOTHER)) if isinstance(said, dict) else _ANOTHER
        return _explain_foreign(" ".join(said.split())[:_MOST_QUOTED], options)
    status, message = str(exc.status()), " ".join(said.split())
    if "DEADLINE_EXCEEDED" in status:
        return _explain_deadline(options)
    if match := re.search(r"CERTIFICATE_VERIFY_FAILED: [^:;]+|Hostname Verification Check failed", message):
        return _explain_distrust(match[0].split(": ")[-1], options)
    is_empty = "received an empty response" in message
    is_garbled = is_empty or "while decoding the response" in message
    # What stands in front of a server answers in its own words, and so does another port than the one meant.
    if is_garbled:
        # Without a body, why it could not be read.
        reason = exc.debug_details() or re.sub("^.*?decoding the response: | response: None$", "", message)
        reason = "without a word" if is_empty else reason
        message = f"HTTP {status} " + " ".join(re.sub(r"<[^>]*>", " ", reason).split())[:_MOST_QUOTED]
    message = message[:_MOST_SAID].rstrip(".")
    if status in _NO_ACCESS:
        return AccessError(
            f"{options.address} lets nobody in without leave",
            expected="a token that it knows and a call that it allows",
            got=f"'{message}'",
            remedy=f"pass the token with {options.words.token}" if options.words.token else "ask past what wants it",
        )
    # gRPC reports a server that is not there as it reports one that refuses for now.
    if status == "StatusCode.UNAVAILABLE" and re.search("connect|socket closed|resol", message, re.IGNORECASE):
        return _explain_unreachable(message.rsplit(": ", 1)[-1].rstrip("]"), options)
    is_for_now = status in _FOR_NOW or any(pattern.search(message) for pattern in (_NOT_READY, _BUSY))
    if "unknown model" in message:
        return (UnavailableError if is_for_now else ModelError)(
            message,
            expected=f"a model that {options.address} serves",
            remedy=f"choose with {options.words.model}",
        )
    sentence = f"the server refused the request: {message or 'without a word'}"
    if is_for_now:
        return UnavailableError(sentence)
    kind = GarbledError if is_garbled else CrashError if _CRASHED.search(message) else RefusedError
    # A proxy may serve under a path; whoever names one that nobody serves is told nothing of it by who answers.
    _, slash, path = options.address.partition("/")
    remedy = (
        f"leave out /{path} of {options.words.url} if no proxy serves under it" if slash and status == "404" else ""
    )
    refusal = kind(sentence, remedy=remedy)
    # A process that died says nothing of what it was asked.
    refusal.is_content = kind is RefusedError and status in _CONTENT
    return refusal


def _explain_deadline(options: Options) -> ClientError:
    return DeadlineError(
        f"no answer from {options.address}",
        expected=f"one within {options.timeout_s:g} s",
        got="none",
        remedy=f"raise {options.words.timeout}" if options.words.timeout else "ask again",
    )


def _explain_distrust(reason: str, options: Options) -> ClientError:
    return UntrustedError(
        f"the server at {options.address} is not trusted",
        expected=f"a certificate of that name from an authority in {options.ca or 'the default ones'}",
        got=f"'{reason}'",
        remedy=f"pass the authority's certificate with {options.words.ca}" if options.words.ca else "",
    )


def _explain_unreachable(reason: str, options: Options) -> ClientError:
    return UnreachableError(
        f"no server can be reached at {options.address} over {options.protocol}",
        expected="one to listen there",
        got=f"'{reason}'",
        remedy=f"start it with `{options.words.serve}`, or correct {_name_address(options)}",
    )
