"""The verb `consolidate`: any checkpoint that we read, as a Hugging Face folder of safetensors.

The bytes are copied in pieces from where they lie to where they belong, checked on the way, and never are a tensor in
memory. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints import StoredCheckpoint, open_checkpoint
from ..checkpoints.plain.huggingface import FORMAT_KEY, ZERO_SIZE_KEY
from ..checkpoints.storage.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..checkpoints.storage.paths import check_inside, open_regular, read_json
from ..consolidation.safetensors_output import SafetensorsOutput, refuse_inflated
from ..consolidation.staging import stage_folder
from ..errors import CheckpointError, escape_controls, list_some

_DTYPES = {dtype.name: dtype for dtype in (FLOAT32, BFLOAT16, FLOAT16)}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", re.IGNORECASE)

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
            dtype=None if dtype is None else _DTYPES[dtype],
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
            if key in ("dtype", "torch_dtype") and value in (*_DTYPES, "float64") and value != dtype_name:
                config[key] = dtype_name
                changed = True
            elif isinstance(value, dict):
                changed |= _set_dtype(value, dtype_name)
    return changed


def parse_size(text: str) -> int:
    """Return the bytes that `5GB`, `300 MB` or `1000` stand for; units of 1000, as in `save_pretrained`.

    Raises:
        argparse.ArgumentTypeError: `text` is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _UNITS[match[2].upper()] if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB or 300MB")
    return int(size)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "consolidate",
        help="write a training checkpoint as a Hugging Face folder of safetensors",
        description="Write a training checkpoint's weights as safetensors, bit for bit, with config and tokenizer.",
    )
    parser.add_argument("directory", type=Path, help="the checkpoint, as the trainer left it")
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--tag", help="which checkpoint in DIRECTORY (default: the one that its file latest names)")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="cast the weights (default: as they are)")
    parser.add_argument(
        "--max-shard-size", type=parse_size, default="5GB", metavar="SIZE", help="such as 300MB (default: 5GB)"
    )
    parser.add_argument(
        "--allow-non-finite", action="store_true", help="let NaN and infinite weights through instead of refusing"
    )
    parser.set_defaults(command=run_consolidate)


def run_consolidate(args: argparse.Namespace) -> int:
    """Run the verb; write a line on what was done and one on each thing missing. Raises what `consolidate` raises."""
    started = time.monotonic()
    done = consolidate(
        args.directory,
        args.out,
        tag=args.tag,
        dtype=args.dtype,
        max_shard_bytes=args.max_shard_size,
        allow_non_finite=args.allow_non_finite,
    )
    tied = f", {done.tied} tied names recorded" if done.tied else ""
    lines = [
        f"{args.out}: {done.tensors} tensors, {done.total_bytes / 1e9:.3f} GB{tied}, from {done.format_name}, "
        f"in {time.monotonic() - started:.1f} s",
        *(f"missing: {what}" for what in done.missing),
    ]
    sys.stdout.writelines(escape_controls(line) + "\n" for line in lines)
    return 0
