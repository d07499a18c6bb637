"""Hugging Face folders: safetensors and `.bin`, in one file or sharded with an index."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from export.checkpoints.base import Checkpoint, StateDict, TensorSpec
from export.errors import CheckpointError, list_some

# In this order: safetensors is preferred where a folder holds both, as transformers does.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

# The dtype names of the safetensors header (huggingface/safetensors, README "Format") that torch can hold.
_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def recognises(directory: Path) -> bool:
    """Tell whether `directory` holds the weights of a Hugging Face folder."""
    return any((directory / name).is_file() for name in WEIGHT_FILES)


def open_huggingface(directory: Path) -> Checkpoint:
    """Return a reader for the Hugging Face folder `directory`.

    Raises:
        CheckpointError: A weight file is missing, truncated, not what its name says, or disagrees with the index.
    """
    name = next(name for name in WEIGHT_FILES if (directory / name).is_file())
    index = _read_index(directory / name) if name.endswith(".index.json") else None
    shard_names = sorted(set(index.values())) if index else [name]
    for shard_name in shard_names:
        _check_shard_path(directory, shard_name)
    shards: dict[Path, StateDict] = {}
    for shard_name in shard_names:
        path = directory / shard_name
        shards[path] = _SafetensorsFile(path) if shard_name.endswith(".safetensors") else _TorchFile(path)
    kind = "safetensors" if "safetensors" in name else "torch .bin"
    return _HuggingFaceCheckpoint(directory, kind, shards, index)


class _HuggingFaceCheckpoint:
    """A folder of one or more weight files, each tensor in exactly one of them."""

    def __init__(
        self, directory: Path, kind: str, shards: Mapping[Path, StateDict], index: Mapping[str, str] | None
    ) -> None:
        self.directory = directory
        self.weight_files = tuple(sorted(shards))
        self.format_name = f"Hugging Face {kind}, {len(shards)} file{'s' if len(shards) > 1 else ''}"
        self._home: dict[str, StateDict] = {}
        self._specs: dict[str, TensorSpec] = {}
        for path, shard in shards.items():
            specs = shard.specs()
            if index is not None:
                _check_against_index(path, specs, index)
            for tensor_name, spec in specs.items():
                self._home[tensor_name] = shard
                self._specs[tensor_name] = spec

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def read(self, name: str) -> torch.Tensor:
        return self._home[name].read(name)


class _SafetensorsFile:
    """One `.safetensors` file; the library maps it, so only what is read takes memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as exc:
            raise _unreadable(path, str(exc)) from exc
        self._specs: dict[str, TensorSpec] = {}
        for name in self._file.keys():  # noqa: SIM118 (safe_open is no mapping)
            piece = self._file.get_slice(name)
            dtype = _SAFETENSORS_DTYPES.get(piece.get_dtype())
            if dtype is None:
                raise CheckpointError(
                    f"{name} in {path} has a dtype that is not read",
                    expected="one of " + ", ".join(_SAFETENSORS_DTYPES),
                    got=piece.get_dtype(),
                    remedy="save the checkpoint unquantised",
                )
            self._specs[name] = TensorSpec(shape=tuple(piece.get_shape()), dtype=dtype)

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor


class _TorchFile:
    """One `.bin` file, mapped; `weights_only` lets no global of the pickle run."""

    def __init__(self, path: Path) -> None:
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        # torch.load raises whatever the damaged part happens to raise: RuntimeError, EOFError, KeyError, ...
        except Exception as exc:
            raise _unreadable(path, str(exc).split("\n", 1)[0]) from exc
        if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
            raise CheckpointError(
                f"{path} is no state dict",
                expected="a dict of tensors",
                got=type(content).__name__ if not isinstance(content, dict) else "a dict with other values",
                remedy="save it with model.save_pretrained()",
            )
        self._tensors: dict[str, torch.Tensor] = content

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for name, t in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def _read_index(path: Path) -> dict[str, str]:
    """Return tensor name → shard file name, as the index says."""
    try:
        index: Any = json.loads(path.read_text(encoding="utf-8"))
        weight_map = index["weight_map"]
        if not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError("weight_map is empty or names no files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise _unreadable(path, str(exc)) from exc
    return dict(weight_map)


def _check_shard_path(directory: Path, shard_name: str) -> None:
    if Path(shard_name).name != shard_name:
        raise CheckpointError(
            f"the index in {directory} leads outside the folder",
            expected="plain file names",
            got=repr(shard_name),
            remedy="do not use this checkpoint unless you know why",
        )
    if not (directory / shard_name).is_file():
        raise CheckpointError(
            f"{directory} lacks a shard that its index names",
            expected=shard_name,
            got="no such file",
            remedy="copy the whole checkpoint",
        )


def _check_against_index(path: Path, specs: Mapping[str, TensorSpec], index: Mapping[str, str]) -> None:
    promised = {name for name, shard in index.items() if shard == path.name}
    missing, extra = promised - specs.keys(), specs.keys() - promised
    if missing or extra:
        found = [f"without {list_some(missing)}"] if missing else []
        found += [f"with {list_some(extra)}"] if extra else []
        raise CheckpointError(
            f"{path} is not the shard that the index describes",
            expected=f"its {len(promised)} tensors",
            got="the file " + " and ".join(found),
            remedy="copy index and shards from the same save",
        )


def _unreadable(path: Path, reason: str) -> CheckpointError:
    size = path.stat().st_size if path.is_file() else 0
    return CheckpointError(
        f"{path} cannot be read",
        expected="a whole weight file" if path.suffix != ".json" else "an index with a weight_map",
        got=f"{size} bytes ({reason.rstrip('.')})",
        remedy="copy the checkpoint again",
    )
