"""From a causal language model to an OpenVINO file that keeps its own keys and values: what OpenVINO GenAI serves.

The attention of every layer stays one ScaledDotProductAttention, which OpenVINO GenAI turns into paged attention. So
the file is made of the module, not of an ONNX graph, in which attention is many nodes.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..errors import GraphError

if TYPE_CHECKING:
    import openvino as ov

# What OpenVINO GenAI looks for by name (2026.4, src/cpp/src/utils.cpp and paged_attention_transformations.cpp).
_FED = ("input_ids", "attention_mask", "position_ids")
_BEAM = "beam_idx"
_ATTENTION = "ScaledDotProductAttention"

# Sizes that are traced: a batch of 2, 5 tokens after 3; none of them 1, which may be taken for a constant.
_BATCH, _NEW, _PAST = 2, 5, 3

_SERVE_LOGITS = "pass --task text-generation-logits, which has the model's scores served by ONNX Runtime"


def write_stateful_decoder(model: PreTrainedModel, cache_shapes: Sequence[tuple[int, int]], path: Path) -> None:
    """Write `model` in fp32 to `path`, an .xml file with the weights in a .bin file beside it.

    It takes `input_ids` and `position_ids`, [batch, seq_len], int64, `attention_mask`, [batch, past_len+seq_len],
    int64, and `beam_idx`, [batch], int32, the row of the past that each row goes on from; it returns `logits`,
    [batch, seq_len, vocabulary], fp32.

    Args:
        model: A causal language model; its way of computing attention is another one meanwhile.
        cache_shapes: The heads of each layer's keys and values, and the size of one.
        path: Where the file goes.

    Raises:
        GraphError: The architecture cannot be converted.
    """
    import openvino as ov

    name = type(model).__name__
    _refuse_alibi(model)
    module = _WithPast(model)
    past = [torch.randn(_BATCH, heads, _PAST, size) for heads, size in cache_shapes for _ in range(2)]
    example = (
        torch.ones(_BATCH, _NEW, dtype=torch.int64),
        torch.ones(_BATCH, _PAST + _NEW, dtype=torch.int64),
        torch.arange(_PAST, _PAST + _NEW).expand(_BATCH, _NEW).contiguous(),
        *past,
    )
    try:
        with _fused_attention(model), torch.no_grad(), warnings.catch_warnings():
            # What depends on sizes is tried at others by the proof.
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(module, example, check_trace=False, strict=False)  # type: ignore[no-untyped-call]
            converted = ov.convert_model(traced, example_input=example)
    # What the two libraries raise for an architecture that they cannot follow is up to that architecture.
    except Exception as exc:
        raise GraphError(
            f"{name} cannot be converted for OpenVINO",
            expected="a decoder that takes positions, a mask of four dimensions, and keys and values",
            got=" ".join(str(exc).split())[:200].rstrip(".:;"),
            remedy=_SERVE_LOGITS,
        ) from exc
    _name_ports(converted, cache_shapes)
    found = sum(node.get_type_name() == _ATTENTION for node in converted.get_ops())
    if found != len(cache_shapes):
        raise GraphError(
            f"the attention of {name} cannot be paged",
            expected=f"one {_ATTENTION} in each of {len(cache_shapes)} layers",
            got=str(found),
            remedy=_SERVE_LOGITS,
        )
    _keep_state(converted, cache_shapes)
    ov.save_model(converted, path, compress_to_fp16=False)


def _refuse_alibi(model: PreTrainedModel) -> None:
    """Refuse a Falcon that was trained with ALiBi, which is laid out by a mask of another shape.

    Raises:
        GraphError: It is one.
    """
    if getattr(model.config, "alibi", False):
        raise GraphError(
            f"{type(model).__name__} with ALiBi cannot be converted for OpenVINO",
            expected="a decoder that takes positions",
            got="alibi true in config.json",
            remedy="pass --engine vllm, or export an architecture that docs/generation.md lists as published",
        )


class _JoinedCache(DynamicCache):
    """Joins past and new without the empty first tensor of DynamicCache, which OpenVINO's frontend cannot join."""

    def __init__(self, past: Sequence[Tensor]) -> None:
        super().__init__()
        self.pairs = list(zip(past[::2], past[1::2], strict=True))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        keys, values = self.pairs[layer_idx]
        self.pairs[layer_idx] = (torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2))
        return self.pairs[layer_idx]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.pairs[0][0].shape[2]


