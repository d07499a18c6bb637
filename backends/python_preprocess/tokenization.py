"""From texts to token ids: decoding, truncation and padding, without a word about Triton."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

Int64Array = npt.NDArray[np.int64]

# Of a text that is truncated anyway, this many characters for each token that the model reads are tokenised: first so
# many as real texts need, then so many as even URLs and numbers do. 1 MiB of punctuation took a second and a half as a
# whole, and takes milliseconds like this.
_CHARACTERS_PER_TOKEN = (8, 32)

# What cannot be cut is tokenised as a whole up to this length, which takes a fifth of a second at worst: texts that are
# truncated at their beginning, or that have no words. So are two long texts of a pair, to see which is the longer.
_WHOLE_CHARACTERS = 1 << 17


# Lengths in tokens that a request is padded to, separated by commas: the dynamic batcher joins requests of one length.
LENGTHS_PARAMETER = "modelyard_lengths"


# Of a tokenizer that puts no token of its own around a text, as GPT-2's.
NO_TOKEN = "TEXT holds no token: expected at least one, got an empty sequence; leave out texts that are empty"


class TextError(ValueError):
    """A text that cannot be tokenised; the message is for the caller who sent it."""


class TextTokenizer:
    """A `tokenizer.json`, which holds truncation and padding as well, and the tensors that are wanted of it.

    Args:
        path: The `tokenizer.json`.
        tensor_names: Names of the tensors to make.
        has_windows: Whether what is truncated follows in windows of its own, as many as it takes.
        lengths: What a request is padded to, the smallest first: the first that holds its longest sequence. Where
            none does, and where there are none, it is padded to that sequence.

    Attributes:
        unknown_id: Id that stands for what the model has no token for; None where it has none.
        marks_continuation: Whether tokens that continue a word begin with a mark.

    Raises:
        ValueError: The file sets no truncation or padding, or a tensor is wanted that a tokenizer does not make.
    """

    def __init__(
        self, path: Path, tensor_names: Sequence[str], *, has_windows: bool = False, lengths: Sequence[int] = ()
    ) -> None:
        unknown = sorted(set(tensor_names) - TENSORS.keys())
        if unknown:
            raise ValueError(f"a tokenizer does not make {', '.join(unknown)}: expected {', '.join(TENSORS)}")
        self._tokenizer = Tokenizer.from_file(str(path))
        if self._tokenizer.padding is None or self._tokenizer.truncation is None:
            raise ValueError(f"{path} sets no padding or no truncation: expected a file that the export wrote")
        self._padding = dict(self._tokenizer.padding)
        # A batch is padded request by request: a caller's shape must not depend on other callers.
        self._tokenizer.no_padding()
        self._shortening = None if has_windows else Shortening(self._tokenizer)
        self._overlap = Overlap(self._tokenizer) if has_windows else None
        self._pairing = None if has_windows else Pairing(self._tokenizer)
        self._tensor_names = list(tensor_names)
        self._has_windows = has_windows
        self._lengths = lengths
        self.unknown_id = find_unknown_id(self._tokenizer)
        self.marks_continuation = bool(getattr(self._tokenizer.model, "continuing_subword_prefix", None))

    def encode(self, rows: Sequence[tuple[str, ...]]) -> "list[TokenizedRow | TextError]":
        """Return what each row of one or two texts became, unpadded, or why it became nothing.

        All rows are encoded at once, over the cores that this process may use.
        """
        shortened = self._shorten(rows)
        asked = [row[0] if len(row) == 1 else row for row in shortened if not isinstance(row, TextError)]
        encodings = iter(self._encode_all(asked))
        made = [row if isinstance(row, TextError) else next(encodings) for row in shortened]
        return [
            self._check(encoding, row) if isinstance(encoding, Encoding) else encoding
            for encoding, row in zip(made, rows, strict=True)
        ]

    def _encode_all(self, asked: "list[str | tuple[str, ...]]") -> "list[Encoding | TextError]":
        apart = {index for index, text in enumerate(asked) if self._is_long_pair(text)}
        together = iter(self._encode_together([text for index, text in enumerate(asked) if index not in apart]))
        return [self._encode_one(text) if index in apart else next(together) for index, text in enumerate(asked)]

    def _is_long_pair(self, text: "str | tuple[str, ...]") -> bool:
        return self._pairing is not None and self._pairing.is_long(text)

    def _encode_together(self, asked: "list[str | tuple[str, ...]]") -> "list[Encoding | TextError]":
        try:
            if self._overlap is None or not self._overlap.is_less_for_any(asked):
                return list(self._tokenizer.encode_batch(asked))
        # The library raises plain Exception for a text that its model has no token for, and names no row.
        except Exception:
            pass
        return [self._encode_one(text) for text in asked]

    def _shorten(self, rows: Sequence[tuple[str, ...]]) -> "Sequence[tuple[str, ...] | TextError]":
        if self._shortening is None:
            return rows
        try:
            return self._shortening.shorten(rows)
        # As above.
        except Exception:
            return [self._shortening.shorten_one(row) for row in rows]

    def stack(self, rows: "Sequence[TokenizedRow]") -> Mapping[str, Int64Array]:
        """Return the wanted tensors of one request, int64, padded to its longest sequence or a length that holds it.

        Returns:
            Name → [rows, seq_len, ...], or [rows, windows, seq_len, ...] where there are windows.
        """
        longest = max(len(window.ids) for row in rows for window in row.windows)
        longest = next((length for length in self._lengths if length >= longest), longest)
        count = max(len(row.windows) for row in rows)
        return {name: np.stack([self._fill(row, name, count, longest) for row in rows]) for name in self._tensor_names}

    def _fill(self, row: "TokenizedRow", name: str, windows: int, seq_len: int) -> Int64Array:
        """Return one tensor of one row, padded in both directions."""
        wanted = TENSORS[name]
        made = [np.array(wanted.make(self, row, window), dtype=np.int64) for window in row.windows]
        filling = self._padding[wanted.filling] if isinstance(wanted.filling, str) else wanted.filling
        tensor = np.full((windows, seq_len, *made[0].shape[1:]), filling, dtype=np.int64)
        for index, values in enumerate(made):
            start = seq_len - len(values) if self._padding["direction"] == "left" else 0
            tensor[index, start : start + len(values)] = values
        return tensor if self._has_windows else tensor[0]

    def _check(self, encoding: Encoding, row: tuple[str, ...]) -> "TokenizedRow | TextError":
        if not encoding.ids:
            return TextError(NO_TOKEN)
        return TokenizedRow(row, [encoding, *(encoding.overflowing if self._has_windows else [])])

    def _encode_one(self, text: "str | tuple[str, ...]") -> "Encoding | TextError":
        try:
            if self._pairing is not None and self._pairing.is_long(text):
                return self._pairing.encode(text[0], text[1])
            tokenizer = self._tokenizer if self._overlap is None else self._overlap.choose(self._tokenizer, text)
            return tokenizer.encode(*([text] if isinstance(text, str) else text))
        except TextError as exc:
            return exc
        # As above.
        except Exception as exc:
            if "Truncation error" in str(exc):
                limit = (self._tokenizer.truncation or {}).get("max_length")
                return TextError(
                    f"TEXT leaves no room for TEXT_PAIR: expected fewer than {limit} tokens together with a part of "
                    f"TEXT_PAIR, got more in TEXT alone; shorten it"
                )
            return TextError(f"TEXT cannot be tokenised: {exc}; remove the characters that the model does not know")


@dataclass(frozen=True)
class Beginning:
    """What is left of a long text.

    Attributes:
        text: Its beginning.
        tokens: How many tokens that has.
    """

    text: str
    tokens: int


class Shortening:
    """Leaves of a long text no more than decides which tokens the model reads.

    Words are tokenised one by one, so the tokens of a text's beginning are those of the whole text up to about the word
    that the cut went through. What counts is where the tokenizer itself says that words end: one that does not split
    into words has a single one, and its texts are never cut.

    Args:
        tokenizer: Tokenizer that truncates; it stays as it is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        truncation = tokenizer.truncation or {}
        self._tokens = int(truncation["max_length"])
        self._cuts_end = truncation["direction"] == "right"
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
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


