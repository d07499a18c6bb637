"""One pass over the bytes of a checkpoint: checksums, finite values, second copies, and copying where they belong.

A CRC-32 covers a block as a whole, and a block may hold a whole rank's weights: it is read in segments by several
threads, whatever the tensors cut out of it, and their checksums are put together. Each part is checked and handed on as
it passes, so that nothing is read twice. Memory is a few chunks for each thread.
"""

from __future__ import annotations

import itertools
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from export.checkpoints.assembled_tensor import AssembledTensor, read_elements
from export.checkpoints.cast import cast_bytes, count_non_finite, equals_cast
from export.checkpoints.crc32 import combine_crc32
from export.checkpoints.dtypes import ElementType
from export.checkpoints.stored_tensor import (
    CHUNK_BYTES,
    THREADS,
    ByteRange,
    StoredTensor,
    read_range,
    reuse_memory,
)
from export.checkpoints.zip_archive import StoredBlock
from export.errors import CheckpointError, list_some

# What one thread reads of a block before another may go on: small enough that none has nothing to do at the end.
_SEGMENT_BYTES = 64 * CHUNK_BYTES
_WINDOW_ELEMENTS = 1 << 18

# Called with a tensor's name, the byte in the row-major tensor where the part begins, and the part.
Sink = Callable[[str, int, memoryview], None]


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A second copy of a tensor, of the same or lower precision.

    Attributes:
        name: What to call it in messages.
        holder: The name of the tensor that it is a copy of.
        tensor: Where it lies.
        group: Copies of one group are complained about together.
    """

    name: str
    holder: str
    tensor: StoredTensor
    group: int


@dataclass(frozen=True)
class _Use:
    """Where a range of a block belongs: `name`'s bytes from `target` on."""

    start: int
    stop: int
    name: str
    target: int
    dtype: ElementType


@dataclass
class _BlockPlan:
    """What is done with a block: ranges in the order of plain tensors, and others that assembled tensors read."""

    uses: list[_Use] = field(default_factory=list)
    claims: list[tuple[int, int]] = field(default_factory=list)

    def shares_claims(self) -> bool:
        """Tell whether bytes that an assembled tensor reads are also read for another tensor."""
        ranges = [(use.start, use.stop, False) for use in self.uses] + [(*claim, True) for claim in self.claims]
        end_of_all = end_of_claims = 0
        for start, stop, is_claim in sorted(ranges):
            if start < (end_of_all if is_claim else end_of_claims):
                return True
            end_of_all = max(end_of_all, stop)
            end_of_claims = max(end_of_claims, stop) if is_claim else end_of_claims
        return False


def scan(
    tensors: Mapping[str, StoredTensor],
    *,
    copies: Sequence[Copy] = (),
    beside: Iterable[StoredBlock] = (),
    allow_non_finite: bool = False,
    sink: Sink | None = None,
) -> None:
    """Read every block that `tensors` lie in, check it, and hand every part of every tensor to `sink`.

    Parts of one tensor may arrive in any order and from several threads at once. Blocks `beside` are checked as well.

    Raises:
        CheckpointError: A checksum is wrong, a file ends early, a weight is not finite, or a copy differs.
    """
    plans: dict[StoredBlock, _BlockPlan] = {block: _BlockPlan() for block in beside}
    for name, tensor in tensors.items():
        _plan(name, tensor, plans)
    for plan in plans.values():
        plan.uses.sort(key=lambda use: use.start)
        plan.claims.sort()
        if plan.shares_claims():
            # Then the checksum has a reading of its own.
            plan.claims.clear()
    scanner = _Scanner(tensors, copies, {block for block, plan in plans.items() if plan.claims}, sink)
    jobs: list[tuple[int, Callable[[], None]]] = []
    for block, plan in plans.items():
        jobs += scanner.list_segments(block, plan)
    for name, tensor in tensors.items():
        if tensor.stride is not None:
            jobs.append((tensor.nbytes, scanner.make_job(name, tensor)))
    jobs += [(copy.tensor.nbytes, scanner.make_comparison(copy)) for copy in scanner.unpaired]
    jobs.sort(key=lambda job: -job[0])
    _run([job for _, job in jobs], scanner.stopped)
    for block in plans:
        scanner.check_crc32(block)
    if scanner.non_finite and not allow_non_finite:
        refuse_non_finite(tensors, scanner.non_finite)
    if scanner.differing:
        _refuse_different(tensors, copies, scanner.differing)


