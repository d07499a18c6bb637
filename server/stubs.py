"""The processes in which the Python backend runs its model instances, as /proc shows them."""

import contextlib
import os
import platform
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .sampling import find_library
from .shortage import is_shortage

_STUB = "triton_python_backend_stub"

# The stub's arguments in the Python backend of 2.51 (src/stub_launcher.cc).
_MODEL_PATH, _SHM_REGION, _INSTANCE = 1, 2, 8

# futex(2), by machine. A stub without work waits on a futex that it shares with tritonserver; whatever a model's own
# code waits on is private to the process.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_PRIVATE_FLAG = 128

# From the futex on which it waits for work: two semaphores, a mutex, size and buffer of the queue, then as int32 how
# many messages were put in and how many taken out, both modulo the size (MessageQueue in src/message_queue.h).
_QUEUE_BYTES = 96
_TAKEN_AT = slice(92, 96)

_SHARED_MEMORY = Path("/dev/shm")

# Longer than a debugger's moment.
_STOPPED_S = 1.0

# The interpreter with what is built into it, and what everything uses.
_INTERPRETER = re.compile(r"/libpython3[^/]*$|/lib-dynload/[^/]*$")
_COMMON = re.compile(r"/(libc|libm|ld-linux[^/]*|ld-musl[^/]*)[.-][^/]*$|^\[")

# A process that is at one piece of work for this long is asked what it is doing, at every look.
_SAMPLE_AFTER_S = 0.5

# A loop has been seen so often, and used a core so long: on a machine with too much to do, waiting for one is no loop.
_LOOP_SAMPLES = 3
_LOOP_CPU_S = 0.5

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long one piece of work may take.

    A model whose requests rightly take longer says so in its config.pbtxt, in the parameters `modelyard_blocked_s` and
    `modelyard_busy_s`.

    Attributes:
        blocked_s: A model's own code that waits this long without using a core hangs, and so does code that runs in
            Python's interpreter for this long without a moment in a library that computes.
        busy_s: Whatever keeps a core this long hangs.
    """

    blocked_s: float = 1.5
    busy_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Look:
    """What /proc said of a stub's main thread at one moment.

    Attributes:
        state: One letter, as in proc(5).
        waits_for_work: Whether it waits for tritonserver; None where we may not know.
        futex: Address of the futex that it waits on, else 0.
        cpu_ticks: Of the whole process so far.
        switches: How often the main thread gave up its core by itself.
    """

    state: str
    waits_for_work: bool | None
    futex: int
    cpu_ticks: int
    switches: int


@dataclass(kw_only=True, eq=False)
class Stub:
    """One backend process: one instance of one version of a model.

    Attributes:
        pid: Of the process.
        started: When it started, in clock ticks since boot: with the pid it names a process for good.
        model: Name of the model.
        instance: As tritonserver calls it.
        region: Name of its shared memory in /dev/shm.
        look: The latest.
        queue: Address of the queue from which it takes its work; 0 until it is seen to wait for some, and so has
            loaded its model.
        passed: What the queue held. What was put in and taken out is counted in there, so it changes with every piece
            of work and with nothing else.
        steady_since: Since when nothing about it has moved, monotonic.
        same_task_since: Since when it has been at the same piece of work, monotonic.
        ticks_before: What it had used of the cores by then.
        interpreting_since: Since when it was never seen outside of Python's interpreter, monotonic.
        samples: How often it was seen inside of it since then.
        limits: How long one piece of work may take, once that is known.
        handled: Whether its end was already dealt with.
    """

    pid: int
    started: int
    model: str
    instance: str
    region: str
    look: Look
    queue: int = 0
    passed: bytes = b""
    steady_since: float = field(default_factory=time.monotonic)
    same_task_since: float = field(default_factory=time.monotonic)
    ticks_before: int = 0
    interpreting_since: float = field(default_factory=time.monotonic)
    samples: int = 0
    limits: Limits | None = None
    handled: bool = False

    @property
    def has_waited(self) -> bool:
        """Whether it has loaded its model."""
        return self.queue != 0

    @property
    def is_dead(self) -> bool:
        """Whether it has ended; tritonserver does not collect it, so it stays as a zombie."""
        return self.look.state in "ZX"

    @property
    def is_idle(self) -> bool:
        """Whether it surely has nothing to do."""
        return self.is_dead or self.look.waits_for_work is True

    def update(self, look: Look) -> None:
        """Take in what was seen now."""
        now = time.monotonic()
        before, self.look = self.look, look
        passed, self.passed = self.passed, _read_memory(self.pid, self.queue or look.futex, _QUEUE_BYTES)
        # The first message that it takes tells it to load its model, so one that waits for that has not begun yet.
        if look.waits_for_work and not self.queue and any(self.passed[_TAKEN_AT]):
            self.queue = look.futex
        if look.waits_for_work or passed != self.passed:
            self.same_task_since = self.interpreting_since = now
            self.ticks_before, self.samples = look.cpu_ticks, 0
        if look != before:
            self.steady_since = now
        if self._is_at_work and look.state == "R" and now - self.same_task_since >= _SAMPLE_AFTER_S:
            self._sample(now)

    def find_hang(self) -> str | None:
        """Return why this process will not go on by itself, or None."""
        now = time.monotonic()
        limits = self.limits or Limits()
        if self.look.state == "T" and now - self.steady_since >= _STOPPED_S:
            return "was stopped by a signal"
        if not self._is_at_work:
            return None
        # S alone: a thread in R waits for a core, and one in D for a disk.
        if self.look.state == "S" and now - self.steady_since >= limits.blocked_s:
            return f"waited {limits.blocked_s:g} s inside a request without computing"
        if self._is_looping and now - self.interpreting_since >= limits.blocked_s:
            return f"ran nothing but Python for {limits.blocked_s:g} s inside a request"
        if now - self.same_task_since >= limits.busy_s:
            return f"was at one request for {limits.busy_s:g} s"
        return None

    @property
    def _is_at_work(self) -> bool:
        # Before it first waits it loads its model, which may take any time.
        return self.has_waited and self.look.waits_for_work is False

    @property
    def _is_looping(self) -> bool:
        cpu_s = (self.look.cpu_ticks - self.ticks_before) / _TICKS_PER_S
        return self.samples >= _LOOP_SAMPLES and cpu_s >= _LOOP_CPU_S

    def _sample(self, now: float) -> None:
        library = find_library(self.pid)
        if library is None:
            return
        if _INTERPRETER.search(library):
            self.samples += 1
        # Both computing and interpreted code allocate and copy in the C library; that tells nothing.
        elif not _COMMON.search(library):
            self.interpreting_since, self.samples = now, 0

    def describe_end(self) -> str:
        """Return how it ended, for people."""
        try:
            status = int(Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[-1])
        except (OSError, ValueError, IndexError):
            return "died"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return f"was killed by {signal.Signals(number).name if number in set(signal.Signals) else number}"
        return f"ended with exit code {os.WEXITSTATUS(status)}"

    def kill(self) -> None:
        """End it at once, unless its pid belongs to another process by now."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            if _read_start(self.pid) == self.started:
                os.kill(self.pid, signal.SIGKILL)


