"""What the rows of new tokens start as, in the input embedding, the output embedding and its bias."""

import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..errors import VocabularyError
from .vocabulary_options import AddedToken

_WHOLE_WORDS = ("zeros", "mean", "random")

# The spread of new rows where the configuration names none, as transformers' models have it.
DEFAULT_SPREAD = 0.02


def check_initializer(tokenizer: PreTrainedTokenizerBase, item: AddedToken) -> None:
    """Refuse an initializer that names nothing the tokenizer knows.

    Raises:
        VocabularyError: The token to copy does not exist, or the description holds nothing but unknown words.
    """
    kind, argument = split_initializer(item.initializer)
    if kind == "copy" and argument not in tokenizer.get_vocab():
        raise VocabularyError(
            f"the token that {item.token} is to be a copy of does not exist",
            expected="a token that the checkpoint's tokenizer has before any is added",
            got=repr(argument),
            remedy="name one as the tokenizer writes it",
        )
    if kind == "mean of" and not description_ids(tokenizer, argument):
        raise VocabularyError(
            f"the description of {item.token} has no known token",
            expected="words that the tokenizer knows",
            got=repr(argument),
            remedy="describe the token in the words of the model's language",
        )


def split_initializer(initializer: str) -> tuple[str, str]:
    """Return kind and argument: `zeros`, `mean`, `random`, `copy` with a token, or `mean of` with a description."""
    if initializer in _WHOLE_WORDS:
        return initializer, ""
    if initializer.startswith("copy:"):
        return "copy", initializer.removeprefix("copy:")
    return "mean of", initializer.removeprefix("mean:")


def build_row(
    table: Tensor, item: AddedToken, tokenizer: PreTrainedTokenizerBase, generator: torch.Generator, spread: float
) -> Tensor:
    """Return the row that `item` starts as.

    Args:
        table: The tokens that were there before, [rows, hidden] or a bias [rows], fp32.
        item: The token, whose initializer has been checked.
        tokenizer: The tokenizer that knows the words of the description.
        generator: Source of `random` rows; a bias then starts at 0, as in transformers' models.
        spread: Standard deviation of `random` rows.

    Returns:
        [hidden], or a scalar.
    """
    kind, argument = split_initializer(item.initializer)
    if kind == "zeros" or (kind == "random" and table.dim() == 1):
        return torch.zeros_like(table[0])
    if kind == "random":
        return torch.empty_like(table[0]).normal_(0.0, spread, generator=generator)
    if kind == "copy":
        return table[tokenizer.get_vocab()[argument]]
    rows = table[description_ids(tokenizer, argument)] if kind == "mean of" else table
    return rows.mean(dim=0)


def description_ids(tokenizer: PreTrainedTokenizerBase, description: str) -> list[int]:
    """Return the ids of the words of a description that the tokenizer knows."""
    ids: list[int] = tokenizer(description, add_special_tokens=False)["input_ids"]
    return [token_id for token_id in ids if token_id != tokenizer.unk_token_id]
