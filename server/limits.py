"""What this process and those that it starts may have open and running, and whether that is enough to serve."""

import contextlib
import math
import os
import resource
import shlex
import tempfile
from pathlib import Path

from modelyard.free_memory import list_groups, read_free_memory

from .errors import NotFoundError, ShortageError

# tritonserver 2.51 has 70 files open with one model of four steps. With fewer it neither serves nor ends: with 64, it
# fills its log for ever.
MIN_OPEN_FILES = 256

# On two cores it and the launcher have 50 threads running without a model, and 12 more for every backend process, of
# which a third are the process's own. Where one cannot be started, it ends.
MIN_THREADS = 128
_THREADS_OF_NONE = 64
_THREADS_OF_A_PROCESS = 12
_THREADS_OF_AN_ENDED = 8
# What else comes and goes meanwhile: connections, and the launcher's own looks.
_SPARE_THREADS = 16

_RAISE_THREADS = "raise the limit (ulimit -Hu, LimitNPROC and TasksMax of systemd, pids_limit of a container)"

# Each of its threads has a stack of 1 GiB, of which only what is used takes memory: a model of a single step was served
# with 105 GiB of addresses and not with 76, one of four with 256 and not with 160, and six with 190 took 345 without a
# limit.
MIN_ADDRESS_BYTES = 176 << 30
COMFORTABLE_ADDRESS_BYTES = 512 << 30

# Every connection is an open file.
COMFORTABLE_OPEN_FILES = 1024

_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 21, 24


def raise_limits() -> None:
    """Let this process and what it starts have as many files, threads and addresses as they may.

    The usual soft limit of 1,024 files is for programs that use select(2).
    """
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_DATA):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (hard, hard))


def check_open_files() -> float:
    """Return how many files one process may open at most.

    Raises:
        ShortageError: Too few to serve.
    """
    limit = _read_hard_limit(resource.RLIMIT_NOFILE)
    if limit < MIN_OPEN_FILES:
        raise ShortageError(
            "one process may open too few files",
            expected=f"at least {MIN_OPEN_FILES}, and one more for every connection",
            got=f"{limit:.0f}",
            remedy="raise the limit (ulimit -Hn, LimitNOFILE of systemd, --ulimit nofile of a container)",
        )
    return limit


def describe_open_files(pid: int) -> str:
    """Return in words how many files process `pid` of this user has open, of how many.

    Raises:
        OSError: It has ended, or this process has no descriptor or memory left to look with.
    """
    limit, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    return f"{len(os.listdir(f'/proc/{pid}/fd'))} of {limit} files open"  # noqa: PTH208


def check_threads(needed: int = MIN_THREADS) -> float:
    """Return how many more threads may run: of this user, and in this control group.

    Args:
        needed: How many at least; as many as serving takes.

    Raises:
        ShortageError: Fewer.
    """
    return _check_free_threads(needed, _RAISE_THREADS)


def check_threads_of(processes: int, freed: int = 0) -> None:
    """Refuse to start so many backend processes at once where too few threads may run.

    tritonserver 2.51 aborts where it cannot start one (std::system_error), and waits without end for a process that
    did.

    Args:
        processes: How many.
        freed: Threads that end before.

    Raises:
        ShortageError: Too few for them.
    """
    needed = _SPARE_THREADS + _THREADS_OF_A_PROCESS * processes - freed
    _check_free_threads(needed, f"{_RAISE_THREADS}, or serve fewer models")


def count_threads_of(processes: int, living: int) -> int:
    """Return how many threads end with a model that is unloaded.

    Args:
        processes: How many it was loaded with.
        living: How many of them have not ended; tritonserver keeps its own threads for the others.
    """
    return _THREADS_OF_A_PROCESS * living + _THREADS_OF_AN_ENDED * max(0, processes - living)


def frees_enough_threads(ended: int, processes: int, held: int, whole: float) -> bool:
    """Tell whether too few threads may run for so many backend processes, and enough for a tritonserver started anew.

    Args:
        ended: Of how many processes that have ended it keeps its own threads.
        processes: How many.
        held: How many threads it has with its processes.
        whole: How many it had when all of them were there.
    """
    free = _count_free_threads() + held
    if not _lacks_threads(processes, 0) or free < MIN_THREADS:
        return False
    return free >= whole or not _lacks_threads(processes, _THREADS_OF_AN_ENDED * ended)


def _lacks_threads(processes: int, freed: int) -> bool:
    try:
        check_threads_of(processes, freed)
    except ShortageError:
        return True
    return False


def _count_free_threads() -> float:
    return min(_count_free_threads_of_user(), _count_free_threads_of_group())


def _check_free_threads(needed: int, remedy: str) -> float:
    free = _count_free_threads()
    if free < needed:
        raise ShortageError(
            "too few threads may run", expected=f"{needed} more at least", got=f"{free:.0f}", remedy=remedy
        )
    return free


def check_memory(needed: int, freed: int = 0) -> None:
    """Refuse to start what takes more memory than may be taken: the kernel would end whatever it chooses.

    Args:
        needed: Bytes.
        freed: Bytes that come free before.

    Raises:
        ShortageError: Fewer may be taken, of the machine or of a control group.
    """
    free = read_free_memory()
    if free is not None and free + freed < needed:
        raise ShortageError(
            "too little memory may be taken",
            expected=f"{(needed - freed) / 1e6:.0f} MB more at least",
            got=f"{free / 1e6:.0f}",
            remedy="raise the limit (MemoryMax of systemd, mem_limit of a container), or serve fewer models",
        )


