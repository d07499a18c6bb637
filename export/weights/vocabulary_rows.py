"""The rows that belong to the tokenizer's ids: grown, cut and padded together with it, in every table alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..checkpoints import StateDict
from ..errors import VocabularyError, list_some
from .new_rows import DEFAULT_SPREAD, build_row
from .tokenizer import add_tokens, check_ids_have_rows, hash_vocabulary
from .torch_model import find_input_embedding, find_logit_biases, find_output_tables
from .transforms import AssignRows, CutRows, FitColumns
from .vocabulary_options import AddedToken, VocabularyOptions


@dataclass(frozen=True, kw_only=True)
class VocabularyRows:
    """How tokenizer, tables and configuration were brought together.

    Attributes:
        recorded: What `config.vocab_size` said.
        before: Rows of the checkpoint's input embedding, which are the truth.
        after: Rows of what is served.
        tokens: Rows that the tokenizer's ids reach, added ones included.
        added: The tokens that got a row.
        known: Tokens that were to be added and have a row already.
        tables: Names of the tensors that have these rows, or as many columns.
        sha256: Hash of the vocabulary, comparable with `vocabulary_sha256` in a `config.json`.
    """

    recorded: int
    before: int
    after: int
    tokens: int
    added: list[str]
    known: list[str]
    tables: list[str]
    sha256: str

    @property
    def unused(self) -> int:
        """Rows that no id of the tokenizer reaches."""
        return self.after - self.tokens

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was asked for and not done, and what looks as if the tokenizer were another model's."""
        return (*self._warn_of_known(), *self._warn_of_unused())

    def _warn_of_known(self) -> tuple[str, ...]:
        if not self.known:
            return ()
        names = list_some(self.known)
        return (f"the tokenizer has {names} already: each keeps the row that it has, whatever it was to start as.",)

    def _warn_of_unused(self) -> tuple[str, ...]:
        # Tables are padded, but not by more than they hold.
        if self.unused <= self.after / 2:
            return ()
        return (
            f"the tokenizer has {self.tokens} tokens, and the embedding {self.after} rows: if it is not the one that "
            "the checkpoint was trained with, every answer is wrong; pass the folder of that one with --base.",
        )


def fit_vocabulary(
    config: PretrainedConfig, weights: StateDict, tokenizer: PreTrainedTokenizerBase, options: VocabularyOptions
) -> tuple[StateDict, VocabularyRows]:
    """Add the tokens to `tokenizer`, and return `weights` with exactly the rows that go with it.

    The weights are the truth: `config.vocab_size` becomes what they say. A new token takes the next id, which may be
    a row that a trainer's padding left unused. The output embedding of a language-model head and its bias move in
    step with the input embedding; where they are tied, all get the same rows.

    Args:
        config: The checkpoint's configuration; its `vocab_size` is corrected.
        weights: The checkpoint's tensors, in fp32.
        tokenizer: The checkpoint's tokenizer, which gets the new tokens.
        options: The tokens to add, and what happens to the other rows.

    Raises:
        VocabularyError: The tokenizer has ids without a row, or far fewer than there are rows, or a new token cannot be
            started as asked.
        ModelError: The checkpoint's input embedding cannot be determined.
    """
    table = find_input_embedding(config, weights.specs())
    before, recorded = weights.specs()[table].shape[0], int(config.vocab_size or 0)
    # Marian's decoder may have a vocabulary of its own, which does not hold the tokens of the source.
    is_shared = getattr(config, "share_encoder_decoder_embeddings", True)
    _set_vocab_size(config, before, is_shared=is_shared)
    outputs = find_output_tables(config, weights.specs(), before, table) if is_shared else []
    check_ids_have_rows(tokenizer, before, table, allow_other_tokenizer=options.allow_other_tokenizer)
    tokens_before = _count_ids(tokenizer)
    new = add_tokens(tokenizer, options.added_tokens)
    _check_contiguous(tokenizer, new, tokens_before)
    tokens = _count_ids(tokenizer)
    after = max(before, tokens) if options.unused_rows == "keep" else tokens
    after = -(-after // options.pad_to_multiple_of) * options.pad_to_multiple_of
    is_tied = bool(getattr(config, "tie_word_embeddings", False))
    for name in (table, *outputs):
        # Untied tables start with rows of their own, tied ones with the same.
        seed = options.seed + (name != table and not is_tied)
        spread = float(getattr(config, "initializer_range", DEFAULT_SPREAD))
        weights = _fit_table(weights, name, tokenizer, new, tokens_before, after, seed, spread)
    biases = find_logit_biases(weights.specs(), before) if is_shared else []
    for name in biases:
        weights = FitColumns(source=weights, name=name, columns=after)
    _set_vocab_size(config, after, is_shared=is_shared)
    return weights, VocabularyRows(
        recorded=recorded,
        before=before,
        after=after,
        tokens=tokens,
        added=[item.token for item in new],
        known=sorted({item.token for item in options.added_tokens} - {item.token for item in new}),
        tables=[table, *outputs, *biases],
        sha256=hash_vocabulary(tokenizer),
    )


def _set_vocab_size(config: PretrainedConfig, rows: int, *, is_shared: bool) -> None:
    config.vocab_size = rows
    if is_shared and getattr(config, "decoder_vocab_size", None) is not None:
        config.decoder_vocab_size = rows


def _fit_table(
    weights: StateDict,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    new: Sequence[AddedToken],
    start: int,
    after: int,
    seed: int,
    spread: float,
) -> StateDict:
    """Return `weights` with the tensor `name` of `after` rows, those of the new tokens from row `start` on."""
    rows = weights.specs()[name].shape[0]
    if new or after > rows:
        old = weights.read(name)
        generator = torch.Generator().manual_seed(seed)
        # Only rows of tokens that the model knows: those that a trainer's padding left are not part of a mean.
        made = [build_row(old[:start], item, tokenizer, generator, spread) for item in new]
        beyond = max(after, rows) - max(rows, start + len(new))
        padding = [old[:start].mean(dim=0)] * (beyond if after > rows else 0)
        if made:
            weights = AssignRows(source=weights, name=name, start=start, rows=torch.stack(made))
        if padding:
            end = weights.specs()[name].shape[0]
            weights = AssignRows(source=weights, name=name, start=end, rows=torch.stack(padding))
    if weights.specs()[name].shape[0] > after:
        weights = CutRows(source=weights, name=name, rows=after)
    return weights


def _count_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of rows that the tokenizer's ids reach; `len()` is less where ids are left out."""
    return max(tokenizer.get_vocab().values()) + 1


def _check_contiguous(tokenizer: PreTrainedTokenizerBase, new: Sequence[AddedToken], start: int) -> None:
    vocabulary = tokenizer.get_vocab()
    got = [vocabulary[item.token] for item in new]
    if got != list(range(start, start + len(new))):
        raise VocabularyError(
            "the tokenizer gives new tokens ids that leave rows out",
            expected=f"ids from {start} on",
            got=", ".join(map(str, got)),
            remedy="save the tokenizer with ids that follow one another",
        )
