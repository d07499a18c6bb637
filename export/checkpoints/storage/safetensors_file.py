"""The header of a safetensors file, which says where each tensor lies.

Format (huggingface/safetensors, README "Format"): 8 bytes with the header's length, little endian; the header, JSON;
then the tensors' bytes without gaps. No checksums.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..remedies import RECOPY
from .byte_ranges import ByteRange
from .dtypes import BY_SAFETENSORS_NAME
from .file_state import FileState, read_state
from .paths import open_regular, parse_json, refuse_lfs_pointer
from .stored_tensor import ContiguousTensor, StoredTensor
from .zip_archive import StoredBlock

METADATA_KEY = "__metadata__"
# The format's own limit (`MAX_HEADER_SIZE`), which takes at most a gigabyte as Python's objects.
_MAX_HEADER_BYTES = 100_000_000
# As many as an archive of torch may have (`zip_archive.MAX_ENTRIES`). The largest models have some 100,000, over files.
_MAX_TENSORS = 200_000
_SPLIT = "save it in several files, as save_pretrained with max_shard_size does"
# As in `torch_zip`: a longer shape only serves to waste time.
_MAX_DIMS = 64


def read_safetensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return name → tensor and the metadata, reading only the header.

    Raises:
        CheckpointError: The file is cut off, its header lies, or a dtype is not read.
    """
    with open_regular(path) as file:
        state = read_state(file.fileno())
        size = state.size
        try:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                refuse_lfs_pointer(path)
                raise ValueError(f"a header of {length} bytes")
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"the header of {path} is longer than the format allows",
                    expected=f"at most {_MAX_HEADER_BYTES} bytes",
                    got=str(length),
                    remedy=f"{RECOPY}, or {_SPLIT}",
                )
            text = file.read(length)
            # Each entry is an object, as are the header itself and its metadata. Counted before they are parsed, which
            # takes a hundred times as long.
            _check_count(path, text.count(b"{") - 1 - (METADATA_KEY.encode() in text))
            header = parse_json(text, object_pairs_hook=_refuse_doubles)
        except (OSError, ValueError) as exc:
            raise _unreadable(path, str(exc)) from exc
    if not isinstance(header, dict):
        raise _unreadable(path, "the header is not a JSON object")
    metadata = header.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _unreadable(path, "metadata that is not text")
    _check_count(path, len(header))
    start = 8 + length
    tensors = {name: _read_entry(path, name, entry, start, state) for name, entry in header.items()}
    _check_tiling(path, tensors, size - start)
    return tensors, metadata


def _check_count(path: Path, count: int) -> None:
    if count > _MAX_TENSORS:
        raise CheckpointError(
            f"{path} has more tensors than are read of one file",
            expected=f"at most {_MAX_TENSORS}",
            got=str(count),
            remedy=_SPLIT,
        )


def _read_entry(path: Path, name: str, entry: Any, start: int, state: FileState) -> StoredTensor:
    try:
        code, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if len(shape) > _MAX_DIMS or not all(
            type(number) is int and 0 <= number < 1 << 62 for number in (*shape, first, last)
        ):
            raise ValueError(f"{name} has no proper shape")
    except (KeyError, TypeError, ValueError) as exc:
        raise _unreadable(path, f"the entry of {name}: {exc}") from exc
    dtype = BY_SAFETENSORS_NAME.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise CheckpointError(
            f"{name} in {path} has a dtype that is not read",
            expected="one of " + ", ".join(BY_SAFETENSORS_NAME),
            got=str(code),
            remedy="save the checkpoint unquantised",
        )
    if last - first != prod(shape) * dtype.itemsize:
        raise _unreadable(path, f"{name} of shape {list(shape)} in {last - first} bytes")
    block = StoredBlock(path=path, name=name, offset=start + first, length=last - first, crc32=None, file_state=state)
    ranges = (ByteRange(block, 0, block.length),) if block.length else ()
    return ContiguousTensor(dtype=dtype, shape=shape, ranges=ranges)


def _check_tiling(path: Path, tensors: Mapping[str, StoredTensor], size: int) -> None:
    """Check that the tensors lie one after the other and fill the file."""
    blocks = sorted((part.block for tensor in tensors.values() for part in tensor.ranges), key=lambda b: b.offset)
    position = blocks[0].offset if blocks else 0
    first = position
    for block in blocks:
        if block.offset != position:
            raise _unreadable(path, f"{block.name} overlaps another tensor or leaves a gap")
        position += block.length
    if position - first != size:
        raise _unreadable(path, f"{size} bytes of data where the header describes {position - first}")


def _refuse_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name is given twice")
    return names


def _unreadable(path: Path, reason: str) -> CheckpointError:
    size = path.stat().st_size if path.is_file() else 0
    return CheckpointError(
        f"{path} cannot be read",
        expected="a whole weight file",
        got=f"{size} bytes ({reason.rstrip('.')})",
        remedy=RECOPY,
    )
