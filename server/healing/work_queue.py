"""The queue through which tritonserver gives a backend process its work, as their shared memory shows it.

Whether such a process has work, and whether it goes on to the next piece, is recorded nowhere else: to /proc, one that
waits for a request and one that hangs in one look the same. The layout is that of the Python backend's C++ structs,
which no release promises to keep, so it is read only in the releases in which it was seen.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

# Versions of tritonserver for which this was seen to hold, with Python 3.10, 3.11 and 3.12: Triton 24.03 and 24.10.
KNOWN_VERSIONS = ("2.44.0", "2.51.0")

# What is put into shared memory begins with a count of its users (AllocatedShmOwnership in src/shm_manager.h).
OWNERSHIP_BYTES = 16

# IPCControlShm in src/pb_utils.h: four flags and two mutexes, then where the queue is, and that of the answers to it.
QUEUE_HANDLE = struct.Struct("<q")
QUEUE_HANDLE_AT = 88
PARENT_QUEUE_AT = 96

# MessageQueueShm in src/message_queue.h: a semaphore and then, from here on, the one on which the process waits for
# work (sem_t of glibc: its value and how many wait), a mutex, size and buffer of the queue, and how many messages were
# put in and how many taken out, both modulo the size.
QUEUE = struct.Struct("<II64xQqii")
QUEUE_AT = 32

# tritonserver gives one message at its start, which the process is at while it loads its model, and one after it.
MESSAGES_OF_LOADING = 2


@dataclass(frozen=True, kw_only=True)
class WorkQueue:
    """A queue at one moment.

    Attributes:
        put: How many messages tritonserver has put in so far, modulo the queue's size.
        taken: How many of them the process has taken out, likewise.
        is_waited_for: Whether the process waits for the next one.
    """

    put: int
    taken: int
    is_waited_for: bool

    @property
    def is_loading(self) -> bool:
        """Whether the process has yet to load its model; true again for a moment after every thousand messages."""
        return self.put < MESSAGES_OF_LOADING

    @property
    def has_loaded(self) -> bool:
        """Whether the process has loaded its model; false again for a moment after every thousand messages."""
        return self.taken >= MESSAGES_OF_LOADING


def read_queue(region: Path, control_handle: int) -> WorkQueue | None:
    """Return the queue of a backend process.

    Args:
        region: The file of its shared memory.
        control_handle: Where in it the control struct lies, as the process was told on its command line.

    Returns:
        None where there is none, yet or any more.

    Raises:
        OSError: This process has no descriptor or memory left to look with.
    """
    try:
        with region.open("rb", buffering=0) as file:
            file.seek(control_handle + OWNERSHIP_BYTES + QUEUE_HANDLE_AT)
            (queue_handle,) = QUEUE_HANDLE.unpack(file.read(QUEUE_HANDLE.size))
            file.seek(queue_handle + OWNERSHIP_BYTES + QUEUE_AT)
            value, waiting, size, _, put, taken = QUEUE.unpack(file.read(QUEUE.size))
    except (FileNotFoundError, PermissionError, ValueError, struct.error):
        return None
    if queue_handle <= 0 or not size:
        return None
    return WorkQueue(put=put, taken=taken, is_waited_for=value == 0 and waiting > 0 and put == taken)
