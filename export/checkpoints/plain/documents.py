"""What describes a model beside its weights: of use as far as it can be read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..storage.paths import (
    MAX_JSON_BYTES,
    check_inside,
    read_json,
    read_json_object,
    refuse_lfs_pointer,
    refuse_spoiled_texts,
)
from .sentence_modules import TRANSFORMER_FILES, read_sentence_modules

# As `save_pretrained` of models, tokenizers and processors names them, and Sentence-Transformers' `save`.
DOCUMENTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    # Of GPT-2, BERT, Marian (`target_vocab.json`), FSMT (`vocab-src.json`), LUKE (`entity_vocab.json`) and Megatron
    # (`gpt2-vocab.json`).
    "*vocab*.json",
    "vocab.txt",
    "*merges.txt",
    "*.model",
    "*.spm",
    "bpe.codes",
    "normalizer.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "feature_extractor_config.json",
    "video_preprocessor_config.json",
    "config_sentence_transformers.json",
    *TRANSFORMER_FILES,
)


def find_documents(directory: Path, pattern: str) -> list[Path]:
    """Return what is there under the names that one of `DOCUMENTS` stands for, regular files or not.

    A folder may be called anything that a pattern takes, but not as a file that belongs to the model.
    """
    if "*" in pattern:
        return sorted(path for path in directory.glob(pattern) if not path.is_dir())
    return [directory / pattern] if os.path.lexists(directory / pattern) else []


def refuse_false_documents(directory: Path) -> None:
    """Refuse what bears the name of a document and is no regular file, which transformers would take for absent.

    So is a pointer of Git LFS: of a template, say, every question would be answered as if it were that. A byte order
    mark in front of one would be part of every question.

    Raises:
        CheckpointError: Something is.
    """
    for path in _list_documents(directory):
        if path.suffix == ".json":
            refuse_lfs_pointer(path)
        else:
            refuse_spoiled_texts(path.parent, [path.name])


def check_documents(directory: Path, *, may_lead_outside: bool = False) -> None:
    """Refuse a document that is there and cannot be read, those of Sentence-Transformers' modules included.

    Args:
        directory: The folder that they lie in.
        may_lead_outside: Whether links out of it are let through, where nothing is copied.

    Raises:
        CheckpointError: It is damaged, is not a regular file, or is a link that leads outside.
    """
    for path in _list_documents(directory):
        if not may_lead_outside:
            check_inside(path, directory)
        _check_document(path)
    for module in read_sentence_modules(directory) or ():
        if os.path.lexists(path := module.folder / "config.json"):
            _check_document(path)


def _list_documents(directory: Path) -> Iterator[Path]:
    return (path for pattern in DOCUMENTS for path in find_documents(directory, pattern))


def _check_document(path: Path) -> None:
    refuse_lfs_pointer(path)
    if path.suffix != ".json":
        refuse_spoiled_texts(path.parent, [path.name])
    # What is larger is not looked at.
    elif path.stat().st_size <= MAX_JSON_BYTES:
        # Lists of tokens are not all objects.
        (read_json if "vocab" in path.name else read_json_object)(path)
