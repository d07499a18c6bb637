"""What a machine lacks to serve, before anyone waits for it: `python -m server doctor`."""

import contextlib
import ctypes
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from .endpoints import Endpoints, check_ports_free
from .errors import ServerError
from .following.models import list_models
from .following.wishes import count_processes
from .limits import (
    COMFORTABLE_ADDRESS_BYTES,
    COMFORTABLE_OPEN_FILES,
    check_address_space,
    check_open_files,
    check_temporary_folder,
    check_threads,
    describe_fallback,
    describe_few_threads,
    starts_programs,
)
from .locations import name_command, name_opening
from .tritonserver.installation import Installation, build_environment, find_installation

Verdict = Literal["ok", "warning", "broken"]

# Every Python backend instance takes 1 MiB at least, and more for its largest batch.
_SHM_BYTES = 64 << 20

# Without these ONNX Runtime falls back to kernels for the CPUs of 2010.
_CPU_FEATURES = ("avx2", "fma")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: Subject that was looked at.
        verdict: ok; warning: it serves, but less well; broken: it does not serve.
        found: What is there.
        remedy: What to do about it; empty where all is well.
    """

    what: str
    verdict: Verdict
    found: str
    remedy: str = ""


def examine(repository: Path, endpoints: Endpoints) -> list[Finding]:
    """Look at everything that serving needs, in the order in which it is needed."""
    findings = [examine_installation()]
    installation = find_installation() if findings[0].verdict == "ok" else None
    if installation is not None:
        findings.append(examine_libraries(installation))
    findings += [
        examine_shared_memory(Path("/dev/shm")),
        examine_open_files(),
        examine_threads(repository),
        examine_address_space(),
        examine_temporary_folder(holds_programs=installation is not None and not installation.is_assembled),
        examine_ports(endpoints),
        examine_repository(repository),
        examine_cpu(Path("/proc/cpuinfo").read_text()),
        examine_sight(),
        examine_perf_analyzer(),
    ]
    return findings


def render(findings: Iterable[Finding], *, as_json: bool) -> str:
    """Return the findings for people, one a line with its remedy below, or as JSON."""
    findings = list(findings)
    if as_json:
        return json.dumps([asdict(finding) for finding in findings], ensure_ascii=False)
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:<8} {finding.what:<{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<{width}}  → {finding.remedy}")
    return "\n".join(lines)


def examine_installation() -> Finding:
    """Look for a tritonserver whose Python backend runs on this Python."""
    what = "tritonserver and the stub for this Python"
    try:
        installation = find_installation()
    except ServerError as exc:
        return _blame(what, exc)
    return Finding(
        what=what,
        verdict="ok",
        found=f"{installation.executable} ({installation.source}), Python {platform.python_version()}",
    )


def examine_libraries(installation: Installation) -> Finding:
    """Ask the dynamic linker, as the start itself would."""
    done = subprocess.run(
        [shutil.which("ldd") or "/usr/bin/ldd", str(installation.executable), str(installation.python_stub)],
        env=build_environment(installation),
        capture_output=True,
        text=True,
        check=False,
    )
    missing = sorted({line.split()[0] for line in done.stdout.splitlines() if "not found" in line})
    if missing:
        return Finding(
            what="shared libraries",
            verdict="broken",
            found=f"{', '.join(missing)} not found",
            remedy="install the packages that hold them (Debian: apt-file search NAME)",
        )
    return Finding(what="shared libraries", verdict="ok", found="all found")


def examine_shared_memory(directory: Path) -> Finding:
    """Look whether tritonserver and its backend processes have room to exchange tensors."""
    remedy = "mount a tmpfs there; in a container set --shm-size 256m (compose: shm_size)"
    if not os.access(directory, os.W_OK):
        return Finding(what=str(directory), verdict="broken", found="not writable", remedy=remedy)
    free = shutil.disk_usage(directory).free
    return Finding(
        what=str(directory),
        verdict="ok" if free >= _SHM_BYTES else "warning",
        found=f"{free >> 20} MiB free",
        remedy="" if free >= _SHM_BYTES else f"{_SHM_BYTES >> 20} MiB at least: {remedy}",
    )


def examine_open_files() -> Finding:
    """Look whether tritonserver may open what it needs, and a connection for every client."""
    return _examine_limit(
        "open files",
        check_open_files,
        COMFORTABLE_OPEN_FILES,
        lambda limit: f"{limit:.0f} a process",
        f"{COMFORTABLE_OPEN_FILES} at least, for every connection is one: ulimit -Hn",
    )


def _examine_limit(
    what: str, check: Callable[[], float], comfortable: float, describe: Callable[[float], str], remedy: str
) -> Finding:
    try:
        limit = check()
    except ServerError as exc:
        return _blame(what, exc)
    enough = limit >= comfortable
    return Finding(
        what=what, verdict="ok" if enough else "warning", found=describe(limit), remedy="" if enough else remedy
    )


def examine_threads(repository: Path) -> Finding:
    """Look whether tritonserver may start the threads that it needs for what it serves."""
    what, configs = "threads", []
    # Of a repository that cannot be read another finding tells.
    with contextlib.suppress(ServerError, OSError, UnicodeDecodeError):
        configs = [(repository / name / "config.pbtxt").read_text() for name in list_models(repository)]
    try:
        free, few = check_threads(), describe_few_threads(count_processes(configs))
    except ServerError as exc:
        return _blame(what, exc)
    found, _, remedy = few.partition(": ")
    if few:
        return Finding(what=what, verdict="warning", found=found, remedy=remedy)
    return Finding(what=what, verdict="ok", found=f"{free:.0f} more may run" if free < math.inf else "no limit")


def examine_address_space() -> Finding:
    """Look whether tritonserver's threads may have the stacks that they are given."""
    return _examine_limit(
        "addresses",
        check_address_space,
        COMFORTABLE_ADDRESS_BYTES,
        lambda limit: "no limit" if limit == math.inf else f"{limit / (1 << 30):.0f} GiB a process",
        f"{COMFORTABLE_ADDRESS_BYTES >> 30} GiB for many models: lift ulimit -Hv and -Hd",
    )


