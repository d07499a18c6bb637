"""The arguments that Megatron-DeepSpeed stores with a checkpoint, and which of its architectures we have proven.

Arguments are an `argparse.Namespace` under `args` in every `mp_rank_*_model_states.pt` (Megatron-DeepSpeed,
megatron/arguments.py, for their names). What an option changes in the layout or in the forward pass has to be known
before weights are renamed to GPT-2: an architecture that is not GPT-2 is refused by the name of its option.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, list_some
from ..pickles.inert_pickle import GlobalName, Record
from ..remedies import MIXED_RUNS, RECOPY_OR_USE_OLDER

# From this version on, rows of query_key_value are [head, 3, dim]; versions 0 and 1 have other orders, not proven here.
_MIN_VERSION = 2.0

# Options that make another architecture or layout than GPT-2's: name → the values of GPT-2's, besides None.
_GPT2_VALUES: dict[str, tuple[Any, ...]] = {
    "swiglu": (False,),
    "squared_relu": (False,),
    "use_rotary_position_embeddings": (False,),
    "add_position_embedding": (True,),
    "position_embedding_type": ("learned_absolute",),
    "normalization": ("layernorm", "LayerNorm"),
    "apply_layernorm_1p": (False,),
    "embed_layernorm": (False,),
    "sandwich_ln": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "add_bias_linear": (True,),
    "disable_bias_linear": (False,),
    "multi_query_attention": (False,),
    "num_tokentypes": (0,),
    "retro_add_retriever": (False,),
    "mos": (False,),
    "parallel_attn": (False,),
    "window_size": (),
    "glu_activation": (),
    "use_alibi_position_embeddings": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "qk_layernorm": (False,),
    "group_query_attention": (False,),
    "multi_latent_attention": (False,),
    "quick_geglu": (False,),
    # Of Megatron Core (megatron/core/transformer/transformer_config.py); these add no tensor that would tell.
    "softmax_type": ("vanilla",),
    "softmax_scale": (),
    "attn_logit_softcapping": (),
    "qk_l2_norm": (False,),
    "use_mup": (False,),
    "activation_func_clamp_value": (),
    "attention_output_gate": (False,),
    "head_wise_attn_gate": (False,),
    "experimental_attention_variant": ("",),
    "linear_attention_type": ("",),
    "enable_hyper_connections": (False,),
    "heterogeneous_layers_config_path": ("",),
    "heterogeneous_layers_config_encoded_json": ("",),
}
# What older and newer versions call the same number.
_TENSOR_RANKS = ("tensor_model_parallel_size", "model_parallel_size")
_PIPE_RANKS = ("pipeline_model_parallel_size", "pipe_parallel_size")


@dataclass(frozen=True, kw_only=True)
class MegatronArgs:
    """What the arguments say of a GPT-2.

    Attributes:
        ffn_hidden: Width of the feed-forward layer; None where not recorded.
        positions: Rows of the position embeddings; None where not recorded.
        tensor_ranks: Over how many ranks each matrix was split; None where not recorded.
        pipe_ranks: Over how many stages the layers were split; None where not recorded.
        vocabulary: The tokenizer's size, which forks record; None as a rule.
        padded_vocabulary: Rows of the embeddings of all tensor parallel ranks; None where not recorded.
        vocabulary_step: Their number is the next multiple of this; None where not recorded, or padded otherwise.
        activation: transformers' name of the activation; None where the options do not tell.
        tied: Whether the head is the word embeddings.
    """

    layers: int
    hidden: int
    heads: int
    ffn_hidden: int | None
    positions: int | None
    tensor_ranks: int | None
    pipe_ranks: int | None
    vocabulary: int | None
    padded_vocabulary: int | None
    vocabulary_step: int | None
    activation: str | None
    norm_epsilon: float
    tied: bool


def read_args(content: Mapping[Any, Any], path: Path) -> MegatronArgs:
    """Return the arguments out of the content of a model states file, after checking that they are GPT-2's.

    Raises:
        CheckpointError: There are none, they are of an older layout, or of another architecture.
    """
    found = content.get("args")
    settings = found.state if isinstance(found, Record) and isinstance(found.state, dict) else found
    if not isinstance(settings, dict):
        raise CheckpointError(
            f"{path} has no arguments of Megatron-DeepSpeed",
            expected="args with hidden_size, num_layers and num_attention_heads",
            got="none" if found is None else type(found).__name__,
            remedy="other models with tensor parallelism are not read",
        )
    _check_version(content.get("checkpoint_version"), path)
    _check_architecture(settings, path)
    layers, hidden, heads = (
        _required(settings, name, path) for name in ("num_layers", "hidden_size", "num_attention_heads")
    )
    return MegatronArgs(
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn_hidden=_number(settings.get("ffn_hidden_size")),
        positions=_number(settings.get("max_position_embeddings")),
        tensor_ranks=_first(settings, _TENSOR_RANKS),
        pipe_ranks=_first(settings, _PIPE_RANKS),
        vocabulary=_number(settings.get("vocab_size")),
        padded_vocabulary=_number(settings.get("padded_vocab_size")),
        vocabulary_step=_find_step(settings),
        activation=_find_activation(settings),
        norm_epsilon=_read_epsilon(settings.get("layernorm_epsilon", settings.get("norm_epsilon")), path),
        tied=settings.get("untie_embeddings_and_output_weights") is not True,
    )


def check_same_args(args: Sequence[MegatronArgs], paths: Sequence[Path]) -> None:
    """Check that the arguments of all ranks, in the order of `paths`, describe one model.

    Raises:
        CheckpointError: Those of a rank differ from the first rank's.
    """
    first = asdict(args[0])
    for other, path in zip(args[1:], paths[1:], strict=True):
        values = asdict(other)
        different = [name for name in first if first[name] != values[name]]
        if different:
            raise CheckpointError(
                f"the arguments in {path} are of another model than those in {paths[0]}",
                expected=", ".join(f"{name} {first[name]}" for name in different),
                got=", ".join(str(values[name]) for name in different),
                remedy=MIXED_RUNS,
            )


def _check_version(version: Any, path: Path) -> None:
    if not isinstance(version, (int, float)) or isinstance(version, bool) or not _MIN_VERSION <= version < inf:
        raise CheckpointError(
            f"{path} is of a Megatron layout that is not proven",
            expected=f"checkpoint_version {_MIN_VERSION} or later",
            got="none recorded, which means 0" if version is None else f"checkpoint_version {version}",
            remedy="load and save it with a newer Megatron-DeepSpeed",
        )


def _check_architecture(settings: Mapping[str, Any], path: Path) -> None:
    """Refuse every option that makes something other than GPT-2, all at once."""
    other = []
    for name, accepted in _GPT2_VALUES.items():
        value = settings.get(name)
        if value is not None and value not in accepted and not _is_absolute(value):
            other.append(f"{name}={_describe(value)}")
    heads, groups = settings.get("num_attention_heads"), settings.get("num_key_value_heads")
    if groups is not None and groups != heads:
        other.append(f"num_key_value_heads={groups}")
    experts = settings.get("num_experts")
    if experts not in (None, 1, [1], (1,)):
        other.append(f"num_experts={experts}")
    width, hidden = _number(settings.get("kv_channels")), _number(settings.get("hidden_size"))
    if width and hidden and width * (_number(heads) or 0) != hidden:
        other.append(f"kv_channels={width}")
    if other:
        raise CheckpointError(
            f"{path} is of a Megatron architecture that is not proven",
            expected="GPT-2: learned positions, LayerNorm, GELU, biases, as many key as query heads",
            got=list_some(other),
            remedy="convert it with the trainer's own tools to a Hugging Face folder",
        )


def _is_absolute(value: Any) -> bool:
    """Tell whether `value` is the fork of BLOOM's PositionEmbeddingType.absolute, pickled by name or by number."""
    if isinstance(value, Record):
        return value.type_name.endswith(".PositionEmbeddingType") and value.args == (2,)
    return isinstance(value, GlobalName) and value.name.endswith(".PositionEmbeddingType.absolute")


