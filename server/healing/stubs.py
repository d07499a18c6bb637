"""The processes in which the Python backend runs its model instances, as /proc shows them."""

import math
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..tritonserver.backend_processes import STUB
from ..tritonserver.private_memory import close_region
from ..tritonserver.processes import (
    TICKS_PER_S,
    ProcessStat,
    kill,
    list_children,
    list_tasks,
    read_arguments,
    read_stat,
)
from .lost_waits import FIRST_CONTROL_HANDLE, end_lost_wait, is_waited_for, list_regions
from .sampling import Code, find_code
from .work_queue import WorkQueue, read_queue

# The stub's arguments in the Python backend of 2.51 (src/stub_launcher.cc).
_MODEL_PATH, _SHM_REGION, _CONTROL_HANDLE, _INSTANCE = 1, 2, 7, 8

_SHARED_MEMORY = Path("/dev/shm")

# A load whose process ended before it was ever seen is looked for this long after that, so often: it takes reading all
# that tritonserver has mapped, and every start has a few such processes, of which no load is lost.
_NAMELESS_S = 60.0
_NAMELESS_INTERVAL_S = 2.0

# tritonserver 2.51 may crash when one instance fails while another one is still being created. Those that were started
# together have been seen after this long.
_LOST_S = 0.5

# So often new processes are looked for while nothing is loaded, which takes a look at each of hundreds of threads; so
# long after one came or went they are looked for every time. Those that are known are looked at every time.
_CHILDREN_INTERVAL_S = 0.5
_CHANGING_S = 5.0

# Longer than a debugger's moment.
_STOPPED_S = 1.0

# A process that is at one piece of work for this long is asked what it is doing, at every look.
_SAMPLE_AFTER_S = 0.5

# A loop has been seen so often, and used a core so long: on a machine that is overloaded, a wait for one is not a loop.
_LOOP_SAMPLES = 3
_LOOP_CPU_S = 0.5


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
    """What was seen of a stub at one moment.

    Attributes:
        stat: What /proc says of the process, and so of its main thread.
        switches: How often the main thread gave up its core by itself; 0 while it has nothing to do.
        queue: Its work queue; None where we may not know.
    """

    stat: ProcessStat
    switches: int
    queue: WorkQueue | None


@dataclass(kw_only=True, eq=False)
class Stub:
    """One backend process: one instance of one version of a model.

    Attributes:
        pid: Id of the process.
        started: When it started, in clock ticks since boot: with the pid it names a process for good.
        model: Name of the model.
        version: Version of the model.
        instance: Name of the instance, as tritonserver has it.
        region: File of its shared memory.
        control_handle: Where in it the control struct lies.
        look: The latest.
        has_loaded: Whether it was seen to have loaded its model.
        died_loading: Whether it has ended before it had; tritonserver then waits for it without end.
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
    version: str
    instance: str
    region: Path
    control_handle: int
    look: Look
    has_loaded: bool = False
    died_loading: bool = False
    steady_since: float = field(default_factory=time.monotonic)
    same_task_since: float = field(default_factory=time.monotonic)
    ticks_before: int = 0
    interpreting_since: float = field(default_factory=time.monotonic)
    samples: int = 0
    limits: Limits | None = None
    handled: bool = False

    @property
    def is_dead(self) -> bool:
        """Whether it has ended; tritonserver does not collect it, so it stays as a zombie."""
        return self.look.stat.has_ended

    @property
    def is_loading(self) -> bool:
        """Whether it lives and has not loaded its model yet."""
        return not self.is_dead and not self.has_loaded

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it for longer than a moment."""
        return self.look.stat.state == "T" and time.monotonic() - self.steady_since >= _STOPPED_S

    @property
    def has_ended_well(self) -> bool:
        """Whether it has ended as tritonserver has it end: by itself, with exit code 0."""
        return self.is_dead and self.look.stat.exit_status == 0

    @property
    def is_idle(self) -> bool:
        """Whether it surely has nothing to do."""
        return self.is_dead or (self.look.queue is not None and self.look.queue.is_waited_for)

    def is_replaced_by(self, stubs: "Iterable[Stub]") -> bool:
        """Tell whether one of `stubs` was started later for the same instance, and has loaded its model."""
        instance = self.model, self.version, self.instance
        return any(
            each.started > self.started
            and each.has_loaded
            and not each.is_dead
            and (each.model, each.version, each.instance) == instance
            for each in stubs
        )

    def update(self, look: Look) -> None:
        """Take in what was seen now."""
        now = time.monotonic()
        before, self.look = self.look, look
        if look.queue:
            self.has_loaded |= look.queue.has_loaded
            self.died_loading |= look.stat.has_ended and look.queue.is_loading and not self.has_loaded
            if look.queue.is_waited_for or not before.queue or before.queue.taken != look.queue.taken:
                self.same_task_since = self.interpreting_since = now
                self.ticks_before, self.samples = look.stat.cpu_ticks, 0
        if (look.stat, look.switches) != (before.stat, before.switches):
            self.steady_since = now
        if self._is_at_work and look.stat.state == "R" and now - self.same_task_since >= _SAMPLE_AFTER_S:
            self._sample(now)

    def find_hang(self) -> str | None:
        """Return why this process will not go on by itself, or None."""
        now = time.monotonic()
        limits = self.limits or Limits()
        if self.is_stopped:
            return "was stopped by a signal"
        if not self._is_at_work:
            return None
        # S alone: a thread in R waits for a core, and one in D for a disk.
        if self.look.stat.state == "S" and now - self.steady_since >= limits.blocked_s:
            return f"waited {limits.blocked_s:g} s inside a request without computing"
        if self._is_looping and now - self.interpreting_since >= limits.blocked_s:
            return f"ran nothing but Python for {limits.blocked_s:g} s inside a request"
        if now - self.same_task_since >= limits.busy_s:
            return f"was at one request for {limits.busy_s:g} s"
        return None

    @property
    def _is_at_work(self) -> bool:
        # Loading its model may take any time.
        return self.has_loaded and self.look.queue is not None and not self.look.queue.is_waited_for

    @property
    def _is_looping(self) -> bool:
        cpu_s = (self.look.stat.cpu_ticks - self.ticks_before) / TICKS_PER_S
        return self.samples >= _LOOP_SAMPLES and cpu_s >= _LOOP_CPU_S

    def _sample(self, now: float) -> None:
        code = find_code(self.pid)
        if code is Code.INTERPRETER:
            self.samples += 1
        # Both computing and interpreted code allocate and copy in the C library; that tells nothing.
        elif code is Code.LIBRARY:
            self.interpreting_since, self.samples = now, 0

    def describe(self) -> str:
        """Return which it is, in words."""
        return f"{self.instance} (process {self.pid})"

    def describe_end(self) -> str:
        """Return how it ended, in words."""
        return self.look.stat.describe_end()

    def kill(self) -> None:
        """End it at once, unless its pid belongs to another process by now."""
        kill(self.pid, self.started)


