"""Safetensors files laid out before a byte is written, so that any part of any tensor can be put where it belongs.

Format (huggingface/safetensors, README "Format"): 8 bytes with the header's length, little endian; the header, JSON;
the tensors' bytes without gaps. Shards and index are those of transformers' `save_pretrained`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..checkpoints.storage.cast import can_cast, cast_bytes, count_non_finite
from ..checkpoints.storage.dtypes import ElementType
from ..checkpoints.storage.safetensors_file import METADATA_KEY
from ..checkpoints.storage.stored_tensor import StoredTensor
from ..errors import CheckpointError, list_some
from ..file_limit import advise

# The README of the format asks for 8; the page cache and vector loads like 64.
_HEADER_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class _Place:
    file: int
    offset: int
    source: ElementType
    target: ElementType


class SafetensorsOutput:
    """The files of one model in an existing, empty folder.

    Args:
        folder: Where to write.
        tensors: Name → what will be written, in the order of the model. No two names may stand for the same tensor.
        dtype: What to cast floating-point tensors to; as they are where None.
        max_shard_bytes: Start another file before one grows beyond this; a larger tensor has a file of its own.
        metadata: Goes into every file's header.
        allow_non_finite: Whether a cast may overflow to infinity.

    Raises:
        CheckpointError: A cast is not known, or the format has no place for a name.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, StoredTensor],
        *,
        dtype: ElementType | None,
        max_shard_bytes: int,
        metadata: Mapping[str, str],
        allow_non_finite: bool,
    ) -> None:
        _check_names(tensors)
        self._folder = folder
        self._metadata = dict(metadata)
        self._allow_non_finite = allow_non_finite
        self._files: list[int] = []
        self._places: dict[str, _Place] = {}
        self._targets = {name: _target_dtype(name, tensor, dtype) for name, tensor in tensors.items()}
        self._shards = _split(tensors, self._targets, max_shard_bytes)
        self.total_bytes = sum(tensor.numel * self._targets[name].itemsize for name, tensor in tensors.items())
        self.parameters = sum(tensor.numel for tensor in tensors.values())

    @property
    def dtype_names(self) -> set[str]:
        """The floating-point types of what is written."""
        return {target.name for target in self._targets.values() if target.is_floating_point}

    def __enter__(self) -> SafetensorsOutput:
        count = len(self._shards)
        for index, shard in enumerate(self._shards):
            name = "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._open_shard(name, shard)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)

    def write(self, name: str, position: int, part: memoryview) -> None:
        """Put `part`, the source's bytes of `name` from `position` on, where it belongs. For any thread, in any order.

        Raises:
            CheckpointError: A number does not fit the type it is cast to, or the disk is full.
        """
        place = self._places[name]
        data: bytes | memoryview = part
        if place.source != place.target:
            data = cast_bytes(part, place.source, place.target)
            if not self._allow_non_finite and count_non_finite(data, place.target) > count_non_finite(
                part, place.source
            ):
                raise CheckpointError(
                    f"{name} does not fit {place.target.name}",
                    expected="finite numbers after the cast",
                    got="infinity",
                    remedy="choose --dtype bfloat16 or float32",
                )
        offset = place.offset + position // place.source.itemsize * place.target.itemsize
        _write_all(place.file, data, offset)

    def write_index(self) -> None:
        """Write `model.safetensors.index.json` where there are several files.

        Raises:
            CheckpointError: The disk is full.
        """
        if len(self._shards) == 1:
            return
        count = len(self._shards)
        weight_map = {
            name: f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            for index, shard in enumerate(self._shards)
            for name in shard
        }
        totals = {"total_parameters": self.parameters, "total_size": self.total_bytes}
        index = {"metadata": {**self._metadata, **totals}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _open_shard(self, file_name: str, shard: Mapping[str, StoredTensor]) -> None:
        # The entries stand in the order of the model, so that it is not lost; the bytes do not.
        header: dict[str, object] = {METADATA_KEY: self._metadata, **dict.fromkeys(shard)}
        position = 0
        starts: dict[str, int] = {}
        # Wide types first, as the library writes them: then each tensor starts at a multiple of its element's size.
        for name, tensor in sorted(shard.items(), key=lambda item: -self._targets[item[0]].itemsize):
            target = self._targets[name]
            end = position + tensor.numel * target.itemsize
            header[name] = {
                "dtype": target.safetensors_name,
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            starts[name], position = position, end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
        file = os.open(self._folder / file_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._files.append(file)
        _write_all(file, len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(file, 8 + len(text) + position)
        for name, start in starts.items():
            self._places[name] = _Place(
                file=file, offset=8 + len(text) + start, source=shard[name].dtype, target=self._targets[name]
            )


def _check_names(tensors: Mapping[str, StoredTensor]) -> None:
    if METADATA_KEY in tensors:
        raise CheckpointError(
            f"safetensors has no place for a tensor called {METADATA_KEY}",
            expected="another name",
            got="the key of its own metadata",
            remedy="rename it before saving",
        )


def _target_dtype(name: str, tensor: StoredTensor, dtype: ElementType | None) -> ElementType:
    if dtype is None or not tensor.dtype.is_floating_point:
        return tensor.dtype
    if not can_cast(tensor.dtype, dtype):
        raise CheckpointError(
            f"{name} cannot be cast",
            expected=f"a type that becomes {dtype.name}",
            got=tensor.dtype.name,
            remedy="leave --dtype out",
        )
    return dtype


def _split(
    tensors: Mapping[str, StoredTensor], targets: Mapping[str, ElementType], max_bytes: int
) -> list[dict[str, StoredTensor]]:
    shards: list[dict[str, StoredTensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel * targets[name].itemsize
        if shards[-1] and filled + size > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    return shards


def _write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        try:
            count = os.pwrite(file, view, offset)
        except OSError as exc:
            expected, remedy = advise(exc) or ("", "make room on the disk")
            raise CheckpointError(
                f"the weights in {Path(f'/proc/self/fd/{file}').readlink()} cannot be written",
                expected=expected,
                got=exc.strerror or str(exc),
                remedy=remedy,
            ) from exc
        view, offset = view[count:], offset + count


def refuse_inflated(tensors: Mapping[str, StoredTensor], directory: Path) -> None:
    """Refuse tensors that share so many bytes that a small file would fill a disk.

    Raises:
        CheckpointError: The tensors are over four times the bytes that they lie in.
    """
    blocks = {part.block for tensor in tensors.values() for part in tensor.ranges}
    stored, needed = sum(block.length for block in blocks), sum(tensor.nbytes for tensor in tensors.values())
    if needed > 4 * stored:
        raise CheckpointError(
            f"the tensors of {directory} share their bytes: {list_some(tensors, 3)}",
            expected=f"at most four times the {stored} bytes that they lie in",
            got=f"{needed}",
            remedy="clone() those that are views of one tensor before saving",
        )
