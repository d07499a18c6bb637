"""Static int8 by NNCF: weights and activations, scales measured on real inputs, the most sensitive products in fp32.

One scale serves every value of a tensor, so a few values far beyond the others cost all others their bits. Products are
ranked by how far the largest value that they are given lies above the usual one, and the first of that ranking stay as
they are: of all-MiniLM-L6-v2 the worst cosine on text in several languages is 0.957 with none of its 48 products held
back, 0.992 with 3, 0.995 with 6, 0.999 with 12. A convolution is a product too. Where each channel has one of its own,
as in MobileNet, channels that share a scale differ most, and there is little to win: those are held back first of all.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import EngineError
from ..graph.files import Feed
from .engine import VerifiedGraph
from .openvino_model import MODEL_FILE, describe_model

_GRAPH_FILE = "model.xml"

_BY_CHANNEL = "GroupConvolution"
_PRODUCTS = ("MatMul", "Convolution", _BY_CHANNEL)

# Shares of the products that are held back, in the order in which they are tried.
_SHARES = (0, 1 / 16, 1 / 8, 1 / 4, 1 / 2)


def write_quantized(graph: VerifiedGraph, directory: Path) -> None:
    """Write the graph in int8, with the fewest products in fp32 that hold the bound, and `openvino.json` beside it.

    Args:
        graph: What is quantized, real inputs, and how good a candidate must be.
        directory: An empty folder.

    Raises:
        EngineError: NNCF refuses the graph, nothing in it is a product, or no share holds the bound.
    """
    import openvino as ov

    assert graph.measure, "Bug: int8 is built without a measure"
    # One text at a time, so that no padding is measured.
    feeds = [feed for feed in graph.feeds if len(next(iter(feed.values()))) == 1] or list(graph.feeds)
    source = ov.Core().read_model(str(graph.path))
    ranking = rank_products(source, feeds)
    if not ranking or not feeds:
        raise EngineError(
            f"{graph.path.name} cannot be quantized",
            expected="products, and real inputs to measure scales on",
            got=f"{len(ranking)} products, {len(feeds)} samples",
            remedy="pass --precision fp32",
        )
    path, qualities = directory / MODEL_FILE, []
    for share in _SHARES:
        held_back = ranking[: round(share * len(ranking))]
        graph.on_step(f"int8 with {len(held_back)} of {len(ranking)} products in fp32")
        quantized = _quantize(source.clone(), feeds, held_back)
        ov.save_model(quantized, str(directory / _GRAPH_FILE), compress_to_fp16=False)
        describe_model(graph, _GRAPH_FILE, quantized).write(path, kept_fp32=held_back)
        quality = graph.measure(path)
        qualities.append(quality)
        if quality.holds(graph.bounds[quality.metric]):
            return
    best = max(qualities, key=lambda quality: quality.worst)
    raise EngineError(
        "int8 in OpenVINO does not hold the quality asked for",
        expected=f"{best.metric.replace('_', ' ')} >= {graph.bounds[best.metric]:g}",
        got=f"{best.worst:.6g} with up to {_SHARES[-1]:.0%} of the products in fp32",
        remedy="ask for less, or pass --precision bf16 or fp32",
    )


def rank_products(source: Any, feeds: Sequence[Feed]) -> list[str]:
    """Return the names of all products: those by channel, and then the one first whose inputs reach furthest.

    How far they reach is the largest value beside the usual size of a value.
    """
    import openvino as ov
    from openvino import opset13

    given = _list_activations(source)
    if not given:
        return []
    watched = ov.Model([opset13.result(node.input_value(place)) for node, place in given], source.get_parameters())
    request = ov.Core().compile_model(watched, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    largest, squares, counts = np.zeros((3, len(given)))
    for feed in feeds:
        for index, values in enumerate(request.infer(dict(feed)).values()):
            largest[index] = max(largest[index], np.abs(values).max(initial=0.0))
            squares[index] += np.square(values, dtype=np.float64).sum()
            counts[index] += values.size
    usual = np.sqrt(squares / np.maximum(counts, 1))
    reach: dict[str, tuple[bool, float]] = {}
    for (node, _), most, size in zip(given, largest, usual, strict=True):
        name, is_by_channel = node.get_friendly_name(), node.get_type_name() == _BY_CHANNEL
        reach[name] = max(reach.get(name, (is_by_channel, 0.0)), (is_by_channel, float(most / size) if size else 0.0))
    return sorted(sorted(reach), key=lambda name: reach[name], reverse=True)


def _list_activations(source: Any) -> list[tuple[Any, int]]:
    """Return the products of a model, each with the place of an input that is not a weight."""
    return [
        (node, place)
        for node in source.get_ordered_ops()
        if node.get_type_name() in _PRODUCTS
        for place in (0, 1)
        if not _is_weight(node.input_value(place).get_node())
    ]


def _is_weight(node: Any) -> bool:
    """Tell whether it is a constant, or one in another type or shape."""
    if node.get_type_name() in ("Convert", "Reshape"):
        return _is_weight(node.input_value(0).get_node())
    return bool(node.get_type_name() == "Constant")


def _is_transformer(source: Any) -> bool:
    """Tell whether activations are multiplied with each other, as attention does."""
    nodes = [node.get_friendly_name() for node, _ in _list_activations(source)]
    return len(nodes) > len(set(nodes))


def _quantize(model: Any, feeds: Sequence[Feed], held_back: Sequence[str]) -> Any:
    with _silence():
        import nncf

        nncf.set_log_level(logging.ERROR)
        try:
            return nncf.quantize(
                model,
                nncf.Dataset([dict(feed) for feed in feeds]),
                model_type=nncf.ModelType.TRANSFORMER if _is_transformer(model) else None,
                preset=nncf.QuantizationPreset.MIXED,
                subset_size=len(feeds),
                # A table of bytes would be unpacked for each graph; as it is, it is mapped into memory, once for all.
                ignored_scope=nncf.IgnoredScope(names=list(held_back), types=["Gather"], validate=False),
            )
        # It raises whatever its parts raise.
        except Exception as exc:
            raise EngineError("NNCF cannot quantize the graph", got=str(exc).strip().rstrip(".")[:500]) from exc


def compress_weights(path: Path) -> None:
    """Replace the matrices of an OpenVINO model by bytes with a scale and a zero a row; it computes as before.

    Args:
        path: The .xml file, with its weights beside it; both are written anew.

    Raises:
        EngineError: NNCF fails on it.
    """
    import openvino as ov

    # Not mapped into memory: the files are replaced.
    model = ov.Core().read_model(path.read_bytes(), path.with_suffix(".bin").read_bytes())
    with _silence():
        import nncf

        nncf.set_log_level(logging.ERROR)
        try:
            compressed = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        # It raises whatever its parts raise.
        except Exception as exc:
            raise EngineError("NNCF cannot compress the weights", got=str(exc).strip().rstrip(".")[:500]) from exc
    ov.save_model(compressed, path, compress_to_fp16=False)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep NNCF's bars off the standard output, which may be read by a program."""
    with open(os.devnull, "w", encoding="utf-8") as sink, contextlib.redirect_stdout(sink):  # noqa: PTH123
        yield
