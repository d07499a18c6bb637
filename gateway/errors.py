"""Why the gateway does not start, and why a caller is not answered."""

from collections.abc import Mapping
from typing import Any

# What TEI says in place of a status of OpenAI's: its own, and the kind of error
# (`ErrorType` in text-embeddings-inference, router/src/lib.rs, with its statuses in router/src/http/server.rs).
_TEI = {
    400: (413, "Validation"),
    429: (429, "Overloaded"),
    500: (424, "Backend"),
    502: (424, "Backend"),
    503: (503, "Unhealthy"),
    504: (424, "Backend"),
}


class GatewayError(Exception):
    """Why the gateway does not start, in one sentence: what and where, expected, got, remedy."""

    def __init__(self, what: str, *, expected: str, got: str, remedy: str) -> None:
        super().__init__(f"{what}: expected {expected}, got {got}; {remedy}.")


class ApiError(Exception):
    """Why a caller is not answered, as OpenAI's API and TEI's say it.

    Attributes:
        status: Of HTTP.
        message: One sentence, for the caller.
        type: OpenAI's name of the kind of error.
        param: The parameter that is wrong; None where none is.
        code: OpenAI's name of the error itself, where it has one.
        headers: What the answer says beside it.
        is_overload: Whether others have to be answered first.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",  # noqa: A002
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        is_overload: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers = dict(headers or {})
        self.is_overload = is_overload

    def to_openai(self) -> tuple[int, dict[str, Any]]:
        """Return status and body of the answer, as OpenAI's clients know them."""
        said = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return self.status, {"error": said}

    def to_tei(self) -> tuple[int, dict[str, Any]]:
        """Return status and body of the answer, as TEI's clients know them."""
        status, kind = _TEI[429] if self.is_overload else _TEI.get(self.status, (self.status, "Validation"))
        return status, {"error": self.message, "error_type": kind}


def refuse(param: str, what: str, *, expected: str, got: str, remedy: str = "") -> ApiError:
    """Return the refusal of a parameter, in one sentence."""
    end = f"; {remedy}" if remedy else ""
    return ApiError(400, f"{what}: expected {expected}, got {got}{end}.", param=param)


def refuse_for_now(message: str, *, is_overload: bool = False) -> ApiError:
    """Return the refusal of what may be asked again in a moment."""
    return ApiError(
        503,
        message,
        type="server_error",
        code="service_unavailable",
        headers={"retry-after": "1"},
        is_overload=is_overload,
    )
