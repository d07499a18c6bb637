"""Megatron-LM's own folders of GPT-2, as it and Accelerate's MegatronLMPlugin save them, as one Hugging Face GPT-2.

    latest_checkpointed_iteration.txt              `500`, or `release`
    iter_0000500/mp_rank_TT/model_optim_rng.pt     tensor parallel rank TT
    iter_0000500/mp_rank_TT_PPP/...                the same of pipeline stage PPP, whose layers count from 0

Each file has `args`, `checkpoint_version`, `iteration` and `model`: nested dicts of the legacy model, or the flat names
of Megatron Core's (Megatron-LM, megatron/training/checkpointing.py). The last stage holds the tied embeddings again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, list_some
from ..pickles.torch_zip import open_torch_zip
from ..remedies import LOST_RANKS, OTHER_RANKS, RECOPY_WHOLE
from ..storage.paths import check_inside, read_small, refuse_broken_links, refuse_irregular
from ..storage.stored_tensor import StoredTensor
from ..stored_checkpoint import CheckpointFacts, StoredCheckpoint
from .args import MegatronArgs, check_same_args, read_args
from .beside import check_config, find_end_of_text, find_vocab_size
from .checks import describe_unproven, refuse_doubles
from .parts import Tensors, canonical_name, flatten, join_tensor_ranks, list_replicas, refuse_other_models
from .reader import check_shapes
from .to_gpt2 import build_gpt2_config, convert_to_gpt2

LOOKED_FOR = "Megatron-LM's iter_*/mp_rank_*/model_optim_rng.pt"

_LATEST = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_\d{7,}|release")
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
# The second name: where a distributed optimizer keeps its states in a file of its own.
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_MAX_LATEST_BYTES = 64

# The names of Megatron Core, and of the legacy model since the end of 2023, → those of parts.py, as their ends.
_ENDS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "post_attention_layernorm.bias",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "input_norm.": "input_layernorm.",
    "post_attention_norm.": "post_attention_layernorm.",
    "final_norm.": "final_layernorm.",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXTRA_STATE = "_extra_state"
# What the last of several stages calls its copy of the word embeddings.
_SECOND_TABLES = ("word_embeddings_for_head.weight", "lm_head.weight")
_TABLE = "word_embeddings.weight"


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """The file of one tensor parallel rank of one pipeline stage."""

    path: Path
    tensors: Tensors
    # The tied embeddings once more, where this is the last of several stages.
    second_table: StoredTensor | None
    iteration: Any


def recognises(directory: Path, tag: str | None = None) -> bool:
    """Tell whether Megatron-LM saved into `directory`, which is the folder of all iterations or that of one."""
    if _list_ranks(directory):
        return True
    return any(_list_ranks(entry) or _is_distributed(entry) for entry in _list_iterations(directory))


def open_folder(directory: Path, tag: str | None = None, base: Path | None = None) -> StoredCheckpoint:
    """Return a reader that gives Megatron-LM's GPT-2 under Hugging Face's names, reading no tensor data.

    Args:
        directory: The folder with `latest_checkpointed_iteration.txt`, or an iteration's own.
        tag: Which iteration's folder in it, such as `iter_0000500`; the one that the file names where None.
        base: The folder with configuration and tokenizer, which tell the rows of padding; `directory` as well.

    Raises:
        CheckpointError: The layout or architecture is not proven, files are missing or do not fit each other.
        VocabularyError: The tokenizer has more tokens than the embeddings have rows.
    """
    folder = directory if _list_ranks(directory) else _find_iteration(directory, tag)
    paths = _find_files(folder, directory)
    tensor_ranks, stages = 1 + max(rank for rank, _ in paths), 1 + max(stage for _, stage in paths)
    contents = {key: _read_content(path) for key, path in paths.items()}
    models = {key: _flatten_model(path, contents[key]) for key, path in paths.items()}
    refuse_other_models(str(folder), {name for model in models.values() for name in model}, "Megatron-LM")
    all_args = [read_args(contents[key], path) for key, path in paths.items()]
    check_same_args(all_args, list(paths.values()))
    args = all_args[0]
    _check_parallel(folder, args, tensor_ranks, stages)
    read = {
        key: _read_stage(path, models[key], args, stage=key[1], stages=stages, iteration=contents[key].get("iteration"))
        for key, path in paths.items()
    }
    _check_iterations(folder, list(read.values()))
    refuse_doubles({stage.path: stage.tensors for stage in read.values()})
    parts = [_join_stages([read[rank, stage] for stage in range(stages)]) for rank in range(tensor_ranks)]
    source = str(folder)
    merged = join_tensor_ranks(parts, source)
    positions = check_shapes(merged, args, source)
    vocab_size, unsure = find_vocab_size(directory, args, merged[_TABLE].shape[0], base=base)

    def convert(tensors: Tensors) -> dict[str, StoredTensor]:
        return convert_to_gpt2(tensors, heads=args.heads, vocab_size=vocab_size)

    tables = [read[rank, stages - 1].second_table for rank in range(tensor_ranks)]
    second = [{_TABLE: table} for table in tables if table is not None]
    copies = [convert(join_tensor_ranks(second, source))] if len(second) == tensor_ranks else []
    copies += [convert(replicas) for replicas in list_replicas(parts) if replicas]
    dtype_name = merged[_TABLE].dtype.name
    config = build_gpt2_config(
        args,
        vocab_size=vocab_size,
        positions=positions,
        dtype_name=dtype_name,
        end_of_text=find_end_of_text(directory, base=base),
    )
    check_config(base or directory, config)
    iteration = next(iter(read.values())).iteration
    return StoredCheckpoint(
        directory=directory,
        format_name=f"Megatron-LM GPT-2, tensor parallel {tensor_ranks}, pipeline {stages}",
        tensors=convert(merged),
        copies=tuple(copies),
        config=config,
        archives=tuple(paths.values()),
        facts=CheckpointFacts(
            trainer="Megatron-LM",
            world_size=tensor_ranks * stages,
            step=iteration if type(iteration) is int else None,
            missing=tuple(_list_missing(unsure, tensor_ranks, stages, dtype_name, args)),
        ),
    )


def _list_iterations(directory: Path) -> list[Path]:
    return sorted(entry for entry in directory.iterdir() if _ITERATION.fullmatch(entry.name) and entry.is_dir())


def _list_ranks(folder: Path) -> list[Path]:
    found = sorted(entry for entry in folder.iterdir() if _RANK.fullmatch(entry.name) and entry.is_dir())
    return [entry for entry in found if _find_file(entry)]


def _find_file(folder: Path) -> Path | None:
    """Return the file of a rank's folder, be it a FIFO or a link to nothing: the rank must not pass for absent."""
    return next((folder / name for name in _FILES if os.path.lexists(folder / name)), None)


