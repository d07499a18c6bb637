"""Megatron's GPT-2 under Hugging Face's names and layouts: state dict in, state dict out, nothing read.

Three things differ. Names, by the tables below. `query_key_value`: Megatron keeps the rows of one head together,
[heads, 3, dim], GPT-2 wants all queries, then all keys, then all values. Matrices: GPT-2's Conv1D keeps [in, out], the
transpose of Linear. The vocabulary's padding, added so that each tensor parallel rank has equally many rows, is cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointError
from ..storage.assembled_tensor import transpose
from ..storage.stored_tensor import StoredTensor, join
from .args import MegatronArgs

_BLOCK = re.compile(r"layers\.(\d+)\.(.+)")

# Megatron's name → GPT-2's, outside the blocks.
_OUTER_NAMES = {
    "word_embeddings.weight": "transformer.wte.weight",
    "position_embeddings.weight": "transformer.wpe.weight",
    "final_layernorm.weight": "transformer.ln_f.weight",
    "final_layernorm.bias": "transformer.ln_f.bias",
    "lm_head.weight": "lm_head.weight",
}
# The same for what is within `layers.N.` and `transformer.h.N.`.
_BLOCK_NAMES = {
    "input_layernorm": "ln_1",
    "self_attention.query_key_value": "attn.c_attn",
    "self_attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}
_QUERY_KEY_VALUE = "self_attention.query_key_value"
_VOCABULARY_NAMES = ("word_embeddings.weight", "lm_head.weight")


def convert_to_gpt2(tensors: Mapping[str, StoredTensor], *, heads: int, vocab_size: int) -> dict[str, StoredTensor]:
    """Return the unsplit model under GPT-2's names.

    Args:
        tensors: Megatron's name → tensor, any part of the model; matrices [out, in].
        heads: Attention heads of the whole model.
        vocab_size: Rows of the vocabulary to keep.

    Raises:
        CheckpointError: A name is not Megatron GPT-2's, or a shape does not fit.
    """
    return dict(_convert(name, tensor, heads, vocab_size) for name, tensor in tensors.items())


def expected_shapes(args: MegatronArgs, padded_vocab_size: int, positions: int) -> dict[str, tuple[int, ...]]:
    """Return Megatron's name → shape of the unsplit model."""
    hidden, wide = args.hidden, args.ffn_hidden or 4 * args.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "word_embeddings.weight": (padded_vocab_size, hidden),
        "position_embeddings.weight": (positions, hidden),
    }
    matrices = {
        "self_attention.query_key_value": (3 * hidden, hidden),
        "self_attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (wide, hidden),
        "mlp.dense_4h_to_h": (hidden, wide),
    }
    for layer in range(args.layers):
        for part in _BLOCK_NAMES:
            shape = matrices.get(part, (hidden,))
            shapes[f"layers.{layer}.{part}.weight"] = shape
            shapes[f"layers.{layer}.{part}.bias"] = shape[:1]
    shapes |= {"final_layernorm.weight": (hidden,), "final_layernorm.bias": (hidden,)}
    if not args.tied:
        shapes["lm_head.weight"] = (padded_vocab_size, hidden)
    return shapes


def build_gpt2_config(
    args: MegatronArgs, *, vocab_size: int, positions: int, dtype_name: str, end_of_text: int | None
) -> dict[str, Any]:
    """Return the content of `config.json` for the converted model.

    Args:
        args: Those of the run.
        vocab_size: Rows of the embeddings without padding.
        positions: Rows of the positions.
        dtype_name: Type of the weights.
        end_of_text: Id of <|endoftext|>, as far as a vocabulary tells.
    """
    # GPT-2's own vocabulary ends with it; of another one nothing is known.
    if end_of_text is None and vocab_size == 50257:
        end_of_text = vocab_size - 1
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": vocab_size,
        "n_positions": positions,
        "n_embd": args.hidden,
        "n_layer": args.layers,
        "n_head": args.heads,
        "n_inner": args.ffn_hidden if args.ffn_hidden not in (None, 4 * args.hidden) else None,
        "activation_function": args.activation or "gelu_new",
        "layer_norm_epsilon": args.norm_epsilon,
        "tie_word_embeddings": args.tied,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": dtype_name,
    }


def _convert(name: str, tensor: StoredTensor, heads: int, vocab_size: int) -> tuple[str, StoredTensor]:
    if name in _VOCABULARY_NAMES:
        return _OUTER_NAMES[name], _cut_rows(tensor, vocab_size)
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name], tensor
    match = _BLOCK.fullmatch(name)
    part, _, kind = match[2].rpartition(".") if match else ("", "", "")
    if match is None or part not in _BLOCK_NAMES or kind not in ("weight", "bias"):
        raise CheckpointError(
            f"{name} has no place in GPT-2",
            expected="the names of Megatron's GPT-2",
            got=name,
            remedy="only layouts that are proven are converted",
        )
    if part == _QUERY_KEY_VALUE:
        tensor = _group_by_kind(tensor, heads)
    if len(tensor.shape) == 2:
        tensor = transpose(tensor)
    return f"transformer.h.{match[1]}.{_BLOCK_NAMES[part]}.{kind}", tensor


def _cut_rows(tensor: StoredTensor, rows: int) -> StoredTensor:
    """Return the first `rows` rows of a matrix [padded rows, hidden]."""
    _, width = tensor.shape
    return tensor.take(0, (rows, width))


def _group_by_kind(tensor: StoredTensor, heads: int) -> StoredTensor:
    """Return rows [heads, 3, dim] as [3, heads, dim]; a bias alike."""
    rows = tensor.shape[0]
    if rows % (3 * heads):
        raise CheckpointError(
            "query_key_value does not divide into its heads",
            expected=f"rows in multiples of {3 * heads}",
            got=str(rows),
        )
    slab = tensor.numel // (3 * heads)
    order = (head * 3 + kind for kind in range(3) for head in range(heads))
    return join([tensor.take(index * slab, (slab,)) for index in order], tensor.shape)
