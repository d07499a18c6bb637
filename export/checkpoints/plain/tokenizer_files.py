"""The files that tokenizers lie in. Needs no torch."""

from pathlib import Path

from ...errors import CheckpointError
from ..storage.paths import MAX_JSON_BYTES, has_file, read_json_beside, read_small

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "gpt2-vocab.json",
)

# The share of a vocabulary that no merge makes, such as tokens that were added to it.
_UNMADE = 0.1

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
        CheckpointError: One of the names is there and no regular file, or the two do not belong together.
    """
    halves = [name for name in _MEGATRON_NAMES if has_file(directory / name)]
    if not halves or any(has_file(directory / name) for name in TOKENIZER_FILES[:-1]):
        return {}
    # Of a vocabulary alone transformers would make a tokenizer of one token.
    if len(halves) == 1:
        (other,) = _MEGATRON_NAMES.keys() - {*halves}
        raise CheckpointError(
            f"{directory} has one half of GPT-2's tokenizer",
            expected=f"{other} beside {halves[0]}",
            got="none",
            remedy=f"copy it there as well, or take {halves[0]} away and pass the tokenizer's folder with --base",
        )
    return _MEGATRON_NAMES


def refuse_cut_merges(directory: Path) -> None:
    """Refuse merges that make too few of the vocabulary's tokens, as a file does that was cut: texts get other ids.

    Looked at where no `tokenizer.json` says the same, under the names that transformers looks for and Megatron's.

    Raises:
        CheckpointError: They do, or the two files are not whole.
    """
    names = tuple(find_renamed(directory)) or tuple(_MEGATRON_NAMES.values())
    vocabulary, merges = (directory / name for name in names)
    if has_file(directory / TOKENIZER_FILES[0]) or not (has_file(vocabulary) and has_file(merges)):
        return
    lines = read_small(merges, max_bytes=MAX_JSON_BYTES).decode("utf-8", "replace").split("\n")
    # fastBPE's have how often they were seen behind them.
    made = {"".join(map(_strip_marks, line.rstrip("\r").split(" ")[:2])) for line in lines}
    tokens = map(_strip_marks, read_json_beside(vocabulary))
    # Of several bytes each; a special token is made by nothing.
    wanted = [token for token in tokens if len(token) > 1 and not token.startswith(("<", "["))]
    lacking = sum(token not in made for token in wanted)
    if lacking > _UNMADE * len(wanted):
        raise CheckpointError(
            f"{merges} does not belong to {vocabulary.name}, or was cut",
            expected=f"a merge for each of {len(wanted)} tokens",
            got=f"none for {lacking} of them",
            remedy="copy both files of the tokenizer that the checkpoint was trained with",
        )


def _strip_marks(token: str) -> str:
    """Return a token without what tells in some vocabularies that a word ends or goes on behind it."""
    return token.removesuffix("</w>").removesuffix("@@")
