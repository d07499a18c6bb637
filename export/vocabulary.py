"""The tokenizer, its special tokens, and the embedding rows that its ids reach."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PretrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from export.checkpoints import StateDict
from export.errors import CheckpointError, VocabularyError
from export.request import AddedToken
from export.transforms import AssignRows

# Position tables of the RoBERTa family start at pad_token_id + 1, so two of their rows name no position
# (transformers, modeling_roberta.py, create_position_ids_from_input_ids).
_MODEL_TYPES_WITH_POSITION_OFFSET = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "data2vec-text")


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in `directory`, with the Rust `tokenizers` backend that the server runs as well.

    Raises:
        CheckpointError: The folder holds no tokenizer, or one that cannot be loaded.
        VocabularyError: The tokenizer has no Rust backend, so the server could not run it.
    """
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
    if not any((directory / name).is_file() for name in names):
        raise CheckpointError(
            f"{directory} holds no tokenizer",
            expected="one of " + ", ".join(names),
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


def add_special_tokens(tokenizer: PreTrainedTokenizerBase, added: Sequence[AddedToken]) -> list[AddedToken]:
    """Add the special tokens to `tokenizer` and return those it did not have yet, in the order of their ids.

    Special tokens keep their case and are never split.

    Raises:
        VocabularyError: A token or its description is empty, or the description holds nothing but unknown words.
    """
    new: list[AddedToken] = []
    for item in added:
        if not item.token.strip():
            raise VocabularyError(
                "an added token has no text", expected="TOKEN=DESCRIPTION", got=f"={item.description}"
            )
        if item.token in tokenizer.get_vocab():
            continue
        if not _description_ids(tokenizer, item.description):
            raise VocabularyError(
                f"the description of {item.token} has no known token",
                expected="words that the tokenizer knows",
                got=repr(item.description),
                remedy="describe the token in the words of the model's language",
            )
        new.append(item)
    for item in new:
        # One at a time: the ids then follow the order given.
        tokenizer.add_tokens([item.token], special_tokens=True)
    return new


def assign_new_rows(
    weights: StateDict, table: str, tokenizer: PreTrainedTokenizerBase, new: Sequence[AddedToken]
) -> StateDict:
    """Return `weights` with the embedding row of each new token set to the mean of its description's rows.

    Args:
        weights: The state dict, embeddings in fp32.
        table: Name of the input embedding, [rows, hidden].
        tokenizer: Already knows the new tokens.
        new: What `add_special_tokens` returned.
    """
    if not new:
        return weights
    embedding = weights.read(table)
    rows = [embedding[_description_ids(tokenizer, item.description)].mean(dim=0) for item in new]
    vocabulary = tokenizer.get_vocab()
    start = min(vocabulary[item.token] for item in new)
    return AssignRows(source=weights, name=table, start=start, rows=torch.stack(rows))


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


def read_max_length(directory: Path, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> int:
    """Return the longest sequence that the model was made for, in tokens, special tokens included.

    The smallest of what Sentence-Transformers recorded, what the tokenizer says, and the positions that exist.

    Raises:
        CheckpointError: Nothing limits the length, so no maximum can be verified.
    """
    limits: list[int] = []
    settings: Any = read_json(directory / "sentence_bert_config.json") or {}
    if isinstance(settings.get("max_seq_length"), int):
        limits.append(settings["max_seq_length"])
    # transformers writes 1e30 where the tokenizer has no limit of its own.
    if tokenizer.model_max_length < 1e9:
        limits.append(int(tokenizer.model_max_length))
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        offset = 2 if config.model_type in _MODEL_TYPES_WITH_POSITION_OFFSET else 0
        limits.append(positions - offset)
    limits = [limit for limit in limits if limit > 0]
    if not limits:
        raise CheckpointError(
            f"nothing in {directory} says how long a sequence may be",
            expected="model_max_length in tokenizer_config.json or max_position_embeddings in config.json",
            got="neither",
            remedy="write model_max_length into tokenizer_config.json",
        )
    return min(limits)


def build_server_tokenizer(tokenizer: PreTrainedTokenizerBase, max_length: int) -> Tokenizer:
    """Return the tokenizer as the server loads it: truncation and padding set inside `tokenizer.json`.

    The file is then complete: whoever loads it with the `tokenizers` library gets the ids that were verified.
    """
    backend: Tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.enable_truncation(max_length, direction=tokenizer.truncation_side)
    backend.enable_padding(
        direction=tokenizer.padding_side,
        pad_id=tokenizer.pad_token_id or 0,
        pad_type_id=tokenizer.pad_token_type_id,
        pad_token=tokenizer.pad_token or "",
    )
    return backend


def read_json(path: Path) -> Mapping[str, Any] | list[Any] | None:
    """Return what the JSON file holds, or None where there is no such file.

    Raises:
        CheckpointError: The file is not JSON.
    """
    if not path.is_file():
        return None
    try:
        content: Mapping[str, Any] | list[Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise CheckpointError(
            f"{path} cannot be read", expected="JSON", got=str(exc), remedy="copy the checkpoint again"
        ) from exc
    return content


def _description_ids(tokenizer: PreTrainedTokenizerBase, description: str) -> list[int]:
    ids: list[int] = tokenizer(description, add_special_tokens=False)["input_ids"]
    return [token_id for token_id in ids if token_id != tokenizer.unk_token_id]
