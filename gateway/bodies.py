"""What callers send. A field that is not here is refused; one whose type has a single value has that value alone.

One that is null says nothing, and passes: clients that know more fields send them so.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from .errors import ApiError

_MAX_TEXTS = 2048
# Of which each is written by a request of its own.
_MAX_PROMPTS = 128

# A body beyond these bytes is looked at before it is compared with its form, and holds so many values at most: each
# that does not fit takes microseconds there, in which nobody else is answered.
_LARGE, _MAX_VALUES = 64 * 1024, 20_000

# What the server's parameters hold.
_MAX_INTEGER = 2**63 - 1

# Names of fields that are read once are not kept for the next time.
_ANYTHING = pydantic.TypeAdapter[Any](Any, config=ConfigDict(cache_strings="none"))

T = TypeVar("T", bound="Body")


class Body(BaseModel):
    """Any of them."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _leave_out_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name in cls.model_fields}


Tokens = list[int] | list[list[int]]
Texts = str | list[str]

# What has no effect here may be sent empty, as some clients do.
NoItems = Annotated[list[Any], Field(max_length=0)] | None
NoEntries = Annotated[dict[str, Any], Field(max_length=0)] | None


class Embeddings(Body):
    """`/v1/embeddings`."""

    model: str
    input: Texts | Tokens = Field(description="A text or a list of them; token ids are refused.")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, description="First values of each vector, brought to length 1.")
    truncate_prompt_tokens: Literal[-1] | None = Field(None, description="-1: cut what is too long.")
    user: str | None = None


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool | None = None


class Sampling(Body):
    """How text is written; without a value as the version has it, and drawn at temperature 1 where it says none."""

    model: str
    n: int | None = Field(None, ge=1, le=16)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_MAX_INTEGER)
    min_p: float | None = None
    seed: int | None = Field(None, ge=-_MAX_INTEGER, le=_MAX_INTEGER)
    stop: Texts | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = None
    min_tokens: int | None = Field(None, ge=0, le=_MAX_INTEGER)
    ignore_eos: bool | None = None
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INTEGER)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: NoEntries = None
    user: str | None = None


class Completions(Sampling):
    """`/v1/completions`."""

    prompt: Texts | Tokens = Field(description="A text or a list of them; token ids are refused.")
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None


class TextPart(Body):
    """A piece of what was said."""

    type: Literal["text"]
    text: str


