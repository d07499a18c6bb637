from collections.abc import Mapping

import torch

from export.checkpoints import TensorSpec
from export.weights.transforms import AssignRows, CastToFloat32


class Memory:
    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for name, t in self.tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def test_rows_beyond_the_end_make_the_table_grow_and_keep_the_old_ones() -> None:
    table, other, rows = torch.randn(4, 3), torch.randn(2), torch.randn(2, 3)
    changed = AssignRows(source=Memory(table=table, other=other), name="table", start=4, rows=rows)
    assert changed.specs()["table"].shape == (6, 3)
    assert torch.equal(changed.read("table"), torch.cat([table, rows]))
    assert torch.equal(changed.read("other"), other)


def test_rows_inside_a_padded_table_replace_the_padding() -> None:
    table, rows = torch.randn(8, 3), torch.randn(2, 3)
    changed = AssignRows(source=Memory(table=table), name="table", start=4, rows=rows)
    assert changed.specs()["table"].shape == (8, 3)
    assert torch.equal(changed.read("table"), torch.cat([table[:4], rows, table[6:]]))


def test_casting_is_exact_and_leaves_integers_alone() -> None:
    half, count = torch.randn(5).to(torch.bfloat16), torch.arange(3)
    cast = CastToFloat32(source=Memory(half=half, count=count))
    assert cast.specs()["half"].dtype == cast.read("half").dtype == torch.float32
    assert torch.equal(cast.read("half").to(torch.bfloat16), half)
    assert cast.read("count").dtype == torch.int64