class StubTable:
    """All stubs of one tritonserver, kept from look to look.

    Args:
        tritonserver_pid: Id of its process.

    Attributes:
        reads_queues: Whether this tritonserver is of a version whose work queues we can read. Of another one, nobody
            can tell a stub that hangs from one that waits.
    """

    def __init__(self, tritonserver_pid: int) -> None:
        self._tritonserver_pid = tritonserver_pid
        self.reads_queues = True
        self._stubs: dict[tuple[int, int], Stub] = {}
        self._ever: dict[tuple[int, int], Stub] = {}
        # Processes that ended before they were ever seen, whose command lines nobody can read any more.
        self._nameless: set[tuple[int, int]] = set()
        # What is no stub yet, and since when which of it is stopped by a signal.
        self._starting: list[int] = []
        self._stopped_since: dict[tuple[int, int], float] = {}
        self._nameless_since = self._nameless_look = -math.inf
        self._children: list[int] = []
        self._children_look, self._changed = -math.inf, time.monotonic()

    def refresh(self) -> list[Stub]:
        """Look at every stub and return those that are there, dead ones included.

        Raises:
            OSError: This process has no descriptor or memory left to look with.
        """
        present, self._starting = {}, []
        for pid in self._list_children():
            stat = read_stat(pid)
            if stat is None:
                continue
            identity = (pid, stat.started)
            stub = self._stubs.get(identity) or _open_stub(pid, stat)
            if stub is None and not stat.has_ended:
                self._starting.append(pid)
            elif stub is None and identity not in self._nameless:
                self._nameless.add(identity)
                self._nameless_since = time.monotonic()
            if stub is not None:
                if identity not in self._stubs:
                    close_region(stub.region)
                stub.update(self._look(stub, stat))
                present[identity] = stub
        if present.keys() != self._stubs.keys():
            self._changed = time.monotonic()
        self._stubs = present
        self._ever |= present
        return list(present.values())

    def count_threads(self) -> int:
        """Return how many threads tritonserver and its backend processes have."""
        stubs = [stub.pid for stub in self._stubs.values() if not stub.is_dead]
        return sum(len(list_tasks(pid)) for pid in (self._tritonserver_pid, *stubs))

    def _list_children(self) -> list[int]:
        now = time.monotonic()
        is_changing = now - self._changed < _CHANGING_S or any(stub.is_loading for stub in self._stubs.values())
        if is_changing or now - self._children_look >= _CHILDREN_INTERVAL_S:
            self._children, self._children_look = list_children(self._tritonserver_pid), now
        return self._children

    def end_stopped_loads(self) -> list[str]:
        """End what a signal has stopped before it had loaded its model, and return what that was, in words.

        tritonserver waits for it without end. The load fails then, and is tried again or not by whoever asked for it.

        Raises:
            OSError: This process has no descriptor or memory left to look with.
        """
        now = time.monotonic()
        ended = []
        # Of a version whose queues nobody reads, a stub may have loaded its model long ago.
        for stub in self._stubs.values() if self.reads_queues else ():
            if stub.is_loading and stub.is_stopped:
                stub.kill()
                stub.steady_since = now
                ended.append(f"{stub.model}: {stub.describe()}")
        stopped = {}
        for pid in self._list_starting():
            stat = read_stat(pid)
            if stat is not None and stat.state == "T":
                identity = (pid, stat.started)
                stopped[identity] = self._stopped_since.get(identity, now)
                if now - stopped[identity] >= _STOPPED_S:
                    kill(*identity)
                    ended.append(f"process {pid}, which starts a backend process,")
        self._stopped_since = stopped
        return [f"{name} was stopped by a signal while a model was loaded, and was ended" for name in ended]

    def list_loading(self) -> set[str]:
        """Return the names of the models that a process had not loaded yet at the last look."""
        return {stub.model for stub in self._stubs.values() if stub.is_loading}

    def _list_starting(self) -> Iterator[int]:
        """Yield the shells that are about to become stubs, or try out whether one can run, and what these wait for."""
        for pid in self._starting:
            if any(STUB in word for word in read_arguments(pid)):
                yield pid
                yield from _list_descendants(pid)

    def end_lost_waits(self) -> None:
        """Let every load fail whose process died meanwhile, and every unload go on.

        Raises:
            OSError: This process has no descriptor or memory left to do it with.
        """
        now = time.monotonic()
        loading = {(stub.model, stub.version) for stub in self._stubs.values() if stub.is_loading}
        for stub in self._stubs.values():
            is_alone = (stub.model, stub.version) not in loading
            is_lost = is_alone if stub.died_loading else stub.is_dead and stub.has_loaded
            if is_lost and now - stub.steady_since >= _LOST_S:
                end_lost_wait(stub.region, stub.control_handle, has_loaded=not stub.died_loading)
        is_looked_for = _LOST_S <= now - self._nameless_since < _NAMELESS_S
        if self.reads_queues and not loading and is_looked_for and now - self._nameless_look >= _NAMELESS_INTERVAL_S:
            self._nameless_look = now
            self._end_nameless_loads()

    def _end_nameless_loads(self) -> None:
        """Do so for processes that were never seen: tritonserver waits at a region that no living one has."""
        waiting = [
            region for region in list_regions(self._tritonserver_pid) if is_waited_for(region, FIRST_CONTROL_HANDLE)
        ]
        # Looked at after that: whoever is waited for was started before.
        children = {pid: read_stat(pid) for pid in list_children(self._tritonserver_pid)}
        living = [read_arguments(pid) for pid, stat in children.items() if stat is not None and not stat.has_ended]
        for region in waiting:
            # One that is no stub yet may be about to become the one that is waited for.
            if all(_is_stub(arguments) and region.name not in arguments for arguments in living):
                end_lost_wait(region, FIRST_CONTROL_HANDLE, has_loaded=False)

    def count_regions(self, names: Collection[str]) -> int:
        """Return how many of these files of shared memory tritonserver has, though they may be deleted."""
        try:
            regions = list_regions(self._tritonserver_pid)
        except OSError:
            return 0
        return len({*names} & {region.name.removesuffix(" (deleted)") for region in regions})

    def clear_away(self) -> None:
        """End what a dead tritonserver left: stubs that do not notice, and shared memory that nobody frees."""
        for stub in self._ever.values():
            stub.kill()
            stub.region.unlink(missing_ok=True)

    def _look(self, stub: Stub, stat: ProcessStat) -> Look:
        queue = read_queue(stub.region, stub.control_handle) if self.reads_queues else None
        # Of one that has nothing to do nobody asks whether it moves.
        is_idle = queue is not None and queue.is_waited_for
        return Look(stat=stat, switches=0 if is_idle else _read_switches(stub.pid), queue=queue)


