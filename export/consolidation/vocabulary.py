"""Whether a tokenizer and the rows of an embedding belong together, as far as numbers tell. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers.models import BPE

from ..checkpoints import StoredCheckpoint
from ..checkpoints.plain.model_shapes import ALL_INPUT_EMBEDDINGS, read_vocab_size
from ..checkpoints.plain.tokenizer_files import check_merges, find_renamed
from ..checkpoints.storage.paths import MAX_JSON_BYTES, read_json_beside
from ..errors import VocabularyError

# Rows that no id reaches are usual: tables are padded, of Pythia by 411 rows and of Phi by 905 (1.8 %). A tokenizer
# that lacks more than both is of another model.
_LEAST_SHARE = 0.75
_USUAL_PADDING = 1024

# Files that hold every token with its id, or one a line, where there is no `tokenizer.json`.
_VOCABULARIES = ("vocab.json", "gpt2-vocab.json", "vocab.txt")


def refuse_other_ids(
    ids: Mapping[str, int], rows: int, table: str, *, directory: Path | None = None, allow_other_tokenizer: bool = False
) -> None:
    """Refuse a tokenizer that can produce an id beyond the embedding, or knows too few of its rows to be its own.

    An id beyond makes the whole batch fail in the server, or reads a wrong row.

    Args:
        ids: Token → its id.
        rows: Rows of the embedding.
        table: Its name.
        directory: The folder with the tokenizer, to be named.
        allow_other_tokenizer: Whether it may know few of them.

    Raises:
        VocabularyError: It is one or the other.
    """
    named = "the tokenizer" if directory is None else f"the tokenizer in {directory}"
    token, highest = max(ids.items(), key=lambda item: item[1])
    if highest >= rows:
        raise VocabularyError(
            f"{named} reaches beyond {table}",
            expected=f"ids below its {rows} rows",
            got=f"id {highest} for {token!r}",
            remedy="use the tokenizer that the checkpoint was trained with",
        )
    known = len(set(ids.values()))
    if not allow_other_tokenizer and known < _LEAST_SHARE * rows and rows - known > _USUAL_PADDING:
        raise VocabularyError(
            f"{named} has far fewer ids than {table} has rows",
            expected=f"ids for most of its {rows} rows",
            got=str(known),
            remedy="copy the tokenizer that the checkpoint was trained with, or pass its folder with --base; "
            "--allow-other-tokenizer takes this one, if the rows beyond it are unused on purpose",
        )


def check_carried_tokenizer(directory: Path, checkpoint: StoredCheckpoint, *, allow_other_tokenizer: bool) -> None:
    """Refuse the tokenizer beside a configuration where it cannot be that of the weights; see `refuse_other_ids`.

    Nothing is said of a tokenizer whose tokens no file lists, nor where it is not plain which table they are rows of.

    Raises:
        VocabularyError: It cannot be.
    """
    check_merges(directory)
    _refuse_other_merges(directory)
    ids, table = _read_ids(directory), _find_table(directory, checkpoint)
    if ids and table:
        rows = checkpoint.tensors[table].shape[0]
        refuse_other_ids(ids, rows, table, directory=directory, allow_other_tokenizer=allow_other_tokenizer)


def _refuse_other_merges(directory: Path) -> None:
    """Refuse GPT-2's two files under Megatron's names where they are not of one tokenizer.

    Under other names they may be of a kind that is read otherwise.
    """
    if not (renamed := find_renamed(directory)):
        return
    vocabulary, merges = (directory / name for name in renamed)
    try:
        BPE.from_file(str(vocabulary), str(merges))
    # The library raises what its parts raise.
    except Exception as exc:
        raise VocabularyError(
            f"the tokenizer in {directory} cannot be read",
            expected=f"merges in {merges.name} of tokens that {vocabulary.name} has",
            got=f"'{exc}'",
            remedy="copy both files of the tokenizer that the checkpoint was trained with",
        ) from exc


def _read_ids(directory: Path) -> dict[str, int]:
    """Return token → id of the tokenizer in a folder; empty where no file that we read lists them."""
    if (directory / "tokenizer.json").exists():
        return _read_described(_read_object(directory / "tokenizer.json"))
    found = [directory / name for name in _VOCABULARIES if (directory / name).is_file()]
    ids = _keep_ids(_read_object(found[0]).items()) if found else {}
    return ids | _keep_ids(_read_object(directory / "added_tokens.json").items()) if ids else {}


def _read_described(content: Mapping[str, Any]) -> dict[str, int]:
    """Return token → id of what a `tokenizer.json` says."""
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        # Of Unigram: each with its score, in the order of ids.
        pairs = [(item[0], index) for index, item in enumerate(vocabulary) if isinstance(item, list) and item]
    else:
        pairs = list(vocabulary.items()) if isinstance(vocabulary, dict) else []
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return _keep_ids([*pairs, *((token.get("content"), token.get("id")) for token in tokens)]) if pairs else {}


def _read_object(path: Path) -> dict[str, Any]:
    # What is larger is copied without being looked at.
    if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
        return {}
    if path.suffix == ".txt":
        # Not by `splitlines`: a token may be a separator of Unicode's.
        lines = path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
        return {line: index for index, line in enumerate(lines)}
    return read_json_beside(path)


def _keep_ids(pairs: Iterable[tuple[Any, Any]]) -> dict[str, int]:
    return {token: id_ for token, id_ in pairs if isinstance(token, str) and type(id_) is int}


def _find_table(directory: Path, checkpoint: StoredCheckpoint) -> str:
    """Return the name of an input embedding, or of a table as high as `config.json` says; empty where none is plain."""
    tables = {name: tensor.shape[0] for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    named = [name for name in tables if f".{name}".endswith(tuple(f".{ending}" for ending in ALL_INPUT_EMBEDDINGS))]
    recorded = read_vocab_size(directory)
    found = named or [name for name, rows in tables.items() if rows == recorded]
    # Two vocabularies, of an encoder and a decoder, may have one tokenizer each.
    return found[0] if len({tables[name] for name in found}) == 1 else ""
