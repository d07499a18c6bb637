"""The files that tokenizers lie in. Needs no torch."""

from pathlib import Path

from ..checkpoints.storage.paths import has_file

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "gpt2-vocab.json",
)


def has_tokenizer(directory: Path) -> bool:
    """Tell whether there is any file of a tokenizer in `directory`.

    Raises:
        CheckpointError: One of the names is there and no regular file.
    """
    return any(has_file(directory / name) for name in TOKENIZER_FILES)
