"""The tokenizer, its special tokens, and the embedding rows that its ids reach."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PretrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..checkpoints.storage.paths import read_json_if_any
from ..errors import CheckpointError, VocabularyError
from .new_rows import check_initializer
from .vocabulary_options import AddedToken

# Position tables of the RoBERTa family start at pad_token_id + 1, so two of their rows name no position
# (transformers, modeling_roberta.py, create_position_ids_from_input_ids).
_MODEL_TYPES_WITH_POSITION_OFFSET = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "data2vec-text")


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
)


def has_tokenizer(directory: Path) -> bool:
    """Tell whether there is any file of a tokenizer in `directory`."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in `directory`, with the Rust `tokenizers` backend that the server runs as well.

    Raises:
        CheckpointError: The folder holds no tokenizer, or one that cannot be loaded.
        VocabularyError: The tokenizer has no Rust backend, so the server could not run it.
    """
    if not has_tokenizer(directory):
        raise CheckpointError(
            f"{directory} holds no tokenizer",
            expected="one of " + ", ".join(TOKENIZER_FILES),
            got="none of them",
            remedy="pass the folder of the model that the checkpoint was trained from with --base",
        )
    try:
        # Our own output goes to the server's workers; a fork after tokenising would only print a warning.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    # What a damaged tokenizer raises is up to the library that reads it: OSError, ValueError, a bare Exception, ...
    except Exception as exc:
        raise CheckpointError(
            f"the tokenizer in {directory} cannot be loaded",
            expected="a tokenizer that transformers reads",
            got=str(exc).split("\n", 1)[0].rstrip("."),
            remedy="copy the tokenizer's files again",
        ) from exc
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise VocabularyError(
            f"the tokenizer in {directory} cannot run in the server",
            expected="one with a tokenizer.json",
            got=type(tokenizer).__name__,
            remedy="convert it with transformers and save it beside the weights",
        )
    return tokenizer


def add_tokens(tokenizer: PreTrainedTokenizerBase, added: Sequence[AddedToken]) -> list[AddedToken]:
    """Add tokens to `tokenizer` and return those it did not have yet, in the order of their ids.

    As transformers does: special ones keep their case and are never split; one that is an ordinary token already is
    no longer split either, and adds no row.

    Raises:
        VocabularyError: A token has no text, or its initializer names nothing that the tokenizer knows.
    """
    known = tokenizer.get_vocab()
    for item in added:
        if not item.token.strip():
            raise VocabularyError(
                "an added token has no text", expected="TOKEN=INITIALIZER", got=f"={item.initializer}"
            )
        check_initializer(tokenizer, item)
    for item in added:
        # One at a time: the ids then follow the order given.
        tokenizer.add_tokens([item.token], special_tokens=item.special)
    # Each once, however often it was named.
    return list({item.token: item for item in reversed(added) if item.token not in known}.values())[::-1]


def check_ids_have_rows(tokenizer: PreTrainedTokenizerBase, rows: int, table: str) -> None:
    """Refuse a tokenizer that can produce an id beyond the embedding table.

    Such an id makes the whole batch fail in the server, or reads a wrong row.

    Raises:
        VocabularyError: The tokenizer's highest id has no row.
    """
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if highest >= rows:
        raise VocabularyError(
            f"the tokenizer reaches beyond {table}",
            expected=f"ids below its {rows} rows",
            got=f"id {highest} for {token!r}",
            remedy="use the tokenizer that the checkpoint was trained with",
        )


def read_max_length(
    directory: Path, tokenizer: PreTrainedTokenizerBase | None, config: PretrainedConfig, *, is_required: bool = True
) -> int:
    """Return the longest sequence that the model was made for, in tokens, special tokens included.

    The smallest of what Sentence-Transformers recorded, what the tokenizer says, and the positions that exist; 0 where
    nothing says and the task does not need it.

    Raises:
        CheckpointError: Nothing limits the length, so no maximum can be verified.
    """
    limits: list[int] = []
    settings: Any = read_json_if_any(directory / "sentence_bert_config.json") or {}
    if isinstance(settings.get("max_seq_length"), int):
        limits.append(settings["max_seq_length"])
    # transformers writes 1e30 where the tokenizer has no limit of its own.
    if tokenizer is not None and tokenizer.model_max_length < 1e9:
        limits.append(int(tokenizer.model_max_length))
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        offset = 2 if config.model_type in _MODEL_TYPES_WITH_POSITION_OFFSET else 0
        limits.append(positions - offset)
    limits = [limit for limit in limits if limit > 0]
    if not limits and not is_required:
        return 0
    if not limits:
        raise CheckpointError(
            f"nothing in {directory} says how long a sequence may be",
            expected="model_max_length in tokenizer_config.json or max_position_embeddings in config.json",
            got="neither",
            remedy="write model_max_length into tokenizer_config.json",
        )
    return min(limits)


def check_special_ids(
    directory: Path, tokenizer: PreTrainedTokenizerBase, derived: Mapping[str, Any] | None = None
) -> None:
    """Refuse a tokenizer that belongs to another model, as far as the checkpoint recorded what belongs to it.

    Compared are the ids of special tokens that `config.json` itself names, and `vocabulary_sha256` if it is there.

    Args:
        directory: The folder with `config.json` and the tokenizer.
        tokenizer: The tokenizer to check.
        derived: What another trainer's checkpoint says instead, where there is no `config.json`.

    Raises:
        VocabularyError: An id or the vocabulary differs; every one is named.
    """
    recorded = read_json_if_any(directory / "config.json") or derived or {}
    assert isinstance(recorded, Mapping), "Bug: the configuration was read before"
    different = []
    # The padding's is left out: the mask hides it, so another one in the configuration changes no answer.
    for kind in ("bos", "eos", "cls", "sep", "mask"):
        wanted, got = recorded.get(f"{kind}_token_id"), getattr(tokenizer, f"{kind}_token_id", None)
        if isinstance(wanted, int) and isinstance(got, int) and wanted != got:
            different.append(f"{kind}_token_id {got} where config.json says {wanted}")
    digest = hash_vocabulary(tokenizer)
    if recorded.get("vocabulary_sha256", digest) != digest:
        different.append(f"a vocabulary of SHA-256 {digest} where config.json says {recorded['vocabulary_sha256']}")
    if different:
        raise VocabularyError(
            f"the tokenizer in {directory} belongs to another model",
            expected="the special ids and the vocabulary that config.json names",
            got="; ".join(different),
            remedy="copy the tokenizer that the checkpoint was trained with, or pass --allow-other-tokenizer",
        )


def hash_vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of every token with its id, in the order of ids."""
    ordered = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(ordered, ensure_ascii=False).encode()).hexdigest()
