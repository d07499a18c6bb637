"""Whether the files of a tokenizer agree with each other, and with what transformers makes of them.

Of some classes transformers 5 makes the tokenizer anew, by tokenizer_config.json and by its own defaults, and takes the
vocabulary alone from tokenizer.json, by which releases before 5, and every program without transformers, go.
"""

import base64
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers
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
    "a\u00a0b",
    "…",
    "\ufb01 ½ ² ™ \uff21",
    "e\u0301 \u212b",
    "\uff76\uff9e",
    "你好\uff0c世界。",
    "🙂x",
    "don't",
    "1\u202f000,5",
    "  x",
    " x",
    "x ",
    "a\tb",
    "x\ny",
)
_ADDED = 20

# Whether a text begins and ends with a special token.
_ENDS = ("add_bos_token", "add_eos_token")
# Which releases before 5 frame texts by these alone, when they load a tokenizer.
_FRAMED_BY_SETTINGS = ("CodeLlamaTokenizer", "CohereTokenizer", "GemmaTokenizer", "GPTNeoXTokenizer", "LlamaTokenizer")
# Whose `model_input_names` had token_type_ids in 4.57 and have none in 5.
_TYPED_BEFORE_5 = (
    "AlbertTokenizer",
    "FunnelTokenizer",
    "HerbertTokenizer",
    "RemBertTokenizer",
    "RoFormerTokenizer",
    "SplinterTokenizer",
)

_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
# In small letters, for some tokenizers lower texts before SentencePiece cuts them.
_TEXTS_OF_PIECES = ("hello world", "a\u00a0b", "x…", "x ½ ²", "x™")

_ASK = """
import base64, json, sys
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

processor = SentencePieceProcessor(model_file=sys.argv[1])
texts = [text for text in json.loads(sys.argv[2]) if processor.unk_id() not in processor.encode(text)]
model = sentencepiece_model_pb2.ModelProto()
model.ParseFromString(processor.serialized_model_proto())
charsmap = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
print(json.dumps({"pieces": {text: processor.encode(text, out_type=str) for text in texts}, "charsmap": charsmap}))
"""


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
    if told.get_vocab(with_added_tokens=False) == made.get_vocab(with_added_tokens=False):
        made.model = told.model
    made.normalizer, made.pre_tokenizer, made.decoder = told.normalizer, told.pre_tokenizer, told.decoder
    _refuse_others(directory, told, tokenizer, (*_TEXTS_OF_THE_FILE, *_list_texts_of_added(told)))
    _follow_frame(directory, told, tokenizer)