def examine_temporary_folder(*, holds_programs: bool) -> Finding:
    """Look whether backend processes can be started from the temporary folder."""
    what = "temporary folder"
    try:
        folder = check_temporary_folder(holds_programs=holds_programs)
    except ServerError as exc:
        return _blame(what, exc)
    fallback = describe_fallback(folder)
    if not starts_programs(folder):
        found = f"no program may be started from {folder}{fallback}: processes of a rollout begin all at once"
        return Finding(
            what=what, verdict="warning", found=found, remedy="mount it with exec, or name another in TMPDIR"
        )
    return Finding(
        what=what,
        verdict="warning" if fallback else "ok",
        found=f"{folder}{fallback}",
        remedy="name one in TMPDIR that is there and that this user may write" if fallback else "",
    )


def examine_ports(endpoints: Endpoints) -> Finding:
    """Look whether nobody else listens there."""
    try:
        check_ports_free(endpoints)
    except ServerError as exc:
        return _blame("ports", exc)
    ports = ", ".join(map(str, endpoints.ports.values()))
    return Finding(what="ports", verdict="ok", found=f"{ports} on {endpoints.host} are free")


def examine_repository(repository: Path) -> Finding:
    """Look whether there is something to serve, and this user may read all of it."""
    try:
        models = list_models(repository)
    except ServerError as exc:
        return _blame("model repository", exc)
    except OSError as exc:
        return Finding(
            what="model repository", verdict="broken", found=str(exc), remedy=f"let this user read {repository}"
        )
    unreadable = [path for path in repository.rglob("*") if not os.access(path, os.R_OK)]
    if unreadable:
        return Finding(
            what="model repository",
            verdict="broken",
            found=f"{len(unreadable)} of its files cannot be read, such as {unreadable[0]}",
            remedy=name_opening(repository),
        )
    return Finding(what="model repository", verdict="ok", found=f"{', '.join(models)} in {repository}")


def examine_cpu(cpuinfo: str) -> Finding:
    """Look for what the kernels of ONNX Runtime are fast with, in the text of /proc/cpuinfo."""
    flags = next((line.split(":")[1].split() for line in cpuinfo.splitlines() if line.startswith("flags")), [])
    missing = [feature for feature in _CPU_FEATURES if feature not in flags]
    extra = [feature for feature in ("avx512f", "avx512_vnni", "amx_bf16", "amx_int8") if feature in flags]
    return Finding(
        what="CPU",
        verdict="warning" if missing else "ok",
        found=f"{len(os.sched_getaffinity(0))} cores, {', '.join([*_CPU_FEATURES, *extra])}"
        if not missing
        else f"{platform.machine()} without {', '.join(missing)}",
        remedy="answers come several times slower; use a machine with AVX2" if missing else "",
    )


def examine_sight() -> Finding:
    """Tell whether a loop in Python can be told from a long inference, which takes the right to look into a child."""
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).pause()
        os._exit(0)
    try:
        Path(f"/proc/{pid}/syscall").read_text()
    except OSError as exc:
        return Finding(
            what="watching",
            verdict="warning",
            found=f"/proc/PID/syscall: {exc.strerror}",
            remedy="dead, stopped and blocked processes are found anyway; loops in Python only after a minute",
        )
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return Finding(what="watching", verdict="ok", found="loops in Python can be told from long inferences")


def examine_perf_analyzer() -> Finding:
    """Look for the real one: PyPI's distribution is an empty placeholder below glibc 2.38."""
    found = shutil.which("perf_analyzer") or shutil.which("perf_analyzer", path=str(Path(sys.executable).parent))
    if found and Path(found).stat().st_size > 100_000:
        return Finding(what="perf_analyzer", verdict="ok", found=found)
    return Finding(
        what="perf_analyzer",
        verdict="warning",
        found="the placeholder of PyPI's perf-analyzer 0.1.0" if found else "not installed",
        remedy=f"only measuring needs it; `{name_command('bench')}` fetches one that runs here",
    )


def _blame(what: str, error: ServerError) -> Finding:
    """Return the finding that serving would end in `error`."""
    return Finding(what=what, verdict="broken", found=error.fault, remedy=error.remedy)