def _is_distributed(folder: Path) -> bool:
    """Tell whether it is in Megatron's newer format of one file for all ranks' pieces (`--ckpt-format torch_dist`)."""
    return (folder / ".metadata").is_file() or (folder / "common.pt").is_file()


def _find_iteration(directory: Path, tag: str | None) -> Path:
    iterations = _list_iterations(directory)
    names = [entry.name for entry in iterations]
    wanted = tag
    if wanted is None and os.path.lexists(directory / _LATEST):
        check_inside(directory / _LATEST, directory)
        latest = read_small(directory / _LATEST, max_bytes=_MAX_LATEST_BYTES).decode("ascii", "replace").strip()
        wanted = f"iter_{int(latest):07d}" if latest.isdecimal() and latest.isascii() else latest
    if wanted is None and len(iterations) == 1:
        wanted = names[0]
    if wanted not in names:
        raise CheckpointError(
            f"{directory} has not the iteration that is asked for"
            if wanted
            else f"{directory} holds several iterations",
            expected=wanted or f"one of them to be chosen, or {_LATEST}",
            got=list_some(names),
            remedy="copy the whole checkpoint, or pass --tag with one that is there",
        )
    folder = directory / wanted
    check_inside(folder, directory)
    if not _list_ranks(folder):
        raise CheckpointError(
            f"{folder} is in Megatron's distributed format, which is not read",
            expected="mp_rank_*/model_optim_rng.pt, as --ckpt-format torch saves",
            got="one set of files for all ranks" if _is_distributed(folder) else "none of its files",
            remedy="convert it with Megatron-LM's --ckpt-convert-format torch, or its tools/checkpoint/convert.py",
        )
    return folder


def _find_files(folder: Path, directory: Path) -> dict[tuple[int, int], Path]:
    """Return (tensor parallel rank, pipeline stage) → its file, in order."""
    paths: dict[tuple[int, int], Path] = {}
    for entry in _list_ranks(folder):
        match = _RANK.fullmatch(entry.name)
        assert match, "Bug: a rank's folder was listed that is none"
        if match[3]:
            raise CheckpointError(
                f"{entry} is of a Megatron layout that is not proven",
                expected="tensor and pipeline parallel ranks",
                got="experts",
                remedy="convert it with the trainer's own tools to a Hugging Face folder",
            )
        path = _find_file(entry)
        assert path, "Bug: a rank's folder was listed that has no file"
        refuse_irregular(entry, [path.name])
        check_inside(path, directory)
        paths[int(match[1]), int(match[2] or 0)] = path
    ranks, stages = 1 + max(rank for rank, _ in paths), 1 + max(stage for _, stage in paths)
    missing = [(rank, stage) for rank in range(ranks) for stage in range(stages) if (rank, stage) not in paths]
    if missing:
        refuse_broken_links(folder)
        raise CheckpointError(
            f"{folder} has not the files of every model-parallel rank",
            expected=f"{ranks * stages} folders mp_rank_*",
            got=f"none for {list_some(_name_rank(rank, stage, stages) for rank, stage in missing)}",
            remedy=LOST_RANKS,
        )
    return dict(sorted(paths.items()))


