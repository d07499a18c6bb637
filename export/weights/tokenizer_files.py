"""The files that tokenizers lie in. Needs no torch."""

from pathlib import Path

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
    """Tell whether there is any file of a tokenizer in `directory`."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)
