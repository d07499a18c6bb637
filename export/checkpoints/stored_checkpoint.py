"""A checkpoint whose every tensor is a range of bytes: what all readers of this package return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, list_some
from .state_dict import TensorSpec
from .storage import integrity
from .storage.file_state import FileState, refuse_any_changed
from .storage.second_copies import SecondCopy
from .storage.stored_tensor import StoredTensor
from .storage.zip_archive import StoredBlock, ZipArchive

if TYPE_CHECKING:
    import torch

# A tenth of a second on one core.
_MAX_BESIDE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """What the files say about themselves, beside the tensors; None or empty where they say nothing."""

    trainer: str | None = None
    world_size: int | None = None
    # DeepSpeed's ZeRO stage, 0 to 3.
    stage: int | None = None
    # Optimizer steps taken before the save.
    step: int | None = None
    # What a whole checkpoint of the format would have and this one lacks, or cannot show.
    missing: tuple[str, ...] = ()


@dataclass(kw_only=True)
class StoredCheckpoint:
    """A state dict as the trainer saved it, and the folder with what belongs to it.

    What the trainer's storage did (sharding, padding, pickling) is undone; nothing is resized or cast.


    Attributes:
        directory: The folder with `config.json` and the tokenizer's files.
        format_name: The on-disk format in words.
        tensors: Every name of the model → its bytes. Tied names appear each, with the same bytes.
        tied: Name → the name that holds its bytes.
        copies: Second copies of the model, each name → tensor, of the same or lower precision, that must agree.
        zero_size: Names that the trainer itself recorded as having no elements.
        buffer_names: Names that the trainer recorded as buffers, which no optimizer trains.
        config: What `config.json` would say, where the trainer's own files tell the architecture; None as a rule.
        facts: What the files say about themselves.
        unfiled: Names of tensors that another place in the model trained for itself, of which there is no file.
        unshared: Names of tensors of which another place may have its own, whatever shares them in a module; None where
            the files do not tell.
        archives: The files by `torch.save` among those that it was read from.
        allow_non_finite: Whether NaN and infinity are let through.
    """

    directory: Path
    format_name: str
    tensors: Mapping[str, StoredTensor]
    tied: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[Mapping[str, StoredTensor], ...] = ()
    zero_size: frozenset[str] = frozenset()
    buffer_names: frozenset[str] = frozenset()
    config: Mapping[str, Any] | None = None
    facts: CheckpointFacts = CheckpointFacts()
    unfiled: frozenset[str] = frozenset()
    unshared: frozenset[str] | None = frozenset()
    archives: tuple[Path, ...] = ()
    allow_non_finite: bool = False
    _verified: bool = False

    def __post_init__(self) -> None:
        empty = [name for name, tensor in self.tensors.items() if tensor.numel == 0 and name not in self.zero_size]
        if empty:
            raise CheckpointError(
                f"weights in {self.directory} are of size 0: {list_some(empty)}",
                expected="whole tensors",
                got="placeholders as ZeRO stage 3 leaves them in a model, or parameters that never had elements",
                remedy="after ZeRO stage 3, save with stage3_gather_16bit_weights_on_model_save or pass DeepSpeed's "
                "own checkpoint; otherwise, save the state dict without them",
            )
        if not self.tensors:
            raise CheckpointError(
                f"{self.directory} holds no tensors",
                expected="weights",
                got="none",
                remedy="save the model's state dict there, or pass the folder that holds it",
            )

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """Every file that tensor data is read from, sorted."""
        return tuple(sorted({part.block.path for tensor in self.tensors.values() for part in tensor.ranges}))

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that decides what is read: with those of second copies, and archives that hold no weights."""
        copies = {part.block.path for copy in self.copies for tensor in copy.values() for part in tensor.ranges}
        return tuple(sorted({*self.weight_files, *copies, *self.archives}))

    @property
    def opened(self) -> dict[Path, FileState]:
        """What every file that data is read from was as its header was read."""
        every = (self.tensors, *self.copies)
        blocks = (part.block for each in every for tensor in each.values() for part in tensor.ranges)
        return {block.path: block.file_state for block in blocks}

    def specs(self) -> Mapping[str, TensorSpec]:
        """Return name → shape and dtype of every tensor. Reads no tensor data."""
        return {
            name: TensorSpec(shape=tensor.shape, dtype=tensor.dtype.to_torch()) for name, tensor in self.tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Return one whole tensor on the CPU.

        The first call reads every byte of the checkpoint once, in bounded memory, and checks it (`verify`): nothing is
        handed out of a checkpoint that is damaged elsewhere.

        Raises:
            CheckpointError: The bytes cannot be read or fail a check.
        """
        self.verify()
        return self.tensors[name].to_torch()

    def verify(self) -> None:
        """Check every checksum, that floating-point weights are finite, that copies agree, and that no file changed.

        Raises:
            CheckpointError: Something is wrong, named.
        """
        if not self._verified:
            self.stream(None)
            self._verified = True

    def stream(self, sink: integrity.Sink | None) -> None:
        """Hand every part of every owned tensor to `sink`, and make every check of `verify` on the way.

        What `sink` got is only good when this returns.

        Raises:
            CheckpointError: Something is wrong, named.
        """
        copies = [
            SecondCopy(name=name, holder=self.tied.get(name, name), tensor=tensor, group=group)
            for group, members in enumerate(self.copies)
            for name, tensor in members.items()
            if name in self.tensors
        ]
        integrity.scan(
            self.owned(),
            copies=copies,
            beside=self._find_beside(),
            allow_non_finite=self.allow_non_finite,
            sink=sink,
        )
        # One shard may have been saved again after it was read, and before another was.
        refuse_any_changed(self.opened)

    def _find_beside(self) -> list[StoredBlock]:
        """Return what else lies in the archives, as far as checking it costs next to nothing.

        Damage there changes no weight: it tells that the copy of the checkpoint is bad. In a large checkpoint these are
        the optimizer's moments, twice the bytes of the weights, and looking at them would triple the time.
        """
        used = {part.block for tensor in self.tensors.values() for part in tensor.ranges}
        blocks = [block for path in self.archives for block in ZipArchive(path).blocks().values()]
        beside = [block for block in blocks if block not in used]
        return beside if sum(block.length for block in beside) <= _MAX_BESIDE_BYTES else []

    def owned(self) -> dict[str, StoredTensor]:
        """Return the tensors without the tied names: each byte of the model once."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.tied}


def find_tied(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return each name whose tensor is byte for byte the same range as an earlier name's → that name."""
    holders: dict[StoredTensor, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        if tensor.numel:
            holder = holders.setdefault(tensor, name)
            if holder != name:
                tied[name] = holder
    return tied
