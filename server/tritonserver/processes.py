"""Other processes of this machine, as /proc shows them (proc(5))."""

import contextlib
import os
import signal
from dataclasses import dataclass

# Those that a process dies of, and that it sends to itself.
DEADLY_SIGNALS = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)

TICKS_PER_S = os.sysconf("SC_CLK_TCK")

# Fields of /proc/PID/stat, less the three up to the state: that one stands behind the name, which may hold anything.
_STATE, _PARENT, _USER_TICKS, _SYSTEM_TICKS, _STARTED, _ARGUMENTS_START, _ARGUMENTS_END, _EXIT_STATUS = (
    number - 3 for number in (3, 4, 14, 15, 22, 48, 49, 52)
)


@dataclass(frozen=True, kw_only=True)
class ProcessStat:
    """What /proc/PID/stat says of a process, or of one of its threads.

    Attributes:
        state: One letter: R runs or waits for a core, S sleeps, D waits for a disk, T is stopped, Z has ended.
        parent: Id of the process that started it.
        cpu_ticks: Time on a core so far, in clock ticks.
        started: When it started, in clock ticks since boot: with its id it names a process for good.
        arguments: Addresses at which its command line begins and ends in its memory; zeros where we may not know.
        exit_status: How it ended, as waitpid(2) says it, once it has.
    """

    state: str
    parent: int
    cpu_ticks: int
    started: int
    arguments: tuple[int, int]
    exit_status: int

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more and merely waits to be collected."""
        return self.state in "ZX"

    def describe_end(self) -> str:
        """Return how it ended, in words."""
        if os.WIFSIGNALED(self.exit_status):
            number = os.WTERMSIG(self.exit_status)
            return f"was killed by {signal.Signals(number).name if number in set(signal.Signals) else number}"
        return f"ended with exit code {os.WEXITSTATUS(self.exit_status)}"


def _read(path: str) -> str:
    """Return what a file of /proc holds.

    By its descriptor: tritonserver has some hundred threads, looked at ten times a second in a rollout. A path and a
    decoder for each file took three times as long.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        while piece := os.read(descriptor, 1 << 16):
            pieces.append(piece)
    finally:
        os.close(descriptor)
    return b"".join(pieces).decode(errors="surrogateescape")


def count_own_bytes(pid: int) -> int:
    """Return the bytes of memory that process `pid` shares with no file or other process; 0 where it is no more.

    Raises:
        OSError: This process has no descriptor or memory left to look with.
    """
    try:
        text = _read(f"/proc/{pid}/status")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    own = next((line.split()[1] for line in text.splitlines() if line.startswith("RssAnon:")), "0")
    return 1024 * int(own)


def read_stat(pid: int, task: int | None = None) -> ProcessStat | None:
    """Return what /proc says of process `pid`, or of its thread `task`; None if it is no more.

    Raises:
        OSError: This process has no descriptor or memory left to look with.
    """
    try:
        text = _read(f"/proc/{pid}/stat" if task is None else f"/proc/{pid}/task/{task}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rsplit(")", 1)[1].split()
    return ProcessStat(
        state=fields[_STATE],
        parent=int(fields[_PARENT]),
        cpu_ticks=int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS]),
        started=int(fields[_STARTED]),
        arguments=(int(fields[_ARGUMENTS_START]), int(fields[_ARGUMENTS_END])),
        exit_status=int(fields[_EXIT_STATUS]),
    )


def read_arguments(pid: int) -> list[str]:
    """Return the command line of process `pid`; empty if it has ended.

    Raises:
        OSError: This process has no descriptor or memory left to look with.
    """
    try:
        text = _read(f"/proc/{pid}/cmdline")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.split("\0")[:-1]


def read_bytes_read(pid: int) -> int:
    """Return how many bytes process `pid` has read so far; 0 if it has ended or is another user's.

    Raises:
        OSError: This process has no descriptor or memory left to look with.
    """
    try:
        first, _ = _read(f"/proc/{pid}/io").split("\n", 1)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return int(first.removeprefix("rchar:"))


def list_tasks(pid: int) -> list[int]:
    """Return the ids of the threads of process `pid`.

    Raises:
        OSError: This process has no descriptor or memory left to look with.
    """
    try:
        return [int(entry) for entry in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
    except (FileNotFoundError, ProcessLookupError):
        return []


def list_children(pid: int) -> list[int]:
    """Return the ids of the processes that `pid` started.

    Raises:
        OSError: This process has no descriptor or memory left to look with.
    """
    children: list[int] = []
    for task in list_tasks(pid):
        # A thread may have ended since.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
    return children


def has_mapped(pid: int, path: str, inode: int) -> bool:
    """Tell whether process `pid` has a file in its memory as it lies there: what is written into it is seen at once.

    Args:
        pid: The process.
        path: Without links; empty where that is another file's by now. Behind it stands that it is deleted then.
        inode: Its number, which some file systems show otherwise there.

    Raises:
        OSError: This process has no descriptor or memory left to look with.
    """
    try:
        mappings = [line.split(None, 5) for line in _read(f"/proc/{pid}/maps").splitlines()]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    # Fields: addresses, permissions, offset, device, inode, and the path where there is one (proc_pid_maps(5)).
    return any(len(each) == 6 and (int(each[4]) == inode or each[5] == path) for each in mappings)


def wants_core(pid: int) -> bool:
    """Tell whether a thread of process `pid` runs, waits for a core, or waits for a disk.

    Raises:
        OSError: This process has no descriptor or memory left to look with.
    """
    stats = (read_stat(pid, task) for task in list_tasks(pid))
    return any(stat is not None and stat.state in "RD" for stat in stats)


def is_handling(pid: int, number: int) -> bool:
    """Tell whether a thread of process `pid` is in the handler of a deadly signal: it is kept from another of the kind.

    Raises:
        OSError: This process has no descriptor left to look with.
    """
    bit, everyone = 1 << (number - 1), sum(1 << (each - 1) for each in DEADLY_SIGNALS)
    blocked = (_read_blocked(pid, task) for task in list_tasks(pid))
    # A thread that takes none at all is in no handler.
    return any(each & bit and each & everyone != everyone for each in blocked)


def _read_blocked(pid: int, task: int) -> int:
    """Return the signals that a thread takes none of, as bits; none of one that is gone."""
    try:
        with open(f"/proc/{pid}/task/{task}/status", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
            status = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    _, _, rest = status.partition("\nSigBlk:")
    return int(rest.split(None, 1)[0], 16) if rest else 0


def kill(pid: int, started: int) -> None:
    """End a process at once, unless its id belongs to another one by now.

    Args:
        pid: Id of the process.
        started: When it started, as in `ProcessStat`.
    """
    with contextlib.suppress(OSError):
        stat = read_stat(pid)
        if stat is not None and stat.started == started:
            os.kill(pid, signal.SIGKILL)


def end_children(pid: int) -> None:
    """End what process `pid` started, and has not collected, at once.

    Raises:
        OSError: This process has no descriptor or memory left to look with.
    """
    for child in list_children(pid):
        stat = read_stat(child)
        if stat is not None:
            kill(child, stat.started)
