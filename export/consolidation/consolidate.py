"""Any checkpoint that we read, written as a Hugging Face folder of safetensors.

The bytes are copied in pieces from where they lie to where they belong, checked on the way, and never are a tensor in
memory. Needs no torch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints import StoredCheckpoint, open_checkpoint
from ..checkpoints.plain.huggingface import FORMAT_KEY, ZERO_SIZE_KEY
from ..checkpoints.storage.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..checkpoints.storage.paths import check_inside, open_regular, read_json
from ..errors import CheckpointError, list_some
from .safetensors_output import SafetensorsOutput, refuse_inflated
from .staging import stage_folder

DTYPES = {dtype.name: dtype for dtype in (FLOAT32, BFLOAT16, FLOAT16)}

# What belongs to a model beside its weights, as `save_pretrained` of models, tokenizers and processors names it.
_CARRIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "feature_extractor_config.json",
)
_MAX_CARRIED_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Consolidated:
    """What was written.

    Attributes:
        format_name: What was read, in words.
        tensors: How many were written, tied ones once.
        tied: How many names were left out because another holds their bytes.
        total_bytes: Bytes of weights.
        files: Names of every file in the folder, sorted.
        missing: What a whole checkpoint of the format would have and this one lacks or cannot show.
    """

    format_name: str
    tensors: int
    tied: int
    total_bytes: int
    files: tuple[str, ...]
    missing: tuple[str, ...]


def consolidate(
    source: Path,
    target: Path,
    *,
    tag: str | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    allow_non_finite: bool = False,
) -> Consolidated:
    """Write the checkpoint in `source` to the new folder `target`, for `from_pretrained` to load.

    Tied names are stored once, and recorded in each file's metadata as safetensors' own `save_model` does: the name
    left out → the name that holds it. The folder appears whole or not at all; an interrupted run is simply repeated.

    Args:
        source: The checkpoint.
        target: A folder that does not exist yet.
        tag: Which checkpoint of several in `source`.
        dtype: Cast every floating-point tensor to `float32`, `bfloat16` or `float16`; as they are where None.
        max_shard_bytes: The size from which on a further file is begun.
        allow_non_finite: Let NaN and infinite weights through.

    Raises:
        CheckpointError: The checkpoint is refused, or `target` cannot be written.
    """
    checkpoint = open_checkpoint(source, tag=tag, allow_non_finite=allow_non_finite)
    tensors = checkpoint.owned()
    refuse_inflated(tensors, source)
    with stage_folder(target) as staged:
        output = SafetensorsOutput(
            staged,
            tensors,
            dtype=None if dtype is None else DTYPES[dtype],
            max_shard_bytes=max_shard_bytes,
            metadata=_describe(checkpoint),
            allow_non_finite=allow_non_finite,
        )
        _check_room(staged, target, output.total_bytes)
        with output:
            checkpoint.stream(output.write)
        output.write_index()
        _carry_over(checkpoint.directory, staged, output.dtype_names)
        if checkpoint.config is not None and not (staged / "config.json").exists():
            _write_derived_config(checkpoint.config, staged / "config.json", output.dtype_names)
        files = tuple(sorted(path.name for path in staged.iterdir()))
    return Consolidated(
        format_name=checkpoint.format_name,
        tensors=len(tensors),
        tied=len(checkpoint.tied),
        total_bytes=output.total_bytes,
        files=files,
        missing=checkpoint.facts.missing,
    )


def _describe(checkpoint: StoredCheckpoint) -> dict[str, str]:
    """Return the metadata of every file, the same for the same model in whatever order its names were read.

    Raises:
        CheckpointError: A tied name is a key that means something else.
    """
    # transformers refuses a file whose metadata does not name the framework.
    own = {FORMAT_KEY: "pt"}
    if checkpoint.zero_size:
        own[ZERO_SIZE_KEY] = json.dumps(sorted(checkpoint.zero_size), ensure_ascii=False)
    taken = [name for name in (FORMAT_KEY, ZERO_SIZE_KEY) if name in checkpoint.tied]
    if taken:
        raise CheckpointError(
            f"{list_some(taken)} cannot be recorded as a tied name",
            expected="names that mean nothing else in the metadata of safetensors",
            got=f"{taken[0]}, which shares the bytes of {checkpoint.tied[taken[0]]}",
            remedy="rename it before saving, or save a clone() of it",
        )
    return own | dict(sorted(checkpoint.tied.items()))


def _check_room(staged: Path, target: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(staged).free
    if needed_bytes > free_bytes:
        raise CheckpointError(
            f"{target} does not fit on its disk",
            expected=f"{needed_bytes} free bytes",
            got=str(free_bytes),
            remedy="make room, or choose --dtype bfloat16 if that precision will do",
        )


def _carry_over(directory: Path, staged: Path, dtype_names: set[str]) -> None:
    """Copy the model's configuration and tokenizer, as far as `directory` has them."""
    for pattern in _CARRIED:
        named = "*" not in pattern
        for path in (directory / pattern,) if named else sorted(directory.glob(pattern)):
            # A folder may be called anything, but not as a file that belongs to the model.
            if not (os.path.lexists(path) if named else path.is_file()):
                continue
            check_inside(path, directory)
            open_regular(path).close()
            if path.stat().st_size > _MAX_CARRIED_BYTES:
                raise CheckpointError(
                    f"{path} is too large to belong to a model's configuration",
                    expected=f"{_MAX_CARRIED_BYTES} bytes at most",
                    got=str(path.stat().st_size),
                )
            if path.name == "config.json" and len(dtype_names) == 1:
                _write_config(path, staged / path.name, min(dtype_names))
            else:
                shutil.copyfile(path, staged / path.name)


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
            f"{source} holds what is no text", expected="Unicode", got="half a character", remedy="correct it"
        ) from exc
    target.write_bytes(text)


def _write_derived_config(derived: Mapping[str, Any], target: Path, dtype_names: set[str]) -> None:
    """Write the configuration that a trainer's own files tell, with the dtype that the weights now have."""
    config = dict(derived)
    if len(dtype_names) == 1:
        _set_dtype(config, min(dtype_names))
    target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _set_dtype(config: Any, dtype_name: str) -> bool:
    """Set every dtype in a configuration and those within it; tell whether anything changed."""
    changed = False
    if isinstance(config, dict):
        for key, value in config.items():
            if key in ("dtype", "torch_dtype") and value in (*DTYPES, "float64") and value != dtype_name:
                config[key] = dtype_name
                changed = True
            elif isinstance(value, dict):
                changed |= _set_dtype(value, dtype_name)
    return changed