def _describe(value: Any) -> str:
    if isinstance(value, Record):
        return f"{value.type_name.rpartition('.')[2]}{value.args}"
    return value.name.rpartition(".")[2] if isinstance(value, GlobalName) else str(value)[:50]


def _find_activation(settings: Mapping[str, Any]) -> str | None:
    """Return transformers' name of the GELU: Megatron's fused one and OpenAI's are the approximation by tanh."""
    flags = [settings.get(name) for name in ("bias_gelu_fusion", "openai_gelu", "onnx_safe_gelu")]
    if all(flag is None for flag in flags):
        return None
    fused, openai, _ = flags
    return "gelu_new" if fused or openai else "gelu"


def _find_step(settings: Mapping[str, Any]) -> int | None:
    """Return the number whose next multiple Megatron pads the vocabulary to, equally many rows on each rank."""
    divisor, ranks = _number(settings.get("make_vocab_size_divisible_by")), _first(settings, _TENSOR_RANKS)
    # The fork of BLOOM may pad to a size of the user's own.
    if not divisor or not ranks or settings.get("pad_vocab_size_to") is not None:
        return None
    return divisor * ranks


def _required(settings: Mapping[str, Any], name: str, path: Path) -> int:
    value = _number(settings.get(name))
    if not value:
        raise CheckpointError(
            f"the arguments in {path} lack {name}",
            expected="a number",
            got=repr(settings.get(name))[:100],
            remedy="pass a checkpoint that Megatron-DeepSpeed saved with its arguments",
        )
    return value


def _first(settings: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((value for name in names if (value := _number(settings.get(name)))), None)


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def _read_epsilon(value: Any, path: Path) -> float:
    if value is None:
        # The default of both Megatron and GPT-2.
        return 1e-5
    if not isinstance(value, (int, float)) or not 0 < value < 1:
        raise CheckpointError(
            f"the arguments in {path} have a layernorm_epsilon that is none",
            expected="a number between 0 and 1",
            got=repr(value)[:100],
            remedy=RECOPY_OR_USE_OLDER,
        )
    return float(value)
