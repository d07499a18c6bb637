"""Tokens to text, and which of them have a text that no later token changes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

# Each token has a text of its own, or one that depends on whether it is the first.
_BY_TOKEN = ("ByteLevel", "WordPiece", "Metaspace", "BPEDecoder", "Replace", "ByteFallback", "Fuse", "Strip")


class TextDecoder:
    """What a tokenizer makes of tokens, special ones left out.

    Args:
        tokenizer: As the version has it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        steps = [*_list_steps(tokenizer)]
        self._is_open = not _is_by_token(steps)
        self._has_bytes = any(step["type"] == "ByteFallback" for step in steps)
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._left_out = frozenset(special)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens that follow each other."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def is_open(self, token: int) -> bool:
        """Return whether the text that ends in this token may become another one with the next.

        Bytes that follow each other are characters if all of them are, and else signs for none: of the first ones
        nothing is known before the last one. What is left out of the text does not part them.
        """
        if self._is_open or not self._has_bytes:
            return self._is_open
        text = self._tokenizer.id_to_token(token)
        return text is None or token in self._left_out or (text.startswith("<0x") and text.endswith(">"))


def _list_steps(tokenizer: Tokenizer) -> Iterator[Mapping[str, Any]]:
    """Yield what the tokenizer decodes by, as `tokenizer.json` has it."""
    left = [] if tokenizer.decoder is None else [json.loads(tokenizer.decoder.__getstate__())]
    while left:
        step = left.pop(0)
        if step["type"] == "Sequence":
            left[:0] = step["decoders"]
        else:
            yield step


def _is_by_token(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a text goes on with the text of each token; what changes a whole text may change all of it."""
    is_whole = False
    for step in steps:
        kind = step["type"]
        if kind not in _BY_TOKEN:
            return False
        # Of a whole text, but for one sign at its beginning.
        if is_whole and not (kind == "Fuse" or (kind == "Strip" and step["start"] <= 1 and not step["stop"])):
            return False
        is_whole |= kind in ("ByteLevel", "Fuse")
    return True
