"""Tables of tokens that a model uses for its inputs and its outputs, and of which an adapter changes one alone."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from ..checkpoints import StateDict, TensorSpec
from ..errors import AdapterError, list_some
from .peft_adapter import PeftAdapter
from .trained_model import TrainedModel, find_ends

# peft 0.21, utils/constants.py, EMBEDDING_LAYER_NAMES.
_TIED_LAYERS = ("embed_tokens", "lm_head")


def find_parted(adapter: PeftAdapter, model: TrainedModel) -> set[tuple[str, str]]:
    """Return the tables, each with the other, that are one in the model until the adapter changes one of them alone.

    In training the other one stays what it is. peft says no more than that merging "can lead to complications": its
    `merge_and_unload` changes both, and gives a model that was never trained.

    Raises:
        AdapterError: More than two are the same tensor, or peft was told to change both, and saved one.
    """
    changed = {*adapter.updates, *adapter.replaced}
    parted = set()
    for name in filter(model.is_matrix, changed):
        others = model.find_shared(name)
        if len(others) > 1:
            raise AdapterError(
                f"the adapter in {adapter.folder} changes {name} alone",
                expected="a tensor that the model uses in one place, or as the table of its inputs and its outputs",
                got=f"one that it shares with {list_some(others)}",
                remedy="train it without that table: to merge it, with peft as well, changes all of these",
            )
        # peft ties layers of these two names alone, whatever it was told.
        if others and adapter.ties and name.split(".")[-2] in _TIED_LAYERS and not changed.issuperset(others):
            raise AdapterError(
                f"the adapter in {adapter.folder} is not whole",
                expected=f"{list_some(others)} beside {name}, as ensure_weight_tying asks for",
                got="none",
                remedy="save it with the release of peft that trained it",
            )
        parted |= {pair for other in others for pair in ((name, other), (other, name))}
    return parted


def read_apart(weights: StateDict, adapter: PeftAdapter, pairs: Iterable[tuple[str, str]]) -> dict[str, Tensor]:
    """Return each table of a pair that the checkpoint does not have by its name, or has smaller, as it was before."""
    specs = weights.specs()
    apart = {}
    for name, other in pairs:
        stored, others = find_ends(name, specs), find_ends(other, specs)
        if name in adapter.replaced or (name in adapter.tables and stored):
            continue
        if name in adapter.tables:
            apart[name] = adapter.tables[name]
        elif other in adapter.tables:
            apart[stored[0] if stored else name] = adapter.tables[other]
        elif not stored and others:
            apart[name] = weights.read(others[0])
    return apart


def read_untied(
    weights: StateDict, adapter: PeftAdapter, model: TrainedModel, untied: TrainedModel
) -> dict[str, Tensor]:
    """Return what else is no longer one tensor in a model whose tables are apart, such as BERT's bias of the tokens.

    Raises:
        AdapterError: Its tables are one tensor still.
    """
    specs = weights.specs()
    apart = {}
    for name in model.shared:
        if untied.find_shared(name):
            if model.is_table(name):
                raise AdapterError(
                    f"the adapter in {adapter.folder} changes one of {list_some(model.tables)} alone",
                    expected="an architecture whose input and output embedding may differ",
                    got="one in which they are the same tensor always",
                    remedy="train it without that table: to merge it, with peft as well, changes both",
                )
            continue
        held = [each for other in model.find_shared(name) for each in find_ends(other, specs)]
        if held and not model.is_matrix(name) and not find_ends(name, specs) and name not in adapter.replaced:
            apart[name] = weights.read(held[0])
    return apart


def check_rows(
    folder: Path, model: TrainedModel, before: Mapping[str, TensorSpec], after: Mapping[str, TensorSpec]
) -> None:
    """Refuse tables of which the adapter holds one alone with rows for added tokens.

    Raises:
        AdapterError: Another has fewer.
    """
    named = [name for table in model.tables for name in find_ends(table, after)]
    rows = {name: after[name].shape[0] for name in named}
    known = {before[name].shape[0] for name in named if name in before}
    if len(known) <= 1 < len(set(rows.values())):
        raise AdapterError(
            f"the adapter in {folder} has added tokens in one table alone",
            expected="as many rows in each",
            got=", ".join(f"{name} {count}" for name, count in rows.items()),
            remedy="save it again with peft's save_embedding_layers=True, which saves each",
        )
