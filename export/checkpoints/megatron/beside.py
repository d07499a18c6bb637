"""What lies beside a Megatron checkpoint, or in another folder, and is of the same model: tokenizer, configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, VocabularyError
from ..storage.paths import has_file, read_json_beside
from .args import MegatronArgs

_TIED = "tie_word_embeddings"

# GPT-2's vocabulary as Megatron-LM's README names it, and what its tokenizer ends texts with (`GPT2BPETokenizer.eod`).
_VOCABULARY = "gpt2-vocab.json"
_END_OF_TEXT = "<|endoftext|>"


def find_vocab_size(directory: Path, args: MegatronArgs, rows: int, *, base: Path | None = None) -> tuple[int, str]:
    """Return how many rows of the vocabulary are not padding, and what makes that unsure, if anything does.

    Args:
        directory: The checkpoint's folder, in which `config.json` or a tokenizer may lie.
        args: Forks of Megatron record the tokenizer's size in them.
        rows: Rows of the embeddings, padding included.
        base: The folder with configuration and tokenizer, which is looked into first.

    Raises:
        VocabularyError: There are more tokens than rows, the files contradict each other, or ids are damaged.
        CheckpointError: One of them is not a regular file.
    """
    if base is not None and _read_sizes(base):
        directory = base
    known = _read_sizes(directory)
    if args.vocabulary and args.vocabulary > 0:
        known["the arguments"] = args.vocabulary
    for where, size in known.items():
        if size > rows:
            raise VocabularyError(
                f"{where} in {directory} has more tokens than the checkpoint has embeddings",
                expected=f"{rows} tokens at most",
                got=str(size),
                remedy="use the tokenizer that the checkpoint was trained with",
            )
    if known:
        (first, size), largest = next(iter(known.items())), max(known, key=lambda where: known[where])
        # Rows that no token reaches change nothing, but a token without its row does.
        if known[largest] > size:
            raise VocabularyError(
                f"{first} and {largest} in {directory} are not of one vocabulary",
                expected=f"at least {known[largest]} tokens, as {largest} has",
                got=f"{size} in {first}",
                remedy="use the files that the checkpoint was trained with",
            )
        return size, _doubt_size(first, size, rows, args.vocabulary_step)
    return (
        rows,
        f"the vocabulary's true size: all {rows} rows are kept, padding too; a tokenizer would tell, beside it or in "
        "the folder that --base names",
    )


def find_end_of_text(directory: Path, *, base: Path | None = None) -> int | None:
    """Return the id with which texts end, as far as a vocabulary of GPT-2's kind or a `tokenizer.json` tells.

    Args:
        directory: The checkpoint's folder.
        base: The folder with configuration and tokenizer, which is looked into first.
    """
    if base is not None and _read_sizes(base):
        directory = base
    names = (name for name in (_VOCABULARY, "vocab.json") if has_file(directory / name))
    found = [read_json_beside(directory / name).get(_END_OF_TEXT) for name in names]
    ending = read_json_beside(directory / "tokenizer_config.json").get("eos_token", _END_OF_TEXT)
    ending = ending.get("content") if isinstance(ending, dict) else ending
    found.append(_read_tokens(directory / "tokenizer.json").get(str(ending)))
    return next((each for each in found if type(each) is int), None)


def _doubt_size(where: str, size: int, rows: int, step: int | None) -> str:
    """Return what makes unsure that a vocabulary is the one that the rows are of; empty where nothing does.

    No proof: who goes on with another tokenizer may keep the table as it was.
    """
    if not step or -(-size // step) * step == rows:
        return ""
    return (
        f"proof that the vocabulary in {where} is the one that it was trained with: {size} tokens, padded to a "
        f"multiple of {step} as the arguments say, are not {rows} rows, of which the last {rows - size} are left out"
    )


def _read_sizes(directory: Path) -> dict[str, int]:
    """Return each file in the folder that tells the size of a vocabulary → that size."""
    sizes = {
        "config.json": read_json_beside(directory / "config.json").get("vocab_size"),
        "tokenizer.json": _count_tokenizer(directory / "tokenizer.json"),
        "vocab.json": _count_vocabulary(directory / "vocab.json"),
        _VOCABULARY: _count_vocabulary(directory / _VOCABULARY),
    }
    return {where: size for where, size in sizes.items() if type(size) is int and size > 0}


def _count_tokenizer(path: Path) -> int:
    """Return one more than the highest id in a `tokenizer.json`; 0 where there is none."""
    return _count_ids(path, _read_tokens(path))


def _read_tokens(path: Path) -> dict[str, Any]:
    """Return each token in a `tokenizer.json` → what it has for its id; empty where there is none."""
    content = read_json_beside(path)
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        # Of Unigram: each with its score, in the order of ids.
        vocabulary = {str(item[0]): index for index, item in enumerate(vocabulary) if isinstance(item, list) and item}
    tokens = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict):
            # Special tokens may be in the vocabulary as well, under the same id.
            name, number = token.get("content"), token.get("id")
            if isinstance(name, str) and tokens.setdefault(name, number) != number:
                raise _unlike_ids(path, f"{tokens[name]} and {number} for {name[:50]!r}")
            if not isinstance(name, str):
                tokens[f"added token {number}"] = number
    return tokens


def _count_vocabulary(path: Path) -> int:
    """Return how many tokens a `vocab.json` has, which are numbered from 0 on; 0 where there is none."""
    vocabulary = read_json_beside(path)
    count = _count_ids(path, vocabulary)
    if count != len(vocabulary):
        raise _unlike_ids(path, f"{len(vocabulary)} of them up to {count - 1}")
    return count


def _count_ids(path: Path, tokens: Mapping[str, Any]) -> int:
    """Return one more than the highest id: a damaged one would cut trained rows."""
    holders: dict[int, str] = {}
    for token, number in tokens.items():
        if type(number) is not int or number < 0:
            raise _unlike_ids(path, f"{str(number)[:50]} for {token[:50]!r}")
        holder = holders.setdefault(number, token)
        if holder != token:
            raise _unlike_ids(path, f"{number} for both {holder[:50]!r} and {token[:50]!r}")
    return 1 + max(holders, default=-1)


def _unlike_ids(path: Path, got: str) -> VocabularyError:
    return VocabularyError(
        f"{path} has ids that are not a vocabulary's",
        expected="one for each token, from 0 on",
        got=got,
        remedy="copy it again: it says how many rows of the embeddings are not padding",
    )


def check_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Check that a `config.json` beside the checkpoint, or in the folder that `--base` names, is of the same model.

    Raises:
        CheckpointError: It is of another.
    """
    found = read_json_beside(directory / "config.json")
    sizes = ("model_type", "n_embd", "n_layer", "n_head", "n_positions")
    wrong = [name for name in sizes if name in found and found[name] != config[name]]
    # transformers would start the head at random. The other way round, it loads the head that the weights have.
    if found.get(_TIED) is False and config[_TIED]:
        wrong.append(_TIED)
    if wrong:
        raise CheckpointError(
            f"{directory / 'config.json'} is not of the checkpoint",
            expected=", ".join(f"{name} {config[name]}" for name in wrong),
            got=", ".join(str(found[name]) for name in wrong),
            remedy="remove it, or pass another folder with --base: the checkpoint's arguments tell the architecture",
        )
