"""Why the gateway does not start, and why a caller is not answered."""

from collections.abc import Mapping


class GatewayError(Exception):
    """Why the gateway does not start, in one sentence: what and where, expected, got, remedy."""

    def __init__(self, what: str, *, expected: str, got: str, remedy: str) -> None:
        super().__init__(f"{what}: expected {expected}, got {got}; {remedy}.")


class ApiError(Exception):
    """Why a caller is not answered, as OpenAI's API says it.

    Attributes:
        status: Of HTTP.
        message: One sentence, for the caller.
        type: OpenAI's name of the kind of error.
        param: The parameter that is wrong; None where none is.
        code: OpenAI's name of the error itself, where it has one.
        headers: What the answer says beside it.
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
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers = dict(headers or {})

    @property
    def content(self) -> dict[str, dict[str, str | None]]:
        """The body of the answer."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def refuse(param: str, what: str, *, expected: str, got: str, remedy: str = "") -> ApiError:
    """Return the refusal of a parameter, in one sentence."""
    end = f"; {remedy}" if remedy else ""
    return ApiError(400, f"{what}: expected {expected}, got {got}{end}.", param=param)
