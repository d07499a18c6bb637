"""The tokenizer, its special tokens, and the embedding rows that its ids reach."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..checkpoints.plain.sentence_modules import read_transformer_settings
from ..checkpoints.plain.tokenizer_files import TOKENIZER_FILES, check_merges, find_renamed, has_tokenizer
from ..checkpoints.storage.paths import (
    check_inside,
    read_json_beside,
    read_json_if_any,
    refuse_irregular,
    refuse_spoiled_texts,
)
from ..consolidation.vocabulary import refuse_other_ids
from ..errors import CheckpointError, VocabularyError, list_some
from .new_rows import check_initializer
from .positions import count_rows_without_position, find_unscaled_length
from .tokenizer_agreement import (
    follow_file,
    list_other_steps,
    name_inputs,
    refuse_other_pieces,
    refuse_other_vocabulary,
)
from .tokenizer_refusals import (
    DESCRIBED_BY,
    PASS_BASE,
    UNLIMITED,
    name_unconverted,
    refuse_own_code,
    refuse_sentencepiece,
    refuse_settings,
    refuse_without_unknown,
    refuse_wrong_case,
)
from .vocabulary_options import AddedToken

# The first CLIP's configurations say 0 and 2 of the beginning and the end of texts, whatever its tokenizer has. With
# this end transformers goes by the highest id (modeling_clip.py, CLIPTextTransformer.forward).
_CLIPS_OLD_END = 2
# Before transformers 5 and since: tokenizer.json as it is.
_NO_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# What may belong to it and is no tokenizer alone.
_MORE_FILES = (
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "gpt2-merges.txt",
    "source.spm",
    "target.spm",
)


def is_bare_vocabulary(directory: Path) -> bool:
    """Tell whether nothing beside a vocabulary says which tokenizer it is of, and which its special tokens are.

    So do DeepSpeed-Chat and Megatron leave it. The architecture then tells the tokenizer's class, and that its usual
    special tokens: of OPT, whose vocabulary is GPT-2's class with others, these are wrong.
    """
    return not any((directory / name).is_file() for name in DESCRIBED_BY)


def load_tokenizer(directory: Path, config: PretrainedConfig | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer in `directory`, with the Rust `tokenizers` backend that the server runs as well.

    Args:
        directory: The folder with its files.
        config: The model's configuration, which tells the class of a tokenizer that nothing else describes.

    Raises:
        CheckpointError: The folder holds no tokenizer, or one that cannot be loaded.
        VocabularyError: The tokenizer has no Rust backend, so the server could not run it, or fails at what it does not
            know.
    """
    refuse_irregular(directory, (*TOKENIZER_FILES, *_MORE_FILES))
    if not has_tokenizer(directory):
        raise CheckpointError(
            f"{directory} holds no tokenizer",
            expected="one of " + ", ".join(TOKENIZER_FILES),
            got="none of them",
            remedy=PASS_BASE,
        )
    refuse_spoiled_texts(directory, (*TOKENIZER_FILES, *_MORE_FILES))
    check_merges(directory)
    try:
        # Our own output goes to the server's workers; a fork after tokenising would only print a warning.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        with _under_usual_names(directory) as folder:
            tokenizer = _load(folder, config)
    except CheckpointError:
        raise
    # What a damaged tokenizer raises is up to the library that reads it: OSError, ValueError, a bare Exception, ...
    except Exception as exc:
        refuse_own_code(directory)
        refuse_sentencepiece(directory, exc)
        if (directory / "source.spm").is_file():
            raise name_unconverted(directory, "Marian's two SentencePiece files") from exc
        raise CheckpointError(
            f"the tokenizer in {directory} cannot be loaded",
            expected="a tokenizer that transformers reads",
            got=" ".join(str(exc).split())[:200].rstrip(".:;"),
            remedy=f"copy the tokenizer's files again, or {PASS_BASE}",
        ) from exc
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        # Of what it converts, such as a SentencePiece file alone, the converted one was loaded.
        raise name_unconverted(directory, type(tokenizer).__name__)
    # Before anything is refused with settings that name the inputs.
    name_inputs(directory, tokenizer)
    refuse_settings(directory, tokenizer)
    refuse_wrong_case(directory, tokenizer)
    refuse_other_vocabulary(directory, tokenizer)
    follow_file(directory, tokenizer)
    refuse_other_pieces(directory, tokenizer)
    refuse_without_unknown(directory, tokenizer.backend_tokenizer)
    return tokenizer


