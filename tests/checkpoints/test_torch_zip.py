import argparse
import collections
import enum
import io
import os
import pathlib
import pickle
import random
import re
import struct
import subprocess
import sys
import tarfile
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from export.checkpoints.pickles.inert_pickle import MAX_STEPS, OpaqueKey
from export.checkpoints.pickles.torch_zip import (
    ForeignTensor,
    GlobalName,
    Record,
    StoredTensor,
    open_torch_zip,
    read_bare_pickle,
)
from export.checkpoints.storage.dtypes import BY_NAME, ElementType
from export.errors import CheckpointError


class Colour(enum.Enum):
    RED = 1


class Settings:
    def __init__(self) -> None:
        self.rate = 0.5


def save(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def save_pickle(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None) -> Path:
    """An archive with a pickle of our own making."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
    return path


def make_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    wide = torch.randn(30, 20)
    parameter = torch.nn.Parameter(torch.randn(3))
    parameter.note = "with an attribute"
    return {
        **{name: torch.randint(0, 2, (3, 5)).to(getattr(torch, name)) for name in BY_NAME},
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "view": wide[3:7, :],
        "column": wide[:, 4],
        "columns": wide[:, 4:9],
        "transposed": wide.t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "one_side": torch.arange(512.0).expand(1, -1),
        "parameter": torch.nn.Parameter(wide),
        "parameter_with_state": parameter,
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_tensor_is_read_as_torch_reads_it(tmp_path: Path, protocol: int) -> None:
    path = save(tmp_path / "x.pt", make_tensors(), pickle_protocol=protocol)
    expected, content = torch.load(path, weights_only=False), open_torch_zip(path).content
    assert list(content) == list(expected)
    for name, tensor in expected.items():
        got = content[name].to_torch()
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(got, tensor.detach()), name


def test_chunks_of_any_size_are_the_bytes_of_the_rows(tmp_path: Path) -> None:
    content = open_torch_zip(save(tmp_path / "x.pt", make_tensors())).content
    for name, tensor in make_tensors().items():
        whole = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for chunk_bytes in (8, 24, 100, 1 << 19):
            assert b"".join(content[name].chunks(chunk_bytes)) == whole, (name, chunk_bytes)


def test_tied_tensors_are_equal_and_others_are_not(tmp_path: Path) -> None:
    weight = torch.ones(4, 4)
    content = open_torch_zip(save(tmp_path / "x.pt", {"a": weight, "b": weight, "c": weight.clone()})).content
    assert content["a"] == content["b"] != content["c"]


@pytest.mark.parametrize("protocol", [2, 4])
def test_plain_data_comes_back_and_objects_become_records(tmp_path: Path, protocol: int) -> None:
    saved = {
        "numbers": [1, -1, 255, 65536, 2**40, -(10**30), 0.25, True, None],
        "text": "Grüße \U0001f600 \ud800",
        "bytes": b"\x00\xff",
        "nested": ({"a": (1, (2,))}, []),
        "ordered": collections.OrderedDict(x=1),
        "counts": {1: "int", (1, "a"): "tuple", None: "none"},
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "args": argparse.Namespace(lr=0.1, path=pathlib.PurePosixPath("/data")),
        "colour": Colour.RED,
        "settings": Settings(),
        "set": {1},
        "class": Settings,
        "pattern": re.compile("a+"),
        "random": random.Random(3),
        "buffer": io.BytesIO(b"x"),
        "user_dict": collections.UserDict(a=1),
        "chain": collections.ChainMap({"a": 1}),
        "default": collections.defaultdict(list, a=[1]),
        "ellipsis": ...,
    }
    content = open_torch_zip(save(tmp_path / "x.pt", saved, pickle_protocol=protocol)).content
    for name in ("numbers", "text", "bytes", "nested", "ordered", "counts"):
        assert content[name] == saved[name], name
    assert content["size"] == (2, 3)
    assert content["dtype"] == BY_NAME["bfloat16"]
    assert content["args"].field("lr") == 0.1
    assert content["args"].field("path").type_name == "pathlib.PurePosixPath"
    assert content["settings"].field("rate") == 0.5
    assert isinstance(content["colour"], Record)
    assert content["class"] == GlobalName(f"{__name__}.Settings")
    assert content["set"].type_name == "builtins.set"
    assert content["default"] == {"a": [1]}
    assert content["ellipsis"] == GlobalName("builtins.Ellipsis")
    held = [content[name].type_name for name in ("pattern", "random", "buffer", "user_dict", "chain")]
    assert held == ["re._compile", "random.Random", "_io.BytesIO", "collections.UserDict", "collections.ChainMap"]


def test_keys_that_cost_more_than_a_moment_to_hash_are_wrapped(tmp_path: Path) -> None:
    key: Any = "x"
    for _ in range(40):
        key = (key, key)
    pickled = pickle.dumps({1.5: 1, 2**61: 2, "plain": 3}, 2)
    content = open_torch_zip(save_pickle(tmp_path / "x.pt", pickled)).content
    assert [type(name) for name in content] == [OpaqueKey, OpaqueKey, str]
    # A tuple of 2**40 leaves, 41 of them distinct objects.
    pickled = b"\x80\x02}X\x01\x00\x00\x00x" + b"q\x00h\x00\x86" * 40 + b"K\x01s."
    (name,) = open_torch_zip(save_pickle(tmp_path / "y.pt", pickled)).content
    assert isinstance(name, OpaqueKey)


class Evil:
    """Pickles as a call of whatever it is given."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


HOSTILE = [
    (Evil(os.system, "touch PWNED"), f"{os.name}.system"),
    (Evil(eval, "open('PWNED', 'w')"), "builtins.eval"),
    (Evil(exec, "open('PWNED', 'w')"), "builtins.exec"),
    # Python 3.12 calls it _io.open.
    (Evil(open, "PWNED", "w"), f"{open.__module__}.open"),
    (Evil(__import__, "antigravity"), "builtins.__import__"),
    (Evil(torch.load, "PWNED"), "torch.serialization.load"),
    (Evil(torch.hub.load, "PWNED", "x"), "torch.hub.load"),
    (Evil(subprocess.check_output, ["touch", "PWNED"]), "subprocess.check_output"),
]


@pytest.mark.parametrize(("evil", "name"), HOSTILE, ids=[name for _, name in HOSTILE])
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_would_run_code_is_refused_naming_the_global(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evil: Evil, name: str, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "x.pt", {"state_dict": {"w": torch.ones(2)}, "hook": evil}, pickle_protocol=protocol)
    with pytest.raises(CheckpointError) as refusal:
        open_torch_zip(path)
    assert str(refusal.value) == (
        f"{path} would {'call' if name.startswith('torch.') else 'call or keep'} {name} when it is loaded by pickle: "
        f"expected tensors and plain data, got the global {name}, which is not known to be harmless; "
        "save it without that, and open this file with other tools only if you trust where it came from; "
        "nothing of it was run here."
    )
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x.pt"]


@pytest.mark.parametrize(
    ("pickled", "name"),
    [
        (b"cos\nsystem\n(X\x04\x00\x00\x00truetR.", "os.system"),
        (b"(X\x04\x00\x00\x00trueios\nsystem\n.", "os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "os.system"),
        # By way of an attribute of a class that may be named, and of objects made without a call.
        (b"\x80\x02c__builtin__\ngetattr\ncsubprocess\nPopen\nX\x01\x00\x00\x00x\x86R.", "subprocess.Popen"),
        (b"\x80\x02csubprocess\nPopen\n)\x81.", "subprocess.Popen"),
        # Under the name that Python 2 had for it.
        (b"\x80\x02ccommands\nPopen\n)R.", "subprocess.Popen"),
        (b"\x80\x02cmymodule\nrun\n)R.", "mymodule.run"),
    ],
)
def test_code_by_any_opcode_is_refused_naming_the_global(tmp_path: Path, pickled: bytes, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"would call (or keep )?{name} when"):
        open_torch_zip(save_pickle(tmp_path / "x.pt", pickled))
    (tmp_path / "bare").write_bytes(pickled)
    with pytest.raises(CheckpointError, match=f"would call (or keep )?{name} when"):
        read_bare_pickle(tmp_path / "bare")


def tensor_pickle(key: str, numel: int, offset: int, shape: list[int], stride: list[int]) -> bytes:
    """What torch would write for a tensor, with any numbers in it."""

    class Storage:
        pass

    class Tensor:
        def __reduce__(self) -> Any:
            args = (Storage(), offset, tuple(shape), tuple(stride), False, collections.OrderedDict())
            return torch._utils._rebuild_tensor_v2, args

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, key, "cpu", numel) if isinstance(value, Storage) else None

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump({"w": Tensor()})
    return buffer.getvalue()


def test_the_tensor_of_our_own_making_is_read(tmp_path: Path) -> None:
    pickled = tensor_pickle("0", 6, 1, [2, 2], [2, 1])
    content = open_torch_zip(save_pickle(tmp_path / "x.pt", pickled, {"0": struct.pack("<6f", *range(6))})).content
    assert content["w"].to_torch().tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ((7, 0, [2], [1]), "storage 0 of .* is not what the pickle says: expected 7 elements of 4 bytes, got 24 bytes"),
        ((6, 0, [7], [1]), r"expected a tensor inside its storage of 24 bytes, got shape \(7,\), stride \(1,\)"),
        (
            (6, 5, [2], [1]),
            r"expected a tensor inside its storage of 24 bytes, got shape \(2,\), stride \(1,\), offset 5",
        ),
        ((6, 0, [2], [6]), "expected a tensor inside its storage of 24 bytes"),
        ((6, 1, [1 << 40, 6], [0, 1]), "expected a tensor inside its storage of 24 bytes"),
        ((6, -1, [1], [1]), "expected a whole pickle, got nonsense"),
        ((6, 0, [-1], [1]), "expected a whole pickle, got nonsense"),
        ((6, 0, [2, 3], [1]), "expected a whole pickle, got nonsense"),
        ((6, 0, [1] * 65, [1] * 65), "expected a whole pickle, got nonsense"),
        ((6, 0, [1 << 62, 1 << 62], [1, 1]), "expected a whole pickle, got nonsense"),
    ],
)
def test_a_tensor_that_lies_about_its_storage_is_refused(tmp_path: Path, numbers: Any, sentence: str) -> None:
    path = save_pickle(tmp_path / "x.pt", tensor_pickle("0", *numbers), {"0": bytes(24)})
    with pytest.raises(CheckpointError, match=sentence):
        open_torch_zip(path)


