"""The weights that a trainer gathered beside the shards of its checkpoint: a second copy, under names of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...errors import list_some
from ..storage.stored_tensor import StoredTensor
from ..wrapper_names import strip_wrappers
from . import huggingface


def match_gathered(directory: Path, names: Mapping[str, str]) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Return the gathered copy under the model's names, and what of it could not be matched, in words.

    Args:
        directory: The folder with the gathered copy, if there is one.
        names: Name in the shards → name in the model, without wrappers.

    Raises:
        CheckpointError: The copy's files are damaged, or two of its names become one without wrappers.
    """
    gathered = huggingface.read_gathered(directory)
    stripped, _ = strip_wrappers(gathered, directory)
    # As the shards have it, where they have it: a copy that lacks a tied name may seem to have a prefix more.
    matched = {names.get(name, stripped[name]): tensor for name, tensor in gathered.items()}
    known = set(names.values())
    unmatched = [name for name in matched if name not in known]
    if not unmatched:
        return matched, ()
    return matched, (
        f"a comparison with the gathered copy on {list_some(unmatched, 4)}: the shards have no such names",
    )
