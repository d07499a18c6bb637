"""From texts to token ids: decoding, truncation and padding, without a word about Triton."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer
from truncation import Overlap, Pairing, Shortening, TextError

Int64Array = npt.NDArray[np.int64]

# Lengths in tokens that a request is padded to, separated by commas: the dynamic batcher joins requests of one length.
LENGTHS_PARAMETER = "modelyard_lengths"

# The id of a token that begins a word wherever it stands, as transformers' tokenizer of the checkpoint has it for what
# the model does not know; -1 where it has none.
UNKNOWN_PARAMETER = "modelyard_unknown_id"

# Of a tokenizer that puts no token of its own around a text, as GPT-2's.
NO_TOKEN = "TEXT holds no token: expected at least one, got an empty sequence; leave out texts that are empty"


class TextTokenizer:
    """A `tokenizer.json`, which holds truncation and padding as well, and the tensors that are wanted of it.

    Args:
        path: The `tokenizer.json`.
        tensor_names: Names of the tensors to make.
        has_windows: Whether what is truncated follows in windows of its own, as many as it takes.
        lengths: What a request is padded to, the smallest first: the first that holds its longest sequence. Where
            none does, and where there are none, it is padded to that sequence.
        unknown_id: Id of a token that begins a word wherever it stands; None to take the one that the file names.

    Attributes:
        unknown_id: The same; -1 where there is none.
        marks_continuation: Whether tokens that continue a word begin with a mark.

    Raises:
        ValueError: The file sets no truncation or padding, or a tensor is wanted that a tokenizer does not make.
    """

    def __init__(
        self,
        path: Path,
        tensor_names: Sequence[str],
        *,
        has_windows: bool = False,
        lengths: Sequence[int] = (),
        unknown_id: "int | None" = None,
    ) -> None:
        unknown = sorted(set(tensor_names) - TENSORS.keys())
        if unknown:
            raise ValueError(f"a tokenizer does not make {', '.join(unknown)}: expected {', '.join(TENSORS)}")
        self._tokenizer = Tokenizer.from_file(str(path))
        if self._tokenizer.padding is None or self._tokenizer.truncation is None:
            raise ValueError(f"{path} sets no padding or no truncation: expected a file that the export wrote")
        # Its threads start with the first batch of several texts, and where they cannot, no later one is encoded. Here
        # it is a load that fails then, and is tried again.
        with contextlib.suppress(Exception):
            self._tokenizer.encode_batch(["", ""])
        self._padding = dict(self._tokenizer.padding)
        # A batch is padded request by request: a caller's shape must not depend on other callers.
        self._tokenizer.no_padding()
        self._shortening = None if has_windows else Shortening(self._tokenizer)
        self._overlap = Overlap(self._tokenizer) if has_windows else None
        self._pairing = None if has_windows else Pairing(self._tokenizer)
        self._tensor_names = list(tensor_names)
        self._has_windows = has_windows
        self._lengths = lengths
        if unknown_id is None:
            unknown_id = find_unknown_id(self._tokenizer) if "continues_word" in tensor_names else -1
        self.unknown_id = unknown_id
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


class TokenizedRow:
    """The texts of one row, and the windows that they became: one, unless a long text is read in several."""

    def __init__(self, texts: tuple[str, ...], windows: "list[Encoding]") -> None:
        self.texts = texts
        self.windows = windows


def find_unknown_id(tokenizer: Tokenizer) -> int:
    """Return the id that stands for what the model has no token for; -1 where it has none."""
    # A Unigram model does not tell in Python (tokenizers 0.23), but writes it.
    model = json.loads(tokenizer.to_str())["model"]
    unknown = model.get("unk_token")
    found = tokenizer.token_to_id(unknown) if unknown else model.get("unk_id")
    return -1 if found is None else int(found)


def token_spans(encoding: Encoding) -> Int64Array:
    """Return first character and the one behind the last of each token, [seq_len, 2]; -1 for special tokens."""
    spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    spans[np.array(encoding.special_tokens_mask) == 1] = -1
    return spans


def continues_word(encoding: Encoding, text: str, unknown_id: int, *, marks_continuation: bool) -> Int64Array:
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


def read_unknown_id(config: Mapping[str, Any]) -> "int | None":
    """Return the id of a token that begins a word wherever it stands, -1 for none; None where nothing is said of it.

    Args:
        config: Configuration of the model.

    Raises:
        ValueError: The parameter holds something else than an id or -1.
    """
    text = config.get("parameters", {}).get(UNKNOWN_PARAMETER, {}).get("string_value", "")
    if text not in ("", "-1") and not text.isdecimal():
        raise ValueError(f"the parameter {UNKNOWN_PARAMETER} is wrong: expected a token's id, or -1, got {text!r}")
    return int(text) if text else None


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
