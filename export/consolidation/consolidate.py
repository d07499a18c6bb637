"""Any checkpoint that we read, written as a Hugging Face folder of safetensors.

The bytes are copied in pieces from where they lie to where they belong, checked on the way, and never are a tensor in
memory. Needs no torch, but to look at a model whose configuration comes from elsewhere.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..checkpoints import StoredCheckpoint, open_checkpoint
from ..checkpoints.plain.config_match import ConfigMatch, match_config
from ..checkpoints.plain.documents import check_documents
from ..checkpoints.plain.huggingface import FORMAT_KEY, ZERO_SIZE_KEY
from ..checkpoints.plain.sentence_modules import tell_missing_settings
from ..checkpoints.storage.dtypes import BFLOAT16, FLOAT16, FLOAT32, ElementType
from ..checkpoints.storage.file_state import refuse_late_save
from ..checkpoints.storage.paths import has_file
from ..errors import CheckpointError, list_some
from .carried_files import carry_over, replace_files, set_sizes, write_derived_config
from .fitted import Fit
from .safetensors_output import SafetensorsOutput, refuse_inflated
from .staging import stage_folder
from .vocabulary import check_carried_tokenizer

# For tables that were changed, until they are written.
_SCRATCH = ".scratch"

DTYPES = {dtype.name: dtype for dtype in (FLOAT32, BFLOAT16, FLOAT16)}


@dataclass(frozen=True, kw_only=True)
class Consolidated:
    """What was written.

    Attributes:
        format_name: What was read, in words.
        tensors: How many were written, tied ones once.
        tied: How many names were left out because another holds their bytes.
        total_bytes: Bytes of weights.
        files: Paths of every file in the folder, sorted.
        missing: What a whole checkpoint of the format would have and this one lacks or cannot show.
        warnings: What the reader should know of a vocabulary that was changed, of its size that was corrected, or of a
            head that the weights do not have.
    """

    format_name: str
    tensors: int
    tied: int
    total_bytes: int
    files: tuple[str, ...]
    missing: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def consolidate(
    source: Path,
    target: Path,
    *,
    tag: str | None = None,
    base: Path | None = None,
    fit: Fit | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    allow_non_finite: bool = False,
    allow_other_tokenizer: bool = False,
) -> Consolidated:
    """Write the checkpoint in `source` to the new folder `target`, for `from_pretrained` to load.

    Tied names are stored once, and recorded in each file's metadata as safetensors' own `save_model` does: the name
    left out → the name that holds it. The folder appears whole or not at all; an interrupted run is simply repeated.

    Args:
        source: The checkpoint.
        target: A folder that does not exist yet.
        tag: Name of the checkpoint, where `source` holds several.
        base: Folder with configuration and tokenizer; the checkpoint's own where None.
        fit: Changes the vocabulary; nothing is changed where None.
        dtype: Cast every floating-point tensor to `float32`, `bfloat16` or `float16`; as they are where None.
        max_shard_bytes: The size from which on a further file is begun.
        allow_non_finite: Let NaN and infinite weights through.
        allow_other_tokenizer: Carry a tokenizer that knows few of the rows, where `fit` is None.

    Raises:
        CheckpointError: The checkpoint is refused, or the configuration is of another model, or `target` cannot be
            written.
        VocabularyError: The tokenizer that would be carried belongs to another model.
    """
    if base is not None and not base.is_dir():
        raise CheckpointError(
            f"{base} is no folder", expected="one with config.json and tokenizer", got="none", remedy="correct --base"
        )
    checkpoint = open_checkpoint(source, tag=tag, base=base, allow_non_finite=allow_non_finite)
    options = _Options(dtype=None if dtype is None else DTYPES[dtype], max_shard_bytes=max_shard_bytes)
    directory = base or checkpoint.directory
    if base and not has_file(base / "config.json") and has_file(checkpoint.directory / "config.json"):
        raise CheckpointError(
            f"{base}, which --base names, has no config.json",
            expected="the configuration of the model that the checkpoint was trained from",
            got=f"one in {checkpoint.directory} alone, which would be left out",
            remedy="copy it there as well, or leave --base out",
        )
    check_documents(directory)
    if fit is None:
        check_carried_tokenizer(directory, checkpoint, allow_other_tokenizer=allow_other_tokenizer)
    opened = checkpoint.opened
    with stage_folder(target) as staged:
        fitted = None
        if fit is not None:
            fitted = fit(checkpoint, directory, _make_scratch(staged))
            checkpoint = fitted.checkpoint
        match = _match_config(directory, checkpoint)
        output = _write_weights(checkpoint, staged, options, target)
        further = carry_over(directory, staged, output.dtype_names)
        if match.sizes:
            set_sizes(staged / "config.json", match.sizes)
        for folder, place in further.items():
            place.mkdir(exist_ok=True)
            _write_weights(open_checkpoint(folder, allow_non_finite=allow_non_finite), place, options, target)
        if checkpoint.config is not None and not (staged / "config.json").exists():
            write_derived_config(checkpoint.config, staged / "config.json", output.dtype_names)
        if fitted is not None:
            replace_files(fitted, staged)
            shutil.rmtree(staged / _SCRATCH)
        refuse_late_save(opened)
        files = tuple(sorted(path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()))
    return Consolidated(
        format_name=checkpoint.format_name,
        tensors=len(checkpoint.owned()),
        tied=len(checkpoint.tied),
        total_bytes=output.total_bytes,
        files=files,
        missing=(*checkpoint.facts.missing, *tell_missing_settings(directory)),
        warnings=(
            *(_warn_of_sizes(directory, match.sizes) if fitted is None else fitted.warnings),
            *_warn_of_model(directory, match),
            *_warn_of_no_config(files),
        ),
    )


def _match_config(directory: Path, checkpoint: StoredCheckpoint) -> ConfigMatch:
    """Return what `config.json` says that the weights know better, and what of it they cannot fill.

    The model that it describes takes seconds and some 400 MB to look at. What lies beside a trainer's own save is not
    spared: most trainers write no configuration, and one that was laid there by hand says nothing of their names.

    Raises:
        CheckpointError: The weights are not of the model that it describes.
    """
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    return match_config(directory, shapes, checkpoint.tied)


def _warn_of_sizes(directory: Path, sizes: Mapping[str, int]) -> tuple[str, ...]:
    if not sizes:
        return ()
    said = ", ".join(f"{key} {size}" for key, size in sizes.items())
    return (
        f"config.json of {directory} has another size than the table of tokens: the one that is written has {said}.",
    )


def _warn_of_no_config(files: Collection[str]) -> tuple[str, ...]:
    if "config.json" in files:
        return ()
    return (
        "nothing says which model the weights are of: there is no config.json; name a folder that has it by --base.",
    )


def _warn_of_model(directory: Path, match: ConfigMatch) -> tuple[str, ...]:
    """Return what is to be said of a configuration whose model cannot be built, or has a head that is not trained yet.

    That of a pretrained model may have one. Weights that another head leaves unused are no harm by themselves.
    """
    if match.value_model:
        return (
            f"the weights are of a reward model, behind {match.value_model}: `run` serves it, and transformers does "
            f"not load it by config.json of {directory}, which describes the model that it was trained from.",
        )
    if match.unbuilt:
        return (
            f"config.json of {directory} was not compared with the weights: transformers cannot build the "
            f"{match.unbuilt} that it describes.",
        )
    if match.names_none:
        return (
            f"config.json of {directory} was not compared with the weights: it names no class of model under "
            "architectures, as the config.json of a whole saved model does.",
        )
    if not match.untrained:
        return ()
    unused = f"; it has no place for {list_some(match.unused, 4)}" if match.unused else ""
    return (
        f"config.json of {directory} names {match.class_name}, whose {list_some(match.untrained, 4)} the weights do "
        f"not have: transformers starts them at random{unused}.",
    )


def _make_scratch(staged: Path) -> Path:
    """Return a new folder inside of the one that is removed if this ends early."""
    scratch = staged / _SCRATCH
    scratch.mkdir()
    return scratch


@dataclass(frozen=True, kw_only=True)
class _Options:
    dtype: ElementType | None
    max_shard_bytes: int


def _write_weights(checkpoint: StoredCheckpoint, folder: Path, options: _Options, target: Path) -> SafetensorsOutput:
    tensors = checkpoint.owned()
    refuse_inflated(tensors, checkpoint.directory)
    output = SafetensorsOutput(
        folder,
        tensors,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_bytes,
        metadata=_describe(checkpoint),
        allow_non_finite=checkpoint.allow_non_finite,
    )
    _check_room(folder, target, output.total_bytes)
    with output:
        checkpoint.stream(output.write)
    output.write_index()
    return output


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