def test_a_tensor_of_more_elements_than_its_storage_is_no_stored_tensor(tmp_path: Path) -> None:
    path = save_pickle(tmp_path / "x.pt", tensor_pickle("0", 6, 0, [1 << 40], [0]), {"0": bytes(24)})
    assert isinstance(open_torch_zip(path).content["w"], ForeignTensor)


def test_a_state_that_would_put_another_storage_into_a_tensor_is_refused(tmp_path: Path) -> None:
    # `Tensor.__setstate__` takes (storage, offset, shape, stride) and calls set_() with them.
    whole = tensor_pickle("0", 6, 0, [6], [1])
    before, after = whole[:-2], whole[-2:]
    assert after == b"s."
    path = save_pickle(tmp_path / "x.pt", before + b"(K\x00K\x00))tb" + after, {"0": bytes(24)})
    with pytest.raises(CheckpointError, match="expected a whole pickle, got nonsense at byte"):
        open_torch_zip(path)


def test_a_storage_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = save_pickle(tmp_path / "x.pt", tensor_pickle("1", 6, 0, [1], [1]), {"0": bytes(24)})
    with pytest.raises(CheckpointError, match=r"storage 1 of .* is not what the pickle says: expected its bytes"):
        open_torch_zip(path)


@pytest.mark.parametrize(
    ("pickled", "sentence"),
    [
        (b"", "expected a whole pickle, got nonsense at byte 0"),
        (b"\x80\x02}", "expected a whole pickle, got nonsense at byte 3"),
        (b"\x80\x07N.", "expected a pickle protocol up to 5, got 7"),
        (b"\x80\x02NN.", "expected one value at the pickle's end, got 2"),
        (b"\x80\x02\x82\x01.", "expected opcodes that picklers emit for data, got 0x82"),
        (b"\x80\x02B\xff\xff\xff\x7fabc.", "expected a whole pickle, got nonsense"),
        (b"\x80\x04\x8e" + b"\xff" * 8 + b".", "expected a whole pickle, got nonsense"),
        (b"\x80\x02h\x05.", "expected a whole pickle, got nonsense"),
        (b"\x80\x02K\x01Q.", "expected a pickle without outer references|expected a whole pickle, got nonsense"),
        (b"\x80\x02" + b"(" * 2000 + b".", "expected at most 1000 values within each other, got more"),
        (b"\x80\x02" + b"N0" * (MAX_STEPS // 2) + b"N.", f"expected at most {MAX_STEPS} steps, got more"),
    ],
)
def test_a_damaged_or_excessive_pickle_is_refused(tmp_path: Path, pickled: bytes, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        open_torch_zip(save_pickle(tmp_path / "x.pt", pickled))


COPIED = b"(" + b"N" * 100_000 + b"tq\x00"


@pytest.mark.parametrize(
    ("pickled", "sentence"),
    [
        # One call of a builder, and no call that would take as many arguments.
        (b"\x80\x02ctorch\nSize\n()" + b"N" * 16 + b"tR.", "expected a whole pickle, got nonsense"),
        (
            b"\x80\x02" + COPIED + b"}K\x01K\x01sq\x01ctorch.nn\nModule\nq\x02" + b"h\x02h\x00h\x01\x92" * 30 + b".",
            f"expected at most {MAX_STEPS} steps, got more",
        ),
        (
            b"\x80\x04X\x00\x10\x00\x00" + b"a" * 4096 + b"\x8c\x01B\x93.",
            "expected names of at most 1024 characters, got one of 4097",
        ),
        (
            b"\x80\x02c__builtin__\ngetattr\nctorch.nn\nModule\nX\x00\x10\x00\x00" + b"a" * 4096 + b"\x86R.",
            "expected names of at most 1024 characters, got one of 4111",
        ),
        # A thousand characters for three steps, every time.
        (
            b"\x80\x02X\xf4\x01\x00\x00" + b"a" * 500 + b"q\x00" + b"h\x00h\x00\x93" * 90_000 + b".",
            f"expected at most {MAX_STEPS} steps, got more",
        ),
        # Equal to the key before it and another object, so that both are compared to the end.
        (
            b"\x80\x02}" + (b"X\x00\x20\x00\x00" + b"a" * 8192 + b"Ns") * 2 + b".",
            "expected names of at most 4096 characters, got one of 8192; give what is in it shorter names",
        ),
        (
            b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\nq\x000)q\x010"
            + b"(h\x00Nh\x01Ntq\x010" * 3000
            + b"h\x00h\x01R.",
            "expected a whole pickle, got nonsense",
        ),
    ],
    ids=["arguments", "keywords", "name", "member", "many names", "keys", "rebuilt within itself"],
)
def test_what_would_be_copied_again_and_again_is_bounded(tmp_path: Path, pickled: bytes, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        open_torch_zip(save_pickle(tmp_path / "x.pt", pickled))


def test_a_memo_index_of_four_billion_takes_no_memory(tmp_path: Path) -> None:
    content = open_torch_zip(save_pickle(tmp_path / "x.pt", b"\x80\x02Nr\xff\xff\xff\xff0j\xff\xff\xff\xff.")).content
    assert content is None


def test_ten_thousand_levels_of_nesting_are_read_without_recursion(tmp_path: Path) -> None:
    content = open_torch_zip(save_pickle(tmp_path / "x.pt", b"\x80\x02N" + b"\x85" * 10_000 + b".")).content
    depth = 0
    while content is not None:
        (content,), depth = content, depth + 1
    assert depth == 10_000


def test_other_formats_of_torch_are_refused_by_name(tmp_path: Path) -> None:
    legacy = save(tmp_path / "legacy.pt", {"w": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(
        CheckpointError, match=r"got the format before torch 1\.6; if it is a checkpoint, load and save"
    ):
        open_torch_zip(legacy)
    with tarfile.open(tmp_path / "old.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("pickle"))
    with pytest.raises(CheckpointError, match=r"got a tar file, the format before torch 0\.1\.10"):
        open_torch_zip(tmp_path / "old.tar")
    with pytest.warns(DeprecationWarning, match="jit"):
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "script.pt"))
    with pytest.raises(CheckpointError, match=r"expected an archive by torch.save, got a TorchScript program"):
        open_torch_zip(tmp_path / "script.pt")
    (tmp_path / "short.pt").write_bytes(b"weights")
    with pytest.raises(CheckpointError, match="got 7 bytes of something else; if it is a checkpoint, load and save"):
        open_torch_zip(tmp_path / "short.pt")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "got an empty file; copy the checkpoint again, or use the one before it"),
        (bytes(5_000), "got zeros; copy the checkpoint again, or use the one before it"),
    ],
    ids=["empty", "zeros"],
)
def test_a_file_without_its_content_is_refused_with_a_remedy_that_helps(
    content: bytes, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(told)):
        open_torch_zip(path)


def test_a_tensors_name_that_is_too_long_is_named_as_that(tmp_path: Path) -> None:
    for state in ({"x" * 300_000: torch.ones(2)}, torch.nn.ModuleDict({"x" * 300_000: torch.nn.PReLU()}).state_dict()):
        with pytest.raises(CheckpointError, match="expected names of at most 4096 characters, got one of 30000"):
            open_torch_zip(save(tmp_path / "x.pt", state))


def test_a_file_of_another_byte_order_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
        archive.writestr("archive/byteorder", "big")
    with pytest.raises(CheckpointError, match="with another byte order: expected little, got 'big'"):
        open_torch_zip(path)


def test_a_file_saved_without_checksums_is_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = save(tmp_path / "x.pt", {"w": torch.ones(3)})
    finally:
        torch.serialization.set_crc32_options(before)
    opened = open_torch_zip(path)
    assert [block.crc32 for block in opened.storages.values()] == [None]
    assert torch.equal(opened.content["w"].to_torch(), torch.ones(3))


def test_an_archive_within_a_file_is_read_at_its_place(tmp_path: Path) -> None:
    inner = save(tmp_path / "x.pt", {"w": torch.arange(5.0)}).read_bytes()
    outer = tmp_path / "outer"
    outer.write_bytes(b"before" + inner + b"after")
    opened = open_torch_zip(outer, start=6, length=len(inner))
    assert torch.equal(opened.content["w"].to_torch(), torch.arange(5.0))
    with pytest.raises(CheckpointError, match="is not an intact torch archive at byte 6"):
        open_torch_zip(outer, start=6, length=len(inner) + 1)


def test_tensors_that_are_no_byte_ranges_become_records(tmp_path: Path) -> None:
    saved = {"sparse": torch.eye(3).to_sparse(), "complex": torch.ones(2, dtype=torch.complex64)}
    content = open_torch_zip(save(tmp_path / "x.pt", saved)).content
    assert all(isinstance(value, Record) and "ensor" in value.type_name for value in content.values())


def test_element_types_are_torchs_own() -> None:
    for element in BY_NAME.values():
        assert isinstance(element, ElementType)
        assert element.to_torch().itemsize == element.itemsize
        assert element.to_torch().is_floating_point == element.is_floating_point


def test_a_stored_tensor_is_cut_only_within_its_elements(tmp_path: Path) -> None:
    tensor: StoredTensor = open_torch_zip(save(tmp_path / "x.pt", torch.arange(10.0))).content
    part = tensor.take(4, (3,))
    assert part.to_torch().tolist() == [4, 5, 6]
    with pytest.raises(CheckpointError, match="is too short: expected elements 4 to 11, row-major, got 10 elements"):
        tensor.cut(4, 11)


class Npu:
    """Pickled as torch_npu pickles a tensor of an Ascend device: by its own function, and a format behind it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self.tensor
        place = (tensor._typed_storage(), tensor.storage_offset(), tuple(tensor.size()), tensor.stride())
        return sys.modules["torch_npu.utils.storage"]._rebuild_npu_tensor, (*place, False, {}, 29)


@pytest.mark.parametrize("device", ["npu:0", "xpu:0", "hpu", "maia:3", "a device of 2031"])
def test_a_storage_of_any_device_is_read(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch_npu.utils.storage")
    exec("def _rebuild_npu_tensor(*args): ...", module.__dict__)
    module._rebuild_npu_tensor.__module__ = module.__name__
    for name in ("torch_npu", "torch_npu.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    # What torch itself writes is then of that device.
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: device)
    plain, view = torch.randn(3, 4), torch.randn(4, 6)[1:, ::2]
    from_cpu = (torch._utils._rebuild_device_tensor_from_cpu_tensor, (plain, plain.dtype, device, False))
    whole = type("Whole", (), {"__reduce__": lambda self: from_cpu})()
    torch.save({"plain": plain, "npu": Npu(plain), "view": Npu(view), "whole": whole}, tmp_path / "x.pt")
    monkeypatch.undo()
    content = open_torch_zip(tmp_path / "x.pt").content
    for name, expected in {"plain": plain, "npu": plain, "view": view, "whole": plain}.items():
        assert torch.equal(content[name].to_torch(), expected), name
