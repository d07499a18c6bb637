"""FSDP's full state dict in one file: every tensor whole, as rank 0 gathered it (FULL_STATE_DICT)."""

from __future__ import annotations

from pathlib import Path

from ...errors import CheckpointError, list_some
from ..pickles.torch_zip import open_torch_zip, refuse_foreign_tensors
from ..storage.paths import check_inside
from ..storage.stored_tensor import StoredTensor
from ..stored_checkpoint import StoredCheckpoint, find_tied

# What a module keeps beside its tensors, of any type (torch.nn.Module.get_extra_state).
EXTRA_STATE = "_extra_state"


def open_full_file(path: Path) -> StoredCheckpoint:
    """Return a reader for a file with the state dict of a model and nothing else, reading no tensor data.

    Names stay as they are in the file. Tensors without elements are the model's own: FSDP leaves no placeholders.

    Raises:
        CheckpointError: The file is damaged, or holds something else.
    """
    check_inside(path, path.parent)
    content = open_torch_zip(path).content
    state = content if isinstance(content, dict) else {}
    refuse_foreign_tensors(path, state)
    tensors = {str(name): value for name, value in state.items() if isinstance(value, StoredTensor)}
    others = [name for name in state if str(name) not in tensors and not str(name).endswith(EXTRA_STATE)]
    if others or not tensors:
        raise CheckpointError(
            f"{path} is not a full state dict",
            expected="names and tensors",
            got=f"other values under {list_some(others)}" if others else type(content).__name__,
            remedy="save the model's state dict alone",
        )
    return StoredCheckpoint(
        directory=path.parent,
        format_name="FSDP full state dict, 1 file",
        tensors=tensors,
        tied=find_tied(tensors),
        zero_size=frozenset(name for name, tensor in tensors.items() if 0 in tensor.shape),
        archives=(path,),
    )
