"""A checkpoint whose tables, tokenizer and configuration were brought together before it is written again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ..checkpoints import StoredCheckpoint, open_checkpoint
from ..checkpoints.storage.paths import read_json_if_any
from ..consolidation.fitted import Fitted
from ..errors import VocabularyError
from .tokenizer import check_special_ids, load_tokenizer
from .torch_model import load_config
from .transforms import CastToFloat32
from .vocabulary_options import VocabularyOptions
from .vocabulary_rows import fit_vocabulary

_ROWS_FILE = "rows.safetensors"
# Whatever fits into fp32 comes back as it was.
_MAX_BYTES = 4
# What older releases of transformers and slow tokenizers read: tokens that were added are in `tokenizer.json` alone.
# LUKE's `entity_vocab.json` is no vocabulary of texts.
_SUPERSEDED = (
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.txt",
    "vocab.json",
    "*-vocab.json",
    "*merges.txt",
    "*.model",
    "*.spm",
    "bpe.codes",
)


def fit_checkpoint(options: VocabularyOptions, checkpoint: StoredCheckpoint, directory: Path, scratch: Path) -> Fitted:
    """Return the checkpoint with the rows that were asked for, each in the type that its table is stored in.

    Args:
        options: Tokens to add, and what becomes of the other rows.
        checkpoint: The weights.
        directory: Folder with configuration and tokenizer.
        scratch: An empty folder, for the tables and for the tokenizer's new files.

    Raises:
        CheckpointError: There is no configuration or tokenizer, or the weights are damaged.
        VocabularyError: The tokenizer belongs to another model, or a token cannot be started as asked.
    """
    recorded: Any = read_json_if_any(directory / "config.json") or {}
    parts = [key for key, value in recorded.items() if isinstance(value, dict) and "vocab_size" in value]
    if parts:
        raise VocabularyError(
            f"the vocabulary of {directory} cannot be changed",
            expected="a model with one vocabulary",
            got=f"parts with vocabularies of their own: {', '.join(parts)}",
        )
    config = load_config(directory, checkpoint.config, weights=checkpoint.directory)
    tokenizer = load_tokenizer(directory, config)
    if not options.allow_other_tokenizer:
        check_special_ids(directory, tokenizer, checkpoint.config)
    weights, rows = fit_vocabulary(config, CastToFloat32(source=checkpoint), tokenizer, options)
    stored = {name: checkpoint.specs()[name].dtype for name in rows.tables}
    if wide := [name for name, dtype in stored.items() if dtype.itemsize > _MAX_BYTES]:
        raise VocabularyError(
            f"{', '.join(wide)} would be rounded",
            expected="tables of 32 bits a number or less",
            got=str(stored[wide[0]]).removeprefix("torch."),
            remedy="consolidate it with --dtype float32 first, and then add the tokens",
        )
    made = {name: weights.read(name).to(dtype).contiguous() for name, dtype in stored.items()}
    # What shares its bytes with another goes on doing so where both got the same rows.
    tied = {
        name: holder
        for name, holder in checkpoint.tied.items()
        if name not in made or made[name].equal(made.get(holder, made[name][:0]))
    }
    save_file({name: table for name, table in made.items() if name not in tied}, scratch / _ROWS_FILE)
    written = open_checkpoint(scratch / _ROWS_FILE, allow_non_finite=checkpoint.allow_non_finite).tensors
    tensors = {**checkpoint.tensors, **{name: written[tied.get(name, name)] for name in made}}
    files = scratch / "tokenizer"
    tokenizer.save_pretrained(files)
    # Marian's decoder may have a vocabulary of its own, which stays as it is.
    decoder_rows = getattr(config, "decoder_vocab_size", None)
    changed = {"vocab_size": rows.after, "decoder_vocab_size": decoder_rows, "vocabulary_sha256": rows.sha256}
    return Fitted(
        # Second copies were compared with what the trainer saved when the tables were read.
        checkpoint=replace(checkpoint, tensors=tensors, tied=tied, copies=()),
        files=files,
        superseded=_SUPERSEDED,
        warnings=rows.warnings,
        config={key: value for key, value in changed.items() if key == "vocab_size" or key in recorded},
    )