def _load(folder: Path, config: PretrainedConfig | None) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase
    settings = read_json_beside(folder / DESCRIBED_BY[1])
    is_plain = settings.get("tokenizer_class") in _NO_CLASSES and "auto_map" not in settings
    if is_plain and (folder / DESCRIBED_BY[0]).is_file():
        # Of some architectures, such as Qwen2, transformers 5 takes their own class in its place, with its own rules.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    else:
        described = {} if (folder / "config.json").is_file() or config is None else {"config": config}
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **described)
    return tokenizer


@contextlib.contextmanager
def _under_usual_names(directory: Path) -> Iterator[Path]:
    """Yield a folder with the tokenizer under the names that transformers looks for."""
    renamed = find_renamed(directory)
    if not renamed:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="modelyard-tokenizer-") as folder:
        for name, usual in renamed.items():
            check_inside(directory / name, directory)
            shutil.copyfile(directory / name, Path(folder) / usual)
        if (directory / "config.json").is_file():
            shutil.copyfile(directory / "config.json", Path(folder) / "config.json")
        yield Path(folder)


def add_tokens(tokenizer: PreTrainedTokenizerBase, added: Sequence[AddedToken]) -> list[AddedToken]:
    """Add tokens to `tokenizer` and return those it did not have yet, in the order of their ids.

    As transformers does: special ones keep their case and are never split; one that is an ordinary token already is
    no longer split either, and adds no row.

    Raises:
        VocabularyError: A token has no text, or its initializer names nothing that the tokenizer knows.
    """
    known = tokenizer.get_vocab()
    for item in added:
        if not item.token.strip():
            raise VocabularyError(
                "an added token has no text", expected="TOKEN=INITIALIZER", got=f"={item.initializer}"
            )
        check_initializer(tokenizer, item)
    for item in added:
        # One at a time: the ids then follow the order given.
        tokenizer.add_tokens([item.token], special_tokens=item.special)
    # Each once, however often it was named.
    return list({item.token: item for item in reversed(added) if item.token not in known}.values())[::-1]


def check_ids_have_rows(
    tokenizer: PreTrainedTokenizerBase, rows: int, table: str, *, allow_other_tokenizer: bool = False
) -> None:
    """Refuse a tokenizer whose ids and the embedding's rows do not belong together; see `refuse_other_ids`.

    Raises:
        VocabularyError: They do not.
    """
    refuse_other_ids(tokenizer.get_vocab(), rows, table, allow_other_tokenizer=allow_other_tokenizer)


def read_max_length(
    directory: Path, tokenizer: PreTrainedTokenizerBase | None, config: PretrainedConfig, *, is_required: bool = True
) -> int:
    """Return the longest sequence that the model was made for, in tokens, special tokens included.

    The smallest of what Sentence-Transformers recorded, what the tokenizer says, the positions that exist, and those
    that every text has alike; 0 where nothing says and the task does not need it.

    Raises:
        CheckpointError: Nothing limits the length, so no maximum can be verified.
    """
    limits: list[int] = []
    recorded = read_transformer_settings(directory).get("max_seq_length")
    if recorded is not None:
        limits.append(_check_length(recorded, "max_seq_length", f"what Sentence-Transformers recorded in {directory}"))
    if tokenizer is not None and tokenizer.model_max_length < UNLIMITED:
        limits.append(int(tokenizer.model_max_length))
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        limits.append(positions - count_rows_without_position(config))
    limits = [limit for limit in (*limits, find_unscaled_length(config)) if limit > 0]
    if not limits and not is_required:
        return 0
    if not limits:
        raise CheckpointError(
            f"nothing in {directory} says how long a sequence may be",
            expected="model_max_length in tokenizer_config.json or max_position_embeddings in config.json",
            got="neither",
            remedy="write model_max_length into tokenizer_config.json",
        )
    return min(limits)


def _check_length(value: Any, name: str, where: str) -> int:
    """Return a length that a file says, which may be anything.

    Raises:
        CheckpointError: It is none.
    """
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"{name} in {where} cannot be used",
            expected="a number of tokens, or null",
            got=repr(value),
            remedy="correct it, or copy the file again",
        )
    return value


