"""The files that tokenizers lie in. Needs no torch."""

from pathlib import Path

from ...errors import CheckpointError
from ..storage.paths import has_file

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "gpt2-vocab.json",
)

# GPT-2's two files as Megatron-LM's README has them downloaded → as transformers names them.
_MEGATRON_NAMES = {"gpt2-vocab.json": "vocab.json", "gpt2-merges.txt": "merges.txt"}


def has_tokenizer(directory: Path) -> bool:
    """Tell whether there is any file of a tokenizer in `directory`.

    Raises:
        CheckpointError: One of the names is there and no regular file.
    """
    return any(has_file(directory / name) for name in TOKENIZER_FILES)


def find_renamed(directory: Path) -> dict[str, str]:
    """Return the name that transformers looks for of each file of the tokenizer that bears another; {} where none does.

    Raises:
        CheckpointError: One of the names is there and no regular file, or the vocabulary has no merges.
    """
    vocabulary, merges = _MEGATRON_NAMES
    if any(has_file(directory / name) for name in TOKENIZER_FILES[:-1]) or not has_file(directory / vocabulary):
        return {}
    # transformers would make a tokenizer of one token of it.
    if not has_file(directory / merges):
        raise CheckpointError(
            f"{directory} has one half of GPT-2's tokenizer",
            expected=f"{merges} beside {vocabulary}",
            got="none",
            remedy=f"copy it there as well, or take {vocabulary} away and pass the tokenizer's folder with --base",
        )
    return _MEGATRON_NAMES
