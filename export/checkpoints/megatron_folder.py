"""What lies beside a Megatron checkpoint and is of the same model: a tokenizer, a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export.checkpoints.megatron_args import MegatronArgs
from export.errors import CheckpointError, VocabularyError

_MAX_JSON_BYTES = 64 << 20


def find_vocab_size(directory: Path, args: MegatronArgs, rows: int) -> tuple[int, str]:
    """Return how many rows of the vocabulary are no padding, and what makes that unsure, if anything does.

    Args:
        directory: Where `config.json` or a tokenizer may lie.
        args: Forks of Megatron record the tokenizer's size in them.
        rows: Of the embeddings, padding included.

    Raises:
        VocabularyError: There are more tokens than rows.
    """
    config, tokenizer = _read_json(directory / "config.json"), _read_json(directory / "tokenizer.json")
    vocabulary = _read_json(directory / "vocab.json")
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    ids = list(model["vocab"].values()) if isinstance(model, dict) and isinstance(model.get("vocab"), dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    known = {
        "config.json": config.get("vocab_size"),
        "tokenizer.json": 1 + max((i for i in ids if type(i) is int), default=-1),
        "vocab.json": 1 + max((i for i in vocabulary.values() if type(i) is int), default=-1),
        "the arguments": args.vocabulary,
    }
    for where, size in known.items():
        if type(size) is int and size > 0:
            if size > rows:
                raise VocabularyError(
                    f"{where} in {directory} has more tokens than the checkpoint has embeddings",
                    expected=f"{rows} tokens at most",
                    got=str(size),
                    remedy="use the tokenizer that the checkpoint was trained with",
                )
            return size, ""
    return (
        rows,
        f"the vocabulary's true size: all {rows} rows are kept, padding too; a tokenizer beside them would tell",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def check_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Check that a `config.json` beside the checkpoint is of the same model.

    Raises:
        CheckpointError: It is of another.
    """
    found = _read_json(directory / "config.json")
    sizes = ("model_type", "n_embd", "n_layer", "n_head", "n_positions")
    wrong = [name for name in sizes if name in found and found[name] != config[name]]
    if wrong:
        raise CheckpointError(
            f"{directory / 'config.json'} is not of the checkpoint beside it",
            expected=", ".join(f"{name} {config[name]}" for name in wrong),
            got=", ".join(str(found[name]) for name in wrong),
            remedy="remove it: the checkpoint's own arguments tell the architecture",
        )
