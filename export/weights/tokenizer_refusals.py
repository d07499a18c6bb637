"""What is refused of a tokenizer that was loaded, or could not be."""

from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..checkpoints.plain.tokenizer_files import TOKENIZER_FILES
from ..checkpoints.storage.paths import read_json_beside
from ..errors import CheckpointError, VocabularyError, list_some

# What says more of a tokenizer than its vocabulary.
DESCRIBED_BY = ("tokenizer.json", "tokenizer_config.json")
# Tokens from which on a tokenizer has no limit of its own: transformers writes 1e30.
UNLIMITED = 1e9

# What tokenizers of one vocabulary may make other tokens of: capitals, accents, Chinese characters, signs and numbers,
# a text without a space in front of it, and spaces.
_TELLING_TEXTS = ("Hello World", "Über naïve café", "中文字", "a-b, c. 1,234", "x", "a  b")
_TELLING_WORDS = 50

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


def refuse_other_tokens(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer whose files do not agree on what they make of texts.

    transformers makes some tokenizers, such as BERT's, anew by what tokenizer_config.json says, and by its own defaults
    where that says nothing: of capitals, accents, Chinese characters, or a space in front of a text.

    Raises:
        VocabularyError: They do not agree.
    """
    path = directory / DESCRIBED_BY[0]
    # The others are made of tokenizer.json as it is.
    if type(tokenizer) is PreTrainedTokenizerFast or not path.is_file():
        return
    told, made = Tokenizer.from_file(str(path)), tokenizer.backend_tokenizer
    for text in (*_TELLING_TEXTS, *_list_telling_words(told)):
        tokens, others = (_list_tokens(each, text) for each in (told, made))
        if tokens != others:
            raise VocabularyError(
                f"the files of the tokenizer in {directory} do not agree on {text!r}",
                expected=f"what {path.name} makes of it, {list_some(map(repr, tokens), 6) or 'nothing'}",
                got=f"{list_some(map(repr, others), 6) or 'nothing'}, by {DESCRIBED_BY[1]} or for want of it",
                remedy=f"copy {DESCRIBED_BY[1]} from the model that the checkpoint was trained from, or have "
                f'{path.name} taken as it is: write "tokenizer_class": "PreTrainedTokenizerFast" into it',
            )


def refuse_other_vocabulary(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer.json beside the list of another model's tokens.

    Some models' lists are older than their tokenizer.json, which has a few tokens more or others: what has most of its
    tokens elsewhere is another model's.

    Raises:
        VocabularyError: It is.
    """
    path, listed = directory / DESCRIBED_BY[0], directory / "vocab.txt"
    if not path.is_file() or not listed.is_file():
        return
    ids = tokenizer.get_vocab()
    tokens = [token.rstrip("\r") for token in listed.read_text(encoding="utf-8", errors="replace").split("\n")]
    # fairseq's lists have a count behind each token.
    places = {token: place for place, token in enumerate(tokens) if token in ids}
    others = [token for token, place in places.items() if ids[token] != place]
    if 2 * len(others) > len(places):
        raise VocabularyError(
            f"the files of the tokenizer in {directory} are of several models",
            expected=f"the tokens of {listed.name} with their ids in {path.name}",
            got=f"others for {len(others)} of {len(places)}, such as {list_some(map(repr, others), 3)}",
            remedy="copy both from the model that the checkpoint was trained from, or take away the one that is not "
            "its own",
        )


def _list_telling_words(tokenizer: Tokenizer) -> list[str]:
    """Return words of a vocabulary, of which few may have those that others have, in small letters and capitals."""
    words = sorted(word for token in tokenizer.get_vocab() if (word := token.removeprefix("##").strip("▁Ġ")).isalpha())
    some = words[:: len(words) // _TELLING_WORDS + 1]
    return [made for word in some for made in (word, word.upper(), word.capitalize())]


def _list_tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    try:
        encoding = tokenizer.encode(text, add_special_tokens=False)
    # The library's own errors are bare ones; see `refuse_without_unknown`.
    except Exception:
        return []
    # It may be told to pad every text.
    return [token for token, counts in zip(encoding.tokens, encoding.attention_mask, strict=True) if counts]


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