def _follow_frame(directory: Path, told: Tokenizer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have texts stand between the special tokens, and have the types, that tokenizer.json gives them.

    Raises:
        VocabularyError: Settings by which releases before 5 or since go, whatever that says, say otherwise.
    """
    made = tokenizer.backend_tokenizer
    expected, got = _show_frame(told), _show_frame(made)
    settings = read_json_beside(directory / DESCRIBED_BY[1])
    # The language in front of a text is a setting, and the file has that of whoever saved it.
    if expected == got or settings.get("src_lang"):
        return
    if settings and (type(tokenizer).__name__ in _FRAMED_BY_SETTINGS or any(settings.get(name) for name in _ENDS)):
        if not any(told.num_special_tokens_to_add(is_pair) for is_pair in (False, True)):
            # They add to what the file leaves bare, as in some of Llama's relatives.
            return
        raise VocabularyError(
            f"the files of the tokenizer in {directory} do not agree on what stands around a text",
            expected=f"what {DESCRIBED_BY[0]} puts there, {expected}",
            got=f"{got}, by {' and '.join(_ENDS)} in {DESCRIBED_BY[1]} or for want of them",
            remedy=_describe_remedy(tokenizer),
        )
    made.post_processor = told.post_processor


def list_other_steps(told: Tokenizer, made: Tokenizer) -> list[str]:
    """Return the names of the steps, as tokenizer.json has them, that two tokenizers do not have alike."""
    names = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    return [name for name in names if _read_step(told, name) != _read_step(made, name)]


def _read_step(tokenizer: Tokenizer, name: str) -> bytes:
    step = getattr(tokenizer, name)
    return b"" if step is None else step.__getstate__()


def _show_frame(tokenizer: Tokenizer) -> str:
    """Return what a text and a pair become, with the type of each token that has another than 0."""
    return " and ".join(
        repr(" ".join(f"{token}:{kind}" if kind else token for token, kind in _encode(tokenizer, "x", pair)))
        for pair in (None, "x")
    )


def refuse_other_pieces(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that transformers made of a SentencePiece file alone, and that cuts texts otherwise than that.

    As 5 does with Llama's, whose first word it leaves without the mark of a word's beginning.

    Raises:
        VocabularyError: It does.
    """
    path = next((directory / name for name in _SENTENCEPIECE_FILES if (directory / name).is_file()), None)
    if path is None or (directory / DESCRIBED_BY[0]).is_file():
        return
    told = _ask_sentencepiece(path)
    made = tokenizer.backend_tokenizer
    if any(pieces != _list_tokens(made, text) for text, pieces in told.pieces.items()) and told.charsmap:
        # Of some it leaves out the normalizer that the file holds.
        own = [made.normalizer] if made.normalizer else []
        made.normalizer = normalizers.Sequence([normalizers.Precompiled(told.charsmap), *own])
    for text, pieces in told.pieces.items():
        tokens = _list_tokens(made, text)
        if pieces != tokens:
            raise VocabularyError(
                f"the tokenizer that transformers makes of {path} is another",
                expected=f"what SentencePiece makes of {text!r}, {_show(pieces)}",
                got=_show(tokens),
                remedy="write tokenizer.json beside it with a release of transformers before 5, by "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
            )


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What SentencePiece says of a model.

    Attributes:
        pieces: Text → what it cuts it into, of texts of which it knows everything.
        charsmap: What it changes texts by before that; empty where it does not.
    """

    pieces: Mapping[str, list[str]]
    charsmap: bytes


def _ask_sentencepiece(path: Path) -> _Told:
    """Ask the package about a model, in a process of its own: some of its releases crash beside others' libraries."""
    asked = [sys.executable, "-c", _ASK, str(path), json.dumps(_TEXTS_OF_PIECES)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    # Without the package transformers reads no such file, and one of tiktoken, which may have the same name, is none.
    answer: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"pieces": {}, "charsmap": ""}
    return _Told(pieces=answer["pieces"], charsmap=base64.b64decode(answer["charsmap"]))


def name_inputs(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have the second text of a pair its own type, where tokenizer.json gives it one and the model was made for two.

    Of a tokenizer of no class and of some classes, whose settings name no inputs, releases of transformers before 5
    hand the types to the model; 5 leaves them out.
    """
    if _leaves_types_open(directory, tokenizer) and not _is_trained_with_5(directory):
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
        # So it is written where the tokenizer is saved.
        tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names


def warn_of_types(directory: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return a warning where nothing but the releases that wrote the files tells whether the second text has a type."""
    if not _leaves_types_open(directory, tokenizer):
        return ()
    given, other, names = (
        (
            "none of its own, as transformers 5 gives none",
            "before 5",
            '["input_ids", "token_type_ids", "attention_mask"]',
        )
        if _is_trained_with_5(directory)
        else ("a token type of its own, as transformers before 5 gives one", "5", '["input_ids", "attention_mask"]')
    )
    return (
        f"the second text of a pair has {given}, by the release that wrote {DESCRIBED_BY[1]} and config.json in "
        f'{directory}; if the model was trained with transformers {other}, write "model_input_names": {names} in '
        f"{DESCRIBED_BY[1]}.",
    )


def _leaves_types_open(directory: Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    types = read_json_beside(directory / "config.json").get("type_vocab_size")
    settings = read_json_beside(directory / DESCRIBED_BY[1])
    kind = type(tokenizer)
    # 5 writes the backend, and leaves the types out of what it saves as of what it loads.
    if "model_input_names" in settings or "backend" in settings or not isinstance(types, int) or types < 2:
        return False
    is_untyped = kind is PreTrainedTokenizerFast or kind.__name__ in _TYPED_BEFORE_5
    return is_untyped and len({kind for _, kind in _encode(tokenizer.backend_tokenizer, "a", "b")}) > 1


def _is_trained_with_5(directory: Path) -> bool:
    release = str(read_json_beside(directory / "config.json").get("transformers_version", "")).partition(".")[0]
    return release.isdecimal() and int(release) >= 5


def _refuse_others(directory: Path, told: Tokenizer, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> None:
    for text in texts:
        tokens, others = _list_tokens(told, text), _list_tokens(tokenizer.backend_tokenizer, text)
        if tokens != others:
            raise VocabularyError(
                f"the files of the tokenizer in {directory} do not agree on {text!r}",
                expected=f"what {DESCRIBED_BY[0]} makes of it, {_show(tokens)}",
                got=f"{_show(others)}, by {DESCRIBED_BY[1]} or for want of it",
                remedy=_describe_remedy(tokenizer),
            )


def _describe_remedy(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return settings that have tokenizer.json taken as it is, for the same special tokens and inputs of the model."""
    tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name.endswith("_token")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": tokenizer.model_input_names}
    return (
        f"copy {DESCRIBED_BY[1]} from the model that the checkpoint was trained from, or have {DESCRIBED_BY[0]} taken "
        f"as it is, with these in {DESCRIBED_BY[1]}: {json.dumps(settings | tokens, ensure_ascii=False)}"
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


def _list_words(tokenizer: Tokenizer) -> list[str]:
    """Return words of a vocabulary, of which few may have those that others have, in small letters and capitals."""
    words = sorted(word for token in tokenizer.get_vocab() if (word := token.removeprefix("##").strip("▁Ġ")).isalpha())
    some = words[:: len(words) // _WORDS + 1]
    return [made for word in some for made in (word, word.upper(), word.capitalize())]


def _list_tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return [token for token, _ in _encode(tokenizer, text, framed=False)]


def _encode(tokenizer: Tokenizer, text: str, pair: str | None = None, *, framed: bool = True) -> list[tuple[str, int]]:
    """Return each token of a text, or of a pair, with its type; none where the tokenizer fails at it."""
    try:
        encoding = tokenizer.encode(text, pair, add_special_tokens=framed)
    # The library's own errors are bare ones; see `refuse_without_unknown`.
    except Exception:
        return []
    # It may be told to pad every text.
    every = zip(encoding.tokens, encoding.type_ids, encoding.attention_mask, strict=True)
    return [(token, kind) for token, kind, counts in every if counts]


def _show(tokens: Sequence[str]) -> str:
    return " ".join([*tokens[:8], *(["..."] if len(tokens) > 8 else [])]) or "nothing"


def _list_texts_of_added(tokenizer: Tokenizer) -> list[str]:
    """Return texts with tokens that were added, which may take the spaces around them, or leave them."""
    # Those of the user before the special ones, of which T5 has a hundred.
    added = sorted((token.special, token.content) for token in tokenizer.get_added_tokens_decoder().values())
    return [text for _, token in added[:_ADDED] for text in (f"x {token} x", f"{token}x", f" {token}")]
