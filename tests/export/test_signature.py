import torch

from export.signature import BATCH, PAST_LEN, SEQ_LEN, TensorSignature, split_dim


def test_a_dimension_that_is_a_sum_is_known_by_its_parts() -> None:
    mask = TensorSignature(name="mask", dtype=torch.int64, dims=(BATCH, f"{PAST_LEN}+{SEQ_LEN}", 4))
    assert mask.symbols == {BATCH, PAST_LEN, SEQ_LEN}
    assert mask.resolve_dims({BATCH: 2, PAST_LEN: 5, SEQ_LEN: 3}) == (2, 8, 4)
    assert mask.dynamic_axes == {0: BATCH, 1: "past_len+seq_len"}
    assert (split_dim("past_len+seq_len"), split_dim(SEQ_LEN), split_dim(4)) == ((PAST_LEN, SEQ_LEN), (SEQ_LEN,), ())
