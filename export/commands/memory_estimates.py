"""What exporting and serving a checkpoint will hold in memory, by engine and precision. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints import StoredCheckpoint
from ..checkpoints.plain.sentence_modules import TRANSFORMER_FILES
from ..checkpoints.storage.paths import read_json_beside
from ..engines.openvino_generation import BLOCK_TOKENS, VALUE_BYTES, measure_block


@dataclass(frozen=True, kw_only=True)
class Line:
    """Bytes that are held: what every model takes, and multiples of its weights in fp32 and of one row's activations.

    `rows` is 0 where all that was measured took texts of the same length, which stands in `base_mb` and `factor` then.
    """

    base_mb: float
    factor: float
    rows: float = 0.0

    def at(self, weights_bytes: int, row_bytes: int = 0) -> int:
        """Return the bytes for a model with so many bytes of weights in fp32, and of activations in its longest row."""
        return round(self.base_mb * 1e6 + self.factor * weights_bytes + self.rows * row_bytes)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one engine takes in one precision.

    Attributes:
        export: All processes of an export together, at most, by the bytes of all weights.
        instance: One instance, ready, by the bytes of the weights without the table of tokens; of what writes text, by
            the bytes of all, for its scores take the whole table.
        sizes: Sizes of models that the lines are drawn through; through two, no third one has checked them.
        loads_small_whole: Whether an instance holds the table of tokens at once where weights lie in the graph's own
            file, as they do up to `EMBEDDED_BYTES`.
    """

    export: Line
    instance: Line
    sizes: int
    loads_small_whole: bool = False

    def measure_instance(self, weights_bytes: int, table_bytes: int, row_bytes: int) -> tuple[int, int]:
        """Return the bytes that an instance holds, and how many more once texts have used every token."""
        is_whole = self.loads_small_whole and weights_bytes <= EMBEDDED_BYTES
        later = 0 if is_whole else table_bytes
        return self.instance.at(weights_bytes - later, row_bytes), later


# As `graph/onnx_export.py` has it, which needs torch.
EMBEDDED_BYTES = 128 << 20

# Engine → precision → lines through what `make memory` measured of random BERTs on two cores. The table in
# docs/checkpoints.md has each measurement beside what these say. All of them were fitted, none was held out. What is
# not here has not been measured at several sizes.
GRAPHS: Mapping[str, Mapping[str, Held]] = {
    "onnxruntime": {
        "fp32": Held(
            export=Line(base_mb=796, factor=2.17, rows=59.4),
            instance=Line(base_mb=90, factor=1.0),
            sizes=6,
            loads_small_whole=True,
        ),
        "int8": Held(
            export=Line(base_mb=896, factor=2.75, rows=42.8), instance=Line(base_mb=71, factor=0.55, rows=2.9), sizes=5
        ),
    },
    "openvino": {
        "fp32": Held(
            export=Line(base_mb=1200, factor=2.47, rows=34.7),
            instance=Line(base_mb=180, factor=2.45, rows=10.7),
            sizes=4,
        ),
        "int8": Held(
            export=Line(base_mb=918, factor=3.28, rows=30.7), instance=Line(base_mb=190, factor=0.69), sizes=4
        ),
    },
}

# What is exported to ONNX Runtime in fp32 of encoders that differ from BERT in what their attention holds, by
# `model_type`, through three models each: scores by relative positions several times, or none that are kept.
FAMILIES: Mapping[str, Held] = {
    "deberta-v2": Held(
        export=Line(base_mb=707, factor=2.66, rows=189.5),
        instance=Line(base_mb=100, factor=1.15, rows=9.0),
        sizes=3,
        loads_small_whole=True,
    ),
    "t5": Held(
        export=Line(base_mb=892, factor=1.84, rows=19.9),
        instance=Line(base_mb=90, factor=1.0),
        sizes=3,
        loads_small_whole=True,
    ),
    "distilbert": Held(
        export=Line(base_mb=864, factor=2.03, rows=30.3),
        instance=Line(base_mb=90, factor=1.0),
        sizes=3,
        loads_small_whole=True,
    ),
}
_MEASURED_BY_FAMILY = ("onnxruntime", "fp32")
# Of these some sizes were measured, and BERT's lines tell them.
_LIKE_BERT = ("bert", "roberta", "xlm-roberta", "camembert", "mpnet", "electra")

# Precision → the same of random GPT-2s in the engine that writes text, without its pool of keys and values.
WRITERS: Mapping[str, Held] = {
    "fp32": Held(export=Line(base_mb=1722, factor=3.41), instance=Line(base_mb=146, factor=2.01), sizes=3)
}