class _WithPast(nn.Module):
    """Tensors in, tensors out; the mask is made here, so that tracing sees no library code that branches."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        length, total = input_ids.shape[1], attention_mask.shape[1]
        columns, rows = torch.arange(total)[None, :], torch.arange(length)[:, None] + (total - length)
        seen = (columns <= rows)[None, None] & attention_mask[:, None, None, :].bool()
        # Padding sees itself: a softmax over nothing is NaN, which the next layer would spread.
        allowed = seen | (columns == rows)[None, None]
        cache = _JoinedCache(past)
        answer = self.model(
            input_ids=input_ids,
            attention_mask=allowed,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return (answer.logits, *(tensor for pair in cache.pairs for tensor in pair))


@contextlib.contextmanager
def _fused_attention(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _list_names(part: str, layers: int) -> list[str]:
    return [f"{part}.{index}.{kind}" for index in range(layers) for kind in ("key", "value")]


def _name_ports(model: "ov.Model", cache_shapes: Sequence[tuple[int, int]]) -> None:
    """Give inputs and outputs the names and the free axes that they are served with."""
    import openvino as ov

    layers = len(cache_shapes)
    shapes = [ov.PartialShape([-1, -1])] * len(_FED)
    shapes += [ov.PartialShape([-1, heads, -1, size]) for heads, size in cache_shapes for _ in range(2)]
    names = [*_FED, *_list_names("past_key_values", layers)]
    for port, name, shape in zip(model.inputs, names, shapes, strict=True):
        node = port.get_node()
        node.set_partial_shape(shape)
        # Both: GPT-2 with the tensor's name alone loads and fails at its first step.
        node.set_friendly_name(name)
        port.get_tensor().set_names({name})
        if name in _FED:
            node.set_element_type(ov.Type.i64)
    for port, name in zip(model.outputs, ["logits", *_list_names("present", layers)], strict=True):
        port.get_tensor().set_names({name})
    model.validate_nodes_and_infer_types()


def _keep_state(model: "ov.Model", cache_shapes: Sequence[tuple[int, int]]) -> None:
    """Turn the keys and values from inputs and outputs into variables, empty at first."""
    import numpy as np
    import openvino as ov
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    layers = len(cache_shapes)
    pairs = dict(zip(_list_names("past_key_values", layers), _list_names("present", layers), strict=True))
    beam = ops.parameter(name=_BEAM, dtype=ov.Type.i32, shape=ov.PartialShape([-1]))
    beam.output(0).get_tensor().set_names({_BEAM})
    model.add_parameters([beam])
    first_axis = ops.constant(0, dtype=np.int64)
    for name in pairs:
        port = model.input(name)
        consumers = port.get_target_inputs()
        gathered = ops.gather(port, beam, first_axis)
        for consumer in consumers:
            consumer.replace_source_output(gathered.output(0))
    model.validate_nodes_and_infer_types()
    shapes = {name: model.input(name).get_partial_shape() for name in pairs}
    apply_make_stateful_transformation(model, pairs)
    batch = ops.gather(
        ops.shape_of(model.input(_FED[0]), "i64"), ops.constant([0], dtype=np.int64), ops.constant(0, dtype=np.int64)
    )
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            name = next(name for name in pairs if node.get_variable_id().startswith(name))
            heads, size = shapes[name][1].get_length(), shapes[name][3].get_length()
            known = [ops.constant([value], dtype=np.int64) for value in (heads, 0, size)]
            empty = ops.broadcast(ops.constant(0.0, dtype=np.float32), ops.concat([batch, *known], axis=0))
            node.set_arguments([empty])
    model.validate_nodes_and_infer_types()
