"""From texts to token ids: decoding, truncation and padding, without a word about Triton."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

Int64Array = npt.NDArray[np.int64]

# The tensors that a step of this kind can make, and the attribute of an `Encoding` that each of them is.
_TENSORS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}


class TextError(ValueError):
    """A text that cannot be tokenised; the message is for the caller who sent it."""


class TextTokenizer:
    """A `tokenizer.json`, which holds truncation and padding as well, and the tensors that are wanted of it.

    Raises:
        ValueError: The file sets no truncation or padding, or a tensor is wanted that a tokenizer does not make.
    """

    def __init__(self, path: Path, tensor_names: Sequence[str]) -> None:
        unknown = sorted(set(tensor_names) - _TENSORS.keys())
        if unknown:
            raise ValueError(f"outputs {', '.join(unknown)} are none of a tokenizer: expected {', '.join(_TENSORS)}")
        self._tokenizer = Tokenizer.from_file(str(path))
        if self._tokenizer.padding is None or self._tokenizer.truncation is None:
            raise ValueError(f"{path} sets no padding or no truncation: expected a file that the export wrote")
        self._padding = dict(self._tokenizer.padding)
        # A batch is padded request by request, for a caller's shape must not depend on strangers.
        self._tokenizer.no_padding()
        self._tensor_names = list(tensor_names)

    def encode(self, texts: Sequence[str]) -> "list[Encoding | TextError]":
        """Return one encoding a text, unpadded and truncated to the model's limit, or why there is none.

        All texts are encoded at once, over all cores.
        """
        try:
            encodings: list[Encoding | TextError] = list(self._tokenizer.encode_batch(list(texts)))
        # The library raises plain Exception for a text that its model has no token for, and names no row.
        except Exception:
            encodings = [self._encode_one(text) for text in texts]
        return [
            TextError("TEXT holds no token: expected at least one, got an empty sequence")
            if isinstance(encoding, Encoding) and not encoding.ids
            else encoding
            for encoding in encodings
        ]

    def stack(self, encodings: Sequence[Encoding]) -> Mapping[str, Int64Array]:
        """Return the wanted tensors of one request, each [rows, seq_len], int64, padded to its longest row."""
        longest = max(len(encoding.ids) for encoding in encodings)
        for encoding in encodings:
            encoding.pad(
                longest,
                direction=self._padding["direction"],
                pad_id=self._padding["pad_id"],
                pad_type_id=self._padding["pad_type_id"],
                pad_token=self._padding["pad_token"],
            )
        return {
            name: np.array([getattr(encoding, _TENSORS[name]) for encoding in encodings], dtype=np.int64)
            for name in self._tensor_names
        }

    def _encode_one(self, text: str) -> "Encoding | TextError":
        try:
            return self._tokenizer.encode(text)
        # As above.
        except Exception as exc:
            return TextError(f"TEXT cannot be tokenised: {exc}; remove the characters that the model does not know")


def decode_text(value: "bytes | str", row: int) -> str:
    """Return the text of one row.

    Args:
        value: As it came over the wire.
        row: Its place in the request, for the message.

    Raises:
        TextError: The bytes are not UTF-8.
    """
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise TextError(
            f"TEXT row {row} is not UTF-8: expected valid bytes, got 0x{value[exc.start]:02x} at byte {exc.start} "
            f"({exc.reason}); encode the text as UTF-8"
        ) from exc
