"""One pass over the bytes of a checkpoint: checksums, finite values, and copying them where they belong.

Blocks are read from start to end, whatever the tensors cut out of them, because a CRC-32 covers a block as a whole.
Each part is handed on as it passes, so that checking costs no second reading. Memory is one chunk for each thread.
"""

from __future__ import annotations

import itertools
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from export.checkpoints.cast import cast_bytes, count_non_finite
from export.checkpoints.dtypes import ElementType
from export.checkpoints.stored_tensor import CHUNK_BYTES, StoredTensor, cut_ranges, read_range
from export.checkpoints.zip_archive import StoredBlock
from export.errors import CheckpointError, list_some

# Reading and CRC-32 release the interpreter's lock; beyond a few threads the disk or the page cache is the limit.
THREADS = min(4, os.cpu_count() or 1)
_WINDOW_ELEMENTS = 1 << 18

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


def scan(
    tensors: Mapping[str, StoredTensor],
    *,
    beside: Iterable[StoredBlock] = (),
    allow_non_finite: bool = False,
    sink: Sink | None = None,
) -> None:
    """Read every block that `tensors` lie in, check it, and hand every part of every tensor to `sink`.

    Parts of one tensor may arrive in any order and from several threads at once. Blocks `beside` are checked as well.

    Raises:
        CheckpointError: A checksum is wrong, a file ends early, or a weight is not finite.
    """
    uses: dict[StoredBlock, list[_Use]] = {block: [] for block in beside}
    strided: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if tensor.stride is not None:
            strided[name] = tensor
        position = 0
        for part in tensor.ranges:
            parts = uses.setdefault(part.block, [])
            if tensor.stride is None:
                parts.append(_Use(part.start, part.start + part.length, name, position, tensor.dtype))
            position += part.length
    scanner = _Scanner(sink)
    with ThreadPoolExecutor(THREADS) as pool:
        largest_first = sorted(uses, key=lambda block: -block.length)
        jobs = [pool.submit(scanner.scan_block, block, uses[block]) for block in largest_first]
        jobs += [pool.submit(scanner.scan_strided, name, tensor) for name, tensor in strided.items()]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            scanner.stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    if scanner.non_finite and not allow_non_finite:
        refuse_non_finite(tensors, scanner.non_finite)


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
    """Reads blocks in several threads, until one fails or the main thread is interrupted."""

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self.stopped = threading.Event()
        # Name → how many of its elements are NaN or infinite.
        self.non_finite: dict[str, int] = {}

    def scan_block(self, block: StoredBlock, uses: list[_Use]) -> None:
        uses.sort(key=lambda use: use.start)
        crc32, position = 0, 0
        # The uses that may reach into the chunk at hand: those before `first` are done with.
        first = 0
        for chunk in _read_block(block):
            if self.stopped.is_set():
                return
            crc32 = zlib.crc32(chunk, crc32)
            end = position + len(chunk)
            while first < len(uses) and uses[first].stop <= position:
                first += 1
            for use in itertools.islice(uses, first, None):
                if use.start >= end:
                    break
                start, stop = max(use.start, position), min(use.stop, end)
                if start < stop:
                    self._hand_on(
                        use.name, use.target + start - use.start, chunk[start - position : stop - position], use.dtype
                    )
            position = end
        if block.crc32 is not None and crc32 != block.crc32:
            raise CheckpointError(
                f"{block.path} is damaged in {block.name}",
                expected=f"CRC-32 {block.crc32:08x}",
                got=f"{crc32:08x}",
                remedy="copy the checkpoint again, or use the one before it",
            )

    def scan_strided(self, name: str, tensor: StoredTensor) -> None:
        position = 0
        for chunk in tensor.chunks():
            if self.stopped.is_set():
                return
            self._hand_on(name, position, memoryview(chunk), tensor.dtype)
            position += len(chunk)

    def _hand_on(self, name: str, position: int, part: memoryview, dtype: ElementType) -> None:
        count = count_non_finite(part, dtype)
        if count:
            with self._lock:
                self.non_finite[name] = self.non_finite.get(name, 0) + count
        if self._sink is not None:
            self._sink(name, position, part)


def _read_block(block: StoredBlock) -> Iterator[memoryview]:
    """Yield the block's bytes in one buffer that is overwritten each time: memoryviews of at most `CHUNK_BYTES`."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(1, block.length))))
    position = 0
    try:
        with block.path.open("rb", buffering=0) as file:
            while position < block.length:
                # Chunks start at multiples of their size, which every element size divides.
                wanted = buffer[: min(len(buffer), block.length - position)]
                filled = 0
                while filled < len(wanted):
                    count = os.preadv(file.fileno(), [wanted[filled:]], block.offset + position + filled)
                    if not count:
                        raise CheckpointError(
                            f"{block.path} ends early",
                            expected=f"{block.offset + block.length} bytes",
                            got=f"{block.offset + position + filled}",
                            remedy="copy the checkpoint again",
                        )
                    filled += count
                yield wanted
                position += filled
    except OSError as exc:
        raise CheckpointError(f"{block.path} cannot be read", got=exc.strerror or str(exc)) from exc


def compare_copies(tensors: Mapping[str, StoredTensor], copies: Mapping[str, StoredTensor]) -> None:
    """Check that each copy is its tensor, cast to the copy's dtype.

    Stages 1 and 2 of ZeRO keep the weights of the forward pass beside the fp32 pieces, and these are cast from those
    after every step. A rank file that is swapped, doubled or from another step cannot pass this.

    Raises:
        CheckpointError: A copy differs, or has another shape.
    """
    names = [name for name in copies if name in tensors]
    with ThreadPoolExecutor(THREADS) as pool:
        same = list(pool.map(lambda name: _agree(tensors[name], copies[name]), names))
    wrong = [name for name, agrees in zip(names, same, strict=True) if not agrees]
    if wrong:
        ours = {part.block.path for name in wrong for part in tensors[name].ranges}
        theirs = {part.block.path for name in wrong for part in copies[name].ranges}
        dtype = copies[wrong[0]].dtype.name
        raise CheckpointError(
            f"the pieces in {list_some(ours, 4)} disagree with the {dtype} copy in {list_some(theirs, 4)}"
            f" on {list_some(wrong)}",
            expected=f"the same {len(names)} weights in both",
            got=f"{len(wrong)} that differ",
            remedy="a rank file is swapped, doubled, damaged or from another step; copy the checkpoint again",
        )


def _agree(tensor: StoredTensor, copy: StoredTensor) -> bool:
    if tensor.shape != copy.shape:
        return False
    windows = zip(_read_windows(tensor), _read_windows(copy), strict=True)
    return all(cast_bytes(ours, tensor.dtype, copy.dtype) == theirs for ours, theirs in windows)


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
    size = tensor.dtype.itemsize
    return b"".join(
        chunk for part in cut_ranges(tensor.ranges, start * size, stop * size) for chunk in read_range(part)
    )
