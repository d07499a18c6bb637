"""Whether the files of a tokenizer agree with each other, and with what transformers makes of them.

Of some classes transformers 5 makes the tokenizer anew, by tokenizer_config.json and by its own defaults, and takes the
vocabulary alone from tokenizer.json, by which releases before 5, and every program without transformers, go.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..checkpoints.storage.paths import read_json_beside
from ..errors import VocabularyError, list_some
from .tokenizer_refusals import DESCRIBED_BY

# What settings change that either file may have: capitals, accents, Chinese characters, signs and numbers, a text
# without a space in front of it, and spaces.
_TEXTS_OF_SETTINGS = ("Hello World", "Über naïve café", "中文字", "a-b, c. 1,234", "x", "a  b")
_WORDS = 50

# What tokenizer.json alone may take otherwise: characters with others of the same meaning, spaces at either end,
# control characters, half-width and full-width signs, pictures.
_TEXTS_OF_THE_FILE = (
    *(
        "a\u00a0b",
        "…",
        "\ufb01 ½ ² ™ \uff21",
        "e\u0301 \u212b",
        "\uff76\uff9e",
        "你好\uff0c世界。",
        "🙂x",
        "don't",
        "1\u202f000,5",
    ),
    *("  x", " x", "x ", "a\tb", "x\ny"),
)
_ADDED = 20


def follow_file(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have a tokenizer make the tokens that its tokenizer.json says, which the model was trained with.

    Raises:
        VocabularyError: Its other files say otherwise.
    """
    path = directory / DESCRIBED_BY[0]
    # The others are made of tokenizer.json as it is.
    if type(tokenizer) is PreTrainedTokenizerFast or not path.is_file():
        return
    told, made = Tokenizer.from_file(str(path)), tokenizer.backend_tokenizer
    _refuse_others(directory, told, tokenizer, (*_TEXTS_OF_SETTINGS, *_list_words(told)))
    texts = (*_TEXTS_OF_THE_FILE, *_list_texts_of_added(told))
    if any(_list_tokens(told, text) != _list_tokens(made, text) for text in texts):
        made.normalizer, made.pre_tokenizer, made.decoder = told.normalizer, told.pre_tokenizer, told.decoder
        _refuse_others(directory, told, tokenizer, texts)


def name_inputs(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have the second text of a pair its own type, where tokenizer.json gives it one and the model was made for two.

    Of a tokenizer of no class, whose settings name no inputs, releases of transformers before 5 hand the types to the
    model; 5 leaves them out.
    """
    types = read_json_beside(directory / "config.json").get("type_vocab_size")
    is_named = "model_input_names" in read_json_beside(directory / DESCRIBED_BY[1])
    if is_named or type(tokenizer) is not PreTrainedTokenizerFast or not isinstance(types, int) or types < 2:
        return
    if len({*tokenizer.backend_tokenizer.encode("a", "b").type_ids}) > 1:
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]


def _refuse_others(directory: Path, told: Tokenizer, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> None:
    for text in texts:
        tokens, others = _list_tokens(told, text), _list_tokens(tokenizer.backend_tokenizer, text)
        if tokens != others:
            raise VocabularyError(
                f"the files of the tokenizer in {directory} do not agree on {text!r}",
                expected=f"what {DESCRIBED_BY[0]} makes of it, {list_some(map(repr, tokens), 6) or 'nothing'}",
                got=f"{list_some(map(repr, others), 6) or 'nothing'}, by {DESCRIBED_BY[1]} or for want of it",
                remedy=f"copy {DESCRIBED_BY[1]} from the model that the checkpoint was trained from, or have "
                f"{DESCRIBED_BY[0]} taken as it is, with these in {DESCRIBED_BY[1]}: {_describe_as_it_is(tokenizer)}",
            )


def _describe_as_it_is(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return settings that have tokenizer.json taken as it is, for the same special tokens and inputs of the model."""
    tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name.endswith("_token")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": tokenizer.model_input_names}
    return json.dumps(settings | tokens, ensure_ascii=False)


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


def _list_words(tokenizer: Tokenizer) -> list[str]:
    """Return words of a vocabulary, of which few may have those that others have, in small letters and capitals."""
    words = sorted(word for token in tokenizer.get_vocab() if (word := token.removeprefix("##").strip("▁Ġ")).isalpha())
    some = words[:: len(words) // _WORDS + 1]
    return [made for word in some for made in (word, word.upper(), word.capitalize())]


def _list_tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    try:
        encoding = tokenizer.encode(text, add_special_tokens=False)
    # The library's own errors are bare ones; see `refuse_without_unknown`.
    except Exception:
        return []
    # It may be told to pad every text.
    return [token for token, counts in zip(encoding.tokens, encoding.attention_mask, strict=True) if counts]


def _list_texts_of_added(tokenizer: Tokenizer) -> list[str]:
    """Return texts with tokens that were added, which may take the spaces around them, or leave them."""
    added = sorted(token.content for token in tokenizer.get_added_tokens_decoder().values())[:_ADDED]
    return [text for token in added for text in (f"x {token} x", f"{token}x", f" {token}")]
