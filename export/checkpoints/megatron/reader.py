"""Megatron-DeepSpeed's GPT-2, split over tensor and pipeline parallel ranks, as one Hugging Face GPT-2.

On disk (DeepSpeed 0.19.8, runtime/pipe/module.py and topology.py): `layer_LL-model_TT-model_states.pt` holds pipeline
layer LL of tensor parallel rank TT, in training precision. `mp_rank_NN_model_states.pt` has no weights then, but the
arguments and the names of what the optimizer trains; NN counts pipeline stages times tensor ranks, so the tensor rank
is NN modulo their number. `zero_pp_rank_D_mp_rank_NN_optim_states.pt` has the fp32 pieces, each NN by ZeRO's own rule.
Without a pipeline, the weights are nested in `module` of each `mp_rank_NN` file.

The fp32 pieces are the weights wherever there are any; the copies in training precision and the replicas on other
tensor ranks must agree with them. The last stage's copy of the tied embeddings is not looked at: its position
embeddings are not trained.

What nothing shows is reported as a fact: which tensor parallel rank is which, and without fp32 pieces, which layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, list_some
from ..deepspeed.files import LOOKED_FOR, DeepSpeedFiles, find_files, recognises_folder
from ..deepspeed.masters import name_masters
from ..deepspeed.model_parallel import ModelParallelRank, check_steps, has_megatrons_arguments, list_models, read_rank
from ..pickles.torch_zip import open_torch_zip
from ..remedies import LOST_RANKS, OTHER_RANKS
from ..storage.stored_tensor import StoredTensor
from ..stored_checkpoint import CheckpointFacts, StoredCheckpoint
from .args import MegatronArgs, check_same_args, read_args
from .beside import check_config, find_end_of_text, find_vocab_size
from .checks import describe_unproven, refuse_doubles
from .parts import (
    Tensors,
    canonical_name,
    flatten,
    join_tensor_ranks,
    list_replicas,
    name_layers,
    refuse_other_models,
)
from .to_gpt2 import build_gpt2_config, convert_to_gpt2, expected_shapes

__all__ = ["LOOKED_FOR", "open_folder", "recognises"]


@dataclass(frozen=True, kw_only=True)
class _TensorRank:
    """What the model states hold of one tensor parallel rank, all stages together.

    Attributes:
        tensors: Our name → tensor in training precision.
        names: ZeRO's name → ours, where ZeRO numbers pipeline layers.
    """

    tensors: Tensors
    names: Mapping[str, str]


def recognises(directory: Path, tag: str | None = None) -> bool:
    """Tell whether a DeepSpeed checkpoint's model was split over tensor or pipeline ranks, or has Megatron's arguments.

    Raises:
        CheckpointError: It is DeepSpeed's, and `tag` is not there, none is chosen, or its first file is damaged.
    """
    if not recognises_folder(directory):
        return False
    files = find_files(directory, tag)
    if files.pipeline_layers or any(rank for _, rank in (*files.models, *files.optimizers)):
        return True
    path = files.models.get((0, 0))
    return path is not None and not files.partitioned and has_megatrons_arguments(path)


def open_folder(directory: Path, tag: str | None = None, base: Path | None = None) -> StoredCheckpoint:
    """Return a reader that gives Megatron's GPT-2 under Hugging Face's names, reading no tensor data.

    Args:
        directory: The folder with `latest`, or the tag's own folder.
        tag: Which checkpoint in it; the one that `latest` names where None.
        base: The folder with configuration and tokenizer, which tell the rows of padding; `directory` as well.

    Raises:
        CheckpointError: The layout or architecture is not proven, files are missing or do not fit each other.
        VocabularyError: The tokenizer has more tokens than the embeddings have rows.
    """
    files = find_files(directory, tag)
    paths = list_models(files)
    all_args = [read_args(_read_content(path), path) for path in paths]
    check_same_args(all_args, paths)
    args = all_args[0]
    tensor_ranks = _count_tensor_ranks(files, args, len(paths))
    ranks = [read_rank(files, index, path) for index, path in enumerate(paths)]
    check_steps(files, ranks)
    low = _read_layers(files, args, tensor_ranks) if files.pipeline_layers else _read_modules(paths, str(files.folder))
    ranks = _name_masters(ranks, low)
    parts = _choose_parts(files, low, ranks)
    source = str(files.folder)
    merged = join_tensor_ranks(parts, source)
    positions = check_shapes(merged, args, source)
    vocab_size, unsure = find_vocab_size(files.directory, args, merged["word_embeddings.weight"].shape[0], base=base)

    def convert(tensors: Tensors) -> dict[str, StoredTensor]:
        return convert_to_gpt2(tensors, heads=args.heads, vocab_size=vocab_size)

    exact, numbered = any(rank.trained for rank in ranks), bool(files.optimizers)
    copies = [convert(join_tensor_ranks([rank.tensors for rank in low], source))] if exact else []
    copies += [convert(replicas) for replicas in list_replicas(parts) if replicas]
    tensors = convert(merged)
    layer_files = args.layers if files.pipeline_layers else 0
    unproven = (unsure, *describe_unproven(tensor_ranks=tensor_ranks, layer_files=layer_files, numbered=numbered))
    dtype_name = merged["word_embeddings.weight"].dtype.name
    config = build_gpt2_config(
        args,
        vocab_size=vocab_size,
        positions=positions,
        dtype_name=dtype_name,
        end_of_text=find_end_of_text(files.directory, base=base),
    )
    check_config(base or files.directory, config)
    return StoredCheckpoint(
        directory=files.directory,
        format_name=f"Megatron-DeepSpeed GPT-2, tensor parallel {tensor_ranks}, pipeline {len(paths) // tensor_ranks}",
        tensors=tensors,
        copies=tuple(copies),
        config=config,
        archives=(*paths, *files.pipeline_layers.values(), *files.optimizers.values()),
        facts=_describe(ranks, unproven, args, dtype_name if not exact else None),
    )


def _read_content(path: Path) -> Mapping[Any, Any]:
    content = open_torch_zip(path).content
    return content if isinstance(content, dict) else {}


def _count_tensor_ranks(files: DeepSpeedFiles, args: MegatronArgs, models: int) -> int:
    """Return over how many ranks matrices are split, after checking that all ranks' files are there."""
    in_layers = {rank for _, rank in files.pipeline_layers}
    found = 1 + max(in_layers) if in_layers else models
    tensor_ranks = args.tensor_ranks or found
    layers = sorted({layer for layer, _ in files.pipeline_layers})
    missing = [
        f"layer_{layer:02d}-model_{rank:02d}"
        for layer in layers
        for rank in range(max(tensor_ranks, found))
        if (layer, rank) not in files.pipeline_layers
    ]
    expected = tensor_ranks * (args.pipe_ranks or max(1, models // tensor_ranks))
    if missing or found != tensor_ranks or models != expected:
        raise CheckpointError(
            f"{files.folder} has not the files of every model-parallel rank",
            expected=f"{tensor_ranks} tensor parallel ranks, {expected} files mp_rank_*",
            got=f"none for {list_some(missing)}" if missing else f"{found} tensor parallel ranks, {models} files",
            remedy=LOST_RANKS if missing or models < expected else OTHER_RANKS,
        )
    return tensor_ranks


def _read_layers(files: DeepSpeedFiles, args: MegatronArgs, tensor_ranks: int) -> list[_TensorRank]:
    """Return what the pipeline's layer files hold for each tensor parallel rank."""
    ranks = []
    held: dict[Path, Tensors] = {}
    for rank in range(tensor_ranks):
        paths = {layer: path for (layer, owner), path in files.pipeline_layers.items() if owner == rank}
        layers = {layer: flatten(path, _read_content(path)) for layer, path in paths.items()}
        names = name_layers({layer: list(own) for layer, own in layers.items()}, args.layers, str(files.folder))
        for layer, path in paths.items():
            held[path] = {names[layer, own]: tensor for own, tensor in layers[layer].items()}
        ranks.append(
            _TensorRank(
                tensors={ours: layers[layer][own] for (layer, own), ours in names.items()},
                # ZeRO names the same parameters by layer: `3.mlp.dense_h_to_4h.bias`.
                names={f"{layer}.{own}": ours for (layer, own), ours in names.items()},
            )
        )
    refuse_doubles(held)
    return ranks


def _read_modules(paths: Sequence[Path], source: str) -> list[_TensorRank]:
    """Return the same of models without a pipeline, whose weights are nested in each rank's `module`."""
    modules = {path: flatten(path, _read_content(path).get("module")) for path in paths}
    refuse_other_models(source, {name for module in modules.values() for name in module}, "Megatron-DeepSpeed")
    held: dict[Path, Tensors] = {
        path: {canonical_name(name): tensor for name, tensor in module.items()} for path, module in modules.items()
    }
    refuse_doubles(held)
    return [_TensorRank(tensors=tensors, names={}) for tensors in held.values()]


def _name_masters(ranks: Sequence[ModelParallelRank], low: Sequence[_TensorRank]) -> list[ModelParallelRank]:
    """Return ranks with the fp32 weights that 16-bit optimizers keep without ZeRO, where all of them can be named.

    Not of several pipeline stages: the last one's copy of the tied embeddings has positions that no layer file holds.
    """
    if len(ranks) != len(low) or any(rank.trained for rank in ranks):
        return list(ranks)
    named = [name_masters(replace(rank.states, module=own.tensors))[0] for rank, own in zip(ranks, low, strict=True)]
    if any(found.keys() != own.tensors.keys() for found, own in zip(named, low, strict=True)):
        return list(ranks)
    return [replace(rank, trained=found) for rank, found in zip(ranks, named, strict=True)]


def _choose_parts(
    files: DeepSpeedFiles, low: Sequence[_TensorRank], ranks: Sequence[ModelParallelRank]
) -> list[dict[str, StoredTensor]]:
    """Return, for each tensor parallel rank, the fp32 pieces where there are any, else what is in `low`."""
    if not any(rank.trained for rank in ranks):
        return [dict(rank.tensors) for rank in low]
    parts: list[dict[str, StoredTensor]] = []
    for index, rank in enumerate(low):
        trained: dict[str, StoredTensor] = {}
        # Stages in order, the first that trains a name: the tied embeddings are the first stage's.
        for stage in ranks[index :: len(low)]:
            for name, tensor in stage.trained.items():
                trained.setdefault(rank.names.get(name) or canonical_name(name), tensor)
        different = trained.keys() ^ rank.tensors.keys()
        if different:
            raise CheckpointError(
                f"the optimizer states in {files.folder} hold other parameters than the model states",
                expected=f"the {len(rank.tensors)} parameters of tensor parallel rank {index}",
                got=f"differences in {list_some(different)}",
                remedy="files of two runs are mixed, or parameters were frozen, which is not proven",
            )
        # Where only fragments identified them, the pieces are still flat.
        parts.append({name: trained[name].reshape(own.shape) for name, own in rank.tensors.items()})
    return parts


def check_shapes(merged: Tensors, args: MegatronArgs, source: str) -> int:
    """Check the whole model's names and shapes against the arguments; return the rows of the position embeddings."""
    found = (merged.get("word_embeddings.weight"), merged.get("position_embeddings.weight"))
    rows, positions = (table.shape[0] if table is not None and table.shape else 0 for table in found)
    expected = expected_shapes(args, rows, positions)
    wrong = [name for name in merged.keys() & expected.keys() if merged[name].shape != expected[name]]
    different = merged.keys() ^ expected.keys()
    recorded, tables = (args.positions or positions, args.padded_vocabulary or rows), (positions, rows)
    if wrong or different or recorded != tables:
        misfits = [f"{name} {list(merged[name].shape)}" for name in wrong]
        misfits += [f"no {name}" if name in expected else name for name in sorted(different)]
        raise CheckpointError(
            f"the weights in {source} are not those that its arguments describe",
            expected=f"{len(expected)} tensors of {args.layers} layers, {args.hidden} wide",
            got=list_some(misfits)
            or "{} positions and {} rows of the vocabulary, not {} and {}".format(*tables, *recorded),
            remedy="files of two runs are mixed, or the layout is not proven",
        )
    return positions


def _describe(
    ranks: Sequence[ModelParallelRank], unproven: Sequence[str], args: MegatronArgs, low_dtype: str | None
) -> CheckpointFacts:
    states = ranks[0].states
    missing = [line for line in unproven if line]
    if low_dtype not in (None, "float32"):
        unnamed = any(rank.states.masters for rank in ranks)
        kept = (
            f"in the optimizer's state without names, given in {low_dtype}" if unnamed else f"saved as {low_dtype} only"
        )
        missing.append(f"fp32 weights: {kept}")
    if args.activation is None:
        missing.append("the activation: not among the arguments, taken as Megatron's default, GELU by tanh")
    return CheckpointFacts(
        trainer="Megatron-DeepSpeed" + (f", DeepSpeed {states.version}" if states.version else ""),
        world_size=len(ranks) * (states.dp_world_size or 1),
        stage=states.stage,
        step=states.step,
        missing=tuple(missing),
    )
