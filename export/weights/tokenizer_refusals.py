"""What is refused of a tokenizer that was loaded, or could not be."""

from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..checkpoints.plain.tokenizer_files import TOKENIZER_FILES
from ..checkpoints.storage.paths import read_json_beside
from ..errors import CheckpointError, VocabularyError, list_some

# What says more of a tokenizer than its vocabulary.
DESCRIBED_BY = ("tokenizer.json", "tokenizer_config.json")
# Tokens from which on a tokenizer has no limit of its own: transformers writes 1e30.
UNLIMITED = 1e9

# Characters that few vocabularies have, of several kinds, for some are normalised away.
_RARE_TEXT = "\U0001202f \ua566 \u224b \ue000"

# The release that goes with the protobuf of requirements/; 0.2.3 wants a later one.
_SENTENCEPIECE = "sentencepiece==0.2.1"
PASS_BASE = "pass the folder of the model that the checkpoint was trained from with --base"


def name_unconverted(directory: Path, got: str) -> VocabularyError:
    """Return what is said of a tokenizer that has no form which the server runs."""
    return VocabularyError(
        f"the tokenizer in {directory} cannot run in the server",
        expected="one with a tokenizer.json",
        got=f"{got}, which transformers converts to none",
        remedy="write one that gives the same ids with the library tokenizers, or, for a task of tensors, take the "
        "tokenizer's files out of the folder",
    )


def refuse_own_code(directory: Path) -> None:
    """Refuse a tokenizer that is Python in the checkpoint.

    Raises:
        CheckpointError: It is one.
    """
    content = read_json_beside(directory / DESCRIBED_BY[1])
    named, class_name = content.get("auto_map"), content.get("tokenizer_class")
    # The older form names no automatic class.
    named = named.get("AutoTokenizer") if isinstance(named, dict) else named
    if named and isinstance(class_name, str) and not hasattr(transformers, class_name):
        raise CheckpointError(
            f"the tokenizer in {directory} is Python in the checkpoint, which is never run",
            expected="a tokenizer_class that transformers has, or a tokenizer.json",
            got=f"{class_name!r} and auto_map {named!r}",
            remedy="if you trust it, convert it with transformers and save it as tokenizer.json beside the weights",
        )


def refuse_sentencepiece(directory: Path, exc: Exception) -> None:
    """Refuse a tokenizer that transformers did not read for want of the package that reads its one file.

    Without it, or with one that does not go with protobuf, transformers takes the file for another kind's, and asks for
    tiktoken.

    Raises:
        CheckpointError: It is one.
    """
    files = [] if (directory / "tokenizer.json").is_file() else sorted(directory.glob("*.model"))
    is_unread = any(package in str(exc).lower() for package in ("tiktoken", "sentencepiece"))
    if is_unread and any(_is_sentencepiece(path) for path in files):
        raise CheckpointError(
            f"the tokenizer in {directory} needs the package sentencepiece",
            expected=f"a tokenizer.json beside {files[0].name}, or sentencepiece installed",
            got="no tokenizer.json, and no sentencepiece that transformers can use",
            remedy=f"pip install {_SENTENCEPIECE} beside modelyard, or write tokenizer.json where it is installed, by "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        ) from exc


def _is_sentencepiece(path: Path) -> bool:
    """Tell whether a file is SentencePiece's, which begins with a piece in protobuf; tiktoken's are base64."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1) == b"\n"


def refuse_wrong_case(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a vocabulary with capitals for a tokenizer that, for want of a word on it, would take them off texts."""
    is_said = "do_lower_case" in read_json_beside(directory / DESCRIBED_BY[1])
    if is_said or (directory / DESCRIBED_BY[0]).is_file() or not getattr(tokenizer, "do_lower_case", False):
        return
    capitals = sorted(token for token in tokenizer.get_vocab() if token not in tokenizer.all_special_tokens)
    capitals = [token for token in capitals if token != token.lower() and not token.startswith("[")]
    if capitals:
        raise VocabularyError(
            f"nothing in {directory} says whether its tokenizer keeps capitals",
            expected=f"do_lower_case in {DESCRIBED_BY[1]}, for the vocabulary has {len(capitals)} tokens with capitals",
            got="none that says so, and a tokenizer that takes them off by default",
            remedy=PASS_BASE,
        )


def refuse_without_unknown(directory: Path, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that fails at a character which it does not know, for want of an unknown token.

    Raises:
        VocabularyError: It does.
    """
    try:
        tokenizer.encode(_RARE_TEXT)
    # The library's own errors are bare ones.
    except Exception as exc:
        raise VocabularyError(
            f"the tokenizer in {directory} fails at a text with characters that it does not know",
            expected="an unknown token, which tokenizer.json names under model, and which its vocabulary has",
            got=" ".join(str(exc).split())[:200].rstrip(".:;"),
            remedy="set unk_id, of a Unigram model its place in the vocabulary, or else unk_token, to the token that "
            "the model was trained with for them",
        ) from exc


def is_length(value: Any) -> bool:
    """Tell whether `value` is a number of tokens, or says that there is no limit."""
    return isinstance(value, (int, float)) and value > 0 and (value >= UNLIMITED or float(value).is_integer())


def refuse_settings(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer whose settings are of no use, or that has no vocabulary.

    Raises:
        CheckpointError: It is one.
    """
    # transformers takes these values as they are; the first may be 1e30.
    length, names = tokenizer.model_max_length, tokenizer.model_input_names
    for name, value, expected, is_right in (
        ("model_max_length", length, "a number of tokens", is_length(length)),
        ("model_input_names", names, "a list of names", all(isinstance(each, str) for each in names)),
        (
            "split_special_tokens",
            tokenizer.split_special_tokens,
            "false, for the server reads a special token that is spelled out in a text as one",
            not tokenizer.split_special_tokens,
        ),
    ):
        if not is_right:
            raise CheckpointError(
                f"{name} in {directory / DESCRIBED_BY[1]} cannot be used",
                expected=expected,
                got=repr(value),
                remedy="correct it, or leave it out",
            )
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        # Without a vocabulary transformers makes a tokenizer of its class's special tokens.
        raise CheckpointError(
            f"the tokenizer in {directory} has no vocabulary",
            expected=f"tokens of texts, in one of {', '.join(TOKENIZER_FILES)}, of its own kind",
            got=f"special tokens alone, {list_some(sorted(tokenizer.all_special_tokens))}",
            remedy=f"copy the tokenizer's files again, or {PASS_BASE}",
        )
