"""What every kind of tensor on disk keeps to, whether its bytes lie in order, as a view or in boxes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from export.checkpoints.pickles.torch_zip import open_torch_zip
from export.checkpoints.storage.assembled_tensor import AssembledTensor, Box, assemble, transpose
from export.checkpoints.storage.byte_ranges import OpenFiles
from export.checkpoints.storage.dtypes import FLOAT32
from export.checkpoints.storage.stored_tensor import ContiguousTensor, StoredTensor, read_unchecked
from export.checkpoints.storage.strided_tensor import StridedTensor
from export.errors import CheckpointError

WHOLE = torch.arange(7 * 9, dtype=torch.float32).reshape(7, 9)


def store(path: Path, tensor: torch.Tensor) -> StoredTensor:
    torch.save(tensor, path)
    stored = open_torch_zip(path).content
    assert isinstance(stored, StoredTensor)
    return stored


def shard(folder: Path, whole: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> list[Box]:
    """Store `whole` in two halves of its columns, each as `view` gives it."""
    halves = ((0, whole[:, :5]), (5, whole[:, 5:]))
    return [Box((0, start), store(folder / f"{start}.pt", view(half))) for start, half in halves]


def make_boxes(folder: Path) -> StoredTensor:
    return assemble((7, 9), FLOAT32, shard(folder, WHOLE, lambda half: half.contiguous()), name="w")


# Each makes a tensor equal to `WHOLE`.
KINDS: dict[str, tuple[type[StoredTensor], Callable[[Path], StoredTensor]]] = {
    "contiguous": (ContiguousTensor, lambda folder: store(folder / "w.pt", WHOLE)),
    "strided": (StridedTensor, lambda folder: store(folder / "w.pt", WHOLE.repeat_interleave(2, dim=1)[:, ::2])),
    "boxes": (AssembledTensor, make_boxes),
    "transposed": (AssembledTensor, lambda folder: store(folder / "w.pt", WHOLE.T.contiguous().T)),
    "boxes transposed": (AssembledTensor, lambda folder: transpose(
        assemble((9, 7), FLOAT32, shard(folder, WHOLE.T, lambda half: half.contiguous()), name="w")
    )),
    "transposed boxes": (AssembledTensor, lambda folder: assemble(
        (7, 9), FLOAT32, shard(folder, WHOLE, lambda half: half.T.contiguous().T), name="w"
    )),
}  # fmt: skip


@pytest.fixture(params=KINDS)
def tensor(request: pytest.FixtureRequest, tmp_path: Path) -> StoredTensor:
    kind, make = KINDS[request.param]
    made = make(tmp_path)
    assert type(made) is kind
    return made


def test_chunks_are_the_elements_row_after_row(tensor: StoredTensor) -> None:
    for size in (1, 50, 1 << 20):
        assert b"".join(tensor.chunks(size)) == WHOLE.numpy().tobytes()
    assert tensor.to_torch().equal(WHOLE)


def test_pieces_are_every_element_once_wherever_they_lie(tensor: StoredTensor) -> None:
    found, arrived = bytearray(tensor.nbytes), 0
    with OpenFiles() as files:
        for position, piece in tensor.pieces(read_unchecked(files, tensor.runs)):
            found[position : position + len(piece)] = piece
            arrived += len(piece)
    assert found == WHOLE.numpy().tobytes() and arrived == tensor.nbytes


def test_runs_are_what_is_read(tensor: StoredTensor) -> None:
    assert tuple(part for run in tensor.runs for part in run.ranges) == tensor.ranges
    assert tensor.is_all_of_its_runs == (sum(run.numel for run in tensor.runs) == tensor.numel)


def test_elements_are_cut_out_or_it_is_said_that_they_do_not_lie_in_order(tensor: StoredTensor) -> None:
    if isinstance(tensor, ContiguousTensor):
        assert tensor.take(10, (2, 3)).to_torch().equal(WHOLE.flatten()[10:16].reshape(2, 3))
        assert tensor.reshape((9, 7)).to_torch().equal(WHOLE.reshape(9, 7))
        return
    for cut in (lambda: tensor.cut(10, 16), lambda: tensor.take(0, (1,)), lambda: tensor.reshape((9, 7))):
        with pytest.raises(CheckpointError, match=r"must lie in order: expected .*; call contiguous\(\) on it"):
            cut()


def test_a_matrix_transposed_twice_is_the_matrix(tensor: StoredTensor) -> None:
    if isinstance(tensor, StridedTensor):
        with pytest.raises(CheckpointError, match=r"saved as views: expected contiguous shards, or all of them trans"):
            transpose(tensor)
        return
    turned = transpose(tensor)
    assert turned.to_torch().equal(WHOLE.T)
    assert transpose(turned) == tensor


def test_shards_that_are_views_of_any_other_kind_are_refused(tmp_path: Path) -> None:
    boxes = shard(tmp_path, WHOLE, lambda half: half.repeat_interleave(2, dim=1)[:, ::2])
    with pytest.raises(CheckpointError, match=r"w has shards in .*0\.pt that were saved as views: .* strides of"):
        assemble((7, 9), FLOAT32, boxes, name="w")
