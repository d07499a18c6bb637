"""What a request asks for: the parameters of vLLM's `SamplingParams` known here, without a word about Triton."""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# A text beyond this is refused unread.
MAX_TEXT_BYTES = 1 << 20
_MAX_ANSWERS = 16
_MAX_STOPS = 16
# A whole number of more digits lies beyond every bound, and Python reads none of 5,000.
_MAX_DIGITS = 40

# Scores are divided by it in single precision.
_MIN_TEMPERATURE = 0.001


class RequestError(ValueError):
    """A request that is refused; the message is for the caller who sent it."""


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How one request is to be answered; 0 tokens at most and None are what the version or the engine has by default.

    Attributes:
        max_tokens: Tokens that are written at most.
        min_tokens: Tokens before which no text ends.
        temperature: 0 takes the likeliest token every time.
        top_p: Share of probability that is drawn from.
        top_k: Number of tokens that are drawn from; 0 for all.
        min_p: Least probability, in parts of the largest, of a token that is drawn.
        repetition_penalty: Divides the scores of tokens that were there.
        presence_penalty: Taken from the score of a token that was written.
        frequency_penalty: The same for each time that it was.
        seed: Where drawing begins; None for anywhere.
        stop: Texts that end the answer and are not part of it.
        ignore_eos: Whether to go on where the model ends a text.
        n: How many answers are written.
        add_special_tokens: Whether the tokenizer puts those around the prompt that it puts around texts; a chat's
            template has them written out.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = field(default=())
    ignore_eos: bool = False
    n: int = 1
    add_special_tokens: bool = True

    def choose_seed(self, index: int) -> int:
        """Return what an answer is drawn with; left alone, the engine draws the same for everyone."""
        return secrets.randbits(63) if self.seed is None else self.seed + index


@dataclass(frozen=True)
class _Number:
    """A number within bounds, which may come as text: NVIDIA's own examples send `"0.1"`."""

    convert: Callable[[Any], Any]
    low: float
    high: float

    def __call__(self, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        number = self.convert(value)
        if number != float(value) or not self.low <= number <= self.high:
            raise ValueError
        return number

    def __str__(self) -> str:
        return f"{'a whole number' if self.convert is int else 'a number'} from {self.low} to {self.high}"


class _Flag:
    def __call__(self, value: Any) -> bool:
        known = {True: True, False: False, "true": True, "false": False}
        if not isinstance(value, (bool, str)) or value not in known:
            raise ValueError
        return known[value]

    def __str__(self) -> str:
        return "true or false"


class _Texts:
    def __call__(self, value: Any) -> tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > _MAX_STOPS or not all(_may_be_written(text) for text in texts):
            raise ValueError
        return tuple(texts)

    def __str__(self) -> str:
        return f"a text or up to {_MAX_STOPS} in a list, each of one character or more"


def _may_be_written(text: Any) -> bool:
    """Tell whether an answer may hold `text`: no halves of characters, which JSON can send."""
    return isinstance(text, str) and text.encode(errors="ignore").decode() == text != ""


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "max_tokens": _Number(int, 1, 1 << 30),
    "min_tokens": _Number(int, 0, 1 << 30),
    "temperature": _Number(float, 0, 100),
    "top_p": _Number(float, 1e-6, 1),
    "top_k": _Number(int, -1, 1 << 30),
    "min_p": _Number(float, 0, 0.999),
    "repetition_penalty": _Number(float, 0.01, 100),
    "presence_penalty": _Number(float, -2, 2),
    "frequency_penalty": _Number(float, -2, 2),
    "seed": _Number(int, 0, (1 << 63) - 1),
    "stop": _Texts(),
    "ignore_eos": _Flag(),
    "n": _Number(int, 1, _MAX_ANSWERS),
    "add_special_tokens": _Flag(),
}

# What tritonserver and its clients add to a request.
_TRITONS = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output")


def read_parameters(given: str | None, flat: Mapping[str, Any], defaults: Mapping[str, Any]) -> Parameters:
    """Return what a request asks for.

    Args:
        given: The text of the input `sampling_parameters`, JSON; None where it was not sent.
        flat: Parameters of the request itself.
        defaults: What the version has for parameters that are in neither.

    Raises:
        RequestError: A parameter is unknown, has another kind of value, or is given twice.
    """
    asked = _parse(given) if given else {}
    for name, value in flat.items():
        if name in _TRITONS or name.startswith("triton_"):
            continue
        if name in asked:
            raise RequestError(
                f"{name} is given twice: expected it once, got it in sampling_parameters and beside it; leave one out"
            )
        asked[name] = value
    read = {**defaults, **{name: _read(name, value) for name, value in asked.items() if value is not None}}
    if asked.get("min_tokens") is None and "min_tokens" in read:
        # Asked for by nobody, it makes no answer longer than was asked for.
        read["min_tokens"] = min(read["min_tokens"], read.get("max_tokens", Parameters.max_tokens))
    parameters = Parameters(**read)
    if 0 < parameters.temperature < _MIN_TEMPERATURE:
        raise RequestError(
            f"temperature is too small: expected 0, which takes the likeliest token, or at least {_MIN_TEMPERATURE}, "
            f"got {parameters.temperature:g}; pass one of these"
        )
    if parameters.min_tokens > parameters.max_tokens:
        raise RequestError(
            f"min_tokens {parameters.min_tokens} has no effect: expected at most max_tokens, {parameters.max_tokens}; "
            "pass a larger max_tokens or a smaller min_tokens"
        )
    if parameters.temperature == 0 and parameters.n > 1:
        raise RequestError(
            f"n {parameters.n} has no effect: expected a temperature above 0 beside it, got 0; pass one, or leave n out"
        )
    return parameters


def _parse(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text, object_pairs_hook=_refuse_doubles, parse_int=_parse_whole)
    except RequestError:
        raise
    # Python gives up on a thousand brackets within one another.
    except (ValueError, RecursionError):
        kind = "JSON"
    else:
        if isinstance(content, dict):
            return content
        kind = "a JSON object"
    raise RequestError(
        f"sampling_parameters is not {kind}: expected an object such as {{}}, got {text[:40]!r}; "
        'write each parameter by its name, as in {"max_tokens": 16}'
    )


def _refuse_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        name = next(name for name in names if names.count(name) > 1)
        raise RequestError(
            f"{name[:40]} is given twice: expected it once, got it {names.count(name)} times in sampling_parameters; "
            "leave the others out"
        )
    return content


def _parse_whole(digits: str) -> int:
    return int(digits[: _MAX_DIGITS + 1])


def _read(name: str, value: Any) -> Any:
    kind = _KINDS.get(name)
    if kind is None:
        raise RequestError(f"the parameter {name[:40]!r} is unknown: expected one of {', '.join(_KINDS)}; leave it out")
    try:
        return kind(value)
    except (ValueError, OverflowError):
        raise RequestError(
            f"{name} cannot be used: expected {kind}, got {_show(value)!r}; pass such a value, or leave it out"
        ) from None


def _show(value: Any) -> str:
    return (json.dumps(value) if isinstance(value, (list, dict)) else str(value))[:40]