def _plan(name: str, tensor: StoredTensor, plans: dict[StoredBlock, _BlockPlan]) -> None:
    """Add what `tensor` needs of each block to `plans`."""
    position = 0
    claimed = isinstance(tensor, AssembledTensor) and all(box.part.stride is None for box in tensor.boxes)
    for part in tensor.ranges:
        plan = plans.setdefault(part.block, _BlockPlan())
        stop = part.start + part.length
        if tensor.stride is None:
            plan.uses.append(_Use(part.start, stop, name, position, tensor.dtype))
        elif claimed:
            plan.claims.append((part.start, stop))
        position += part.length


def _run(jobs: Iterable[Callable[[], None]], stopped: threading.Event) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        running = [pool.submit(job) for job in jobs]
        try:
            for job in running:
                job.result()
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


def refuse_non_finite(tensors: Mapping[str, StoredTensor], bad: Mapping[str, int]) -> None:
    """Raise for tensors with NaN or infinite elements.

    Raises:
        CheckpointError: Always.
    """
    paths = {part.block.path for name in bad for part in tensors[name].ranges}
    raise CheckpointError(
        f"weights in {list_some(paths)} are NaN or infinite: {list_some(bad)}",
        expected="finite numbers",
        got=f"{sum(bad.values())} elements that are not",
        remedy="use a checkpoint from before the training diverged, or pass --allow-non-finite",
    )


def _refuse_different(
    tensors: Mapping[str, StoredTensor], copies: Sequence[Copy], differing: set[tuple[int, str]]
) -> None:
    """Raise for the first group of copies in which one is not its tensor, cast to the copy's dtype.

    Stages 1 and 2 of ZeRO keep the weights of the forward pass beside the fp32 pieces, and these are cast from those
    after every step. A rank file that is swapped, doubled or from another step cannot pass this.
    """
    group = min(number for number, _ in differing)
    alike = [copy for copy in copies if copy.group == group]
    wrong = [copy for copy in alike if (group, copy.name) in differing]
    ours = {part.block.path for copy in wrong for part in tensors[copy.holder].ranges}
    theirs = {part.block.path for copy in wrong for part in copy.tensor.ranges}
    raise CheckpointError(
        f"the pieces in {list_some(ours, 4)} disagree with the {wrong[0].tensor.dtype.name} copy in"
        f" {list_some(theirs, 4)} on {list_some(copy.name for copy in wrong)}",
        expected=f"the same {len(alike)} weights in both",
        got=f"{len(wrong)} that differ",
        remedy="a rank file is swapped, doubled, damaged or from another step; copy the checkpoint again",
    )


