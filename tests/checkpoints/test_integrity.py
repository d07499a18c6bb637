"""The one pass over a checkpoint's bytes, in segments and bands as small as a model of many gigabytes has."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from export.checkpoints.pickles.torch_zip import open_torch_zip
from export.checkpoints.storage import assembled_tensor, integrity, stored_tensor, strided_tensor
from export.checkpoints.storage.assembled_tensor import Box, assemble, transpose
from export.checkpoints.storage.byte_ranges import OpenFiles
from export.checkpoints.storage.dtypes import FLOAT32
from export.checkpoints.storage.second_copies import SecondCopy
from export.checkpoints.storage.stored_tensor import StoredTensor
from export.checkpoints.storage.zip_archive import StoredBlock
from export.errors import CheckpointError

ROWS, WIDTH = 37, 24


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "CHUNK_BYTES", 256)
    monkeypatch.setattr(integrity, "_SEGMENT_BYTES", 1024)
    monkeypatch.setattr(assembled_tensor, "CHUNK_BYTES", 256)
    monkeypatch.setattr(assembled_tensor, "BAND_BYTES", 8 * WIDTH * 4)
    monkeypatch.setattr(stored_tensor, "CHUNK_BYTES", 256)
    monkeypatch.setattr(strided_tensor, "CHUNK_BYTES", 256)


def spoil(path: Path, content: bytes | bytearray) -> None:
    """Write other bytes as a disk that fails does: nothing but them tells."""
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def store(path: Path, content: object) -> dict[str, StoredTensor]:
    torch.save(content, path)
    found = open_torch_zip(path).content
    assert isinstance(found, dict)
    return found


def make(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, torch.Tensor], list[SecondCopy]]:
    """One flat storage that everything is cut out of, as ZeRO leaves it, and copies in 16 bits."""
    flat = torch.randn(3 * ROWS * WIDTH + 5, generator=torch.Generator().manual_seed(1))
    first, second, third = flat[5:].view(3, ROWS, WIDTH)
    truth = {"bias": flat[:5], "turned": first.T, "joined": torch.cat([second, third], dim=1)}
    stored = store(folder / "pieces.pt", {"flat": flat, "bias": flat[:5], "a": first, "b": second, "c": third})
    boxes = [Box((0, 0), stored["b"]), Box((0, WIDTH), stored["c"])]
    tensors = {
        "bias": stored["bias"],
        "turned": transpose(stored["a"]),
        "joined": assemble((ROWS, 2 * WIDTH), FLOAT32, boxes, name="joined"),
    }
    low = store(folder / "low.pt", {name: tensor.bfloat16() for name, tensor in (("a", first), ("b", second))})
    whole = store(folder / "whole.pt", {"joined": truth["joined"].bfloat16()})
    copies = [
        SecondCopy(name="turned", holder="turned", tensor=transpose(low["a"]), group=0),
        SecondCopy(name="joined", holder="joined", tensor=whole["joined"], group=1),
    ]
    return tensors, truth, copies


@pytest.mark.parametrize("large_rows", [False, True])
def test_every_byte_arrives_once_where_it_belongs(
    tmp_path: Path, large_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large_rows:
        monkeypatch.setattr(assembled_tensor, "CHUNK_BYTES", 64)
    tensors, truth, copies = make(tmp_path)
    found = {name: bytearray(tensor.nbytes) for name, tensor in tensors.items()}
    arrived = dict.fromkeys(tensors, 0)

    def sink(name: str, position: int, part: memoryview) -> None:
        found[name][position : position + len(part)] = part
        arrived[name] += len(part)

    integrity.scan(tensors, copies=copies, sink=sink)
    for name, tensor in truth.items():
        assert found[name] == tensor.contiguous().numpy().tobytes(), name
        assert arrived[name] == tensors[name].nbytes
    integrity.scan(tensors, copies=copies)


def test_a_bit_flipped_anywhere_is_found(tmp_path: Path) -> None:
    tensors, _, copies = make(tmp_path)
    block = tensors["bias"].ranges[0].block
    whole = block.path.read_bytes()
    for position in range(0, block.length, 331):
        content = bytearray(whole)
        content[block.offset + position] ^= 1
        spoil(block.path, content)
        with pytest.raises(CheckpointError, match=r"is damaged in pieces/data/0: expected CRC-32"):
            integrity.scan(tensors, copies=copies)


@pytest.mark.parametrize("name", ["turned", "joined"])
def test_a_copy_that_differs_anywhere_is_found(tmp_path: Path, name: str) -> None:
    tensors, _, copies = make(tmp_path)
    (copy,) = (copy for copy in copies if copy.name == name)
    block = copy.tensor.ranges[0].block
    whole = block.path.read_bytes()
    for position in range(0, block.length, 61):
        content = bytearray(whole)
        content[block.offset + position] ^= 1 << position % 8
        spoil(block.path, content)
        with pytest.raises(CheckpointError, match=f"disagree with the bfloat16 copy in .* on {name}: expected"):
            integrity.scan(tensors, copies=copies)
    spoil(block.path, whole)
    integrity.scan(tensors, copies=copies)


def test_what_two_tensors_share_is_checked_once(tmp_path: Path) -> None:
    tensors, truth, _ = make(tmp_path)
    tensors |= {"again": tensors["turned"]}
    integrity.scan(tensors)
    assert tensors["again"].to_torch().equal(truth["turned"])


def test_values_that_are_not_finite_are_counted_wherever_they_lie(tmp_path: Path) -> None:
    weight = torch.ones(ROWS, WIDTH)
    weight[ROWS - 1, 3] = torch.nan
    weight[20, 0] = torch.inf
    tensors = {"turned": transpose(store(tmp_path / "x.pt", {"w": weight})["w"])}
    with pytest.raises(CheckpointError, match="are NaN or infinite: turned: expected finite numbers, got 2 elements"):
        integrity.scan(tensors)
    integrity.scan(tensors, allow_non_finite=True)


# How a weight is saved that is a view: a transpose, some columns, every second element, a stack of transposes, what
# torch.channels_last makes of a convolution, a band of a transpose, the same row again and again.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda flat: flat[: ROWS * WIDTH].view(ROWS, WIDTH).T,
    "columns": lambda flat: flat[: ROWS * WIDTH].view(ROWS, WIDTH)[:, 3:9],
    "steps": lambda flat: flat[1::2],
    "stacked": lambda flat: flat[: 4 * 6 * 24].view(4, 24, 6).transpose(1, 2),
    "one": lambda flat: flat[: 6 * 24].view(1, 24, 6).transpose(1, 2),
    "channels last": lambda flat: flat[: 8 * 3 * 3 * 7].view(8, 3, 3, 7).permute(0, 3, 1, 2),
    "reversed": lambda flat: flat[: 4 * 6 * 24].view(4, 6, 24).permute(2, 1, 0),
    "band": lambda flat: flat[: ROWS * WIDTH].view(ROWS, WIDTH)[:, 3:9].T,
    "again": lambda flat: flat[: 6 * 24].view(6, 24).unsqueeze(1).expand(6, 3, 24),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_are_read_once_in_the_order_of_their_rows(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = VIEWS[kind](torch.randn(ROWS * WIDTH, generator=torch.Generator().manual_seed(1)))
    tensors = store(tmp_path / "view.pt", {"view": view})
    block = tensors["view"].ranges[0].block
    found, arrived, read = bytearray(view.nbytes), 0, [0] * block.length
    read_into = OpenFiles.read_into

    def count(self: OpenFiles, block: StoredBlock, start: int, buffer: memoryview) -> None:
        read[start : start + len(buffer)] = [times + 1 for times in read[start : start + len(buffer)]]
        read_into(self, block, start, buffer)

    def sink(_: str, position: int, part: memoryview) -> None:
        nonlocal arrived
        found[position : position + len(part)] = part
        arrived += len(part)

    monkeypatch.setattr(OpenFiles, "read_into", count)
    integrity.scan(tensors, sink=sink)
    assert found == view.contiguous().numpy().tobytes() and arrived == view.nbytes
    # What is handed on is what the checksum is of, not another reading of the same place.
    assert set(read) == {1}
    assert tensors["view"].to_torch().equal(view)
    assert b"".join(tensors["view"].chunks(100)) == found


@pytest.mark.parametrize("kind", VIEWS)
def test_views_that_are_damaged_or_cut_off_are_refused(tmp_path: Path, kind: str) -> None:
    view = VIEWS[kind](torch.ones(ROWS * WIDTH))
    tensors = store(tmp_path / "view.pt", {"view": view})
    block = tensors["view"].ranges[0].block
    whole = block.path.read_bytes()
    for position in (0, block.length // 2, block.length - 1):
        content = bytearray(whole)
        content[block.offset + position] ^= 1
        spoil(block.path, content)
        with pytest.raises(CheckpointError, match=r"is damaged in view/data/0: expected CRC-32"):
            integrity.scan(tensors)
    # As by another process, between the look at the directory and the reading.
    block.path.write_bytes(whole[: block.offset + 100])
    with pytest.raises(CheckpointError, match=r"view\.pt was written while it was read"):
        integrity.scan(tensors, sink=lambda *_: None)
    with pytest.raises(CheckpointError, match=r"view\.pt was written while it was read"):
        tensors["view"].to_torch()


def test_views_that_would_have_to_be_whole_in_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strided_tensor, "_MAX_WINDOW_BYTES", 2000)
    tensors = store(tmp_path / "view.pt", {"view": VIEWS["reversed"](torch.ones(ROWS * WIDTH))})
    with pytest.raises(
        CheckpointError, match=r"not read at its size: .* got shape \[24, 6, 4\], stride \[1, 24, 144\]"
    ):
        integrity.scan(tensors)