class Message(Body):
    """What somebody said."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    tool_calls: NoItems = None
    function_call: None = None
    audio: None = None
    annotations: NoItems = None


class PlainText(Body):
    """The only form that an answer has."""

    type: Literal["text"]


class Chat(Sampling):
    """`/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_INTEGER)
    logprobs: Literal[False] | None = None
    response_format: PlainText | None = None
    store: Literal[False] | None = None
    tools: NoItems = None
    tool_choice: Literal["none"] | None = None


class Document(Body):
    """A document, as some clients write it."""

    text: str


class Rerank(Body):
    """`/v1/rerank`."""

    model: str
    query: str
    documents: list[str | Document] = Field(max_length=_MAX_TEXTS)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    truncate_prompt_tokens: Literal[-1] | None = None


class TeiBody(Body):
    """Any of TEI's, which serves one model; here `model` names one where several would fit."""

    model: str | None = None


class TeiEmbed(TeiBody):
    """`/embed`."""

    inputs: Texts
    normalize: bool | None = Field(None, description="Whether vectors are brought to length 1; true without it.")
    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] | None = None
    dimensions: int | None = Field(None, ge=1)


class TeiRerank(TeiBody):
    """`/rerank`."""

    query: str
    texts: list[str] = Field(max_length=_MAX_TEXTS)
    raw_scores: Literal[False] | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] | None = None


class TeiPredict(TeiBody):
    """`/predict`."""

    inputs: Texts | list[list[str]] = Field(description="A text, a pair in a list, or a list of lists of one or two.")
    raw_scores: Literal[False] | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] | None = None


class TeiTokenize(TeiBody):
    """`/tokenize`."""

    inputs: Texts
    add_special_tokens: bool | None = None


def read_body(kind: type[T], content: bytes | bytearray) -> T:
    """Return what a caller sent.

    Raises:
        ApiError: It is no JSON, a parameter is unknown or lacks, or has a value that cannot be used.
    """
    if len(content) > _LARGE:
        _check_amount(content)
    try:
        return kind.model_validate_json(content)
    except pydantic.ValidationError as exc:
        raise _explain(kind, exc) from None


def read_texts(param: str, given: Any, most: int = _MAX_TEXTS) -> list[str]:
    """Return a text or a list of them as a list.

    Raises:
        ApiError: There is none, or too many, or they are token ids.
    """
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise ApiError(400, f"{param} is empty: expected at least one text, got none.", param=param)
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(
            400,
            f"{param} holds token ids: expected texts, for ids mean something to the tokenizer alone that made them; "
            "send the texts (LangChain: check_embedding_ctx_length=False).",
            param=param,
        )
    if len(texts) > most:
        raise ApiError(
            400,
            f"{param} is too long: expected at most {most} texts, got {len(texts)}; ask several times.",
            param=param,
        )
    return list(texts)


def _check_amount(content: bytes | bytearray) -> None:
    """Refuse more values than any answer is made of.

    Raises:
        ApiError: There are more.
    """
    try:
        given = _ANYTHING.validate_json(content)
    # It is told below what is wrong with it.
    except ValueError:
        return
    for param in ("input", "prompt"):
        texts = given.get(param) if isinstance(given, dict) else None
        if isinstance(texts, list):
            read_texts(param, texts)
    number, inner = 0, [given]
    while inner:
        value = inner.pop()
        if isinstance(value, (dict, list)):
            number += len(value)
            inner += value.values() if isinstance(value, dict) else value
        if number > _MAX_VALUES:
            raise ApiError(
                400, f"the body holds too much: expected at most {_MAX_VALUES} values, got more; ask several times."
            )


def read_prompts(given: Any) -> list[str]:
    """Return the prompts of a completion; see `read_texts`."""
    return read_texts("prompt", given, _MAX_PROMPTS)


def _explain(kind: type[Body], exc: pydantic.ValidationError) -> ApiError:
    """Return the first thing that is wrong, in one sentence."""
    errors = exc.errors(include_url=False, include_input=True)
    first = errors[0]
    if not first["loc"]:
        what = "no JSON" if first["type"] == "json_invalid" else "no JSON object"
        return ApiError(400, f"the body is {what}: expected an object, got '{first['msg'][:200]}'.")
    # Of the types that a value may have, the one that got furthest is what was meant.
    same = [(_name_param(error["loc"]), error) for error in errors if error["loc"][0] == first["loc"][0]]
    param, first = max(same, key=lambda one: one[0].count("."))
    if first["type"] == "extra_forbidden":
        known = f"one of {', '.join(kind.model_fields)}" if param in first["loc"] else "none of this name there"
        return ApiError(
            400,
            f"the parameter {param[:100]!r} is not known here: expected {known}.",
            param=param[:100],
            code="unknown_parameter",
        )
    if first["type"] == "missing":
        return ApiError(
            400,
            f"the parameter {param} is missing: expected it, got none.",
            param=param,
            code="missing_required_parameter",
        )
    ways = dict.fromkeys(_describe_way(error) for place, error in same if place == param)
    got = json.dumps(first["input"], ensure_ascii=False)[:60]
    return ApiError(400, f"{param} cannot be used: expected {' or '.join(ways)[:300]}, got {got}.", param=param)


def _name_param(place: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in place if _is_callers(part))


def _describe_way(error: Mapping[str, Any]) -> str:
    """Return what would have been right, as somebody says it who writes JSON."""
    bounds, kind = error.get("ctx", {}), error["type"]
    if kind == "too_short":
        return f"at least {bounds['min_length']} of them"
    if kind == "too_long":
        most = bounds["max_length"]
        return f"at most {most} of them, not {bounds['actual_length']}" if most else "none"
    way = str(error["msg"]).removeprefix("Input should be ")
    return {"False": "false", "True": "true"}.get(way, way)


def _is_callers(part: int | str) -> bool:
    """Tell whether a part of a place is the caller's: pydantic names the types that it tried as well."""
    return isinstance(part, int) or ("[" not in part and part not in ("str", "TextPart", "Document"))