class StubTable:
    """All stubs of one tritonserver, kept from look to look."""

    def __init__(self, tritonserver_pid: int) -> None:
        self._tritonserver_pid = tritonserver_pid
        self._stubs: dict[tuple[int, int], Stub] = {}
        self._ever: dict[tuple[int, int], Stub] = {}

    def refresh(self) -> list[Stub]:
        """Look at every stub and return those that are there, dead ones included.

        Raises:
            OSError: This process has no descriptor or memory left to look with; of the stubs that tells nothing.
        """
        present = {}
        for pid in list_children(self._tritonserver_pid):
            try:
                identity = (pid, _read_start(pid))
                look = _look(pid)
                stub = self._stubs.get(identity) or _open_stub(*identity, look)
            except (OSError, IndexError, ValueError) as exc:
                if is_shortage(exc):
                    raise
                continue
            if stub is not None:
                stub.update(look)
                present[identity] = stub
        self._stubs = present
        self._ever |= present
        return list(present.values())

    def clear_away(self) -> None:
        """End what a dead tritonserver left: stubs that do not notice, and shared memory that nobody frees."""
        for stub in self._ever.values():
            stub.kill()
            if "/" not in stub.region:
                (_SHARED_MEMORY / stub.region).unlink(missing_ok=True)


def list_children(pid: int) -> Iterable[int]:
    """Return the ids of the processes that `pid` started.

    Raises:
        OSError: This process has no descriptor or memory left to look with.
    """
    children: list[int] = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError as exc:
        if is_shortage(exc):
            raise
        return []
    for task in tasks:
        try:
            children += map(int, (task / "children").read_text().split())
        # A thread that has ended since.
        except OSError as exc:
            if is_shortage(exc):
                raise
    return children


def _open_stub(pid: int, started: int, look: Look) -> Stub | None:
    """Return the stub that process `pid` is; None if it is something else, or dead before it was ever seen alive."""
    arguments = Path(f"/proc/{pid}/cmdline").read_text(errors="surrogateescape").split("\0")
    if not arguments[0].endswith(_STUB) or len(arguments) <= _INSTANCE:
        return None
    # <repository>/<model>/<version>/<file>
    model = Path(arguments[_MODEL_PATH]).parent.parent.name
    return Stub(
        pid=pid,
        started=started,
        model=model,
        instance=arguments[_INSTANCE],
        region=arguments[_SHM_REGION],
        look=look,
    )


def _look(pid: int) -> Look:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    status = Path(f"/proc/{pid}/status").read_text()
    switches = status.rsplit("\nvoluntary_ctxt_switches:", 1)[1].split(None, 1)[0]
    futex = _find_futex(pid)
    return Look(
        state=fields[0],
        waits_for_work=None if futex is None else futex != 0,
        futex=futex or 0,
        cpu_ticks=int(fields[11]) + int(fields[12]),
        switches=int(switches),
    )


def _find_futex(pid: int) -> int | None:
    """Return the address of the shared futex that a process waits on; 0 if it does not, None where we may not know."""
    try:
        words = Path(f"/proc/{pid}/syscall").read_text().split()
    # Not ours to see (ptrace is forbidden here), or a kernel without it.
    except OSError as exc:
        if is_shortage(exc):
            raise
        return None
    if _FUTEX is None:
        return None
    # "running", or the number of the call and its arguments.
    waits = words[0] == str(_FUTEX) and not int(words[2], 16) & _FUTEX_PRIVATE_FLAG
    return int(words[1], 16) if waits else 0


def _read_memory(pid: int, address: int, length: int) -> bytes:
    if not address:
        return b""
    try:
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(length)
    # It ends just now.
    except (OSError, OverflowError):
        return b""


def _read_start(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
