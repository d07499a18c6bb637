"""Tokens to text as they come: a character is sent whole, and a stop string not at all."""

from collections.abc import Sequence

from text_decoder import TextDecoder

# What stands for bytes that are not a character, or not yet.
_INCOMPLETE = "\ufffd"


class WrittenText:
    """The text of one answer.

    Args:
        decoder: Tokens to text.
        stops: Texts that end it.

    Attributes:
        text: All of it so far, without what may yet become another character.
        is_stopped: Whether a stop string ended it.
    """

    def __init__(self, decoder: TextDecoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = stops
        # Those from `_from` on are decoded together, because what a token is may depend on those before it; up to
        # `_read` they are in the text.
        self._tokens: list[int] = []
        self._from = self._read = 0
        self._sent = 0
        self.text = ""
        self.is_stopped = False

    def add(self, token: int) -> None:
        """Take in a token; none after a stop string."""
        if self.is_stopped:
            return
        self._tokens.append(token)
        if self._decoder.is_open(token):
            return
        known = self._decoder.decode(self._tokens[self._from : self._read])
        new = self._decoder.decode(self._tokens[self._from :])
        if len(new) > len(known) and not new.endswith(_INCOMPLETE):
            self._from, self._read = self._read, len(self._tokens)
            self._append(new[len(known) :])

    def finish(self) -> None:
        """Take in what is left of the last character."""
        if not self.is_stopped:
            known = self._decoder.decode(self._tokens[self._from : self._read])
            self._read = len(self._tokens)
            self._append(self._decoder.decode(self._tokens[self._from :])[len(known) :])
        self._stops = ()

    @property
    def is_ahead(self) -> bool:
        """Whether there is anything to take."""
        return self._find_end() > self._sent

    def take(self) -> str:
        """Return what was not yet taken and is surely no part of a stop string."""
        end = self._find_end()
        piece = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _append(self, piece: str) -> None:
        # A stop string that was not there before ends in the new piece.
        start = max(0, len(self.text) - max(map(len, self._stops), default=0))
        self.text += piece
        found = [place for stop in self._stops if (place := self.text.find(stop, start)) >= 0]
        if found:
            self.text, self.is_stopped = self.text[: min(found)], True

    def _find_end(self) -> int:
        return len(self.text) - self._count_held()

    def _count_held(self) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        if self.is_stopped:
            return 0
        lengths = (
            length
            for stop in self._stops
            for length in range(min(len(stop) - 1, len(self.text)), 0, -1)
            if self.text.endswith(stop[:length])
        )
        return max(lengths, default=0)
