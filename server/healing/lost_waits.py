"""Ends what tritonserver waits for from a backend process that died meanwhile.

tritonserver 2.51 has no limit on how long it waits for a backend process to load its model, nor for one that it tells
to end, and does not look whether that process still lives (`parent_message_queue_->Pop()` in the Python backend's
src/stub_launcher.cc). A load or unload whose process is killed would never end: neither that version nor another one of
the model could be loaded any more, nor unloaded. So the waiting side is given an answer in place of the dead one: its
own question. As an answer to that of loading it is refused, and the load fails like any other; whatever is answered to
that of ending is not looked at. What it waits for in a request it gives up by itself.
"""

import contextlib
import ctypes
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .work_queue import (
    MESSAGES_OF_LOADING,
    OWNERSHIP_BYTES,
    PARENT_QUEUE_AT,
    QUEUE,
    QUEUE_AT,
    QUEUE_HANDLE,
    QUEUE_HANDLE_AT,
)

# MessageQueueShm in src/message_queue.h: where its two semaphores (sem_t) and its mutex (pthread_mutex_t) lie.
_FREE_PLACES_AT, _MESSAGES_AT, _MUTEX_AT, _PUT_AT = 0, 32, 64, 120

# What a message is, at its beginning (PYTHONSTUB_CommandType in src/ipc_message.h): here, that the process is to end.
_COMMAND = struct.Struct("<i")
_TO_END = 5

# The first thing that is put into the memory of a process, so the same for all of them.
FIRST_CONTROL_HANDLE = 336

_REGION = "_backend_shm_region_"

_HANDLE = struct.Struct("<q")
_INDEX = struct.Struct("<i")

_LIBC = ctypes.CDLL(None)


def list_regions(tritonserver_pid: int) -> list[Path]:
    """Return the files of the shared memory of all backend processes that a tritonserver has, or had.

    Raises:
        OSError: This process has no descriptor or memory left to look with.
    """
    try:
        lines = Path(f"/proc/{tritonserver_pid}/maps").read_text(errors="surrogateescape").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return []
    found = {line[line.index("/") :] for line in lines if _REGION in line}
    return [Path(name) for name in sorted(found)]


def is_waited_for(region: Path, control_handle: int) -> bool:
    """Tell whether tritonserver waits now for a process to load its model, or to end.

    Args:
        region: The file of the process's shared memory.
        control_handle: Where in it the control struct lies, as the process was told on its command line.

    Raises:
        OSError: This process has no descriptor or memory left to look with.
    """
    with _open(region, control_handle, has_loaded=False) as found:
        return found is not None


def end_lost_wait(region: Path, control_handle: int, *, has_loaded: bool) -> None:
    """Answer what tritonserver waits for from a process that died as it loaded its model, or was to end, if it waits.

    Args:
        region: The file of the process's shared memory.
        control_handle: Where in it the control struct lies, as the process was told on its command line.
        has_loaded: Whether the process had loaded its model, so that it can only be waited for to end.

    Raises:
        OSError: This process has no descriptor or memory left to do it with.
    """
    with _open(region, control_handle, has_loaded=has_loaded) as found:
        if found is not None:
            _put(found.memory, found.answers, found.question)


@dataclass(frozen=True, kw_only=True)
class _Wait:
    """A wait of tritonserver's for a process to load its model, or to end.

    Attributes:
        memory: Of the process.
        answers: Where the queue lies at which it waits.
        question: What it asked last; 0 before the first question, when any answer will do.
    """

    memory: mmap.mmap
    answers: int
    question: int


@contextlib.contextmanager
def _open(region: Path, control_handle: int, *, has_loaded: bool) -> Iterator[_Wait | None]:
    """Open the memory of a process for which tritonserver waits now; None where it does not."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(region.open("r+b", buffering=0))
            memory = stack.enter_context(mmap.mmap(file.fileno(), 0))
            found = _find_wait(memory, control_handle + OWNERSHIP_BYTES, has_loaded=has_loaded)
        # Without the file, or in one of another layout, nobody waits.
        except (FileNotFoundError, PermissionError, ValueError, struct.error):
            found = None
        yield found


def _find_wait(memory: mmap.mmap, control: int, *, has_loaded: bool) -> _Wait | None:
    questions = _find_queue(memory, control + QUEUE_HANDLE_AT)
    answers = _find_queue(memory, control + PARENT_QUEUE_AT)
    _, _, places, buffer, asked, _ = QUEUE.unpack_from(memory, questions + _MESSAGES_AT)
    value, waiting, size, _, put, taken = QUEUE.unpack_from(memory, answers + _MESSAGES_AT)
    if places <= 0 or value or not waiting or put != taken or not 0 <= put < size:
        return None
    # Counted modulo the size: of a process that has served it may be 0 again.
    last = buffer + OWNERSHIP_BYTES + (asked - 1) % places * _HANDLE.size
    (question,) = _HANDLE.unpack_from(memory, last)
    if question > 0 and _COMMAND.unpack_from(memory, question + OWNERSHIP_BYTES)[0] == _TO_END:
        return _Wait(memory=memory, answers=answers, question=question)
    if has_loaded or asked >= MESSAGES_OF_LOADING:
        return None
    return _Wait(memory=memory, answers=answers, question=question if asked else 0)


def _find_queue(memory: mmap.mmap, handle_at: int) -> int:
    (handle,) = QUEUE_HANDLE.unpack_from(memory, handle_at)
    if not 0 < handle <= len(memory) - OWNERSHIP_BYTES - QUEUE_AT - QUEUE.size:
        raise ValueError(handle)
    return int(handle) + OWNERSHIP_BYTES


def _put(memory: mmap.mmap, queue: int, message: int) -> None:
    """Put a message into a queue in the order of MessageQueue::Push, unless it is full or held by a dead process."""
    whole = (ctypes.c_char * len(memory)).from_buffer(memory)
    try:
        start = ctypes.addressof(whole) + queue
        free_places, messages, mutex = (
            ctypes.c_void_p(start + offset) for offset in (_FREE_PLACES_AT, _MESSAGES_AT, _MUTEX_AT)
        )
        if _LIBC.sem_trywait(free_places) != 0:
            return
        if _LIBC.pthread_mutex_trylock(mutex) != 0:
            _LIBC.sem_post(free_places)
            return
        _, _, size, buffer, put, _ = QUEUE.unpack_from(memory, queue + _MESSAGES_AT)
        _HANDLE.pack_into(memory, buffer + OWNERSHIP_BYTES + put * _HANDLE.size, message)
        _INDEX.pack_into(memory, queue + _PUT_AT, (put + 1) % size)
        _LIBC.pthread_mutex_unlock(mutex)
        _LIBC.sem_post(messages)
    finally:
        # Memory that is still looked at cannot be closed.
        del whole
