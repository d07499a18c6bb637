"""The layers that stand in several places of DeepSpeed's pipelines, by what the stages trained of them.

DeepSpeed (0.19.8, runtime/pipe/module.py, `_index_tied_modules`) builds such a layer in every stage that has a place of
it. There the optimizer names what it trains `tied_modules.KEY.`, in whichever places the layer stands. Only the weights
that the layer's `TiedLayerSpec` names are kept the same in all stages; each stage trains its own of the others. Of a
place that is a function of the layer, such as a head of the first layer's embeddings, there is no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError, list_some
from ..remedies import GATHER_PIPELINE
from ..storage.second_copies import agrees
from ..storage.stored_tensor import StoredTensor

Tensors = Mapping[str, StoredTensor]

# What the optimizer calls such a layer: this, its key and the name within it.
TIED = "tied_modules."


@dataclass(frozen=True, kw_only=True)
class _Tied:
    """What one stage trained of a layer that stands in several places.

    Attributes:
        stage: The stage, from 0.
        key: What the trainer calls the layer.
        tensors: Name in the layer → fp32 tensor.
    """

    stage: int
    key: str
    tensors: Mapping[str, StoredTensor]

    def fits(self, layer: Tensors) -> bool:
        """Tell by names and sizes whether a layer may be this one."""
        return all(name in layer and layer[name].numel == tensor.numel for name, tensor in self.tensors.items())


@dataclass(frozen=True, kw_only=True)
class Lost:
    """What a stage has for itself of a layer, at a place for which DeepSpeed writes no file, such as a head.

    Attributes:
        stage: The stage, from 0.
        key: What the trainer calls the layer.
        home: Number of the layer whose file has the others.
        used: Names in the layer of what the stage trained, and used.
        idle: Of what it trained, and no gradient ever reached.
        untrained: Of buffers and frozen weights, which it may use.
    """

    stage: int
    key: str
    home: int
    used: Sequence[str]
    idle: Sequence[str]
    untrained: Sequence[str]

    def list_all(self, names: Sequence[str]) -> frozenset[str]:
        """Return names in the layer under those that the model has for them."""
        return frozenset(f"{self.home}.{name}" for name in names)

    def describe(self) -> list[str]:
        """Return what is lost, in words."""
        kinds = {
            "": self.used,
            "buffers and frozen weights that it may use, ": self.untrained,
            "what no gradient reached, ": self.idle,
        }
        return [
            f"a layer for what stage {self.stage} has of its own in {TIED}{self.key}: {kind}{list_some(names)}; "
            f"of layer {self.home} is given what that has"
            for kind, names in kinds.items()
            if names
        ]


def place(
    folder: Path, trained: Sequence[Tensors], low: Tensors, list_unused: Callable[[int, Sequence[str]], set[str]]
) -> tuple[dict[str, StoredTensor], list[Lost]]:
    """Find what was trained of each layer.

    A tied layer is found by its stage, names and sizes; where several may be it, by which of them agrees with the
    layer's own file, for which these are read.

    Args:
        folder: The checkpoint's, for messages.
        trained: Of each stage, what its optimizer names → fp32 tensor.
        low: Name in the layers, such as `3.weight` → tensor in training precision.
        list_unused: Returns what of that which the optimizer of a stage names never changed an answer.

    Returns:
        Name in the layers → fp32 tensor, and what of a tied layer is in no layer's file.

    Raises:
        CheckpointError: It is not known of which layer something is.
    """
    own = [{name: tensor for name, tensor in stage.items() if name in low} for stage in trained]
    placed = {name: tensor for stage in own for name, tensor in stage.items()}
    numbers = [{_split(name)[0] for name in stage} for stage in own]
    tied = [each for number, stage in enumerate(trained) for each in _group_tied(number, stage)]
    unplaced = [name for stage in trained for name in stage if name not in low and not name.startswith(TIED)]
    homes: dict[str, int] = {}
    with_file: set[tuple[int, str]] = set()
    for number, held in _group_layers(low).items():
        stages = _list_stages(number, numbers)
        fitting = [each for each in tied if each.stage in stages and each.fits(held)]
        if any(number in each for each in numbers) or not fitting:
            continue
        found = _choose(fitting, held)
        if found is None:
            unplaced += [f"{number}.{name}" for name in fitting[0].tensors]
            continue
        with_file.add((found.stage, found.key))
        homes.setdefault(found.key, number)
        placed |= {f"{number}.{name}": tensor for name, tensor in found.tensors.items()}
    unplaced += [f"{TIED}{each.key}.{name}" for each in tied if each.key not in homes for name in each.tensors]
    if unplaced:
        raise CheckpointError(
            f"it cannot be told which layers in {folder} have what the optimizer trained",
            expected="the names of its layers, or tied layers whose weights tell them apart",
            got=list_some(dict.fromkeys(unplaced)),
            remedy=GATHER_PIPELINE,
        )
    # Such as a head that is a function of the first layer's module: DeepSpeed writes no file for it.
    without = [each for each in tied if (each.stage, each.key) not in with_file]
    layers = _group_layers(low)
    return placed, [_find_lost(each, homes[each.key], layers, placed, list_unused) for each in without]


def _group_tied(stage: int, trained: Tensors) -> list[_Tied]:
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in trained.items():
        if name.startswith(TIED):
            key, _, end = name.removeprefix(TIED).partition(".")
            found.setdefault(key, {})[end] = tensor
    return [_Tied(stage=stage, key=key, tensors=tensors) for key, tensors in found.items()]


def _group_layers(low: Tensors) -> dict[int, dict[str, StoredTensor]]:
    layers: dict[int, dict[str, StoredTensor]] = {}
    for name, tensor in low.items():
        number, end = _split(name)
        layers.setdefault(number, {})[end] = tensor
    return layers


def _split(name: str) -> tuple[int, str]:
    number, _, end = name.partition(".")
    return int(number), end


def _list_stages(number: int, numbers: Sequence[set[int]]) -> range:
    """Return the stages that a layer may be of, by the other layers of each: they follow one another."""
    before = [stage for stage, layers in enumerate(numbers) if layers and min(layers) < number]
    behind = [stage for stage, layers in enumerate(numbers) if layers and max(layers) > number]
    return range(max(before, default=0), min(behind, default=len(numbers) - 1) + 1)


def _choose(fitting: Sequence[_Tied], held: Tensors) -> _Tied | None:
    """Return whose copies in training precision a layer's file holds; None where several differ and any may be."""
    if len(fitting) == 1:
        return fitting[0]
    agreeing = [each for each in fitting if not _list_different(each.tensors, held)]
    # Another class of module may be tied by some of its tensors: what is found for all of a layer is the layer's own.
    agreeing.sort(key=lambda each: -len(each.tensors))
    # Where none agrees, the first is refused with what differs as soon as the weights are read.
    first = (agreeing or fitting)[0]
    others = [{name: each.tensors[name] for name in each.tensors.keys() & first.tensors} for each in agreeing[1:]]
    return None if any(_list_different(each, first.tensors) for each in others) else first


def _list_different(masters: Tensors, others: Tensors) -> list[str]:
    """Return the names of fp32 tensors that do not agree with others of the same or lower precision; reads both."""
    return [name for name, tensor in masters.items() if not agrees(tensor.reshape(others[name].shape), others[name])]


def _find_lost(
    tied: _Tied,
    home: int,
    layers: Mapping[int, Tensors],
    placed: Tensors,
    list_unused: Callable[[int, Sequence[str]], set[str]],
) -> Lost:
    # A stage may have another class of module under the same key.
    common = {name: tensor for name, tensor in tied.tensors.items() if f"{home}.{name}" in placed}
    different = _list_different(common, {name: placed[f"{home}.{name}"] for name in common})
    different += [name for name in tied.tensors if name not in common]
    unused = list_unused(tied.stage, [f"{TIED}{tied.key}.{name}" for name in different])
    is_used = {name: f"{TIED}{tied.key}.{name}" not in unused for name in different}
    return Lost(
        stage=tied.stage,
        key=tied.key,
        home=home,
        used=[name for name in different if is_used[name]],
        idle=[name for name in different if not is_used[name]],
        untrained=[name for name in layers[home] if name not in tied.tensors],
    )
