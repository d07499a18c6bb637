"""How many tokens texts are, found without ever holding more of these than the answer takes."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer, models

from .errors import GatewayError

# What a text weighs for each of its characters: one of ASCII becomes a token at most. Of others U+FDFA becomes 18
# characters where the tokenizer normalises (NFKC), and of 33 bytes; real texts have one or two.
_OTHER_THAN_ASCII = 8

# Of this weight texts are tokenized at once. Each token takes 200 bytes until it is counted.
_AT_ONCE = 32 * 1024

# Tokens that a text has less, at most, than its beginning: the word that is cut through may be a single token as a
# whole, which WordPiece makes of a hundred characters and more.
_FEWER = 128

# With gRPC's own the gateway has twelve; with less than nine gRPC neither answers nor fails.
_THREADS = 12


@dataclass(frozen=True)
class Length:
    """How long a text is.

    Attributes:
        tokens: Without those that a tokenizer puts around it.
        is_whole: Whether these are all of the text, or only of its beginning.
    """

    tokens: int
    is_whole: bool = True


def weigh(text: str) -> int:
    """Return what it takes to tokenize a text, in characters of ASCII."""
    return len(text) if text.isascii() else _OTHER_THAN_ASCII * len(text)


def measure(tokenizer: Tokenizer, texts: Iterable[str], most: int) -> Iterator[tuple[str, Length]]:
    """Yield each text with its length, of the longest ones behind the others.

    Args:
        tokenizer: Which neither truncates nor pads.
        texts: Which differ.
        most: Tokens of a text beyond which it need not be known how many it has.
    """
    long: list[str] = []
    short: list[str] = []
    held = 0
    for text in texts:
        weight = weigh(text)
        if weight > _AT_ONCE:
            long.append(text)
            continue
        if short and held + weight > _AT_ONCE:
            yield from zip(short, _count(tokenizer, short), strict=True)
            short, held = [], 0
        short.append(text)
        held += weight
    yield from zip(short, _count(tokenizer, short), strict=True)
    for text in long:
        yield text, _measure_long(tokenizer, text, most)


def _measure_long(tokenizer: Tokenizer, text: str, most: int) -> Length:
    """Return the length of a text, no more of which is tokenized at once than has about as many tokens as are asked of.

    What its parts have tells about how many it will have; it is exactly what it has as a whole.
    """
    size = _AT_ONCE * len(text) // weigh(text)
    about, enough = 0, 2 * (most + _FEWER)
    for end in range(size, len(text) + size, size):
        about += _count(tokenizer, [text[end - size : end]])[0].tokens
        if about <= enough and end < len(text):
            continue
        about = _count(tokenizer, [text[:end]])[0].tokens
        if end >= len(text):
            return Length(about)
        if about > most + _FEWER:
            return Length(about, is_whole=False)
        # Its words are cut through wherever a part ends.
        enough *= 2
    raise AssertionError


def _count(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Length]:
    return [Length(len(each)) for each in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def start_threads() -> None:
    """Start the threads that texts are tokenized on: where the first batch of several cannot, no later one is.

    Raises:
        GatewayError: They cannot be started, or those that gRPC will want: it never asks anybody then.
    """
    try:
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode_batch(["a", "a"])
    # What the library raises then is no Exception, and has no name that can be imported.
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":
            raise
        raise _refuse_threads(
            "texts cannot be tokenized", "threads for that", f"'{str(exc).splitlines()[0]}'"
        ) from None
    _try_threads()


def _try_threads() -> None:
    ended = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(_THREADS):
            thread = threading.Thread(target=ended.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as exc:
        expected = f"{_THREADS} more to be started"
        raise _refuse_threads("too few threads may run", expected, f"{len(started)} and '{exc}'") from exc
    finally:
        ended.set()
        for thread in started:
            thread.join()


def _refuse_threads(fault: str, expected: str, got: str) -> GatewayError:
    return GatewayError(
        fault,
        expected=expected,
        got=got,
        remedy="raise the limit on threads (ulimit -u, TasksMax of systemd, pids_limit of a container)",
    )