def _list_descendants(pid: int) -> Iterator[int]:
    for child in list_children(pid):
        yield child
        yield from _list_descendants(child)


def _open_stub(pid: int, stat: ProcessStat) -> Stub | None:
    """Return the stub that process `pid` is; None if it is something else, or dead before it was ever seen alive."""
    arguments = read_arguments(pid)
    if not _is_stub(arguments):
        return None
    # <repository>/<model>/<version>/<file>
    folder = Path(arguments[_MODEL_PATH]).parent
    region, handle = arguments[_SHM_REGION], arguments[_CONTROL_HANDLE]
    if "/" in region or not handle.isdecimal():
        return None
    return Stub(
        pid=pid,
        started=stat.started,
        model=folder.parent.name,
        version=folder.name,
        instance=arguments[_INSTANCE],
        region=_SHARED_MEMORY / region,
        control_handle=int(handle),
        look=Look(stat=stat, switches=0, queue=None),
    )


def _is_stub(arguments: list[str]) -> bool:
    return len(arguments) > _INSTANCE and arguments[0].endswith(STUB)


def _read_switches(pid: int) -> int:
    """Return how often the main thread of process `pid` gave up its core by itself; 0 if it is no more."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="surrogateescape")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # A process that ends just now has none.
    _, _, switches = status.rpartition("\nvoluntary_ctxt_switches:")
    return int(switches.split(None, 1)[0]) if switches else 0