class Pairing:
    """Encodes two long texts of a pair as the library does, without what is truncated of them.

    The library goes on to pair each window of that of the one with each of the other: of two texts of 20,000 characters
    without blanks, which cannot be cut, that were 8 GB, though nothing is made of it here.

    Args:
        tokenizer: Tokenizer that truncates; it stays as it is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        truncation = tokenizer.truncation or {}
        self._tokens = int(truncation["max_length"])
        self._cuts_end = truncation["direction"] == "right"
        # Of the others, one text stays whole, or there is an error.
        self._cuts_both = truncation["strategy"] == "longest_first"
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

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
        self._whole = Tokenizer.from_str(tokenizer.to_str())
        self._whole.no_truncation()
        self._whole.no_padding()
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


class TokenizedRow:
    """The texts of one row, and the windows that they became: one, unless a long text is read in several."""

    def __init__(self, texts: tuple[str, ...], windows: "list[Encoding]") -> None:
        self.texts = texts
        self.windows = windows


def find_unknown_id(tokenizer: Tokenizer) -> "int | None":
    """Return the id that stands for what the model has no token for, if it has one."""
    unknown = getattr(tokenizer.model, "unk_token", None)
    return tokenizer.token_to_id(unknown) if unknown else getattr(tokenizer.model, "unk_id", None)


def token_spans(encoding: Encoding) -> Int64Array:
    """Return first character and the one behind the last of each token, [seq_len, 2]; -1 for special tokens."""
    spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    spans[np.array(encoding.special_tokens_mask) == 1] = -1
    return spans


def continues_word(encoding: Encoding, text: str, unknown_id: "int | None", *, marks_continuation: bool) -> Int64Array:
    """Return 1 for each token that belongs to the word of the token before it, [seq_len].

    As transformers' `TokenClassificationPipeline` tells: where the tokenizer marks such tokens, by a token that is
    longer than its text; elsewhere by the blank that is missing before it.
    """
    flags = []
    for token, token_id, (start, end) in zip(encoding.tokens, encoding.ids, encoding.offsets, strict=True):
        if token_id == unknown_id:
            flags.append(0)
        elif marks_continuation:
            flags.append(int(len(token) != len(text[start:end])))
        else:
            flags.append(int(start > 0 and " " not in text[start - 1 : start + 1]))
    return np.array(flags, dtype=np.int64)


def answer_spans(encoding: Encoding) -> Int64Array:
    """Return the characters of the word that each token of the second text lies in, [seq_len, 2]; -1 elsewhere."""
    spans = np.full((len(encoding.ids), 2), -1, dtype=np.int64)
    for index, sequence in enumerate(encoding.sequence_ids):
        if sequence == 1:
            word = encoding.token_to_word(index)
            spans[index] = encoding.offsets[index] if word is None else encoding.word_to_chars(word, 1)
    return spans


@dataclass(frozen=True)
class MadeTensor:
    """A tensor that a step of this kind can make.

    Attributes:
        make: Its values for one window of one row, [seq_len, ...], of the tokenizer, the row and the window.
        filling: What stands in its padding; text is the key of the tokenizer's own setting.
    """

    make: Callable[[TextTokenizer, TokenizedRow, Encoding], Any]
    filling: "int | str"


# Name → how it is made. The first three are the model's own, the others are for the step behind it.
TENSORS: Mapping[str, MadeTensor] = {
    "input_ids": MadeTensor(lambda tokenizer, row, window: window.ids, "pad_id"),
    "attention_mask": MadeTensor(lambda tokenizer, row, window: window.attention_mask, 0),
    "token_type_ids": MadeTensor(lambda tokenizer, row, window: window.type_ids, "pad_type_id"),
    "token_spans": MadeTensor(lambda tokenizer, row, window: token_spans(window), -1),
    "continues_word": MadeTensor(
        lambda tokenizer, row, window: continues_word(
            window, row.texts[0], tokenizer.unknown_id, marks_continuation=tokenizer.marks_continuation
        ),
        0,
    ),
    "answer_spans": MadeTensor(lambda tokenizer, row, window: answer_spans(window), -1),
}


def read_lengths(config: Mapping[str, Any]) -> list[int]:
    """Return the lengths in tokens that requests are padded to, the smallest first; none where they are not.

    Args:
        config: Configuration of the model.

    Raises:
        ValueError: The parameter holds something else than numbers of at least 1.
    """
    text = config.get("parameters", {}).get(LENGTHS_PARAMETER, {}).get("string_value", "")
    words = text.split(",") if text else []
    if not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"the parameter {LENGTHS_PARAMETER} is wrong: expected numbers as in 32,64,128, got {text!r}")
    return sorted(map(int, words))


def decode_text(value: "bytes | str", row: int, name: str = "TEXT") -> str:
    """Return the text of one row.

    Args:
        value: The text as it came over the wire.
        row: Its place in the request, for the message.
        name: Name of the input, for the message.

    Raises:
        TextError: The bytes are not UTF-8.
    """
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise TextError(
            f"{name} row {row} is not UTF-8: expected valid bytes, got 0x{value[exc.start]:02x} at byte {exc.start} "
            f"({exc.reason}); encode the text as UTF-8"
        ) from exc
