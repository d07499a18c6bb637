"""The parts of a Megatron model that its ranks hold, under one set of names, and their way back to whole tensors.

Column parallel weights are split along the first dimension, row parallel ones along the second, everything else is on
every tensor parallel rank alike (Megatron-LM, megatron/core/tensor_parallel/layers.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, list_some
from ..pickles.torch_zip import refuse_foreign_tensors
from ..remedies import MIXED_RUNS
from ..storage.assembled_tensor import Box, assemble
from ..storage.stored_tensor import StoredTensor

Tensors = Mapping[str, StoredTensor]

_COLUMN_PARALLEL = re.compile(
    r"word_embeddings\.weight|lm_head\.weight"
    r"|layers\.\d+\.(self_attention\.query_key_value|mlp\.dense_h_to_4h)\.(weight|bias)"
)
_ROW_PARALLEL = re.compile(r"layers\.\d+\.(self_attention\.dense|mlp\.dense_4h_to_h)\.weight")

# A model of 200 layers has 2,500 tensors, some 6 dicts deep.
_MAX_DEPTH, _MAX_ENTRIES = 16, 200_000

# Before every name: DDP and fp16 wrappers, and Megatron's own modules around a model without a pipeline.
_WRAPPERS = re.compile(r"^(?:module\.)*(?:language_model\.)?")
_OUTER_MODULES = re.compile(r"^(?:embedding|encoder|transformer|tied_modules\.[^.]+)\.")
_SAME_NAMES = {"output_layer.weight": "lm_head.weight", "attention": "self_attention"}


# What only a BERT has beside GPT-2's parts, with or without the head that tells pairs.
_BERTS = ("tokentype_embeddings.", "pooler.", "binary_head.", "lm_head.dense.")
# A T5's two stacks, whatever its layers are called.
_STACKS = ("encoder.layers.", "decoder.layers.")

# Kinds of pipeline layers, first to last; the tables of words and positions are one layer, or two in any order.
_ORDER = {"word_embeddings": 0, "position_embeddings": 0, "layers": 1, "final_layernorm": 2, "lm_head": 3}


def canonical_name(name: str) -> str:
    """Return the one name under which we know a parameter of a model without a pipeline.

    `module.language_model.transformer.layers.0.attention.dense.bias` is `layers.0.self_attention.dense.bias`.
    """
    name = _OUTER_MODULES.sub("", _WRAPPERS.sub("", name))
    name = re.sub(r"^(layers\.\d+\.)attention\.", r"\1self_attention.", name)
    return _SAME_NAMES.get(name, name)


def refuse_other_models(source: str, names: Collection[str], trainer: str) -> None:
    """Refuse Megatron's BERT and T5 by what GPT-2 has no place for, whatever else is wrong with them.

    Args:
        source: What to call the checkpoint in messages.
        names: The parameters of all its files, as they are there.
        trainer: Which of Megatron's saved it.

    Raises:
        CheckpointError: It is one of them.
    """
    bare = sorted(_WRAPPERS.sub("", name) for name in names)
    stacks = [first for stack in _STACKS if (first := next((name for name in bare if name.startswith(stack)), ""))]
    heads = [name for name in bare if canonical_name(name).startswith(_BERTS)]
    is_t5 = len(stacks) == len(_STACKS)
    if not is_t5 and not heads:
        return
    raise CheckpointError(
        f"{source} is of {trainer} {'T5' if is_t5 else 'BERT'}, which is not read",
        expected="GPT-2",
        got=list_some(stacks if is_t5 else heads),
        remedy="convert it with the trainer's own tools to a Hugging Face folder",
    )


def flatten(path: Path, module: Any) -> dict[str, StoredTensor]:
    """Return the tensors of nested state dicts in the file `path` under names joined by dots.

    Raises:
        CheckpointError: There is one that is not read, or dicts hold each other without end.
    """
    tensors: dict[str, StoredTensor] = {}
    foreign: dict[str, Any] = {}
    waiting = [("", module, 0)]
    seen = 0
    while waiting:
        name, value, depth = waiting.pop()
        if isinstance(value, StoredTensor):
            tensors[name] = value
        elif isinstance(value, dict) and depth < _MAX_DEPTH:
            # One dict may be in others many times over: what is walked through is counted, not what is stored.
            seen += len(value)
            if seen > _MAX_ENTRIES:
                raise CheckpointError(
                    f"the state dicts in {path} are nested beyond any model",
                    expected=f"at most {_MAX_ENTRIES} entries in all",
                    got="more",
                    remedy="do not use this checkpoint unless you know why",
                )
            # In the order of the dict, which is the model's.
            waiting += [(f"{name}.{key}".lstrip("."), value[key], depth + 1) for key in reversed(value)]
        else:
            foreign[name] = value
    refuse_foreign_tensors(path, foreign)
    return tensors


def name_layers(layers: Mapping[int, Sequence[str]], count: int, source: str) -> dict[tuple[int, str], str]:
    """Return (pipeline layer, its own name) → our name, determined by what each layer holds.

    The numbers of a pipeline's layers count functions without weights, and differ between versions.

    Args:
        layers: Pipeline layer → names of its tensors.
        count: How many transformer layers the model has.
        source: What to call the checkpoint in messages.

    Raises:
        CheckpointError: A layer is of no known kind, or there are too few or too many of one.
    """
    names: dict[tuple[int, str], str] = {}
    blocks = [index for index in sorted(layers) if "input_layernorm.weight" in layers[index]]
    unknown: list[str] = []
    for index, own in layers.items():
        for name in own:
            if index in blocks:
                ours = f"layers.{blocks.index(index)}.{re.sub('^attention[.]', 'self_attention.', name)}"
            elif set(own) == {"weight", "bias"}:
                ours = f"final_layernorm.{name}"
            elif (
                name == "word_embeddings.weight"
                and "position_embeddings.weight" not in own
                and index > max(blocks, default=index)
            ):
                ours = "lm_head.weight"
            elif name in ("word_embeddings.weight", "position_embeddings.weight", "lm_head.weight"):
                ours = name
            else:
                unknown.append(f"{index}.{name}")
                continue
            names[index, name] = ours
    # Embeddings, blocks, the last norm and head, whatever functions without weights are numbered between them.
    kinds = {index: "layers" if index in blocks else ours.split(".")[0] for (index, _), ours in names.items()}
    order = [_ORDER[kinds[index]] for index in sorted(kinds)]
    doubled = [ours for ours, times in Counter(names.values()).items() if times > 1]
    if len(blocks) != count or unknown or doubled or order != sorted(order):
        found = [f"{len(blocks)} of them"] if len(blocks) != count else []
        found += [list_some(unknown)] if unknown else []
        found += [f"{list_some(doubled)} twice"] if doubled else []
        found = found or [f"another order, {', '.join(f'{index} {kinds[index]}' for index in sorted(kinds))}"]
        raise CheckpointError(
            f"the layers in {source} are not those of Megatron's GPT-2",
            expected=f"embeddings, {count} transformer layers and a final norm",
            got=" and ".join(found),
            remedy="layer files are missing or of another run, or the layout is not proven",
        )
    return names


def join_tensor_ranks(ranks: Sequence[Tensors], source: str) -> dict[str, StoredTensor]:
    """Return the whole tensors out of what each tensor parallel rank holds of them.

    Replicated tensors are taken from the first rank; `list_replicas` has the others.

    Raises:
        CheckpointError: The ranks hold different names or parts that do not fit.
    """
    for rank, tensors in enumerate(ranks):
        different = tensors.keys() ^ ranks[0].keys()
        if different:
            raise CheckpointError(
                f"the tensor parallel ranks in {source} hold different parameters",
                expected=f"the {len(ranks[0])} of rank 0",
                got=f"differences on rank {rank}: {list_some(different)}",
                remedy=MIXED_RUNS,
            )
    return {name: _join(name, [tensors[name] for tensors in ranks], source) for name in ranks[0]}


def list_replicas(ranks: Sequence[Tensors]) -> list[dict[str, StoredTensor]]:
    """Return, for each rank but the first, the tensors that must equal the first rank's."""
    return [{name: tensor for name, tensor in tensors.items() if find_split_dim(name) is None} for tensors in ranks[1:]]


def find_split_dim(name: str) -> int | None:
    """Return along which dimension tensor parallel ranks split `name`, one of ours; None where all hold it alike."""
    if _COLUMN_PARALLEL.fullmatch(name):
        return 0
    return 1 if _ROW_PARALLEL.fullmatch(name) else None


def _join(name: str, parts: Sequence[StoredTensor], source: str) -> StoredTensor:
    dim = find_split_dim(name)
    if dim is None or len(parts) == 1:
        return parts[0]
    first = parts[0]
    if any(part.shape != first.shape for part in parts) or dim >= len(first.shape):
        raise CheckpointError(
            f"the tensor parallel ranks in {source} hold parts of {name} that do not fit",
            expected=f"{len(parts)} equal parts",
            got=list_some(list(part.shape) for part in parts),
            remedy=MIXED_RUNS,
        )
    step = first.shape[dim]
    shape = tuple(side * len(parts) if index == dim else side for index, side in enumerate(first.shape))
    boxes = [
        Box(tuple(rank * step if index == dim else 0 for index in range(len(shape))), part)
        for rank, part in enumerate(parts)
    ]
    return assemble(shape, first.dtype, boxes, name=name)