def _name_rank(rank: int, stage: int, stages: int) -> str:
    return f"mp_rank_{rank:02d}_{stage:03d}" if stages > 1 else f"mp_rank_{rank:02d}"


def _read_content(path: Path) -> Mapping[Any, Any]:
    content = open_torch_zip(path).content
    return content if isinstance(content, dict) else {}


def _check_parallel(folder: Path, args: MegatronArgs, tensor_ranks: int, stages: int) -> None:
    told = (args.tensor_ranks or tensor_ranks, args.pipe_ranks or stages)
    if told != (tensor_ranks, stages) or args.layers % stages:
        raise CheckpointError(
            f"{folder} has not the files of every model-parallel rank",
            expected=f"{told[0]} tensor parallel ranks, {told[1]} stages of {args.layers} layers, as its arguments say",
            got=f"{tensor_ranks} and {stages}",
            remedy=LOST_RANKS if tensor_ranks * stages < told[0] * told[1] else OTHER_RANKS,
        )


def _flatten_model(path: Path, content: Mapping[Any, Any]) -> Tensors:
    """Return the tensors of a file's model under their names there."""
    model = content.get("model")
    if not isinstance(model, dict):
        raise CheckpointError(
            f"{path} holds no model of Megatron-LM that is read",
            expected="a state dict under model",
            got="the parts of an interleaved pipeline" if "model0" in content else "none",
            remedy="convert it with Megatron-LM's tools/checkpoint/convert.py to one pipeline stage",
        )
    return flatten(path, model)


def _read_stage(path: Path, model: Tensors, args: MegatronArgs, *, stage: int, stages: int, iteration: Any) -> _Stage:
    share = args.layers // stages
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in model.items():
        if not name.endswith(_EXTRA_STATE):
            tensors[_find_name(name, stage * share)] = tensor
    held = {int(match[1]) for match in map(_LAYER.fullmatch, tensors) if match}
    if held != set(range(stage * share, (stage + 1) * share)):
        raise CheckpointError(
            f"{path} holds other layers than its stage has",
            expected=f"{share} of {args.layers}, counted from 0",
            got=f"{len(held)}",
            remedy="layers were split unevenly, which is not proven, or files of two runs are mixed",
        )
    second = None
    if args.tied:
        found = [tensors.pop(name) for name in _SECOND_TABLES if name in tensors]
        second = found[0] if found and stages > 1 else None
    return _Stage(path=path, tensors=tensors, second_table=second, iteration=iteration)


def _find_name(name: str, first_layer: int) -> str:
    """Return our name of a parameter of a stage whose layers are numbered from `first_layer` on in the whole model."""
    name = canonical_name(name.removeprefix("decoder."))
    match = _LAYER.fullmatch(name)
    end = match[2] if match else name
    renamed = next((new + end[len(old) :] for old, new in _ENDS.items() if end.startswith(old)), end)
    return f"layers.{int(match[1]) + first_layer}.{renamed}" if match else renamed


def _check_iterations(folder: Path, stages: Sequence[_Stage]) -> None:
    found = {f"{stage.path.parent.name}": str(stage.iteration)[:50] for stage in stages}
    if len(set(found.values())) > 1:
        raise CheckpointError(
            f"the files in {folder} are from different iterations",
            expected="one iteration",
            got=list_some(f"{iteration} in {name}" for name, iteration in found.items()),
            remedy=RECOPY_WHOLE,
        )


def _join_stages(stages: Sequence[_Stage]) -> dict[str, StoredTensor]:
    """Return what one tensor parallel rank holds of the whole model, in the order of the model."""
    joined: dict[str, StoredTensor] = {}
    for stage in stages:
        doubled = joined.keys() & stage.tensors.keys()
        if doubled:
            raise CheckpointError(
                f"{stage.path} holds what an earlier stage holds as well",
                expected="each parameter on one stage",
                got=list_some(doubled),
                remedy=RECOPY_WHOLE,
            )
        joined |= stage.tensors
    return joined


def _list_missing(unsure: str, tensor_ranks: int, stages: int, dtype_name: str, args: MegatronArgs) -> list[str]:
    missing = [unsure, *describe_unproven(tensor_ranks=tensor_ranks, layer_files=0, numbered=False)]
    # The first has the embeddings, the last the final norm; nothing tells those between them apart.
    if stages > 3:
        missing.append("proof of the order of the pipeline's inner stages: their numbers are in the files' names alone")
    if dtype_name != "float32":
        missing.append(f"fp32 weights: in the optimizer's state without names, given in {dtype_name}")
    if args.activation is None:
        missing.append("the activation: not among the arguments, taken as Megatron's default, GELU by tanh")
    return [line for line in missing if line]
