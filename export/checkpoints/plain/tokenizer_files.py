"""The files that tokenizers lie in. Needs no torch."""

import re
from pathlib import Path

from ...errors import CheckpointError, list_some
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

# The share of a vocabulary that no merge may make where it is not one of all bytes, and may be of another kind.
_UNMADE = 0.1

# How GPT-2's tokenizer writes the 256 bytes (transformers, `bytes_to_unicode`).
_BYTES = {*map(chr, (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)))}
# Special tokens, as they are written, and what fairseq fills vocabularies up with.
_SPECIAL = re.compile(r"<.*|\[.*|__\w+__|madeupword\d+", re.DOTALL)

# GPT-2's two files as Megatron-LM's README has them downloaded → as transformers names them.
_MEGATRON_NAMES = {"gpt2-vocab.json": "vocab.json", "gpt2-merges.txt": "merges.txt"}


def has_tokenizer(directory: Path) -> bool:
    """Tell whether there is any file of a tokenizer in `directory`.

    Raises:
        CheckpointError: One of the names is there and no regular file, or merges without their vocabulary.
    """
    if any(has_file(directory / name) for name in TOKENIZER_FILES) or find_renamed(directory):
        return True
    vocabulary, merges = _MEGATRON_NAMES.values()
    # FSMT and others have vocabularies of other names beside theirs.
    if has_file(directory / merges) and not any(directory.glob("*vocab*")):
        raise _refuse_half(directory, merges, vocabulary)
    return False


def _refuse_half(directory: Path, half: str, other: str) -> CheckpointError:
    return CheckpointError(
        f"{directory} has one half of GPT-2's tokenizer",
        expected=f"{other} beside {half}",
        got="none",
        remedy=f"copy it there as well, or take {half} away and pass the tokenizer's folder with --base",
    )


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
        raise _refuse_half(directory, halves[0], other)
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
    tokens = read_json_beside(vocabulary).keys() - _list_added(directory)
    wanted = [token for token in map(_strip_marks, tokens) if len(token) > 1 and not _SPECIAL.fullmatch(token)]
    unmade = sorted(token for token in wanted if token not in made)
    if len(unmade) > (0 if tokens >= _BYTES else _UNMADE * len(wanted)):
        raise CheckpointError(
            f"{merges} does not belong to {vocabulary.name}, or was cut",
            expected=f"a merge for each of {len(wanted)} tokens",
            got=f"none for {len(unmade)}: {list_some(map(repr, unmade), 3)}",
            remedy="copy both files of the tokenizer that the checkpoint was trained with, or name in "
            "added_tokens.json, with their ids, the tokens that were added",
        )


def _list_added(directory: Path) -> set[str]:
    """Return the tokens of which the files beside a vocabulary say that they were added, or are special."""
    described = read_json_beside(directory / "tokenizer_config.json").get("added_tokens_decoder")
    entries = [*described.values()] if isinstance(described, dict) else []
    entries += read_json_beside(directory / "special_tokens_map.json").values()
    contents = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    return {*read_json_beside(directory / "added_tokens.json"), *(each for each in contents if isinstance(each, str))}


def _strip_marks(token: str) -> str:
    """Return a token without what tells in some vocabularies that a word ends or goes on behind it."""
    return token.removesuffix("</w>").removesuffix("@@")
