"""What `torch.save` wrote, read as data: containers, scalars, and tensors as byte ranges of the file.

    opened = open_torch_zip(path)           # parses directory and pickle; reads no tensor data, imports no torch
    opened.content                          # dict, list, tuple, str, int, float, bool, None, bytes,
                                            # StoredTensor, Record, GlobalName, ElementType (a dtype)
    opened.content["module"]["w"].chunks()  # StoredTensor: dtype, shape, ranges, chunks(), to_torch()

Tensors of one storage share a `StoredBlock`, so two names are tied exactly when their `StoredTensor`s are equal. What
is neither tensor nor plain data is a `Record` (`export.checkpoints.inert_globals` has the policy); a tensor subclass
whose data lies in other tensors, such as DTensor, is a `Record` with them in its `state`. A tensor whose values are not
those of its bytes, one after the other, is a `ForeignTensor`: refused in a model (`refuse_foreign_tensors`), ignored
beside it.

Format: a zip archive of stored entries `NAME/data.pkl`, `NAME/data/KEY` (one per storage), `NAME/byteorder`,
`NAME/version` and, in newer files, `NAME/.format_version` and `NAME/.data/serialization_id` (torch 2.13,
torch/serialization.py, `_save`). The format before torch 1.6, a tar or a bare pickle, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, list_some
from ..remedies import RECOPY_OR_USE_OLDER, find_remedy
from ..storage.assembled_tensor import transpose
from ..storage.byte_ranges import ByteRange
from ..storage.dtypes import BY_NAME, BY_STORAGE_NAME, ElementType
from ..storage.paths import open_regular, read_small, refuse_lfs_pointer
from ..storage.stored_tensor import ContiguousTensor, StoredTensor
from ..storage.strided_tensor import StridedTensor
from ..storage.zip_archive import StoredBlock, ZipArchive
from .inert_pickle import (
    MAX_PICKLE_BYTES,
    Builder,
    GlobalName,
    InertUnpickler,
    Record,
    hashable,
)

__all__ = [
    "DTENSORS",
    "GATHER_RANKS",
    "SHARDED_TENSOR",
    "ForeignTensor",
    "GlobalName",
    "Record",
    "StoredTensor",
    "TorchZip",
    "is_tensor",
    "open_torch_zip",
    "read_bare_pickle",
    "refuse_foreign_tensors",
]

# torch allows 64 (c10/core/TensorIterator and numpy's limit alike); a longer shape only serves to waste time.
_MAX_DIMS = 64
_MAX_ENCODED_BYTES = 16 << 20
_SAVE_DENSE = "save the model's full state dict, unquantised"
# A rank's part of a tensor, by FSDP: the names that DTensor has had, and ShardedTensor.
DTENSORS = (
    "torch.distributed.tensor.DTensor",
    "torch.distributed._tensor.DTensor",
    "torch.distributed._tensor.api.DTensor",
)
SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
GATHER_RANKS = (
    "put the files of all ranks into one folder as pytorch_model_fsdp_rankN.bin, N from 0, and pass the folder, or "
    "save the model's full state dict"
)
# What torch sets on a tensor after it is rebuilt (torch/_utils.py, `set_tensor_metadata`), and what takes it off again.
_RESOLVED_BY = {"neg": "resolve_neg()", "conj": "resolve_conj()"}
# The first bytes of a file by torch before 1.6: its magic number as a pickled int (torch/serialization.py).
_LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f920")
# Those of other files that bear the same suffixes: the length of a header of up to 100 MB, and the header; and the
# protocol of a pickle, from 2 on (pickletools.py, `PROTO`).
_SAFETENSORS = re.compile(rb"[\0-\xff]{3}[\0-\5]\0{4}\{", re.DOTALL)
_BARE_PICKLE = re.compile(rb"\x80[\2-\5]")


@dataclass(frozen=True)
class TorchZip:
    """One file, or one archive within a file, as `open_torch_zip` found it.

    Attributes:
        root: The folder in it that holds everything, which torch names after the file that it saves to.
    """

    path: Path
    root: str
    content: Any
    # Every storage of the file that the content's tensors lie in, by key.
    storages: dict[str, StoredBlock]


class ForeignTensor(Record):
    """A tensor that is not a plain range of bytes.

    Attributes:
        found: What it is instead, in words.
        remedy: What makes it a plain one.
    """

    __slots__ = ("found", "remedy")

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__("torch.Tensor")
        self.found = found
        self.remedy = remedy


@dataclass(frozen=True)
class _StorageType:
    # None for an untyped storage, whose length counts bytes.
    dtype: ElementType | None


@dataclass(frozen=True)
class _Storage:
    block: StoredBlock
    dtype: ElementType | None


def open_torch_zip(path: Path, *, start: int = 0, length: int | None = None) -> TorchZip:
    """Parse a file by `torch.save`, or the archive that lies at `start` in a file (as in a `.distcp`).

    Memory is bounded by the pickle, never by the tensors.

    Raises:
        CheckpointError: The file is not in this format, is damaged, or its pickle names something that no checkpoint
            needs.
    """
    _refuse_other_formats(path, start)
    archive = ZipArchive(path, start=start, length=length)
    root = _find_root(archive)
    if f"{root}/byteorder" in archive.names:
        byte_order = archive.read(f"{root}/byteorder", max_bytes=16)
        if byte_order != b"little":
            raise CheckpointError(
                f"{path} was saved on a machine with another byte order",
                expected="little",
                got=repr(byte_order.decode("ascii", "replace")),
                remedy="load and save it on a little-endian machine",
            )
    pickled = archive.read(f"{root}/data.pkl", max_bytes=MAX_PICKLE_BYTES)
    storages = _Storages(archive, root)
    machine = InertUnpickler(
        pickled, str(path), builders=_BUILDERS, constants=_CONSTANTS, load_persistent=storages.load_persistent
    )
    content = machine.load()
    return TorchZip(path, root, content, storages.used)


def read_bare_pickle(path: Path) -> Any:
    """Return what a pickle outside any archive holds, such as the `.metadata` of `torch.distributed.checkpoint`.

    Raises:
        CheckpointError: The file cannot be read, is damaged, holds tensors, or names what no checkpoint needs.
    """
    data = read_small(path, max_bytes=MAX_PICKLE_BYTES)
    return InertUnpickler(data, str(path), builders=_BUILDERS, constants=_CONSTANTS).load()


def refuse_foreign_tensors(path: Path, state: Mapping[Any, Any]) -> None:
    """Refuse a state dict whose tensors are not plain byte ranges: sparse, quantised, complex, distributed, negated.

    Other values than tensors are none of its business: a module may keep any state it likes.

    Raises:
        CheckpointError: There is such a tensor.
    """
    foreign = {name: value for name, value in state.items() if is_tensor(value) and isinstance(value, Record)}
    if foreign:
        found = {value.found if isinstance(value, ForeignTensor) else value.type_name for value in foreign.values()}
        remedies = {_find_remedy(value) for value in foreign.values()}
        raise CheckpointError(
            f"{path} holds tensors that are not read: {list_some(foreign)}",
            expected="dense tensors of real numbers",
            got=list_some(found),
            remedy=list_some(remedies),
        )


def _find_remedy(value: ForeignTensor | Record) -> str:
    if isinstance(value, ForeignTensor):
        return value.remedy
    return GATHER_RANKS if value.type_name in (*DTENSORS, SHARDED_TENSOR) else _SAVE_DENSE


def is_tensor(value: Any) -> bool:
    """Tell whether `value` was a tensor when it was saved, be it one that is read or not."""
    if isinstance(value, Record):
        return "Tensor" in value.type_name or "_rebuild" in value.type_name
    return isinstance(value, StoredTensor)


def _refuse_other_formats(path: Path, start: int) -> None:
    with open_regular(path) as file:
        try:
            file.seek(start)
            head = file.read(512)
        except OSError as exc:
            raise CheckpointError(
                f"{path} cannot be read", got=exc.strerror or str(exc), remedy=find_remedy(exc)
            ) from exc
    if head.startswith(b"PK\3\4"):
        return
    refuse_lfs_pointer(path)
    found = f"{len(head)} bytes of something else" if len(head) < 512 else "something else"
    remedy = "if it is a checkpoint, load and save it again with a newer torch"
    if not head.strip(b"\0"):
        # A copy that was broken off, or room on a disk that nothing was written to.
        found, remedy = "zeros" if head else "an empty file", RECOPY_OR_USE_OLDER
    elif head.startswith(_LEGACY_MAGIC):
        found = "the format before torch 1.6"
    elif head[257:262] == b"ustar":
        found = "a tar file, the format before torch 0.1.10"
    elif _SAFETENSORS.match(head):
        found, remedy = "a safetensors file", f"name it {path.with_suffix('.safetensors').name}"
    elif _BARE_PICKLE.match(head):
        found = "a pickle by itself"
        remedy = "if the weights are in it, load it and save them by torch.save, as a dict of tensors by name"
    raise CheckpointError(
        f"{path} is not in the format of torch.save",
        expected="a zip archive, as torch 1.6 and later write it",
        got=found,
        remedy=remedy,
    )


def _find_root(archive: ZipArchive) -> str:
    """Return the folder in the archive that holds everything, which torch names after the file."""
    roots = [name[: -len("/data.pkl")] for name in archive.names if name.endswith("/data.pkl")]
    if len(roots) != 1 or f"{roots[0]}/constants.pkl" in archive.names:
        raise CheckpointError(
            f"{archive.path} holds no state",
            expected="an archive by torch.save with one data.pkl",
            got="a TorchScript program" if len(roots) == 1 else f"a zip archive with {len(roots)} of them",
            remedy="pass the file that the trainer saved",
        )
    return roots[0]


class _Storages:
    """Resolves the persistent ids of one archive: ("storage", type, key, device, number of elements)."""

    def __init__(self, archive: ZipArchive, root: str) -> None:
        self._archive = archive
        # By key, so that no name is put together for each of a million references.
        folder = f"{root}/data/"
        self._blocks = {
            name.removeprefix(folder): block for name, block in archive.blocks().items() if name.startswith(folder)
        }
        self.used: dict[str, StoredBlock] = {}

    def load_persistent(self, identifier: Any) -> _Storage | Record:
        kind, storage_type, key, _, length = identifier
        if isinstance(storage_type, GlobalName):
            # Complex and quantised elements: `refuse_foreign_tensors` has a word on them where they are weights.
            return Record(storage_type.name)
        if kind != "storage" or not isinstance(storage_type, _StorageType) or not isinstance(key, str):
            raise ValueError("an outer reference that is not a storage")
        block = self._blocks.get(key)
        if block is None:
            raise self._broken(key, "its bytes in the archive", "none")
        itemsize = 1 if storage_type.dtype is None else storage_type.dtype.itemsize
        if not isinstance(length, int) or length * itemsize != block.length:
            raise self._broken(key, f"{length} elements of {itemsize} bytes", f"{block.length} bytes")
        self.used[key] = block
        return _Storage(block, storage_type.dtype)

    def _broken(self, key: str, expected: str, got: str) -> CheckpointError:
        return CheckpointError(
            f"storage {key} of {self._archive.path} is not what the pickle says",
            expected=expected,
            got=got,
            remedy=RECOPY_OR_USE_OLDER,
        )


def _build_tensor(
    machine: InertUnpickler, storage: Any, offset: Any, shape: Any, stride: Any, dtype: ElementType
) -> StoredTensor | ForeignTensor:
    """Return the tensor at `offset` elements in `storage`, after checking that every element lies inside it.

    One of more elements than its storage has overlaps itself. None is read, so that a few bytes never fill a disk.
    """
    numbers = (offset, *shape, *stride) if len(shape) <= _MAX_DIMS and len(shape) == len(stride) else ()
    if not numbers or not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError("a tensor without a proper shape")
    # Tensors of more than three dimensions are few, and those of 64 take ten times as long to check.
    machine.charge(len(shape) // 4)
    numel = prod(shape)
    if numel == 0:
        # An empty range tells which names were one tensor.
        return ContiguousTensor(dtype=dtype, shape=tuple(shape), ranges=(ByteRange(storage.block, 0, 0),))
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if (offset + span) * dtype.itemsize > storage.block.length:
        raise machine.refuse(
            f"a tensor inside its storage of {storage.block.length} bytes",
            f"shape {tuple(shape)}, stride {tuple(stride)}, offset {offset} of {dtype.name}",
        )
    if numel * dtype.itemsize > storage.block.length:
        return ForeignTensor(
            "a tensor that overlaps itself, as expand() makes one", "call contiguous() on it before saving"
        )
    ranges = (ByteRange(storage.block, offset * dtype.itemsize, span * dtype.itemsize),)
    if _is_row_major(shape, stride):
        return ContiguousTensor(dtype=dtype, shape=tuple(shape), ranges=ranges)
    if _is_row_major(shape[::-1], stride[::-1]) and len(shape) == 2:
        # As `weight.T` is saved, which is read from start to end whatever its size.
        return transpose(ContiguousTensor(dtype=dtype, shape=tuple(shape[::-1]), ranges=ranges))
    return StridedTensor(dtype=dtype, shape=tuple(shape), ranges=ranges, stride=tuple(stride))


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        # The stride of a side of length 1 is never used, and torch leaves anything there.
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _rebuild_typed(machine: InertUnpickler, args: tuple[Any, ...]) -> StoredTensor | ForeignTensor:
    """`_rebuild_tensor(storage, offset, shape, stride)`, and `_v2` with `requires_grad, hooks, metadata=None` after."""
    storage, offset, shape, stride, *settings = args
    if isinstance(storage, Record):
        return ForeignTensor(f"elements of {storage.type_name}", _SAVE_DENSE)
    if not isinstance(storage, _Storage) or storage.dtype is None:
        raise ValueError("a tensor without a typed storage")
    return _read_metadata(settings[2:]) or _build_tensor(machine, storage, offset, shape, stride, storage.dtype)


def _rebuild_untyped(machine: InertUnpickler, args: tuple[Any, ...]) -> StoredTensor | ForeignTensor:
    """`_rebuild_tensor_v3(storage, offset, shape, stride, requires_grad, hooks, dtype, metadata=None)`."""
    storage, offset, shape, stride, _, _, dtype, *metadata = args
    if isinstance(dtype, GlobalName):
        return ForeignTensor(f"elements of {dtype.name}", _SAVE_DENSE)
    if not isinstance(storage, _Storage) or not isinstance(dtype, ElementType):
        raise ValueError("a tensor without a storage or a dtype")
    return _read_metadata(metadata) or _build_tensor(machine, storage, offset, shape, stride, dtype)


def _rebuild_npu(machine: InertUnpickler, args: tuple[Any, ...]) -> StoredTensor | ForeignTensor:
    """`_rebuild_npu_tensor`: as `_rebuild_tensor_v2`, then the layout that Ascend had it in before it was saved.

    torch_npu 2.1, torch_npu/utils/storage.py, `_reduce_ex`: what is written was moved to the CPU first.
    """
    return _rebuild_typed(machine, args[:6])


def _rebuild_from_cpu(_: InertUnpickler, args: tuple[Any, ...]) -> StoredTensor | ForeignTensor:
    """`_rebuild_device_tensor_from_cpu_tensor(data, dtype, device, requires_grad)`: devices without storages (HPU)."""
    data, dtype, *_rest = args
    if isinstance(data, ForeignTensor):
        return data
    if not isinstance(data, StoredTensor) or dtype != data.dtype:
        raise ValueError("a device's tensor that is not one of the CPU")
    return data


def _read_metadata(metadata: list[Any]) -> ForeignTensor | None:
    """Return what stands for a tensor whose metadata says that its values are not its bytes; None where it says none.

    torch writes bits that are set, and nothing where there are none.
    """
    if not any(metadata):
        return None
    bits = list_some(metadata[0]) if len(metadata) == 1 and isinstance(metadata[0], dict) else "that is unknown"
    resolve = _RESOLVED_BY.get(bits)
    remedy = f"save it again after {resolve}" if resolve else "save it again as a plain tensor"
    return ForeignTensor(f"a view with the bit {bits} set", remedy)


def _rebuild_parameter(_: InertUnpickler, args: tuple[Any, ...]) -> Any:
    """A parameter is its tensor: whether it was trained is not part of its value."""
    data = args[0]
    if not isinstance(data, (StoredTensor, Record)):
        raise ValueError("a parameter that is not a tensor")
    return data


def _rebuild_from_type(machine: InertUnpickler, args: tuple[Any, ...]) -> Any:
    """A tensor with attributes, or of a subclass: (function, type, its args, state)."""
    function, tensor_type, inner, state = args
    builder = _BUILDERS.get(function.name) if isinstance(function, GlobalName) else None
    if builder is _rebuild_from_type:
        raise ValueError("a tensor rebuilt within its rebuilding")
    if builder is not None and isinstance(inner, tuple):
        return machine.call_builder(builder, inner)
    name = tensor_type.name if isinstance(tensor_type, GlobalName) else "torch.Tensor"
    record = Record(name, inner if isinstance(inner, tuple) else ())
    record.state = state
    return record


def _build_size(_: InertUnpickler, args: tuple[Any, ...]) -> tuple[int, ...]:
    """`torch.Size(sides)` is a tuple of its sides."""
    sides = tuple(args[0]) if args and len(args[0]) <= _MAX_DIMS else ()
    if (args and len(args[0]) != len(sides)) or not all(type(side) is int and side >= 0 for side in sides):
        raise ValueError("a shape that is not a list of sizes")
    return sides


def _build_dict(machine: InertUnpickler, args: tuple[Any, ...]) -> dict[Any, Any]:
    """`OrderedDict()` or, from Python 2, `OrderedDict([[key, value], ...])`; `defaultdict(factory)` without factory."""
    pairs = args[0] if args and isinstance(args[0], list) else []
    machine.charge(len(pairs))
    return {hashable(key): value for key, value in pairs}


def _build_bytes(machine: InertUnpickler, args: tuple[Any, ...]) -> bytes:
    """`_codecs.encode(text, "latin1")`, protocol 2's way to write bytes; the empty ones are `bytes()`."""
    if not args:
        return b""
    text = args[0]
    if not isinstance(text, str) or args[1:] not in (("latin1",), ("latin-1",)) or len(text) > _MAX_ENCODED_BYTES:
        raise ValueError("bytes that are not written as text")
    # One step per 64 bytes: the same text may be named a million times.
    machine.charge(len(text) // 64)
    return text.encode("latin-1")


def _build_member(machine: InertUnpickler, args: tuple[Any, ...]) -> GlobalName:
    """`getattr(Class, "NAME")` is how protocols below 4 and Python 3.11 write what a class holds. Nothing is looked up.

    It may be a member of an enumeration or a class of its own (ShardedTensor's `ProcessGroupState`).
    """
    owner, name = args
    if not isinstance(owner, GlobalName) or not isinstance(name, str):
        raise ValueError("an attribute of what is not a class")
    machine.charge_name(len(owner.name) + len(name))
    return GlobalName(f"{owner.name}.{name}")


_BUILDERS: dict[str, Builder] = {
    "_codecs.encode": _build_bytes,
    "builtins.getattr": _build_member,
    "collections.OrderedDict": _build_dict,
    "collections.defaultdict": _build_dict,
    "torch.Size": _build_size,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _rebuild_from_cpu,
    "torch._utils._rebuild_tensor": _rebuild_typed,
    "torch._utils._rebuild_tensor_v2": _rebuild_typed,
    "torch._utils._rebuild_tensor_v3": _rebuild_untyped,
    "torch_npu.utils.storage._rebuild_npu_tensor": _rebuild_npu,
}

_CONSTANTS: dict[str, Any] = {
    **{f"torch.{name}": element for name, element in BY_NAME.items()},
    **{f"torch.{name}": _StorageType(element) for name, element in BY_STORAGE_NAME.items()},
    "torch.UntypedStorage": _StorageType(None),
    "torch.storage.UntypedStorage": _StorageType(None),
}