class _Scanner:
    """Reads blocks and tensors in several threads, until one fails or the main thread is interrupted."""

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        copies: Sequence[Copy],
        claimed: set[StoredBlock],
        sink: Sink | None,
    ) -> None:
        self._tensors = tensors
        self._claimed = claimed
        self._sink = sink
        self._lock = threading.Lock()
        # Block → (start, stop, CRC-32) of what was read of it.
        self._read: dict[StoredBlock, list[tuple[int, int, int]]] = {}
        self.stopped = threading.Event()
        # Name → how many of its elements are NaN or infinite.
        self.non_finite: dict[str, int] = {}
        # (group, name) of copies that are not their tensors.
        self.differing: set[tuple[int, str]] = set()
        # Copies that cannot be looked at while their tensors pass, because they are cut otherwise.
        self.unpaired: list[Copy] = []
        # Name → copies and, for each, the parts that lie as those of the tensor do: its boxes, or itself.
        self._pairs: dict[str, list[tuple[Copy, list[StoredTensor]]]] = {}
        for copy in copies:
            parts = _pair(tensors[copy.holder], copy.tensor)
            if parts is None:
                self.unpaired.append(copy)
            else:
                self._pairs.setdefault(copy.holder, []).append((copy, parts))

    def list_segments(self, block: StoredBlock, plan: _BlockPlan) -> list[tuple[int, Callable[[], None]]]:
        """Return (bytes, job) for all of the block that no assembled tensor reads."""
        jobs: list[tuple[int, Callable[[], None]]] = []
        borders = [0, *itertools.chain.from_iterable(plan.claims), block.length]
        for first, last in zip(borders[::2], borders[1::2], strict=True):
            for start in range(first // _SEGMENT_BYTES * _SEGMENT_BYTES, last, _SEGMENT_BYTES):
                own, stop = max(start, first), min(start + _SEGMENT_BYTES, last)
                uses = [use for use in plan.uses if use.start < stop and use.stop > own]
                jobs.append((stop - own, _Job(self._scan_segment, block, own, stop, uses)))
        return jobs

    def make_job(self, name: str, tensor: StoredTensor) -> Callable[[], None]:
        """Return a job that reads a tensor that is not row-major."""
        if isinstance(tensor, AssembledTensor):
            return _Job(self._scan_assembled, name, tensor)
        return _Job(self._scan_strided, name, tensor)

    def make_comparison(self, copy: Copy) -> Callable[[], None]:
        """Return a job that reads a copy and its tensor once more, to compare them."""
        return _Job(self._compare, copy)

    def check_crc32(self, block: StoredBlock) -> None:
        """Put together what was read of `block`.

        Raises:
            CheckpointError: Its bytes are not those that were saved.
        """
        if block.crc32 is None:
            return
        crc32, position = 0, 0
        for start, stop, part in sorted(self._read.get(block, ())):
            assert start == position, "Bug: a part of a block was not read, or read twice"
            crc32, position = combine_crc32(crc32, part, stop - start), stop
        assert position == block.length, "Bug: the end of a block was not read"
        if crc32 != block.crc32:
            raise CheckpointError(
                f"{block.path} is damaged in {block.name}",
                expected=f"CRC-32 {block.crc32:08x}",
                got=f"{crc32:08x}",
                remedy="copy the checkpoint again, or use the one before it",
            )

    def _scan_segment(self, block: StoredBlock, start: int, stop: int, uses: list[_Use]) -> None:
        buffer = reuse_memory("chunk", CHUNK_BYTES)
        crc32, position = 0, start
        # The uses that may reach into the chunk at hand: those before `first` are done with.
        first = 0
        with _open_block(block) as file:
            while position < stop and not self.stopped.is_set():
                # Chunks end at multiples of their size, which every element size divides.
                end = min(stop, position - position % CHUNK_BYTES + CHUNK_BYTES)
                chunk = buffer[: end - position]
                _read_into(file, block, position, chunk)
                if block.crc32 is not None:
                    crc32 = zlib.crc32(chunk, crc32)
                while first < len(uses) and uses[first].stop <= position:
                    first += 1
                for use in itertools.islice(uses, first, None):
                    if use.start >= end:
                        break
                    begin, finish = max(use.start, position), min(use.stop, end)
                    if begin < finish:
                        part = chunk[begin - position : finish - position]
                        target = use.target + begin - use.start
                        self._check(use.name, 0, target, part, use.dtype)
                        if self._sink is not None:
                            self._sink(use.name, target, part)
                position = end
        self._add_crc32(block, start, stop, crc32)

    def _scan_assembled(self, name: str, tensor: AssembledTensor) -> None:
        # Box → (block, start, stop, CRC-32) of the bytes read last that follow one another.
        runs: dict[int, tuple[StoredBlock, int, int, int]] = {}

        def read(index: int, start: int, stop: int) -> Any:
            part, size = tensor.boxes[index].part, tensor.dtype.itemsize
            if part.stride is not None:
                elements = read_elements(part, start, stop)
                self._check(name, index, start * size, elements.view(np.uint8).data, tensor.dtype)
                return elements
            content = reuse_memory("chunk", (stop - start) * size)
            position = 0
            for window in part.cut(start, stop):
                chunk = content[position : position + window.length]
                with _open_block(window.block) as file:
                    _read_into(file, window.block, window.start, chunk)
                if window.block.crc32 is not None and window.block in self._claimed:
                    self._continue_run(runs, index, window, chunk)
                position += window.length
            self._check(name, index, start * size, content, tensor.dtype)
            return np.frombuffer(content, f"u{size}")

        if self._sink is None:
            # Nobody asks for the tensor, so nothing is put together.
            for index, box in enumerate(tensor.boxes):
                step = CHUNK_BYTES // tensor.dtype.itemsize
                for start in range(0, box.part.numel if not self.stopped.is_set() else 0, step):
                    read(index, start, min(box.part.numel, start + step))
        else:
            for position, piece in tensor.pieces(read):
                if self.stopped.is_set():
                    return
                self._sink(name, position, piece)
        for run in runs.values():
            self._add_crc32(*run)

    def _continue_run(
        self, runs: dict[int, tuple[StoredBlock, int, int, int]], index: int, window: ByteRange, chunk: memoryview
    ) -> None:
        """Add `chunk`, the bytes of `window`, to the run of a box, or begin another where it does not follow."""
        block, start, stop, crc32 = runs.get(index) or (window.block, window.start, window.start, 0)
        if (block, stop) != (window.block, window.start):
            self._add_crc32(block, start, stop, crc32)
            block, start, crc32 = window.block, window.start, 0
        runs[index] = (block, start, window.start + window.length, zlib.crc32(chunk, crc32))

    def _scan_strided(self, name: str, tensor: StoredTensor) -> None:
        position = 0
        for chunk in tensor.chunks():
            if self.stopped.is_set():
                return
            part = memoryview(chunk)
            self._check(name, 0, position, part, tensor.dtype)
            if self._sink is not None:
                self._sink(name, position, part)
            position += len(chunk)

    def _check(self, name: str, index: int, position: int, part: memoryview, dtype: ElementType) -> None:
        """Check bytes of `name`, from `position` on of its box `index` or of itself, and its copies there."""
        count = count_non_finite(part, dtype)
        if count:
            with self._lock:
                self.non_finite[name] = self.non_finite.get(name, 0) + count
        for copy, parts in self._pairs.get(name, ()):
            if (copy.group, copy.name) not in self.differing:
                twin = parts[index]
                start, stop = position // dtype.itemsize, (position + len(part)) // dtype.itemsize
                content = reuse_memory("copy", (stop - start) * twin.dtype.itemsize)
                filled = 0
                for window in twin.cut(start, stop):
                    with _open_block(window.block) as file:
                        _read_into(file, window.block, window.start, content[filled : filled + window.length])
                    filled += window.length
                if not equals_cast(part, dtype, content, twin.dtype):
                    self.differing.add((copy.group, copy.name))

    def _compare(self, copy: Copy) -> None:
        tensor = self._tensors[copy.holder]
        same = tensor.shape == copy.tensor.shape
        for ours, theirs in zip(_read_windows(tensor), _read_windows(copy.tensor), strict=True) if same else ():
            if self.stopped.is_set():
                return
            same = same and cast_bytes(ours, tensor.dtype, copy.tensor.dtype) == theirs
        if not same:
            self.differing.add((copy.group, copy.name))

    def _add_crc32(self, block: StoredBlock, start: int, stop: int, crc32: int) -> None:
        with self._lock:
            self._read.setdefault(block, []).append((start, stop, crc32))


class _Job:
    """A call for a thread, with its arguments."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def __call__(self) -> None:
        self._function(*self._arguments)


def _pair(tensor: StoredTensor, copy: StoredTensor) -> list[StoredTensor] | None:
    """Return the parts of `copy` that lie as those of `tensor` do; None where it is cut otherwise."""
    if tensor.shape != copy.shape:
        return None
    if tensor.stride is None and copy.stride is None:
        return [copy]
    if not isinstance(tensor, AssembledTensor) or not isinstance(copy, AssembledTensor):
        return None
    parts = [box.part for box in copy.boxes]
    cuts = [[(box.offsets, box.part.shape) for box in one.boxes] for one in (tensor, copy)]
    alike = tensor.transposed == copy.transposed and cuts[0] == cuts[1]
    return parts if alike and all(part.stride is None for part in parts) else None


@contextmanager
def _open_block(block: StoredBlock) -> Iterator[int]:
    try:
        file = os.open(block.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise CheckpointError(f"{block.path} cannot be read", got=exc.strerror or str(exc)) from exc
    try:
        yield file
    finally:
        os.close(file)


def _read_into(file: int, block: StoredBlock, start: int, buffer: memoryview) -> None:
    """Fill `buffer` with the block's bytes from `start` on."""
    filled = 0
    while filled < len(buffer):
        try:
            count = os.preadv(file, [buffer[filled:]], block.offset + start + filled)
        except OSError as exc:
            raise CheckpointError(f"{block.path} cannot be read", got=exc.strerror or str(exc)) from exc
        if not count:
            raise CheckpointError(
                f"{block.path} ends early",
                expected=f"{block.offset + block.length} bytes",
                got=f"{block.offset + start + filled}",
                remedy="copy the checkpoint again",
            )
        filled += count


def _read_windows(tensor: StoredTensor) -> Iterator[bytes]:
    """Yield the tensor's bytes, row-major, `_WINDOW_ELEMENTS` elements at a time."""
    if tensor.stride is None:
        for start in range(0, tensor.numel, _WINDOW_ELEMENTS):
            yield _read_window(tensor, start, min(tensor.numel, start + _WINDOW_ELEMENTS))
        return
    size = _WINDOW_ELEMENTS * tensor.dtype.itemsize
    waiting = bytearray()
    for chunk in tensor.chunks():
        waiting += chunk
        while len(waiting) >= size:
            yield bytes(waiting[:size])
            del waiting[:size]
    if waiting:
        yield bytes(waiting)


def _read_window(tensor: StoredTensor, start: int, stop: int) -> bytes:
    return b"".join(chunk for part in tensor.cut(start, stop) for chunk in read_range(part))
