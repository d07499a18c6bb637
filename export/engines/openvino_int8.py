"""Static int8 by NNCF: weights and activations, scales measured on real text."""

import logging
from pathlib import Path
from typing import Any

from ..errors import EngineError
from .engine import VerifiedGraph
from .openvino_model import QUANTIZED_FILE, import_openvino


def quantize(graph: VerifiedGraph, directory: Path) -> None:
    """Write the graph quantized into `directory`, with the weights beside it."""
    ov = import_openvino()
    import nncf

    nncf.set_log_level(logging.ERROR)
    model = ov.Core().read_model(str(graph.path))
    feeds = [dict(feed) for feed in graph.feeds]
    quantized = nncf.quantize(
        model,
        nncf.Dataset(feeds),
        model_type=nncf.ModelType.TRANSFORMER,
        preset=nncf.QuantizationPreset.MIXED,
        subset_size=len(feeds),
    )
    ov.save_model(quantized, str(directory / QUANTIZED_FILE), compress_to_fp16=False)
