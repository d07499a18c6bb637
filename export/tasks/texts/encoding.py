"""Questions, and the token tensors that the checkpoint's own tokenizer makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Encoding, Tokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...errors import VerificationError

# Tensor name → its values for one sequence.
TokenRow = Mapping[str, list[int]]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What one row of a request asks about: a text, or a pair of them."""

    text: str
    pair: str | None = None


class QuestionEncoder:
    """transformers' own tokenizer with the truncation that the server is to have.

    Where a first text leaves windows no more tokens than they are to share, they share half of what it leaves.

    Args:
        tokenizer: The checkpoint's tokenizer, with the added tokens.
        max_length: The longest sequence, in tokens, special tokens included.
        stride: Tokens that two windows of a long second text share; None truncates it instead.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, stride: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.stride = stride

    def encode(self, question: Question) -> list[TokenRow]:
        """Return the windows of a question, which is one sequence unless there is a stride."""
        names = ("input_ids", "attention_mask", "token_type_ids")
        options = {"return_token_type_ids": True, "return_attention_mask": True, "max_length": self.max_length}
        pairs = None if question.pair is None else [question.pair]
        if self.stride is None:
            made = self.tokenizer([question.text], pairs, truncation=True, **options)
        else:
            made = self.tokenizer(
                [question.text],
                pairs,
                truncation="only_second",
                stride=self.find_stride(question),
                return_overflowing_tokens=True,
                **options,
            )
        return [{name: made[name][index] for name in names} for index in range(len(made["input_ids"]))]

    def find_stride(self, question: Question) -> int:
        """Return how many tokens two windows of a question share, which must be fewer than a window has room for.

        The server's step finds the same (backends/python_preprocess/truncation.py).
        """
        stride, room = self.stride or 0, self.find_room(question)
        return stride if stride < room else max(room, 0) // 2

    def find_room(self, question: Question) -> int:
        """Return how many tokens of the second text a window has beside the whole first one; may be negative."""
        first = self.tokenizer(question.text, add_special_tokens=False)["input_ids"]
        return self.max_length - self.tokenizer.num_special_tokens_to_add(pair=True) - len(first)

    def build_server_tokenizer(self) -> Tokenizer:
        """Return the tokenizer as the server loads it: truncation and padding set inside `tokenizer.json`.

        The file is then complete: whoever loads it with the `tokenizers` library gets the ids that were verified.
        """
        tokenizer = self.tokenizer
        backend: Tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.enable_truncation(
            self.max_length,
            stride=self.stride or 0,
            strategy="longest_first" if self.stride is None else "only_second",
            direction=tokenizer.truncation_side,
        )
        backend.enable_padding(
            direction=tokenizer.padding_side,
            pad_id=tokenizer.pad_token_id or 0,
            pad_type_id=tokenizer.pad_token_type_id,
            pad_token=tokenizer.pad_token or "",
        )
        return backend

    def check_agrees(self, served: Tokenizer, questions: Sequence[Question]) -> None:
        """Refuse a server tokenizer that makes other ids than transformers does.

        Raises:
            VerificationError: They differ; the first such text is named.
        """
        # Windows are padded to the longest of their text, as batches are: neither is what is compared.
        bare = Tokenizer.from_str(served.to_str())
        bare.no_padding()
        for question in questions:
            want = [(row["input_ids"], row["token_type_ids"]) for row in self.encode(question)]
            if self.stride is not None:
                bare.enable_truncation(**(bare.truncation or {}) | {"stride": self.find_stride(question)})
            encoding = bare.encode(question.text, question.pair)
            windows: list[Encoding] = [encoding, *(encoding.overflowing if self.stride is not None else [])]
            got = [(window.ids, window.type_ids) for window in windows]
            if got != want:
                raise VerificationError(
                    f"the server's tokenizer reads {question.text[:40]!r} differently from transformers",
                    expected=f"ids {want[0][0][:12]}",
                    got=f"ids {got[0][0][:12]}",
                    remedy="save the tokenizer with the transformers release that the checkpoint was trained with",
                )
