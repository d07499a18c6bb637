"""What is truncated of long texts, without the library's cost for what nobody reads."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Encoding, Tokenizer

# Of a text that is truncated anyway, this many characters for each token that the model reads are tokenised: first so
# many as real texts need, then so many as even URLs and numbers do. 1 MiB of punctuation took a second and a half as a
# whole, and takes milliseconds like this.
_CHARACTERS_PER_TOKEN = (8, 32)

# What cannot be cut is tokenised as a whole up to this length, which takes a fifth of a second at worst: texts that are
# truncated at their beginning, or that have no words. So are two long texts of a pair, to see which is the longer.
_WHOLE_CHARACTERS = 1 << 17


class TextError(ValueError):
    """A text that cannot be tokenised; the message is for the caller who sent it."""


@dataclass(frozen=True)
class Beginning:
    """What is left of a long text.

    Attributes:
        text: Its beginning.
        tokens: How many tokens that has.
    """

    text: str
    tokens: int


class _Truncating:
    """How a tokenizer truncates, and the same one without that."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._truncation = tokenizer.truncation or {}
        self._tokens = int(self._truncation["max_length"])
        self._cuts_end = self._truncation["direction"] == "right"
        self._tokenizer = _copy_whole(tokenizer)


class Shortening(_Truncating):
    """Leaves of a long text no more than decides which tokens the model reads.

    Words are tokenised one by one, so the tokens of a text's beginning are those of the whole text up to about the word
    that the cut went through. What counts is where the tokenizer itself says that words end: one that does not split
    into words has a single one, and its texts are never cut.

    Args:
        tokenizer: Tokenizer that truncates; it stays as it is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        # The cut goes through one word, which may change the one before it, or through an added token, and leaves of
        # that as many words as it has characters at most.
        added = tokenizer.get_added_tokens_decoder().values()
        self._changed_words = 2 + max((len(token.content) for token in added), default=0)

    def shorten(self, rows: Sequence[tuple[str, ...]]) -> "list[tuple[str, ...] | TextError]":
        """Return each row with its long texts cut, or why that cannot be."""
        cut: dict[str, Beginning] = {}
        for ratio in _CHARACTERS_PER_TOKEN:
            size = ratio * self._tokens
            long = [text for text in {text for row in rows for text in row} - cut.keys() if len(text) > size]
            if long and self._cuts_end:
                made = self._tokenizer.encode_batch([text[:size] for text in long], add_special_tokens=False)
                cut |= {
                    text: Beginning(text[:size], len(beginning))
                    for text, beginning in zip(long, made, strict=True)
                    if self._is_enough(beginning)
                }
        return [self._cut(row, cut) for row in rows]

    def shorten_one(self, row: tuple[str, ...]) -> "tuple[str, ...] | TextError":
        """Return the row as `shorten` does, or uncut where the model has no token for its beginning."""
        try:
            return self.shorten([row])[0]
        # As in `TextTokenizer`.
        except Exception:
            return self._cut(row, {})

    def _is_enough(self, beginning: Encoding) -> bool:
        """Tell whether it has all tokens that the model reads before the words that the cut may have changed."""
        words = beginning.word_ids
        if len(words) <= self._tokens:
            return False
        last, first_unread = words[-1], words[self._tokens]
        return last is not None and first_unread is not None and first_unread < last - self._changed_words

    def _cut(self, row: tuple[str, ...], cut: Mapping[str, Beginning]) -> "tuple[str, ...] | TextError":
        """Return the row with what its texts were cut to."""
        kept = tuple(cut[text].text if text in cut else text for text in row)
        if self._keeps_order(row, cut):
            row = kept
        longest = max(map(len, row))
        if longest <= max(_WHOLE_CHARACTERS, _CHARACTERS_PER_TOKEN[-1] * self._tokens):
            return row if row == kept else self._cut_in_order(row, kept)
        return TextError(
            f"a text is too long: expected at most {_WHOLE_CHARACTERS} characters of what cannot be cut before it is "
            f"read, got {longest}; cut it at the {self._tokens} tokens that the model reads"
        )

    def _keeps_order(self, row: tuple[str, ...], cut: Mapping[str, Beginning]) -> bool:
        """Tell whether the longer text of a pair stays the longer one: it is left the odd token."""
        short = [text for text in row if text not in cut]
        if len(row) == 1 or len(short) == len(row):
            return True
        return bool(short) and max(self._count(short)) < min(cut[text].tokens for text in row if text in cut)

    def _cut_in_order(self, row: tuple[str, ...], kept: tuple[str, ...]) -> tuple[str, ...]:
        """Return a pair with as much of the longer text as makes it the longer of what is left.

        Uncut, two texts of 32 kB took 3 GB: the library pairs everything that it truncates of the one with everything
        that it truncates of the other.
        """
        first, second = self._count(row)
        longer = 0 if first > second else 1
        while kept != row:
            left = self._count(kept)
            # Of two that are as long, the second is left the odd token.
            if (left[0] > left[1]) == (first > second):
                break
            if kept[longer] == row[longer]:
                return row
            more = row[longer][: 2 * len(kept[longer])]
            kept = (more, kept[1]) if longer == 0 else (kept[0], more)
        return kept

    def _count(self, texts: Sequence[str]) -> list[int]:
        return [len(made) for made in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]


class Pairing(_Truncating):
    """Encodes two long texts of a pair as the library does, without what is truncated of them.

    The library goes on to pair each window of that of the one with each of the other: of two texts of 20,000 characters
    without blanks, which cannot be cut, that were 8 GB, though nothing is made of it here.

    Args:
        tokenizer: Tokenizer that truncates; it stays as it is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        # Of the others, one text stays whole, or there is an error.
        self._cuts_both = self._truncation["strategy"] == "longest_first"

    def is_long(self, text: "str | tuple[str, ...]") -> bool:
        """Tell whether the windows of two texts may be many: a character has some tokens at most."""
        if isinstance(text, str) or len(text) == 1 or not self._cuts_both:
            return False
        return len(text[0]) * len(text[1]) > (2 * self._tokens) ** 2

    def encode(self, first: str, second: str) -> Encoding:
        """Return the encoding of a pair, whose offsets may differ by a blank, or raise what the library does."""
        one, other = self._tokenizer.encode_batch([first, second], add_special_tokens=False)
        room = self._tokens - self._tokenizer.num_special_tokens_to_add(True)
        left, left_of_other = _share(len(one), len(other), max(room, 0))
        return self._tokenizer.post_process(self._take(one, left), self._take(other, left_of_other))

    def _take(self, encoding: Encoding, size: int) -> Encoding:
        """Return so many tokens of an encoding at the end that is kept, without the rest that `truncate` leaves it."""
        if size >= len(encoding):
            return encoding
        start = 0 if self._cuts_end else len(encoding) - size
        taken = slice(start, start + size)
        state = {
            "ids": encoding.ids[taken],
            "type_ids": encoding.type_ids[taken],
            "tokens": encoding.tokens[taken],
            "words": encoding.word_ids[taken],
            "offsets": encoding.offsets[taken],
            "special_tokens_mask": encoding.special_tokens_mask[taken],
            "attention_mask": encoding.attention_mask[taken],
            "overflowing": [],
            "sequence_ranges": {"0": {"start": 0, "end": size}},
        }
        made = Encoding()
        made.__setstate__(json.dumps(state).encode())
        return made


