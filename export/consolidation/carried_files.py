"""What belongs to a model beside its weights: configuration, tokenizer, and how its answers are made of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.plain import huggingface
from ..checkpoints.plain.documents import DOCUMENTS, find_documents
from ..checkpoints.plain.sentence_modules import (
    MODULES_FILE,
    RECORD_FILE,
    find_sentence_home,
    read_sentence_modules,
)
from ..checkpoints.plain.tokenizer_files import find_renamed
from ..checkpoints.storage.paths import check_inside, has_file, open_regular, read_json
from ..errors import CheckpointError
from ..file_limit import writing_to
from .fitted import Fitted

_MAX_CARRIED_BYTES = 256 << 20
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_INDEX_ENDING = ".index.json"
_DTYPE_NAMES = ("float64", "float32", "bfloat16", "float16")


def carry_over(directory: Path, staged: Path, dtype_names: set[str]) -> dict[Path, Path]:
    """Copy what belongs to the model, as far as `directory` has it, without weights.

    Args:
        directory: Folder of the checkpoint.
        staged: Folder with the weights that were written.
        dtype_names: Floating-point types of these weights.

    Returns:
        Each further folder with weights, as Sentence-Transformers' `Dense` has one → where they belong.

    Raises:
        CheckpointError: A file leads outside, is not a regular one, or is too large.
    """
    renamed = find_renamed(directory)
    for pattern in DOCUMENTS:
        for path in find_documents(directory, pattern):
            if path.name == "config.json" and len(dtype_names) == 1:
                _check_file(path, directory)
                _write_config(path, staged / path.name, min(dtype_names))
            else:
                relative = path.relative_to(directory)
                # Under another name transformers makes a tokenizer of nothing, and does not say so.
                _copy_file(path, directory, staged / renamed.get(str(relative), relative))
    return _carry_sentence_modules(directory, staged)


def _carry_sentence_modules(directory: Path, staged: Path) -> dict[Path, Path]:
    """Copy how token vectors become a text's: without it, a model that is pooled otherwise is served with the mean.

    The transformer, which may have had a folder of its own, is the new folder itself, and has what was beside that.
    """
    modules = read_sentence_modules(directory)
    if modules is None:
        return {}
    home = find_sentence_home(directory)
    if home and home.resolve() != directory.resolve() and has_file(home / RECORD_FILE):
        _copy_file(home / RECORD_FILE, home, staged / RECORD_FILE)
    entries, weights = [], {}
    for module in modules:
        if module.folder.resolve() == directory.resolve():
            entries.append(module.entry | {"path": ""})
            continue
        entries.append(module.entry)
        target = staged / module.entry["path"]
        if module.folder.is_dir() and huggingface.recognises(module.folder):
            weights[module.folder] = target
        for path in sorted(module.folder.iterdir()) if module.folder.is_dir() else ():
            if path.suffix not in _WEIGHT_SUFFIXES and not path.name.endswith(_INDEX_ENDING):
                _copy_file(path, module.folder, target / path.name)
    text = json.dumps(entries, indent=2, ensure_ascii=False) + "\n"
    (staged / MODULES_FILE).write_text(text, encoding="utf-8")
    return weights


def _copy_file(path: Path, directory: Path, target: Path) -> None:
    _check_file(path, directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    with writing_to(target):
        shutil.copyfile(path, target)


def _check_file(path: Path, directory: Path) -> None:
    check_inside(path, directory)
    open_regular(path).close()
    if path.stat().st_size > _MAX_CARRIED_BYTES:
        raise CheckpointError(
            f"{path} is too large to belong to a model's configuration",
            expected=f"{_MAX_CARRIED_BYTES} bytes at most",
            got=str(path.stat().st_size),
        )


def _write_config(source: Path, target: Path, dtype_name: str) -> None:
    """Copy `config.json`, with the dtype that the weights now have.

    transformers 5 loads in the dtype that the configuration names: after bf16 training it would round fp32 weights.
    """
    config = read_json(source)
    if not _set_dtype(config, dtype_name):
        shutil.copyfile(source, target)
        return
    try:
        text = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError as exc:
        raise CheckpointError(
            f"{source} holds what is not text", expected="Unicode", got="half a character", remedy="correct it"
        ) from exc
    target.write_bytes(text)


def write_derived_config(derived: Mapping[str, Any], target: Path, dtype_names: set[str]) -> None:
    """Write the configuration that a trainer's own files tell, with the dtype that the weights now have."""
    config = dict(derived)
    if len(dtype_names) == 1:
        _set_dtype(config, min(dtype_names))
    target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def replace_files(fitted: Fitted, staged: Path) -> None:
    """Give the folder the tokenizer and the configuration that its weights have now."""
    for pattern in fitted.superseded:
        for path in find_documents(staged, pattern):
            path.unlink()
    for path in sorted(fitted.files.iterdir()):
        _copy_file(path, fitted.files, staged / path.name)
    set_sizes(staged / "config.json", fitted.config)


def set_sizes(path: Path, sizes: Mapping[str, Any]) -> None:
    """Have `config.json` say what the tables have now; the key of a part is `text_config.vocab_size`."""
    config = read_json(path)
    for key, size in sizes.items():
        *outer, last = key.split(".")
        place = config
        for name in outer:
            if not isinstance(place.get(name), dict):
                place[name] = {}
            place = place[name]
        place[last] = size
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _set_dtype(config: Any, dtype_name: str) -> bool:
    """Set every dtype in a configuration and those within it; tell whether anything changed."""
    changed = False
    if isinstance(config, dict):
        for key, value in config.items():
            if key in ("dtype", "torch_dtype") and value in _DTYPE_NAMES and value != dtype_name:
                config[key] = dtype_name
                changed = True
            elif isinstance(value, dict):
                changed |= _set_dtype(value, dtype_name)
    return changed