def check_special_ids(
    directory: Path, tokenizer: PreTrainedTokenizerBase, derived: Mapping[str, Any] | None = None
) -> None:
    """Refuse a tokenizer that belongs to another model, as far as the checkpoint recorded what belongs to it.

    Compared are the ids of special tokens that `config.json` itself names, and `vocabulary_sha256` if it is there.
    Another id of the padding alone is no sign: the mask hides it, and users add a token for it (`warn_of_padding`).

    Args:
        directory: The folder with `config.json` and the tokenizer.
        tokenizer: The tokenizer to check.
        derived: What another trainer's checkpoint says instead, where there is no `config.json`.

    Raises:
        VocabularyError: An id or the vocabulary differs; every one is named.
    """
    recorded = read_json_if_any(directory / "config.json") or derived or {}
    assert isinstance(recorded, Mapping), "Bug: the configuration was read before"
    different = []
    for kind in () if _is_first_clip(recorded, tokenizer) else ("bos", "eos", "cls", "sep", "mask"):
        wanted, got = recorded.get(f"{kind}_token_id"), getattr(tokenizer, f"{kind}_token_id", None)
        if isinstance(wanted, int) and isinstance(got, int) and wanted != got:
            different.append(f"{kind}_token_id {got} where config.json says {wanted}")
    padding = find_other_padding(directory, tokenizer)
    if padding and len(strange := _list_strangers(directory, tokenizer)) > 1:
        different.append(
            f"{padding} and no {list_some(strange)} in its tokenizer.json, which transformers put behind the others"
        )
    digest = hash_vocabulary(tokenizer)
    if recorded.get("vocabulary_sha256", digest) != digest:
        different.append(f"a vocabulary of SHA-256 {digest} where config.json says {recorded['vocabulary_sha256']}")
    if different:
        raise VocabularyError(
            f"the tokenizer in {directory} belongs to another model",
            expected="the special ids and the vocabulary that config.json names",
            got="; ".join(different),
            # A vocabulary alone is given the usual special tokens of its class, and those were compared: to take them
            # all the same would answer wrongly.
            remedy=PASS_BASE
            if is_bare_vocabulary(directory)
            else "copy the tokenizer that the checkpoint was trained with, or pass its folder with --base; "
            "--allow-other-tokenizer takes this one, if its special tokens were changed on purpose",
        )


def find_other_padding(directory: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return in words how the padding's id contradicts `config.json`; nothing where it does not."""
    recorded = read_json_if_any(directory / "config.json")
    wanted = recorded.get("pad_token_id") if isinstance(recorded, Mapping) else None
    got = tokenizer.pad_token_id
    differ = (
        isinstance(wanted, int) and isinstance(got, int) and wanted != got and not _is_first_clip(recorded, tokenizer)
    )
    return f"pad_token_id {got} where config.json says {wanted}" if differ else ""


def _is_first_clip(recorded: Any, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether a configuration has the ids that the first CLIP's have, and a tokenizer is made like CLIP's.

    That one's beginning and end are the last of its own vocabulary, and the end is what such a model looks for as the
    highest id.
    """
    is_old = isinstance(recorded, Mapping) and recorded.get("model_type") == "clip_text_model"
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if not is_old or recorded.get("eos_token_id") != _CLIPS_OLD_END or not isinstance(end, int):
        return False
    return start == end - 1 and end >= tokenizer.vocab_size - 1


def warn_of_padding(directory: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return a warning where the tokenizer pads with another id than `config.json` names, and nothing else differs."""
    padding = find_other_padding(directory, tokenizer)
    if not padding:
        return ()
    return (
        f"the tokenizer has {padding}; the mask hides the padding, so no answer depends on it, but if the tokenizer is "
        "not the one that the checkpoint was trained with, pass the folder of that one with --base.",
    )


def warn_of_own_steps(directory: Path, config: PretrainedConfig) -> tuple[str, ...]:
    """Return a warning where steps of a tokenizer were changed, so that transformers 5 loads another than it saved.

    Which of the two a model was trained with is told by nothing. Releases before 5 load what they saved.
    """
    path, settings = (directory / name for name in DESCRIBED_BY)
    if "backend" not in read_json_beside(settings) or not path.is_file():
        return ()
    steps = list_other_steps(Tokenizer.from_file(str(path)), _load(directory, config).backend_tokenizer)
    if not steps:
        return ()
    return (
        f"tokens are made by {' and '.join(steps)} of {path}, where transformers 5 makes its own as it loads the "
        "folder; if the model was trained with a tokenizer that was loaded from there, save that as it is loaded, with "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER).",
    )


def _list_strangers(directory: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the special tokens that have a name alone, so that transformers put them behind the vocabulary.

    A tokenizer that was saved with its special tokens has them in `tokenizer.json`, or their ids in the settings.
    """
    vocabulary, settings = (directory / name for name in DESCRIBED_BY)
    if not vocabulary.is_file():
        return []
    own, given = Tokenizer.from_file(str(vocabulary)), read_json_beside(settings).get("added_tokens_decoder")
    known = {str(number): token.get("content") for number, token in given.items()} if isinstance(given, dict) else {}
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    return [token for token, id_ in ids.items() if own.token_to_id(token) is None and known.get(str(id_)) != token]


def hash_vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of every token with its id, in the order of ids."""
    ordered = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(ordered, ensure_ascii=False).encode()).hexdigest()