def describe_few_threads(processes: int) -> str:
    """Return in a sentence that too few threads may run for so many backend processes; empty where enough may.

    Args:
        processes: How many serve, and how many more a rollout starts beside them.
    """
    free, needed = check_threads(), _THREADS_OF_NONE + _THREADS_OF_A_PROCESS * processes
    if free >= needed:
        return ""
    return (
        f"{free:.0f} more threads may run, and {processes} backend processes, those that a rollout starts among them, "
        f"have about {needed}: {_RAISE_THREADS}, or serve fewer models"
    )


def check_address_space() -> float:
    """Return how many bytes one process may have addresses of.

    Raises:
        ShortageError: Too few to serve.
    """
    # Stacks count as data as well.
    limit = min(_read_hard_limit(resource.RLIMIT_AS), _read_hard_limit(resource.RLIMIT_DATA))
    if limit < MIN_ADDRESS_BYTES:
        raise ShortageError(
            "one process may have too few addresses",
            expected=f"{MIN_ADDRESS_BYTES >> 30} GiB at least, for the stacks of its threads, which take no memory",
            got=f"{limit / (1 << 30):.3g} GiB",
            remedy="lift the limits (ulimit -Hv and -Hd, LimitAS and LimitDATA of systemd); cgroups bound memory",
        )
    return limit


def starts_programs(folder: Path) -> bool:
    """Tell whether programs may be started from a folder; not where its file system is mounted noexec (mount(8))."""
    return not os.statvfs(folder).f_flag & os.ST_NOEXEC


def check_temporary_folder(*, holds_programs: bool) -> Path:
    """Return the folder for temporary files, in which the backends are put together.

    Args:
        holds_programs: Whether programs must lie there, too.

    Raises:
        NotFoundError: tritonserver could not start a process from there, or there is none.
    """
    try:
        folder = Path(tempfile.gettempdir())
    except OSError as exc:
        raise NotFoundError(
            "there is no temporary folder",
            expected="one that this user may write",
            got=f"'{exc.strerror}'",
            remedy="make room, or name one in the environment variable TMPDIR",
        ) from exc
    # tritonserver 2.51 writes the path of a backend process into a line for a shell.
    if shlex.quote(str(folder)) != str(folder):
        raise NotFoundError(
            "the temporary folder cannot be used",
            expected="a path of letters without accents, digits and _@%+=:,./-, for tritonserver hands it to a shell",
            got=repr(str(folder)),
            remedy="name another in the environment variable TMPDIR",
        )
    if holds_programs and not starts_programs(folder):
        raise NotFoundError(
            f"no program may be started from the temporary folder {folder}{describe_fallback(folder)}",
            expected="a file system that is not mounted noexec, for the Python backend is put together there",
            got="noexec",
            remedy="name a folder on another in the environment variable TMPDIR, or mount it with exec",
        )
    return folder


def describe_fallback(folder: Path) -> str:
    """Return of which folder of TMPDIR Python has taken another one's place in silence, and why; empty where of none.

    Args:
        folder: The one that it has taken.
    """
    # As tempfile itself reads it, and tries it.
    named = os.environ.get("TMPDIR") and Path(os.path.abspath(os.environ["TMPDIR"]))  # noqa: PTH100
    if not named or named == folder:
        return ""
    try:
        with tempfile.TemporaryFile(dir=named, buffering=0) as file:
            file.write(b"blat")
    except OSError as exc:
        return f", in place of {named} of TMPDIR ({exc.strerror})"
    return f", in place of {named} of TMPDIR"


def _read_hard_limit(kind: int) -> float:
    _, hard = resource.getrlimit(kind)
    return math.inf if hard == resource.RLIM_INFINITY else hard


def _count_free_threads_of_user() -> float:
    limit = _read_hard_limit(resource.RLIMIT_NPROC)
    if limit == math.inf or _is_free_of_limit():
        return math.inf
    return max(0.0, limit - sum(map(_count_own_threads, Path("/proc").glob("[0-9]*"))))


def _is_free_of_limit() -> bool:
    """Tell whether this is a user whose threads nobody counts (setrlimit(2), RLIMIT_NPROC)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    capabilities = int(next(line.split()[1] for line in lines if line.startswith("CapEff:")), 16)
    return os.getuid() == 0 or bool(capabilities & (1 << _CAP_SYS_ADMIN | 1 << _CAP_SYS_RESOURCE))


def _count_own_threads(process: Path) -> int:
    # Of others, and of those that end just now, there is nothing to count.
    with contextlib.suppress(OSError):
        if process.stat().st_uid == os.getuid():
            return sum(1 for _ in (process / "task").iterdir())
    return 0


def _count_free_threads_of_group() -> float:
    """Return how many more threads the control group allows, and those around it, as far as they can be seen."""
    return min(map(_read_free, list_groups("pids")), default=math.inf)


def _read_free(folder: Path) -> float:
    try:
        limit = (folder / "pids.max").read_text().strip()
        return math.inf if limit == "max" else max(0.0, int(limit) - int((folder / "pids.current").read_text()))
    # The root of the tree has no limit.
    except OSError:
        return math.inf
