"""The processes in which the Python backend runs its model instances, as /proc shows them."""

import contextlib
import os
import platform
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_STUB = "triton_python_backend_stub"

# The stub's arguments in the Python backend of 2.51 (src/stub_launcher.cc).
_MODEL_PATH, _SHM_REGION, _INSTANCE = 1, 2, 8

# futex(2), by machine. A stub without work waits on a futex that it shares with tritonserver; whatever a model's own
# code waits on is private to the process.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_PRIVATE_FLAG = 128

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Look:
    """What /proc said of a stub's main thread at one moment.

    Attributes:
        state: One letter, as in proc(5).
        waits_for_work: Whether it waits for tritonserver; None where we may not know.
        cpu_ticks: Of the whole process so far.
        switches: How often the main thread gave up its core by itself.
    """

    state: str
    waits_for_work: bool | None
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
        has_waited: Whether it was ever seen to wait for work, and so has loaded its model.
        steady_since: Since when nothing about it has moved, monotonic.
        same_task_since: Since when it has been at the same piece of work, monotonic.
        handled: Whether its end was already dealt with.
    """

    pid: int
    started: int
    model: str
    instance: str
    region: str
    look: Look
    has_waited: bool = False
    steady_since: float = field(default_factory=time.monotonic)
    same_task_since: float = field(default_factory=time.monotonic)
    handled: bool = False

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
        if look.waits_for_work:
            self.has_waited = True
        if look.waits_for_work or look.switches != before.switches:
            self.same_task_since = now
        if look != before:
            self.steady_since = now

    def find_hang(self, blocked_s: float, busy_s: float) -> str | None:
        """Return why this process will not go on by itself, or None.

        Args:
            blocked_s: A model's own code that waits this long without using a core hangs.
            busy_s: One piece of work that keeps a core this long hangs.
        """
        now = time.monotonic()
        if self.look.state == "T" and now - self.steady_since >= min(1.0, blocked_s):
            return "was stopped by a signal"
        # Before that it loads its model, which may take any time.
        if not self.has_waited or self.look.waits_for_work is not False:
            return None
        # S alone: a thread in R waits for a core, and one in D for a disk.
        if self.look.state == "S" and now - self.steady_since >= blocked_s:
            return f"waited {blocked_s:g} s inside a request without computing"
        if now - self.same_task_since >= busy_s:
            return f"was at one request for {busy_s:g} s"
        return None

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
        """Look at every stub and return those that are there, dead ones included."""
        present = {}
        for pid in list_children(self._tritonserver_pid):
            try:
                identity = (pid, _read_start(pid))
                look = _look(pid)
                stub = self._stubs.get(identity) or _open_stub(*identity, look)
            except (OSError, IndexError, ValueError):
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
    """Return the ids of the processes that `pid` started."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (task / "children").read_text().split())
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
    return Look(
        state=fields[0],
        waits_for_work=_waits_for_work(pid),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        switches=int(switches),
    )


def _waits_for_work(pid: int) -> bool | None:
    try:
        words = Path(f"/proc/{pid}/syscall").read_text().split()
    # Not ours to see (ptrace is forbidden here), or a kernel without it.
    except OSError:
        return None
    if _FUTEX is None:
        return None
    # "running", or the number of the call and its arguments.
    return words[0] == str(_FUTEX) and not int(words[2], 16) & _FUTEX_PRIVATE_FLAG


def _read_start(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
