"""Published graphs in ONNX Runtime on a GPU, asked as Triton asks them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime

Rows = Sequence[np.ndarray]

# As Triton's native backend sets them, but for TF32, which is on by default.
_CUDA = {"cudnn_conv_algo_search": "EXHAUSTIVE", "arena_extend_strategy": "kNextPowerOfTwo"}


class NoGPUError(Exception):
    """Nothing can be measured."""


def load(repository: Path, name: str, providers: Sequence[object]) -> onnxruntime.InferenceSession:
    """Return the graph of the newest version of `name`."""
    path = find_version(repository, f"{name}_model") / "model.onnx"
    return onnxruntime.InferenceSession(path, providers=list(providers))


def load_on_gpu(repository: Path, name: str, *, tf32: str = "0") -> onnxruntime.InferenceSession:
    """Return the same on the first GPU.

    Raises:
        NoGPUError: There is none, or this ONNX Runtime knows none.
    """
    session = load(repository, name, [("CUDAExecutionProvider", {**_CUDA, "use_tf32": tf32}), "CPUExecutionProvider"])
    if session.get_providers()[0] != "CUDAExecutionProvider":
        raise NoGPUError("ONNX Runtime has no GPU here; install onnxruntime-gpu")
    return session


def find_version(repository: Path, folder: str) -> Path:
    """Return the newest version of a step."""
    versions = [path for path in (repository / folder).iterdir() if path.name.isdigit()]
    return max(versions, key=lambda path: int(path.name))


def ask_padded(session: onnxruntime.InferenceSession, rows: Rows) -> np.ndarray:
    """Return the vectors [rows, width] of texts that are padded to the longest."""
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = row, 1
    return _run(session, {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})


def ask_joined(session: onnxruntime.InferenceSession, rows: Rows) -> np.ndarray:
    """Return the vectors [rows, width] of texts whose tokens follow each other, as Triton joins them."""
    ids = np.concatenate(rows)
    shapes = np.array([[len(row)] for row in rows], np.int32)
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    return _run(session, {**feed, "row_shapes": shapes})


def _run(session: onnxruntime.InferenceSession, feed: dict[str, np.ndarray]) -> np.ndarray:
    wanted = {item.name for item in session.get_inputs()}
    return session.run(["sentence_embedding"], {name: feed[name] for name in wanted})[0]
