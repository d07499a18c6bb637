"""One pass over the bytes of a checkpoint: checksums, finite values, second copies, and copying where they belong.

A CRC-32 covers a block as a whole, and a block may hold a whole rank's weights: it is read in segments by several
threads, whatever the tensors cut out of it, and their checksums are put together. Each part is checked and handed on as
it passes, so that nothing is read twice. Memory is a few chunks for each thread.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from zlib_ng import zlib_ng

from ...errors import CheckpointError, list_some
from .byte_ranges import BAND_BYTES, CHUNK_BYTES, THREADS, ByteRange, OpenFiles, reuse_memory
from .cast import count_non_finite
from .crc32 import Checksums
from .dtypes import ElementType
from .second_copies import SecondCopies, SecondCopy
from .stored_tensor import ContiguousTensor, StoredTensor, bits
from .zip_archive import StoredBlock

# What one thread reads of a block before another may go on: small enough that none has nothing to do at the end.
_SEGMENT_BYTES = 64 * CHUNK_BYTES

# Called with a tensor's name, the byte in the row-major tensor where the part begins, and the part.
Sink = Callable[[str, int, memoryview], None]


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
    """What is done with a block: ranges of contiguous tensors, and claims of others, which jobs of their own read."""

    uses: list[_Use] = field(default_factory=list)
    claims: list[tuple[int, int]] = field(default_factory=list)

    def shares_claims(self) -> bool:
        """Tell whether bytes that a job of its own reads are also read for another tensor."""
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
    copies: Sequence[SecondCopy] = (),
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
    scattered = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, ContiguousTensor)}
    for name, tensor in tensors.items():
        _plan(name, tensor, plans, claimed=name in scattered)
    for plan in plans.values():
        plan.uses.sort(key=lambda use: use.start)
        plan.claims.sort()
        if plan.shares_claims():
            # Then the checksum has a reading of its own, and what is changed in the file between the two readings is
            # not found: a block is put together from parts that were each read once.
            plan.claims.clear()
    second = SecondCopies(tensors, copies)
    scanner = _Scanner(second, {block for block, plan in plans.items() if plan.claims}, sink)
    jobs: list[tuple[int, Callable[[], None]]] = []
    for block, plan in plans.items():
        jobs += scanner.list_segments(block, plan)
    jobs += [(tensor.nbytes, partial(scanner.scan_scattered, name, tensor)) for name, tensor in scattered.items()]
    jobs += [(copy.tensor.nbytes, partial(second.compare_whole, copy)) for copy in second.unpaired]
    jobs.sort(key=lambda job: -job[0])
    _run([job for _, job in jobs], scanner.stopped)
    for block in plans:
        scanner.checksums.check(block)
    if scanner.non_finite and not allow_non_finite:
        refuse_non_finite(tensors, scanner.non_finite)
    second.refuse_different()


def _plan(name: str, tensor: StoredTensor, plans: dict[StoredBlock, _BlockPlan], *, claimed: bool) -> None:
    """Add what `tensor` needs of each block to `plans`."""
    position = 0
    for part in tensor.ranges:
        plan = plans.setdefault(part.block, _BlockPlan())
        stop = part.start + part.length
        if claimed:
            plan.claims.append((part.start, stop))
        else:
            plan.uses.append(_Use(part.start, stop, name, position, tensor.dtype))
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


class _Scanner:
    """Reads blocks and tensors in several threads, until one fails or the main thread is interrupted."""

    def __init__(
        self,
        copies: SecondCopies,
        claimed: set[StoredBlock],
        sink: Sink | None,
    ) -> None:
        self._copies = copies
        self._claimed = claimed
        self._sink = sink
        self._lock = threading.Lock()
        # A tensor that was saved as a view may need much of its file in memory: one thread at a time.
        self._one_window = threading.Lock()
        self.checksums = Checksums()
        self.stopped = threading.Event()
        # Name → how many of its elements are NaN or infinite.
        self.non_finite: dict[str, int] = {}

    def list_segments(self, block: StoredBlock, plan: _BlockPlan) -> list[tuple[int, Callable[[], None]]]:
        """Return (bytes, job) for all of the block that nothing claims."""
        jobs: list[tuple[int, Callable[[], None]]] = []
        starts = [use.start for use in plan.uses]
        # Where uses overlap, one that began long before may still go on: the furthest end so far tells.
        ends = list(itertools.accumulate((use.stop for use in plan.uses), max))
        borders = [0, *itertools.chain.from_iterable(plan.claims), block.length]
        for first, last in zip(borders[::2], borders[1::2], strict=True):
            for start in range(first // _SEGMENT_BYTES * _SEGMENT_BYTES, last, _SEGMENT_BYTES):
                own, stop = max(start, first), min(start + _SEGMENT_BYTES, last)
                uses = plan.uses[bisect_right(ends, own) : bisect_left(starts, stop)]
                jobs.append((stop - own, partial(self._scan_segment, block, own, stop, uses)))
        return jobs

    def _scan_segment(self, block: StoredBlock, start: int, stop: int, uses: list[_Use]) -> None:
        buffer = reuse_memory("chunk", CHUNK_BYTES)
        crc32, position = 0, start
        # The uses that may reach into the chunk at hand: those before `first` are done with.
        first = 0
        with OpenFiles() as files:
            while position < stop and not self.stopped.is_set():
                # Chunks end at multiples of their size, which every element size divides.
                end = min(stop, position - position % CHUNK_BYTES + CHUNK_BYTES)
                chunk = buffer[: end - position]
                files.read_into(block, position, chunk)
                if block.crc32 is not None:
                    crc32 = zlib_ng.crc32(chunk, crc32)
                while first < len(uses) and uses[first].stop <= position:
                    first += 1
                for use in itertools.islice(uses, first, None):
                    if use.start >= end:
                        break
                    begin, finish = max(use.start, position), min(use.stop, end)
                    if begin < finish:
                        part = chunk[begin - position : finish - position]
                        target = use.target + begin - use.start
                        self._check(files, use.name, 0, target, part, use.dtype)
                        if self._sink is not None:
                            self._sink(use.name, target, part)
                position = end
        self.checksums.add(block, start, stop, crc32)

    def scan_scattered(self, name: str, tensor: StoredTensor) -> None:
        """Read a tensor whose ranges are not its elements in order."""
        # Run → (block, start, stop, CRC-32) of the bytes read last that follow one another.
        sums: dict[int, tuple[StoredBlock, int, int, int]] = {}
        runs, dtype, checks_runs = tensor.runs, tensor.dtype, tensor.is_all_of_its_runs

        def read(index: int, start: int, stop: int) -> Any:
            content = _reuse_chunk((stop - start) * dtype.itemsize)
            position = 0
            for window in runs[index].cut(start, stop):
                chunk = content[position : position + window.length]
                files.read_into(window.block, window.start, chunk)
                if window.block.crc32 is not None and window.block in self._claimed:
                    self._continue_sum(sums, index, window, chunk)
                position += window.length
            if checks_runs:
                self._check(files, name, index, start * dtype.itemsize, content, dtype)
            return np.frombuffer(content, bits(dtype))

        in_view = not checks_runs and any(run.nbytes > BAND_BYTES for run in runs)
        with OpenFiles() as files, self._one_window if in_view else nullcontext():
            if self._sink is None and checks_runs:
                # Nobody asks for the tensor, so nothing is put together.
                step = CHUNK_BYTES // dtype.itemsize
                for index, run in enumerate(runs):
                    for start in range(0, run.numel if not self.stopped.is_set() else 0, step):
                        read(index, start, min(run.numel, start + step))
            else:
                for position, piece in tensor.pieces(read):
                    if self.stopped.is_set():
                        return
                    if not checks_runs:
                        self._check(files, name, 0, position, piece, dtype)
                    if self._sink is not None:
                        self._sink(name, position, piece)
        for total in sums.values():
            self.checksums.add(*total)

    def _continue_sum(
        self, sums: dict[int, tuple[StoredBlock, int, int, int]], index: int, window: ByteRange, chunk: memoryview
    ) -> None:
        """Add `chunk`, the bytes of `window`, to the checksum of a run, or begin another where it does not follow."""
        block, start, stop, crc32 = sums.get(index) or (window.block, window.start, window.start, 0)
        if (block, stop) != (window.block, window.start):
            self.checksums.add(block, start, stop, crc32)
            block, start, crc32 = window.block, window.start, 0
        sums[index] = (block, start, window.start + window.length, zlib_ng.crc32(chunk, crc32))

    def _check(
        self, files: OpenFiles, name: str, index: int, position: int, part: memoryview, dtype: ElementType
    ) -> None:
        """Check bytes of `name`, from `position` on of its run `index`, and its copies there."""
        count = count_non_finite(part, dtype)
        if count:
            with self._lock:
                self.non_finite[name] = self.non_finite.get(name, 0) + count
        self._copies.compare_part(files, name, index, position, part, dtype)


def _reuse_chunk(size: int) -> memoryview:
    """Return memory for what is read at once: what is larger than a chunk is rare, and not kept."""
    return reuse_memory("chunk", size) if size <= CHUNK_BYTES else memoryview(bytearray(size))