# The pool of keys and values that a version is published with, and what it is counted by: `kv_cache_mb`,
# `max_num_seqs` (docs/generation.md), and one more block for each request.
_POOL_BYTES = 1024 * (1 << 20)
_SEATS = 64
# What configurations call the same thing, in the order of preference.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_KV_HEADS = ("num_key_value_heads", *_HEADS)
_WIDTH = ("hidden_size", "n_embd", "d_model")
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
# Of encoders alone, some of which have names of their own (DistilBERT, XLNet, BART).
_ENCODER_HEADS = (*_HEADS, "n_heads", "encoder_attention_heads")
_ENCODER_WIDTH = (*_WIDTH, "dim")
_INTERMEDIATE = ("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "hidden_dim", "d_ff", "d_inner")
# Where a longer text may be cut, beside the positions: file → the key in it.
_LIMITS = (*((name, "max_seq_length") for name in TRANSFORMER_FILES), ("tokenizer_config.json", "model_max_length"))
# transformers writes 1e30 where the tokenizer has none of its own.
_NO_LIMIT = 10**9
# Where nothing tells how long a text may be.
_USUAL_LENGTH = 512
# What the configurations of models of pictures and of sounds have, which may have a vocabulary for what they hear.
_OF_SIGNALS = ("image_size", "num_channels", "num_mel_bins", "conv_dim")
# How the names of classes end that write text (transformers 5).
_WRITERS = ("ForCausalLM", "LMHeadModel")


def estimate_memory(checkpoint: StoredCheckpoint) -> dict[str, dict[str, dict[str, Any]]]:
    """Return engine → precision → what is held, in bytes; only of what was measured.

    Each has `export_bytes`, `instance_bytes` (ready), `instance_used_bytes` (once texts have used every token),
    `sizes`, the number of models that were measured, and `as_of` where these were of another family than this one.
    A model without texts has no tokens to use, and has no `instance_used_bytes`. Of text generation it is, in place of
    that, `kv_pool_bytes`: what keys and values take beside the model when the pool is full, where the configuration
    tells their sizes, also in precisions of which nothing else was measured.
    """
    config = checkpoint.config or read_json_beside(checkpoint.directory / "config.json")
    owned = checkpoint.owned().values()
    weights = sum(tensor.numel * 4 if tensor.dtype.is_floating_point else tensor.nbytes for tensor in owned)
    if any(str(name).endswith(_WRITERS) for name in config.get("architectures") or ()):
        told = {precision: _estimate_writer(config, precision, weights) for precision in VALUE_BYTES}
        return {"openvino-genai": {precision: held for precision, held in told.items() if held}}
    tables = [4 * each.numel for each in owned if len(each.shape) == 2 and each.shape[0] == config.get("vocab_size")]
    row = count_row(config, checkpoint.directory)
    # Resident only as texts use its rows.
    table = 0 if any(config.get(key) is not None for key in _OF_SIGNALS) else max(tables, default=0)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    family = str(config.get("model_type", ""))
    for engine, precisions in GRAPHS.items():
        for precision, of_bert in precisions.items():
            is_own = (engine, precision) == _MEASURED_BY_FAMILY and family in FAMILIES
            held = FAMILIES[family] if is_own else of_bert
            instance, later = held.measure_instance(weights, table, row)
            found.setdefault(engine, {})[precision] = {
                "export_bytes": held.export.at(weights, row),
                "instance_bytes": instance,
                **({"instance_used_bytes": instance + later} if table else {}),
                "sizes": held.sizes,
                **({} if is_own or family in _LIKE_BERT else {"as_of": "BERT"}),
            }
    return found


def _estimate_writer(config: Mapping[str, Any], precision: str, weights_bytes: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if held := WRITERS.get(precision):
        told = {
            "export_bytes": held.export.at(weights_bytes),
            "instance_bytes": held.instance.at(weights_bytes),
            "sizes": held.sizes,
        }
    pool = count_pool(config, precision)
    return told | ({"kv_pool_bytes": pool} if pool else {})


def count_pool(config: Mapping[str, Any], precision: str) -> int:
    """Return the bytes of the pool of keys and values when it is full; 0 where the configuration does not tell."""
    layers, heads, kv_heads, width, context = (
        _find_size(config, names) for names in (_LAYERS, _HEADS, _KV_HEADS, _WIDTH, _CONTEXT)
    )
    if not all((layers, heads, kv_heads, width, context)):
        return 0
    head_width = _find_size(config, ("head_dim",)) or width // heads
    block = measure_block([(kv_heads, head_width)] * layers, precision)
    return min(_POOL_BYTES // block, _SEATS * (context // BLOCK_TOKENS + 2)) * block


def count_row(config: Mapping[str, Any], directory: Path) -> int:
    """Return the bytes of the largest activations of the longest text in fp32, which the proof computes with.

    They are those between the two layers of a feed-forward network, `[tokens, intermediate]`, and the scores of
    attention, `[heads, tokens, tokens]`; 0 where the configuration does not tell how wide the model is. Of what else it
    does not tell, it is taken for a BERT: heads of 64, and four times the width between the two layers.
    """
    width = _find_size(config, _ENCODER_WIDTH)
    heads = _find_size(config, _ENCODER_HEADS) or width // 64
    limits = [read_json_beside(directory / name).get(key) for name, key in _LIMITS]
    lengths = [_find_size(config, _CONTEXT), *limits]
    length = min((each for each in lengths if isinstance(each, int) and 0 < each < _NO_LIMIT), default=_USUAL_LENGTH)
    return 4 * length * ((_find_size(config, _INTERMEDIATE) or 4 * width) + heads * length)


def _find_size(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the first of these that the configuration has as a whole number above 0; 0 for none."""
    sizes = (config.get(name) for name in names)
    return next((size for size in sizes if isinstance(size, int) and size > 0), 0)