def _share(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens are left of each text of a pair: the longer one is cut first, and has the odd token."""
    if first + second <= room:
        return first, second
    less = min(first, second)
    kept = (less, room - less) if less <= room // 2 else (room // 2, room - room // 2)
    return kept if first <= second else (kept[1], kept[0])


class Overlap:
    """Has the windows of a second text share fewer tokens where the first one leaves them no more than they share.

    The library panics there, which is no Exception. The export finds the same overlap (export/tasks/texts/encoding.py).

    Args:
        tokenizer: Tokenizer that makes windows; it stays as it is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._truncation = dict(tokenizer.truncation or {})
        self._room = self._truncation["max_length"] - tokenizer.num_special_tokens_to_add(True)
        # A window that has little left for the second text moves on by little: there would be a great many of them.
        self._least_room = max(1, self._truncation["max_length"] // 4)
        self._whole = _copy_whole(tokenizer)
        self._narrow = Tokenizer.from_str(self._whole.to_str())

    def is_less_for_any(self, rows: "Sequence[str | tuple[str, ...]]") -> bool:
        """Tell whether a first text leaves a window no more room than windows share."""
        firsts = [row[0] for row in rows if not isinstance(row, str)]
        made = self._whole.encode_batch(firsts, add_special_tokens=False)
        return any(self._room - len(first) <= self._truncation["stride"] for first in made)

    def choose(self, tokenizer: Tokenizer, row: "str | tuple[str, ...]") -> Tokenizer:
        """Return what tokenises the row: `tokenizer`, or one with a smaller overlap.

        Raises:
            TextError: There would be too many windows.
        """
        if isinstance(row, str):
            return tokenizer
        first, second = (len(self._whole.encode(text, add_special_tokens=False)) for text in row)
        room = self._room - first
        # Where nothing is left for the second text, the library says so itself.
        if room < 1 or room > self._truncation["stride"] or second <= room:
            return tokenizer
        if room < self._least_room:
            raise TextError(
                f"TEXT leaves too little room for TEXT_PAIR, which is read in parts: expected at least "
                f"{self._least_room} of {self._truncation['max_length']} tokens for each part, got {room}; shorten TEXT"
            )
        self._narrow.enable_truncation(**{**self._truncation, "stride": room // 2})
        return self._narrow


def _copy_whole(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy that neither truncates nor pads."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy
