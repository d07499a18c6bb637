"""A text model that computes no padding: every layer sees the tokens of all rows one after another, padding left out.

Only the scores of attention are per row. transformers asks a function for them that can be registered under a name
(https://huggingface.co/docs/transformers/attention_interface); the one registered here lays tokens out in rows, asks
torch, and puts them behind one another again. What stands before and after the layers works on rows.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import GraphError
from ..signature import BATCH, SEQ_LEN, ModelSignature, TensorSignature
from ..targets import Target
from .files import read_graph, save_graph
from .onnx_export import check_graph, export_onnx

# The name under which transformers finds the function.
_ATTENTION = "modelyard_padding_free"

_MASK = "attention_mask"

# Inputs of the traced module alone, so that their sizes have symbols; the graph computes them from the mask.
_KEPT = TensorSignature(name="modelyard_kept", dtype=torch.int64, dims=("tokens",))
_PLACES = TensorSignature(name="modelyard_places", dtype=torch.int64, dims=(BATCH, SEQ_LEN))


class _Packing:
    """Where the tokens of a padded batch are in the row of all tokens.

    Attributes:
        kept: Positions of the tokens in the flattened batch, int64 [tokens].
        places: Position of each place of the batch among the tokens, int64 [batch, seq_len]; any token's for padding.
    """

    def __init__(self, kept: Tensor, places: Tensor) -> None:
        self.kept = kept
        self.places = places

    def pack(self, values: Tensor) -> Tensor:
        """Return the tokens' values, [1, tokens, ...], of a batch's, [batch or 1, seq_len, ...]."""
        rows = values.expand(self.places.shape[0], *values.shape[1:])
        return rows.flatten(0, 1).index_select(0, self.kept).unsqueeze(0)

    def unpack(self, values: Tensor) -> Tensor:
        """Return a batch's values, [batch, seq_len, ...], of the tokens', [1, tokens, ...]."""
        flat = values.squeeze(0).index_select(0, self.places.flatten())
        return flat.view(*self.places.shape, *flat.shape[1:])


class PaddingFree(nn.Module):
    """A task's module whose layers are given no padding.

    Args:
        module: Takes what the signature says; a model of transformers is in it.
        signature: Names the inputs, one of which is the mask.

    Raises:
        GraphError: The model's attention cannot be asked for by name, or it has no layers that can be found.
    """

    def __init__(self, module: nn.Module, signature: ModelSignature) -> None:
        super().__init__()
        self.module = module
        self._names = [tensor.name for tensor in signature.inputs]
        self._models = [each for each in module.modules() if isinstance(each, PreTrainedModel)]
        self._layers = list(_find_layers(module))
        if not self._layers or not all(model._supports_attention_backend for model in self._models):
            name = type(self._models[0]).__name__ if self._models else type(module).__name__
            raise GraphError(
                f"{name} cannot be computed without padding",
                expected="layers and attention that transformers lets others compute",
                got="its own",
                remedy="pass --batching ragged",
            )
        self._packing: _Packing | None = None

    def forward(self, *inputs: Tensor) -> Any:
        """Return what the module returns.

        Args:
            inputs: Those of the module, then where the tokens are, and their places.
        """
        *own, kept, places = inputs
        self._packing = _Packing(kept, places)
        return self.module(*own)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let the layers compute without padding, for the length of a `with` statement."""
        before = [model.config._attn_implementation for model in self._models]
        AttentionInterface.register(_ATTENTION, self._attend)
        AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
        hooks = [layer.register_forward_pre_hook(self._enter, with_kwargs=True) for layer in self._layers]
        hooks += [layer.register_forward_hook(self._leave) for layer in self._layers]
        try:
            for model in self._models:
                model.set_attn_implementation(_ATTENTION)
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for model, name in zip(self._models, before, strict=True):
                model.set_attn_implementation(name)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """Give a layer the tokens of what it is called with."""
        packing = self._current
        given = dict(kwargs)
        if args:
            args = (packing.pack(args[0]), *args[1:])
        else:
            given["hidden_states"] = packing.pack(given["hidden_states"])
        # Of a rotation, which a layer applies to its tokens: cosines and sines.
        if given.get("position_embeddings") is not None:
            given["position_embeddings"] = tuple(map(packing.pack, given["position_embeddings"]))
        return args, given

    def _leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        """Make rows of what a layer returns."""
        if isinstance(output, tuple):
            return (self._current.unpack(output[0]), *output[1:])
        return self._current.unpack(output)

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
    ) -> tuple[Tensor, None]:
        """Return attention's answers for all tokens, [1, tokens, heads, size], of heads' [1, heads, tokens, size]."""
        packing = self._current
        query, key, value = (packing.unpack(heads.transpose(1, 2)).transpose(1, 2) for heads in (query, key, value))
        answers, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **rest)
        return packing.pack(answers), None

    @property
    def _current(self) -> _Packing:
        assert self._packing is not None, "Bug: a layer is called before the module"
        return self._packing


