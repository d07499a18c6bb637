"""Readers of what trainers leave on disk, one module per family of formats."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ..errors import CheckpointError, list_some
from .adapter_names import ADAPTER_FILE, describe_missing_base
from .deepspeed import pipeline as deepspeed_pipeline
from .deepspeed import reader as deepspeed
from .fsdp import reader as fsdp
from .megatron import megatron_lm
from .megatron import reader as megatron
from .plain import huggingface, torch_file
from .remedies import find_remedy
from .storage.paths import has_file, is_taken, read_json_beside, refuse_broken_links
from .stored_checkpoint import StoredCheckpoint


class Reader(Protocol):
    """What each module of a format family offers."""

    # In words, what makes the family known; readers of one trainer's files look for the same.
    LOOKED_FOR: str

    def recognises(self, directory: Path, tag: str | None = None) -> bool:
        """Tell whether `directory` holds a checkpoint of the family.

        Raises:
            CheckpointError: It holds one of the trainer's, about which nothing more can be determined.
        """
        ...

    def open_folder(self, directory: Path, tag: str | None = None, base: Path | None = None) -> StoredCheckpoint:
        """Return a reader for it; raises `CheckpointError` where it is damaged.

        What configuration and tokenizer tell of the weights is looked for in `base`, beside the weights where None.
        """
        ...


# Trainers' own formats: they hold the fp32 weights and may have a gathered 16-bit copy in one of `_PLAIN` beside them.
# A folder is of one trainer at most; of readers that look for the same files, the first that recognises it reads it.
_SHARDED: tuple[Reader, ...] = (deepspeed_pipeline, megatron, megatron_lm, deepspeed, fsdp)
# Formats of a whole model, the first that fits: a folder of Hugging Face often has a `.pt` of other things beside.
_PLAIN: tuple[Reader, ...] = (huggingface, torch_file)

# Of what a folder holds instead, so many names are told.
_MAX_LISTED = 8


# Weights of others → whose they are, and how transformers loads them with the class of the model's task (5.23,
# modeling_utils.py: `from_tf` and `from_flax` are taken there without effect, release 4 has them).
_FOREIGN = {
    "*.gguf": ("llama.cpp (GGUF)", "gguf_file={file!r}) in transformers, with gguf and accelerate installed"),
    "*.h5": ("TensorFlow", "from_tf=True) in transformers 4, with tensorflow installed"),
    "*.msgpack": ("Flax", "from_flax=True) in transformers 4, with flax installed"),
}

# huggingface_hub 1.x, utils/_validators.py, `validate_repo_id`: letters, digits and `-_.`, with its owner as a rule.
_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)


def open_checkpoint(
    directory: Path, *, tag: str | None = None, base: Path | None = None, allow_non_finite: bool = False
) -> StoredCheckpoint:
    """Return a reader for the checkpoint in `directory`, whose format is recognised from the files alone.

    Args:
        directory: The folder, or a single file by `torch.save`.
        tag: Which checkpoint of several in the folder; the trainer's own choice (`latest`) where None.
        base: The folder with configuration and tokenizer, which tell rows of padding and shapes that the files do not;
            the checkpoint's own where None.
        allow_non_finite: Let NaN and infinite weights through.

    Raises:
        CheckpointError: There is no such folder, nothing in it is a checkpoint that we read, or it is damaged.
    """
    try:
        checkpoint = _open(directory, tag, base)
    # A name too long for the file system, or a folder that may not be read, wherever a reader meets it.
    except OSError as exc:
        raise CheckpointError(
            f"{exc.filename or directory} cannot be read",
            expected="the files of a checkpoint",
            got=exc.strerror or str(exc),
            remedy=find_remedy(exc),
        ) from exc
    _refuse_unwritable_names(checkpoint)
    checkpoint.allow_non_finite = allow_non_finite
    missing = (*checkpoint.facts.missing, *describe_missing_base(checkpoint.tensors.keys()))
    checkpoint.facts = replace(checkpoint.facts, missing=missing)
    return checkpoint


def _open(directory: Path, tag: str | None, base: Path | None) -> StoredCheckpoint:
    if is_taken(directory) and directory.suffix in (*torch_file.SUFFIXES, ".bin"):
        return torch_file.open_file(directory)
    if is_taken(directory) and directory.suffix == huggingface.SAFETENSORS_SUFFIX:
        return huggingface.open_file(directory)
    if not directory.is_dir():
        raise CheckpointError(
            f"there is no checkpoint folder {directory}",
            expected="a folder",
            got="a file" if directory.exists() else "nothing",
            remedy=_find_remedy(directory),
        )
    sharded = [reader for reader in _SHARDED if reader.recognises(directory, tag)]
    trainers = list(dict.fromkeys(reader.LOOKED_FOR for reader in sharded))
    if len(trainers) > 1:
        raise CheckpointError(
            f"{directory} holds checkpoints of several trainers",
            expected="one of them",
            got=" and ".join(trainers),
            remedy="pass the folder of the one to export",
        )
    for reader in (*sharded, *_PLAIN):
        if reader in sharded or reader.recognises(directory, tag):
            return reader.open_folder(directory, tag, base)
    _refuse_adapter(directory)
    refuse_broken_links(directory)
    found = sorted(entry.name + "/" * entry.is_dir() for entry in directory.iterdir())
    # The usual slip is to name the folder above.
    inner = [
        name for name in found if name.endswith("/") and (name.startswith("checkpoint-") or _is_known(directory / name))
    ]
    if not inner:
        _refuse_foreign(directory)
        torch_file.refuse_bare_pickle(directory)
    raise CheckpointError(
        f"{directory} holds no checkpoint",
        expected="one of "
        + ", ".join(dict.fromkeys(reader.LOOKED_FOR for reader in (*_PLAIN[:1], *_SHARDED, *_PLAIN[1:]))),
        got=list_some(found, _MAX_LISTED) if found else "an empty folder",
        remedy=f"pass one of {list_some(inner, _MAX_LISTED)}" if inner else "pass the folder that holds the weights",
    )


def _refuse_adapter(directory: Path) -> None:
    """Refuse what peft saves of a model whose own weights did not change.

    Raises:
        CheckpointError: It is such a folder; the message names the model that it changes.
    """
    if not has_file(directory / ADAPTER_FILE):
        return
    named = read_json_beside(directory / ADAPTER_FILE).get("base_model_name_or_path")
    base = named if isinstance(named, str) and named else "the model that it was trained from"
    raise CheckpointError(
        f"{directory} holds an adapter, which is not a whole model",
        expected=f"the model that it changes, {base}" if base is named else base,
        got=ADAPTER_FILE,
        remedy=f"pass that model in its place, and to run this folder as well: --adapter {shlex.quote(str(directory))}",
    )


def _refuse_foreign(directory: Path) -> None:
    """Refuse weights in a format that no reader is for, and that transformers can write anew.

    Raises:
        CheckpointError: There are such weights.
    """
    for pattern, (title, way) in _FOREIGN.items():
        if found := sorted(entry.name for entry in directory.glob(pattern) if entry.is_file()):
            raise CheckpointError(
                f"{directory} holds weights of {title} alone",
                expected="weights of torch, such as model.safetensors",
                got=list_some(found, 4),
                remedy=f"load them by from_pretrained(FOLDER, {way.format(file=found[0])}, save that by "
                "save_pretrained, and pass its folder",
            )


def _find_remedy(directory: Path) -> str:
    """Return what to do about a path that is no folder: it may be a model's id on the Hugging Face Hub."""
    text = str(directory)
    in_a_folder = directory.parent != Path() and directory.parent.is_dir()
    if directory.exists() or in_a_folder or not _HUB_ID.fullmatch(text):
        return "pass the folder that holds the weights"
    return (
        "pass the folder that holds the weights; a model of the Hugging Face Hub is first fetched: "
        f"hf download {text} --local-dir {directory.name}"
    )


def _is_known(directory: Path) -> bool:
    try:
        return any(reader.recognises(directory) for reader in (*_SHARDED, *_PLAIN))
    # It is one, and damaged: the error says how.
    except CheckpointError:
        return True
    # It may not be read, so it is not what the user meant.
    except OSError:
        return False


def _refuse_unwritable_names(checkpoint: StoredCheckpoint) -> None:
    """Refuse names with halves of characters (lone surrogates): no file in UTF-8 can hold them."""
    names = [name for name in (*checkpoint.tensors, *checkpoint.zero_size) if not _is_unicode(name)]
    if names:
        raise CheckpointError(
            f"{checkpoint.directory} holds tensors whose names are not text: {list_some(names)}",
            expected="names in Unicode",
            got="halves of characters",
            remedy="rename them and save again",
        )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
