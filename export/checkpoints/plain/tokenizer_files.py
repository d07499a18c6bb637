"""The files that tokenizers lie in. Needs no torch."""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, list_some
from ..storage.paths import MAX_JSON_BYTES, has_file, read_json_beside, read_small

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "gpt2-vocab.json",
)

# How GPT-2's tokenizer writes the 256 bytes (transformers, `bytes_to_unicode`).
_BYTES = {*map(chr, (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)))}
# Special tokens, as they are written, and what fairseq fills vocabularies up with.
_SPECIAL = re.compile(r"<.+>|\[.+\]|__\w+__|madeupword\d+", re.DOTALL)

_ENDS, _GOES_ON = "</w>", "@@"

# GPT-2's two files as Megatron-LM's README has them downloaded → as transformers names them.
_MEGATRON_NAMES = {"gpt2-vocab.json": "vocab.json", "gpt2-merges.txt": "merges.txt"}

# What a vocabulary's files are called under a prefix or a suffix of somebody's own → as transformers names them.
_LIKE = {
    "*tokenizer*.json": "tokenizer.json",
    "*vocab*.json": "vocab.json",
    "*merges*.txt": "merges.txt",
    "*vocab*.txt": "vocab.txt",
    "*.model": "tokenizer.model",
}


def has_tokenizer(directory: Path) -> bool:
    """Tell whether there is any file of a tokenizer in `directory`.

    Raises:
        CheckpointError: One of the names is there and no regular file, or merges without their vocabulary.
    """
    if any(has_file(directory / name) for name in TOKENIZER_FILES):
        return True
    check_merges(directory)
    return bool(find_renamed(directory))


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


def warn_of_unknown_names(directory: Path) -> tuple[str, ...]:
    """Return a warning where there is no tokenizer, and files that look like one under names that nobody looks for."""
    found = {path.name: name for pattern, name in _LIKE.items() for path in directory.glob(pattern) if path.is_file()}
    if not found or has_tokenizer(directory):
        return ()
    return (
        f"no tokenizer was found, but {list_some(found, 4)} may be one under another name; name it as transformers "
        f"does ({list_some({*found.values()})}), or pass the tokenizer's folder with --base.",
    )


def check_merges(directory: Path) -> None:
    """Refuse merges that do not make a vocabulary's tokens, as a file does that was cut: texts get other ids.

    Looked at where no `tokenizer.json` says the same, under the names that transformers looks for and Megatron's.

    Raises:
        CheckpointError: They do not, or one of the two files is missing or not whole.
    """
    pairs = [[directory / name for name in names] for names in (_MEGATRON_NAMES.values(), _MEGATRON_NAMES.keys())]
    vocabulary, merges = next((pair for pair in pairs if any(map(has_file, pair))), pairs[0])
    if has_file(directory / TOKENIZER_FILES[0]) or not (has_file(vocabulary) or has_file(merges)):
        return
    tokens = read_json_beside(vocabulary).keys()
    # FSMT has two vocabularies of other names beside its merges, and others have one and no merges.
    if not has_file(vocabulary) and not any(directory.glob("vocab-*.json")):
        raise _refuse_half(directory, merges.name, vocabulary.name)
    if not has_file(merges) and tokens >= _BYTES:
        raise _refuse_half(directory, vocabulary.name, merges.name)
    if not (has_file(vocabulary) and has_file(merges)):
        return
    lines = read_small(merges, max_bytes=MAX_JSON_BYTES).decode("utf-8", "replace").split("\n")
    # fastBPE's have how often they were seen behind them.
    made = {"".join(line.rstrip("\r").split(" ")[:2]) for line in lines}
    wanted = _name_merges(tokens - _list_added(directory), made)
    unmade = [token for token, merge in wanted.items() if merge not in made]
    if unmade:
        raise CheckpointError(
            f"{merges} does not belong to {vocabulary.name}, or was cut",
            expected=f"a merge for each of {len(wanted)} tokens",
            got=f"none for {len(unmade)}: {list_some(map(repr, unmade), 3)}",
            remedy="copy both files of the tokenizer that the checkpoint was trained with, or name in "
            "added_tokens.json, with their ids, the tokens that were added",
        )


def _name_merges(tokens: Collection[str], made: Collection[str]) -> dict[str, str]:
    """Return token → what a merge makes of it, of those that are more than a letter.

    Merges write the end of a word as `</w>`. Some vocabularies write a word that goes on with `@@` in place of that
    (subword-nmt).
    """
    marks_going_on = any(token.endswith(_GOES_ON) for token in tokens) and any(merge.endswith(_ENDS) for merge in made)
    found = {}
    for token in tokens:
        goes_on = token.endswith(_GOES_ON) and len(token) > len(_GOES_ON)
        merge = token if not marks_going_on else token.removesuffix(_GOES_ON) if goes_on else token + _ENDS
        if len(merge.removesuffix(_ENDS)) > 1 and not _SPECIAL.fullmatch(token):
            found[token] = merge
    return found


def _list_added(directory: Path) -> set[str]:
    """Return the tokens of which the files beside a vocabulary say that they were added, or are special."""
    described = read_json_beside(directory / "tokenizer_config.json")
    named = [value for key, value in described.items() if "token" in key]
    named += read_json_beside(directory / "special_tokens_map.json").values()
    return {*read_json_beside(directory / "added_tokens.json"), *_list_texts(named)}


def _list_texts(value: Any) -> Iterator[str]:
    """Yield every text in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _list_texts(each)