def export_padding_free(
    module: nn.Module,
    signature: ModelSignature,
    example: tuple[Tensor, ...],
    path: Path,
    target: Target,
    *,
    provenance: Mapping[str, str] | None = None,
) -> None:
    """Write `module` as ONNX to `path`, with the inputs and outputs of the signature, computing no padding.

    Args:
        module: Takes and returns what the signature says; it is left as it was.
        signature: Names and axes of the graph.
        example: Inputs to trace, in the order of the signature.
        path: Where the file goes; large weights go into a second one beside it.
        target: Triton release whose ONNX Runtime must load the file.
        provenance: See `export_onnx`.

    Raises:
        GraphError: The model's layers cannot be computed so, or the exporter fails.
    """
    free = PaddingFree(module, signature)
    traced = ModelSignature(inputs=(*signature.inputs, _KEPT, _PLACES), outputs=signature.outputs)
    rows = example[[tensor.name for tensor in signature.inputs].index(_MASK)].shape
    mask = torch.ones(rows, dtype=torch.int64)
    mask[-1, rows[1] // 2 :] = 0
    with TemporaryDirectory(prefix=".traced-", dir=path.parent) as folder:
        plain = Path(folder) / path.name
        with free.installed():
            export_onnx(free, traced, (*example, *locate_tokens(mask)), plain, target, provenance=provenance)
        model = read_graph(plain)
        _compute_places(model.graph)
        save_graph(model, path)
    check_graph(path, signature, target)


def locate_tokens(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the tokens are in a flattened batch, int64 [tokens], and each place's token, int64 [batch, seq_len].

    The first place of a row counts as a token whatever the mask says: no batch is empty, and some models answer with
    what they make of it.

    Args:
        mask: 1 for a token and 0 for padding, int64 [batch, seq_len].
    """
    is_token = mask.bool() | (torch.arange(mask.shape[1]) == 0)
    return is_token.flatten().nonzero().squeeze(1), (is_token.flatten().cumsum(0) - 1).view(mask.shape)


def _compute_places(graph: ir.Graph) -> None:
    """Have the graph compute from its mask what `locate_tokens` does."""
    inputs = {value.name: value for value in graph.inputs}
    mask = inputs[_MASK]

    def constant(name: str, values: Any) -> ir.Value:
        name = f"modelyard_{name}"
        value = ir.Value(name=name, const_value=ir.tensor(np.array(values, np.int64), name=name))
        graph.register_initializer(value)
        return value

    zero, one, flat = constant("zero", 0), constant("one", 1), constant("flat", [-1])
    nodes: list[ir.Node] = []

    def add(kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        nodes.append(ir.node(kind, list(inputs), attributes=attributes))
        return nodes[-1].outputs[0]

    shape = add("Shape", mask)
    columns = add("Range", zero, add("Gather", shape, one), one)
    is_token = add("Or", add("Cast", mask, to=ir.DataType.BOOL), add("Equal", columns, zero))
    tokens = add("Reshape", is_token, flat)
    kept = add("Reshape", add("NonZero", tokens), flat)
    before = add("Sub", add("CumSum", add("Cast", tokens, to=ir.DataType.INT64), zero), one)
    places = add("Reshape", before, shape)
    for new, name in ((kept, _KEPT.name), (places, _PLACES.name)):
        old = inputs[name]
        new.shape, new.type = old.shape, old.type
        ir.convenience.replace_all_uses_with(old, new)
        graph.inputs.remove(old)
    graph.insert_before(graph[0], nodes)


def _find_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of the models in `module`, not those that are within another."""
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _find_layers(child)
